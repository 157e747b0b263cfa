"""Parameter servers on several hosts: jobs survive deaths, and send little but the payload."""

import pytest
from harness import at_length
from ps_storms import ServerStorm, Storm
from ps_wire import measure_wire

STORMS = {
    "a server": (ServerStorm, ("sync", 2, ["0@30:push-after"])),
    "the host of mpirun has the chief": (Storm, ("async", 3, ["0@6:acked"])),
    "a worker in a move": (Storm, ("ssp", 3, ["1@6:moving"])),
}


@pytest.mark.parametrize("name", at_length(list(STORMS), list(STORMS)[:1]))  # 4 s each
def test_ranks_of_all_hosts_go_on_with_the_exact_state(name, cluster):
    kind, storm = STORMS[name]
    outcome = kind(*storm, "ulfm", cluster).run()
    assert not outcome.problems, (outcome.problems, outcome.output)


def test_hardly_more_than_the_payload_is_on_the_wire(cluster):
    wire = measure_wire(cluster, 2 << 20, 2)
    assert wire["payload"] == 4 << 20
    assert wire["sent"] <= 1.05 * wire["payload"]
    assert wire["received"] <= 1.05 * wire["payload"]
