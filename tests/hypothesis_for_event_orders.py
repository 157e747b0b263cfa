"""Settings of hypothesis for tests in which a list of numbers chooses the order of all events."""

from harness import at_length, is_fast
from hypothesis import HealthCheck, settings


def hypothesis_settings(long, gate, fast):
    """Return settings with so many examples: under ci/all_cases, in ci/test, in ci/test --fast."""
    return settings(
        max_examples=at_length(long, fast if is_fast() else gate),
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[*HealthCheck],
    )
