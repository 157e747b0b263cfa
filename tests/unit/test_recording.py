"""Algorithms without Python: the same bits as the coroutines that they were recorded from."""

import gc
import os
import time

import numpy as np
import pytest
from harness import at_length
from loopback import LoopbackHub
from run_algorithms import CASES, DEADLINE_S, allreduce, body_of, channel, drive, flat

from ringcomm import _core
from ringcomm._core import WireFault
from ringcomm.arrays import Flat
from ringcomm.collectives.algorithms import ring
from ringcomm.collectives.operators import SUM
from ringcomm.collectives.recording import CannotRecord, perform, record_call

SIZES = [1, 2, 3, 4, 7, 8]


def forbidden(*_):
    raise AssertionError("a message went through Python")


def play(size, body, is_native):
    """Run body(channel) on all ranks of a new hub, in this thread; is_native: one bool per rank."""
    hub = LoopbackHub(size)
    transports = [hub.transport(rank) for rank in range(size)]
    for transport, without_python in zip(transports, is_native, strict=True):
        if without_python:
            transport.isend = transport.irecv = forbidden
        else:
            transport.runner = None
    return drive(*[body(channel(transport)) for transport in transports])


def same_bits(xs, ys):
    return all(
        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
        for x, y in zip(xs, ys, strict=True)
    )


@pytest.mark.parametrize("size", at_length(SIZES, [1, 3, 4]))
@pytest.mark.parametrize("count", at_length([0, 7, 1000], [7, 1000]))
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_the_bits_are_those_of_the_coroutine(case, size, count):
    body = body_of(case, count)
    assert same_bits(play(size, body, [True] * size), play(size, body, [False] * size))


@pytest.mark.parametrize("size", at_length([2, 3, 8], [2, 3]))
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_ranks_with_and_without_python_work_together(case, size):
    body = body_of(case, 100)
    mixed = [rank % 2 == 0 for rank in range(size)]
    assert same_bits(play(size, body, mixed), play(size, body, [False] * size))


def test_a_large_array_keeps_its_bits():
    body = lambda t: allreduce(ring)(t, 300_001, np.float32, SUM)  # noqa: E731
    assert same_bits(play(3, body, [True] * 3), play(3, body, [False] * 3))


# --- what is recorded ---------------------------------------------------------------------------
def on_one_rank(algorithm, x):
    transport = LoopbackHub(1).transport(0)
    return drive(perform(algorithm, channel(transport), flat(x)))[0]


def test_an_algorithm_runs_on_paper_once_for_arguments_of_the_same_sizes():
    n_runs = 0

    async def double_(x, t):
        nonlocal n_runs
        n_runs += 1
        t.combine(x, x, SUM)

    xs = [np.arange(n, dtype=np.float32) for n in (5, 5, 6)]
    for x in xs:
        on_one_rank(double_, x)
    assert n_runs == 2
    assert all((x == 2 * np.arange(len(x))).all() for x in xs)


def recorded(run, x):
    t = channel(LoopbackHub(1).transport(0))
    return record_call(run, t, x.bytes, lambda result: result and result.bytes)


def test_a_whole_call_is_recorded_for_other_arrays():
    """With the copies around its algorithm, and what it keeps for itself."""

    def call_on(x, out):
        async def call(t):
            apart = x.like(x.count)
            t.copy(apart, x)
            t.combine(apart, x, SUM)
            t.copy(out, apart)
            return out

        return call

    x, out = flat(np.zeros(5, np.float32)), flat(np.zeros(5, np.float32))
    schedule, peers, writes_x = recorded(call_on(x, out), x)
    assert (peers, writes_x) == ((), False)
    values, doubled = np.arange(5, dtype=np.float32), np.empty(5, np.float32)
    runner = LoopbackHub(1).transport(0).runner
    run = runner.run(schedule, [values.view(np.uint8), doubled.view(np.uint8)], [], 0)
    assert run.drive(DEADLINE_S)
    assert (doubled == 2 * values).all()
    assert not x.bytes.any()
    assert not out.bytes.any()


def test_a_call_that_overwrites_its_array_is_recorded_for_one_argument():
    x = flat(np.zeros(5, np.float32))

    async def call(t):
        t.combine(x, x, SUM)
        return x

    schedule, _, writes_x = recorded(call, x)
    assert writes_x
    values = np.arange(5, dtype=np.float32)
    runner = LoopbackHub(1).transport(0).runner
    assert runner.run(schedule, [np.empty(0, np.uint8), values.view(np.uint8)], [], 0).drive(1)
    assert values.tolist() == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("n_written", [0, 2])
