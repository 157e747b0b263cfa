"""Functions that run at the servers: once per block, as a whole, in order; mistakes are told."""

import threading

import numpy as np
import pytest
from ps_ranks_as_threads import run_workers

import ringcomm as rc
from ringcomm import ps
from ringcomm.ps import job
from ringcomm.ps.job import session
from ringcomm.ps.placement.partitions import Move
from ringcomm.ps.placement.rebalance import move_all
from ringcomm.ps.protocol import function_arguments
from ringcomm.ps.server import user_functions

pytestmark = pytest.mark.one_wire


@pytest.fixture(autouse=True)
def no_functions(monkeypatch):
    monkeypatch.setattr(user_functions, "_registered", {})


def clip(values, limit):
    np.clip(values, -limit, limit, out=values)


def squares(values):
    return float(np.square(values, dtype=np.float64).sum())


def table(count=1000, block_nbytes=1200, **options):
    options.setdefault("updater", ps.optim.Add())
    return ps.table("w", count, block_nbytes=block_nbytes, **options)


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("n_servers", [1, 3])
def test_a_function_changes_every_block_and_returns_by_block(n_servers):
    ps.function(clip)
    ps.function(squares)

    def body(rank):
        t = table(init=np.arange(1000.0))
        if rank == 0:
            t.call("clip", limit=500.0)
            told = t.call("squares").wait()
            assert len(told) == t.n_partitions == 4
            assert sum(told) == np.square(np.minimum(np.arange(1000), 500)).sum()
        rc.barrier()
        return t.pull().wait()

    for values in run_workers(2, body, n_servers):
        np.testing.assert_array_equal(values, np.minimum(np.arange(1000), 500))


def test_calls_and_pushes_of_a_worker_are_carried_out_in_order():
    @ps.function
    def double(values):
        values *= 2

    def body(rank):
        t = table(1)
        expected = 0
        for k in range(20):
            t.push(np.full(1, k, np.float32))
            t.call("double")
            expected = (expected + k) * 2 % (1 << 20)
            if k % 5 == 4:
                t.push(np.full(1, expected, np.float32), assign=True)
        return t.pull().wait()[0] == expected

    assert run_workers(1, body) == [True]


@pytest.mark.usefixtures("wire")
def test_no_pull_sees_half_of_what_a_function_does():
    has_seen = threading.Event()

    @ps.function
    def fill(values, x):
        for part in np.array_split(values, 50):
            part[:] = x

    def body(rank):
        t = table(20_000, 1 << 20)
        if rank == 0:
            k = 0
            while not has_seen.is_set():
                t.call("fill", x=(k := k + 1)).wait()
            return True
        seen = set()
        while len(seen) < 10:
            values = t.pull().wait()
            assert (values == values[0]).all()
            seen.add(values[0])
        has_seen.set()
        return True

    assert run_workers(2, body) == [True, True]


@pytest.mark.parametrize("kind", [ZeroDivisionError, SystemExit])
def test_a_function_that_raises_changes_nothing_and_its_text_is_told(kind):
    @ps.function
    def picky(values):
        values += 1
        if values[0] > 200:
            raise kind("too large")

    def body(rank):
        t = table(init=np.arange(1000.0))
        with pytest.raises(rc.RingcommError) as told:
            t.call("picky").wait()
        for piece in (f"call[w]: picky() raised {kind.__name__}: too large", "block ", "elements"):
            assert piece in str(told.value)
        values = t.pull().wait() - np.arange(1000)
        return [float(values[t.bounds_of(k)[0]]) for k in range(4)]

    assert run_workers(1, body, 2) == [[1.0, 0.0, 0.0, 0.0]]


def test_what_only_looks_is_no_update():
    ps.function(squares)
    ps.function(clip)

    def body(rank):
        t = table(4, init=2.0)
        t.call("squares").wait()
        before = t.push(np.zeros(4, np.float32)).wait().version
        t.call("clip", limit=1.0).wait()
        assert ps.stats()[0]["calls"] == 2
        return before, t.push(np.zeros(4, np.float32)).wait().version

    assert run_workers(1, body) == [(1, 3)]


