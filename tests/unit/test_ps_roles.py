"""Who is worker, server and evaluator: decided alike on every rank, or refused with both values."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringcomm.errors import ConfigError
from ringcomm.ps.roles import InitOptions, Layout, assign, spread


def layout(wishes, hosts=None):
    found = assign(wishes, hosts or [0] * len(wishes))
    return found.workers, found.servers, found.evaluators


def test_one_server_by_default_on_the_highest_rank():
    assert layout([InitOptions()] * 3) == ((0, 1), (2,), ())


def test_servers_are_one_per_host_in_turn_from_the_highest_rank_down():
    hosts = [0, 0, 0, 3, 3, 3]
    assert layout([InitOptions(servers=2)] * 6, hosts) == ((0, 1, 3, 4), (2, 5), ())
    assert layout([InitOptions(servers=3)] * 6, hosts) == ((0, 1, 3), (2, 4, 5), ())


@pytest.mark.parametrize("count", range(1, 6))
def test_rank_0_is_spared_as_long_as_its_host_is_no_smaller(count):
    assert 0 not in spread(range(6), [0, 0, 0, 3, 3, 3], count)


def test_evaluators_stand_below_the_servers():
    wish = InitOptions(servers=2, evaluators=1, evaluates=True)
    assert layout([wish] * 6) == ((0, 1, 2), (4, 5), (3,))


def test_commands_declare_roles():
    wishes = (
        [InitOptions()] * 4 + [InitOptions(role="server")] * 2 + [InitOptions(role="evaluator")]
    )
    assert layout(wishes) == ((0, 1, 2, 3), (4, 5), (6,))


def test_servers_may_come_first():
    assert layout([InitOptions(role="server"), InitOptions(), InitOptions()]) == ((1, 2), (0,), ())


def test_declared_workers_leave_the_rest_to_be_servers():
    assert layout([InitOptions(role="worker"), InitOptions()]) == ((0,), (1,), ())


def test_colocated_servers_are_workers_too():
    found = assign([InitOptions(servers=2, colocated=True)] * 3, [0] * 3)
    assert (found.workers, found.servers) == ((0, 1, 2), (1, 2))
    assert found.is_colocated
    assert found.role_of(2) == "worker"


def test_colocated_alone():
    assert layout([InitOptions(colocated=True)]) == ((0,), (0,), ())


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ([InitOptions()], "1 server asked for, and 1 rank started, of which 0 can be one"),
        ([InitOptions(servers=3)] * 3, "3 servers asked for, and 3 ranks started, of which 2"),
        (
            [InitOptions(servers=1), InitOptions(servers=2)],
            "rank 0 says servers=1, rank 1 says servers=2",
        ),
        (
            [InitOptions(), InitOptions(replication=2)],
            "rank 0 says replication=1, rank 1 says replication=2",
        ),
        (
            [InitOptions(role="boss"), InitOptions()],
            "rank 0 says role='boss'; roles are worker, server",
        ),
        ([InitOptions(servers=0)] * 2, "rank 0 says servers=0; at least 1"),
        ([InitOptions(evaluators=-1)] * 2, "rank 0 says evaluators=-1; at least 0"),
        (
            [InitOptions(servers=2), InitOptions(servers=2), InitOptions(role="server")],
            r"servers=2, and 1 rank \(2\) declare role='server'",
        ),
        ([InitOptions(role="server")] * 2, "leave no worker"),
        ([InitOptions(evaluators=1)] * 3, r"no function is marked @ps.evaluator"),
        (
            [InitOptions(evaluators=3, evaluates=True)] * 3,
            "3 evaluators asked for, and 2 ranks can",
        ),
        ([InitOptions(evaluators=2, evaluates=True)] * 3, "leave no worker"),
        (
            [InitOptions(evaluators=2, evaluates=True)] * 3 + [InitOptions(role="evaluator")],
            "evaluators=2, and 1 rank .3. declare",
        ),
        (
            [InitOptions(colocated=True), InitOptions(colocated=True), InitOptions(role="server")],
            "one or the other",
        ),
    ],
)
def test_contradictions_are_refused_with_both_values(wishes, message):
    with pytest.raises(ConfigError, match=message):
        layout(wishes)


# --- spares -------------------------------------------------------------------------------------
def test_spares_are_the_highest_ranks_and_the_last_servers():
    found = assign([InitOptions(servers=2, spares=1)] * 5, [0] * 5)
    assert (found.workers, found.servers, found.spares) == ((0, 1), (2, 3, 4), 1)
    assert found.server_numbers == (0, 1)
    declared = [InitOptions(role="server")] * 3 + [InitOptions(spares=1)] * 2
    found = assign(declared, [0] * 5)
    assert (found.workers, found.servers, found.server_numbers) == ((3, 4), (0, 1, 2), (0, 1))


@pytest.mark.parametrize(
    ("wishes", "why"),
    [
        ([InitOptions(servers=2, spares=1)] * 3, "2 servers and 1 spare asked for, and 3 ranks"),
        ([InitOptions(role="server"), InitOptions(spares=1)], "leaves no server"),
        ([InitOptions(spares=1), InitOptions()], "rank 0 says spares=1, rank 1 says spares=0"),
        ([InitOptions(spares=-1)] * 3, "spares=-1; at least 0"),
    ],
)  # fmt: skip
def test_spares_that_cannot_be_are_refused_with_the_numbers(wishes, why):
    with pytest.raises(ConfigError, match=re.escape(why)):
        assign(wishes, [0] * len(wishes))


@given(
    deaths=st.permutations(range(6)), n_places=st.integers(1, 4), n=st.integers(1, 5),
    other=st.randoms(),
)  # fmt: skip
def test_ranks_that_know_the_same_dead_servers_know_the_same_losses(deaths, n_places, n, other):
    """In whatever order they have heard of them; and a rank that is told so knows as much."""
    layouts = []
    for _ in range(2):
        layout = Layout((0,), tuple(range(1, 7)), (), spares=6 - n_places)
        dead = deaths[:n]
        other.shuffle(dead)
        for number in dead:
            before = layout.server_numbers, layout.n_losses
            layout.lose(1 + number, ())
            assert layout.n_losses >= before[1]
            if number not in before[0]:  # a spare without a place
                assert (layout.server_numbers, layout.n_losses) == before
        layouts.append(layout)
    first, second = layouts
    assert first.server_numbers == second.server_numbers
    assert first.n_losses == second.n_losses
    told = Layout((0,), tuple(range(1, 7)), (), spares=6 - n_places)
    told.know(first.server_numbers)
    assert told.server_numbers == first.server_numbers
    assert told.n_losses == first.n_losses
