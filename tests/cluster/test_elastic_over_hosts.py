"""Elastic jobs over hosts: ranks die, and those of all hosts go on with exact results."""

import pytest
from harness import at_length
from storms import Storm

STORMS = {
    "a rank, then rank 0": (6, 0, ["3@20:inside", "0@23:after"]),
    "all ranks of a host, whose places spares of another host take": (
        4,
        2,
        ["2@20:before", "3@20:before"],
    ),
}


@pytest.mark.parametrize("name", at_length(list(STORMS), list(STORMS)[1:]))
def test_ranks_of_all_hosts_go_on_with_the_same_exact_state(name, cluster):
    n, n_spares, kills = STORMS[name]
    outcome = Storm(n, kills, "ulfm", n_spares, cluster=cluster).run()
    assert outcome.verdict == "right", (outcome.output, outcome.results)
    assert len(outcome.killed) == 2