def test_in_a_table_with_rounds_it_runs_between_two_of_them():
    came = threading.Event()

    @ps.function
    def double(values):
        values *= 2

    def body(rank):
        t = ps.table("w", 4, updater=ps.optim.SGD(1.0), mode="sync", init=1.0)
        push = np.full(4, -3.0, np.float32)
        if rank == 0:
            first = t.push(push)  # waits for the other
            t.call("double").wait()
            came.set()
            first.wait()
            t.call("double").wait()
        else:
            assert came.wait(60)
            t.push(push).wait()
        rc.barrier()
        assert t.push(push).wait().version == 2  # a call is no round
        return t.pull().wait()[0]

    assert run_workers(2, body, 2) == [(1 * 2 + 3) * 2 + 3] * 2


def test_a_call_waits_for_the_chief_s_values():
    may_begin = threading.Event()

    @ps.function
    def add(values, x):
        values += x

    def body(rank):
        if rank == 0:
            assert may_begin.wait(60)
        else:
            threading.Timer(0.05, may_begin.set).start()
        t = table(init=np.full(1000, 5.0))
        t.call("add", x=rank + 1).wait()
        rc.barrier()
        return t.pull().wait().max()

    assert run_workers(2, body) == [8.0, 8.0]


def test_calls_follow_a_block_that_moves():
    @ps.function
    def add(values, x):
        values += x

    def body(rank):
        t = table(1000)
        for k in range(24):
            if rank == 0:
                move_all(session(), [Move((t.number, k % 4), -1, k // 4 % 2)]).wait()
            t.call("add", x=1)
        t.call("add", x=0).wait()
        rc.barrier()
        return t.pull().wait()

    for values in run_workers(2, body, 2):
        assert (values == 48).all()


# --- arguments and results ----------------------------------------------------------------------
@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        -2.5,
        "text",
        [1, [2, "x"]],
        {"a": 1, "b": {"c": None}},
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.float32(1.5),
        np.zeros((0, 3)),
        {"w": np.ones(40_000), "lr": np.float64(0.1)},
        float("inf"),
    ],
)
def test_arguments_and_results_arrive_as_they_are(value):
    got = []

    @ps.function
    def echo(values, x):
        got.append(x)
        return x

    def body(rank):
        return table(4).call("echo", x=value).wait()

    [[result]] = run_workers(1, body)
    for each in (result, got[0]):
        assert type(each) is type(value)
        np.testing.assert_equal(each, value)


@pytest.mark.parametrize("value", [object(), {1: 2}, np.array([None]), b"bytes", {1, 2}])
def test_what_cannot_be_sent_is_told_at_once(value):
    @ps.function
    def echo(values, x=None):
        return value

    def body(rank):
        t = table(4)
        with pytest.raises(TypeError, match=r"call\[w\]: arguments of echo\(\): "):
            t.call("echo", x=value)
        with pytest.raises(rc.RingcommError, match=r"TypeError: call\[w\]: echo\(\) returned"):
            t.call("echo").wait()
        return True

    assert run_workers(1, body) == [True]


def test_bytes_that_are_no_value_are_refused():
    with pytest.raises(ValueError, match="no partition"):
        function_arguments.unpacked(np.zeros(40, np.uint8))


# --- mistakes -----------------------------------------------------------------------------------
def test_a_mark_behind_init_is_refused():
    def body(rank):
        with pytest.raises(rc.ConfigError, match=r"ps.function: must stand before ps.init"):
            ps.function(clip)
        return True

    assert run_workers(1, body) == [True]


def test_two_of_one_name_are_refused():
    ps.function(clip)
    with pytest.raises(rc.ConfigError, match="two functions 'clip'"):
        ps.function(clip)


def test_a_name_that_servers_lack_is_told_with_both_lists(monkeypatch):
    ps.function(clip)
    known = user_functions.registered()

    def of_this_rank():
        return known if rc.rank() == 0 else {"squares": squares}

    monkeypatch.setattr(job, "registered", of_this_rank)

    def body(rank):
        with pytest.raises(KeyError, match=r"'clip' on rank 1.*has \['squares'\].*has \['clip'\]"):
            table(4).call("clip", limit=1)
        return True

    assert run_workers(1, body) == [True]
