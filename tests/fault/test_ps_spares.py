"""Parameter-server jobs with spares, of which servers are killed; see ci/ps_storms.py."""

import pytest
from harness import IS_MPICH, at_length
from ps_storms import TAKEN, CopiedServerStorm, ServerStorm

pytestmark = pytest.mark.skipif(IS_MPICH, reason="MPICH ends a job when a rank dies")

SIZES = {"n_servers": 2, "spares": 1}
EACH = {
    "two copies": CopiedServerStorm("sync", 2, ["0@30:push-after"], "ulfm", **SIZES),
    "one copy": ServerStorm("async", 2, ["0@30:push-after"], "ulfm", **SIZES),
}


@pytest.mark.parametrize("name", at_length(EACH, ["two copies"]))  # a job takes 5 s
def test_a_spare_takes_the_place_of_a_server_that_is_killed(name):
    storm = EACH[name]
    outcome = storm.run()
    assert not outcome.problems, (str(storm), outcome.problems, outcome.output)
    assert (TAKEN in outcome.output) == (name == "two copies"), outcome.output
