"""Jobs that go wrong: those of ci/ are started as those of the tests are."""

import pytest


@pytest.fixture(autouse=True)
def storms_start_fast(surroundings_of_jobs):
    """Let ranks of ci/storms.py and ci/ps_storms.py, too, load of numpy and torch what they use."""
