"""Jobs that go wrong: those of ci/ are started as those of the tests are."""

import pytest
from harness import job_environment


@pytest.fixture(autouse=True)
def surroundings_of_storms(monkeypatch):
    """Let ranks of ci/storms.py and ci/ps_storms.py, too, load of numpy and torch what they use."""
    path = job_environment().get("PYTHONPATH")
    if path is not None:
        monkeypatch.setenv("PYTHONPATH", path)