def test_a_call_that_reads_what_it_has_not_written_is_not_recorded(n_written):
    """It was filled when the call was planned."""
    x, other = flat(np.zeros(5, np.float32)), flat(np.zeros(5, np.float32))

    async def call(t):
        t.copy(other[:n_written], x[:n_written])
        t.copy(x, other)

    with pytest.raises(CannotRecord):
        recorded(call, x)


@pytest.mark.parametrize("is_native", [False, True])
def test_a_view_of_some_ranks_numbers_them_anew(is_native):
    async def in_two_groups_(x, t):
        assert t.nodes == tuple(range(6))
        group = [r for r in (5, 3, 1, 4, 2, 0) if r % 2 == t.rank % 2]
        part = t.among(group)
        assert (part.size, part.nodes[part.rank]) == (3, t.rank)
        await ring.allreduce_(x, part, SUM)
        await ring.allreduce_(x, t.among(range(6)), SUM)

    async def body(t):
        x = np.full(20, 10.0**t.rank)
        await perform(in_two_groups_, t, flat(x))
        return x

    assert all((x == 333333).all() for x in play(6, body, [is_native] * 6))


def test_an_algorithm_that_touches_memory_itself_is_refused():
    async def zero_(x, t):
        x.bytes[:] = 0

    with pytest.raises(TypeError, match="item assignment"):
        on_one_rank(zero_, np.ones(3))


def test_an_algorithm_that_does_not_wait_for_a_message_is_refused():
    async def forgetful_(x, t):
        t.isend(x.bytes, 0)

    with pytest.raises(ValueError, match="has not waited for"):
        on_one_rank(forgetful_, np.ones(3))


def test_an_algorithm_that_awaits_something_else_is_refused():
    class Other:
        def __await__(self):
            yield ()

    async def impatient_(x, t):
        await Other()

    with pytest.raises(AssertionError, match="may await nothing but its Performer"):
        on_one_rank(impatient_, np.ones(3))


def test_the_result_is_a_view_of_the_argument_it_is_part_of():
    async def tail_(x, t):
        return x[1:]

    x = np.arange(4, dtype=np.int32)
    tail = on_one_rank(tail_, x)
    assert isinstance(tail, Flat)
    assert tail.bytes.view(np.int32).tolist() == [1, 2, 3]
    assert np.shares_memory(tail.bytes, x)


@pytest.mark.parametrize(
    ("span", "peer"), [((0, 0, 9), 0), ((0, 8, 1), 0), ((1, 0, 1), 0), ((0, 0, 1), -1)]
)
def test_a_schedule_refuses_what_lies_outside_of_its_buffers(span, peer):
    schedule = _core.Schedule([8])
    for start in (schedule.send, schedule.receive):
        with pytest.raises(ValueError, match=r"outside of its buffer|whom it speaks to"):
            start(span, peer)


@pytest.mark.parametrize("buffers", [[], [8, 8], [7]])
def test_a_run_refuses_buffers_of_other_sizes(buffers):
    runner = _core.LoopbackHub(1).runner(0)
    with pytest.raises(ValueError, match=r"1 arguments, not|bytes, not 8"):
        runner.run(_core.Schedule([8]), [np.empty(n, np.uint8) for n in buffers], [0], 0)


# --- what is kept ------------------------------------------------------------------------------
def pair():
    hub = LoopbackHub(2)
    return [hub.transport(rank) for rank in range(2)]


def step(transports, xs, tag=0):
    drive(
        *[
            perform(ring.allreduce_, channel(t, tag), flat(x))
            for t, x in zip(transports, xs, strict=True)
        ]
    )


def test_the_same_operation_again_and_again_keeps_one_workspace():
    transports, xs = pair(), [np.ones(1000, np.float32) for _ in range(2)]
    for turn in range(100):
        step(transports, xs)
        assert [t.runner.n_idle for t in transports] == [1, 1]
        assert [t.runner.idle_nbytes for t in transports] == [
            2048 + 4 * 1024
        ] * 2  # scratch and messages
        assert all((x == 2).all() for x in xs), turn
        for x in xs:
            x[:] = 1


