"""Settings of hypothesis for tests in which a list of numbers chooses the order of all events."""

from harness import at_length
from hypothesis import HealthCheck, settings


def hypothesis_settings(long, gate):
    """Return settings with so many examples: under ci/all_cases, and in the gate."""
    return settings(
        max_examples=at_length(long, gate),
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[*HealthCheck],
    )
