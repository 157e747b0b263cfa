"""Who is worker, server and evaluator: decided alike on every rank, or refused with both values."""

import pytest

from ringcomm.errors import ConfigError
from ringcomm.ps.roles import Wish, assign, spread


def layout(wishes, hosts=None):
    found = assign(wishes, hosts or [0] * len(wishes))
    return found.workers, found.servers, found.evaluators


def test_one_server_by_default_on_the_highest_rank():
    assert layout([Wish()] * 3) == ((0, 1), (2,), ())


def test_servers_are_one_per_host_in_turn_from_the_highest_rank_down():
    hosts = [0, 0, 0, 3, 3, 3]
    assert layout([Wish(servers=2)] * 6, hosts) == ((0, 1, 3, 4), (2, 5), ())
    assert layout([Wish(servers=3)] * 6, hosts) == ((0, 1, 3), (2, 4, 5), ())


@pytest.mark.parametrize("count", range(1, 6))
def test_rank_0_is_spared_as_long_as_its_host_is_no_smaller(count):
    assert 0 not in spread(range(6), [0, 0, 0, 3, 3, 3], count)


def test_evaluators_stand_below_the_servers():
    wish = Wish(servers=2, evaluators=1, evaluates=True)
    assert layout([wish] * 6) == ((0, 1, 2), (4, 5), (3,))


def test_commands_declare_roles():
    wishes = [Wish()] * 4 + [Wish(role="server")] * 2 + [Wish(role="evaluator")]
    assert layout(wishes) == ((0, 1, 2, 3), (4, 5), (6,))


def test_servers_may_come_first():
    assert layout([Wish(role="server"), Wish(), Wish()]) == ((1, 2), (0,), ())


def test_declared_workers_leave_the_rest_to_be_servers():
    assert layout([Wish(role="worker"), Wish()]) == ((0,), (1,), ())


def test_colocated_servers_are_workers_too():
    found = assign([Wish(servers=2, colocated=True)] * 3, [0] * 3)
    assert (found.workers, found.servers) == ((0, 1, 2), (1, 2))
    assert found.is_colocated
    assert found.role_of(2) == "worker"


def test_colocated_alone():
    assert layout([Wish(colocated=True)]) == ((0,), (0,), ())


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ([Wish()], "1 server asked for, and 1 rank started, of which 0 can be one"),
        ([Wish(servers=3)] * 3, "3 servers asked for, and 3 ranks started, of which 2"),
        ([Wish(servers=1), Wish(servers=2)], "rank 0 says servers=1, rank 1 says servers=2"),
        ([Wish(), Wish(replication=2)], "rank 0 says replication=1, rank 1 says replication=2"),
        ([Wish(), Wish(placement="x")], "rank 0 says placement='balanced', rank 1 says"),
        ([Wish(role="boss"), Wish()], "rank 0 says role='boss'; roles are worker, server"),
        ([Wish(servers=0)] * 2, "rank 0 says servers=0; at least 1"),
        ([Wish(evaluators=-1)] * 2, "rank 0 says evaluators=-1; at least 0"),
        (
            [Wish(servers=2), Wish(servers=2), Wish(role="server")],
            r"servers=2, and 1 rank \(2\) declare role='server'",
        ),
        ([Wish(role="server")] * 2, "leave no worker"),
        ([Wish(evaluators=1)] * 3, r"no function is marked @ps.evaluator"),
        (
            [Wish(evaluators=3, evaluates=True)] * 3,
            "3 evaluators asked for, and 2 ranks can",
        ),
        ([Wish(evaluators=2, evaluates=True)] * 3, "leave no worker"),
        (
            [Wish(evaluators=2, evaluates=True)] * 3 + [Wish(role="evaluator")],
            "evaluators=2, and 1 rank .3. declare",
        ),
        ([Wish(colocated=True), Wish(colocated=True), Wish(role="server")], "one or the other"),
    ],
)
def test_contradictions_are_refused_with_both_values(wishes, message):
    with pytest.raises(ConfigError, match=message):
        layout(wishes)


def test_workers_alone_say_whether_partitions_move_by_themselves():
    worker, other = Wish(rebalance_every_s=60.0), Wish(rebalance_every_s=30.0)
    commands = [worker, Wish("server"), Wish("evaluator")]
    assert assign(commands, [0, 0, 0]).workers == (0,)
    with pytest.raises(ConfigError, match=r"rank 0 says rebalance_every_s=60.0, rank 1 says"):
        assign([worker, other, Wish("server")], [0, 0, 0])
