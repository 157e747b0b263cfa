"""Pushes that C++ carries out on both copies of a server: the follower first, whoever dies, once.

ps_simulation_over_pipes has the real pipes, and what C++ does with them.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_for_event_orders import hypothesis_settings
from ps_simulation import Choices
from ps_simulation_over_pipes import PipeNet
from ps_simulation_with_copies import MODES

from ringcomm.ps.protocol.frames import FrameKind
from ringcomm.ps.server.homes.home_pushes import NoPushes
from ringcomm.ps.server.homes.replication import Log

ANY_ORDER = hypothesis_settings(5_000, 12)
pytestmark = pytest.mark.usefixtures("model_time")
PRIMARY, FOLLOWER = 2, 3  # ranks of a job of two workers, as to the blocks of server 0


def begun(**sizes):
    """Return a run in which all have opened the table, and nothing is under way."""
    sizes = {"n_servers": 2, "n_workers": 2, "n_steps": 0, "n_deaths": 0} | sizes
    net = PipeNet(MODES["async"], Choices([0]), **sizes)
    while net.deliver_one():
        pass
    return net


def push(net, worker):
    """Let a worker push to a block of server 0."""
    client = net.client(worker)
    client.push_part(client.part_at(0), 0)


def test_no_push_needs_python():
    net = begun(n_steps=60)
    net.run()
    net.require_all()
    n_pushed = sum(sum(net.client(rank).n_pushed.values()) for rank in net.workers)
    assert net.n_without_python == 2 * n_pushed


@pytest.mark.parametrize("n_turns", range(4))  # not sent on yet; sent on; carried out; acknowledged
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("n_pushes", [1, 2])  # the body of the second one is in the frame
def test_a_push_counts_once_whenever_a_server_dies(n_turns, victim, n_pushes):
    net = begun()
    for _ in range(n_pushes):
        push(net, 0)
    for rank in (PRIMARY, FOLLOWER, PRIMARY)[:n_turns]:
        net.poll(rank)
    net.kill(victim)
    net.run()
    assert sum(net.client(0).n_pushed.values()) == n_pushes
    net.require_all()


def test_after_a_death_no_push_needs_python_either():
    net = begun(n_workers=1, n_steps=40)
    net.kill(0)
    while net.tell() or net.deliver_one():
        pass
    before = net.n_without_python
    net.run()
    net.require_all()
    assert net.n_without_python - before == sum(net.client(0).n_pushed.values())


def test_a_push_that_comes_behind_what_is_pythons_is_carried_out_and_reported():
    """Each server is the other's follower, so reports and records share pipes."""
    net = begun()
    net.client(0).ask(1, FrameKind.TICK, clock=1)
    net.poll(FOLLOWER)
    net.poll(PRIMARY)  # its report is for Python
    push(net, 1)
    for rank in (PRIMARY, FOLLOWER, PRIMARY, 1):
        net.poll(rank)
    assert not net.client(1).asked
    net.run()
    net.require_all()


def test_a_report_acknowledges_no_push_after_it():
    net = begun()
    push(net, 0)
    net.poll(PRIMARY)
    net.poll(FOLLOWER)  # the report is on its way
    push(net, 1)
    net.poll(PRIMARY)
    net.poll(0)
    net.poll(1)
    assert [len(net.client(rank).asked) for rank in net.workers] == [0, 1]


def test_a_block_has_a_push_only_once_its_follower_has():
    net = begun()
    part = net.client(0).part_at(0)
    blocks = [
        net.ranks[rank].homes._homes[0].server.catalog.contents[1].parts[part]
        for rank in (PRIMARY, FOLLOWER)
    ]
    push(net, 0)
    for rank, expected in ((PRIMARY, [0, 0]), (FOLLOWER, [0, 1]), (PRIMARY, [1, 1])):
        net.poll(rank)
        assert [block.values.sum() for block in blocks] == expected
        assert [block.version for block in blocks] == expected


@ANY_ORDER
@given(
    numbers=st.binary(min_size=200, max_size=1500), n_servers=st.integers(2, 4),
    n_workers=st.integers(1, 3), n_steps=st.integers(4, 14), n_deaths=st.integers(0, 3),
)  # fmt: skip
def test_partitions_move_whoever_dies(numbers, **sizes):
    net = PipeNet(MODES["async"], Choices(numbers), moves=True, is_patient=True, **sizes)
    net.run()
    net.require_all()


def test_a_pull_has_the_push_before_it():
    net = begun()
    part, values = net.client(0).part_at(0), []
    push(net, 0)
    net.client(0).ask(
        0,
        FrameKind.PULL,
        table=1,
        partition=part,
        take=lambda reply: values.append(reply.body.copy()),
    )
    net.deliver_one()
    assert values[0].view(np.float64).sum() == 1


def test_a_read_goes_behind_pushes_of_which_python_knows_nothing():
    numbers = NoPushes()
    numbers.next()
    numbers.n_under_way = 1
    log = Log(numbers, has_follower=True)
    assert not log.add_read("read")
    assert [*log.done(0)] == []
    assert [*log.done(1)] == ["read"]


@pytest.mark.parametrize("mode", ["async", "ssp", "sync"])
@ANY_ORDER
@given(
    numbers=st.binary(min_size=300, max_size=1500), n_servers=st.integers(2, 4),
    n_workers=st.integers(2, 3), n_steps=st.integers(6, 20), n_deaths=st.integers(1, 3),
    is_patient=st.booleans(),
)  # fmt: skip
def test_what_was_acknowledged_is_there_once_whoever_dies(mode, numbers, **sizes):
    net = PipeNet(MODES[mode], Choices(numbers), **sizes)
    net.run()
    net.require_all()