def test_an_operation_of_another_tag_and_address_takes_the_same_workspace():
    transports = pair()
    for tag in range(20):
        xs = [np.full(1000, tag, np.float32) for _ in range(2)]
        step(transports, xs, tag)
        assert all((x == 2 * tag).all() for x in xs)
    assert [t.runner.n_idle for t in transports] == [1, 1]


def test_operations_in_flight_at_once_have_a_workspace_each():
    transports = pair()
    xs = [[np.full(1000, tag, np.float32) for _ in range(2)] for tag in range(5)]
    strands = [
        perform(ring.allreduce_, channel(t, tag), flat(x))
        for tag, both in enumerate(xs)
        for t, x in zip(transports, both, strict=True)
    ]
    drive(*strands)
    assert all(1 <= t.runner.n_idle <= 5 for t in transports)  # some ended before others began
    assert all((x == 2 * tag).all() for tag, both in enumerate(xs) for x in both)


@pytest.mark.long
def test_idle_workspaces_take_little_memory():
    transports = pair()
    for mib in (50, 60, 140):
        step(transports, [np.zeros(mib << 20, np.uint8) for _ in range(2)])
        assert all(t.runner.idle_nbytes <= 64 << 20 for t in transports)


def test_a_closed_runner_keeps_and_starts_nothing():
    transports = pair()
    step(transports, [np.ones(10), np.ones(10)])
    transports[0].runner.close()
    assert transports[0].runner.n_idle == 0
    with pytest.raises(WireFault, match="closed"):
        transports[0].runner.run(_core.Schedule([]), [], [0, 1], 0)


# --- what goes wrong ---------------------------------------------------------------------------
def first_move(strand):
    """Begin; return the requests that it waits for, once the run has moved, maybe before them."""
    requests = strand.send(None)
    deadline = time.monotonic() + DEADLINE_S
    while not any(request._run.moves or request.test() for request in requests):
        os.sched_yield()
        assert time.monotonic() < deadline
    return requests


@pytest.mark.parametrize("counts", [(10, 20), (20, 10)])
def test_a_message_of_another_size_is_a_fault(counts):
    strands = [
        perform(ring.allreduce_, channel(t), flat(np.ones(n)))
        for t, n in zip(pair(), counts, strict=True)
    ]
    with pytest.raises(WireFault, match="bytes sent"):
        drive(*strands)


def test_an_abandoned_run_takes_no_message_and_keeps_its_buffers():
    transports, x = pair(), np.ones(10)
    t = channel(transports[0])
    strand = perform(ring.allreduce_, t, flat(x))
    first_move(strand)
    strand.close()
    t.abandon()
    del t, strand
    gc.collect()
    out = np.empty(40, np.uint8)
    late = transports[1].irecv(out, 0, 0)  # what rank 0 has sent before it gave up
    send = transports[1].isend(np.zeros(40, np.uint8), 0, 0)
    assert late.test()
    assert not send.test()
    assert out.tobytes() == x[5:].tobytes()[:40]
    assert (x == 1).all()


def test_a_run_that_is_waited_for_says_when_it_moves():
    hub = LoopbackHub(3)
    strands = [
        perform(ring.allreduce_, channel(hub.transport(rank)), flat(np.ones(9)))
        for rank in range(2)
    ]
    first_move(strands[1])
    (move,) = strands[1].send(None)  # what it could post without the other is posted, or soon is
    first_move(strands[0])
    deadline = time.monotonic() + DEADLINE_S
    while not move.test():  # one of its four messages has come
        assert time.monotonic() < deadline
    for strand in strands:
        strand.close()


def test_a_run_drives_itself_without_python():
    hub = _core.LoopbackHub(2)
    x, out = np.arange(8, dtype=np.uint8), np.zeros(8, np.uint8)
    send, receive = _core.Schedule([8]), _core.Schedule([8])
    send.wait([send.send((0, 0, 8), 1)])
    receive.wait([receive.receive((0, 0, 8), 0)])
    sender = hub.runner(0).run(send, [x], [0, 1], 0)
    receiver = hub.runner(1).run(receive, [out], [0, 1], 0)
    assert not receiver.drive(0.0)
    assert sender.drive(5)
    assert receiver.drive(5)
    assert out.tolist() == x.tolist()
