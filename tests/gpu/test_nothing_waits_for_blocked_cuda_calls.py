"""Calls of CUDA block while a stream waits for a rank: nothing may depend on them.

The simulated GPU has what makes them block: the context's lock, which the first launch of a kernel
holds until all streams are idle, and streams that take so many entries and no more. It also has
captures of graphs, which many calls of other threads end, and tells who makes a context on GPU 0.
"""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import simulated_gpu as sim
from gpu_ranks import TRANSPORTS, choose, on_gpus, with_fault
from harness import wait_until
from simulated_nccl import FakeCommunicator

import ringcomm as rc
from ringcomm.arrays import DTYPES, Span
from ringcomm.gpu.executor.idle_calls import IdleCalls
from ringcomm.gpu.executor.jobs import LoadedKernels
from ringcomm.gpu.executor.team import MOST_UNDER_WAY
from ringcomm.gpu.kernels.reduce import ReduceKernel
from ringcomm.gpu.transports.nccl import NcclTransport
from ringcomm.gpu.transports.works import GpuReduce, Job
from ringcomm.transport.channel import Until, Wait

FREED_S = 20.0  # a busy machine needs a second


def block_all_calls(gpu):
    """Load a kernel of another library in a thread, and return once that holds the lock."""
    gpu.is_loading.clear()
    thread = threading.Thread(target=gpu.load_function, args=("of another library",), daemon=True)
    thread.start()
    assert gpu.is_loading.wait(120)
    return thread


def wait_for_the_dead_rank(rank, gpu):
    """Put an operation on the stream that waits for the GPU of rank 1, which stands still."""
    x = sim.array(np.ones(1000))
    rc.allreduce_(x)
    gpu.synchronize()  # also the marks behind the results
    rc.barrier()
    if rank == 1:
        gpu.freeze()
    rc.allreduce_async_(x, name="gradient").wait()


def until_freed(thread):
    """Return how long a thread is still in its call."""
    start = time.monotonic()
    thread.join(FREED_S)
    assert not thread.is_alive(), "the call blocks for ever"
    return time.monotonic() - start


def wait_and_meet(handle):
    """Wait, then meet the others: a launch that a death has let through tells nothing of that."""
    handle.wait()
    rc.barrier()


def assert_ranks_beside_1_end_well(body, transport, tmp_path):
    """Run body(rank, gpu) on 3 ranks, of which rank 1 raises a ValueError."""
    first, dead, third = with_fault(3, body, tmp_path, **choose(transport))
    assert isinstance(dead, ValueError)
    assert first is third is None, (first, third)


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_a_death_frees_who_is_in_a_call(transport, tmp_path):
    all_wait = threading.Barrier(3)

    def body(rank, gpu):
        wait_for_the_dead_rank(rank, gpu)
        thread = block_all_calls(gpu)
        all_wait.wait(120)
        if rank == 1:
            raise ValueError("boom")
        until_freed(thread)
        with pytest.raises(rc.PeerFailedError, match="rank 1 raised ValueError: boom"):
            rc.barrier()

    assert_ranks_beside_1_end_well(body, transport, tmp_path)


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_a_death_is_noticed_while_a_launch_blocks(transport, tmp_path):
    all_wait = threading.Barrier(3)

    def body(rank, gpu):
        wait_for_the_dead_rank(rank, gpu)
        x = sim.array(np.ones(1000))
        if rank == 1:
            all_wait.wait(120)
            rc.allreduce_async(x, name="next")
            time.sleep(0.3)  # in which the others are about to launch it: nothing tells of that
            raise ValueError("boom")
        handle = rc.allreduce_async(x, name="next")
        thread = block_all_calls(gpu)
        all_wait.wait(120)
        with pytest.raises(rc.PeerFailedError, match="rank 1 raised ValueError: boom"):
            wait_and_meet(handle)
        until_freed(thread)

    assert_ranks_beside_1_end_well(body, transport, tmp_path)


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_a_deadline_does_not_need_a_call(transport, tmp_path):
    is_freed = threading.Barrier(2)

    def body(rank, gpu):
        wait_for_the_dead_rank(rank, gpu)
        if rank == 0:
            until_freed(block_all_calls(gpu))
        is_freed.wait(120)
        gpu.thaw()
        with pytest.raises(rc.CommTimeoutError, match=r"allreduce_\[gradient\] on the GPU"):
            rc.barrier()

    results = with_fault(2, body, tmp_path, timeout_s=4, **choose(transport))
    assert results == [None, None]


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_kernels_are_loaded_before_the_stream_waits(transport, tmp_path):
    def body(rank):
        x = sim.array(np.ones(1000, np.float16))
        for op in (rc.SUM, rc.AVERAGE, rc.MAX):
            rc.allreduce(x, op)
        rc.grouped_allreduce([sim.array(np.ones(10)) for _ in range(4)], rc.AVERAGE)
        return x.gpu.n_late_loads

    assert on_gpus(2, body, tmp_path, **choose(transport)) == [0, 0]


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_few_operations_are_under_way_so_that_no_stream_is_full(transport, tmp_path):
    """A full stream blocks the launch, and with it the lock."""
    n = 3 * MOST_UNDER_WAY

    def body(rank):
        x = sim.array(np.ones(10))
        rc.allreduce_(x)
        x.gpu.finish()
        rc.barrier()
        if rank == 1:
            x.gpu.freeze()
        handles = [rc.allreduce_async(x, name=f"{i}") for i in range(n)]
        # Names may be agreed on in any order, the same on all ranks.
        wait_until(lambda: sum(each.done() for each in handles) >= MOST_UNDER_WAY, "no room")
        rc.barrier()
        longest = x.gpu.longest
        x.gpu.thaw()
        return longest, [handle.wait().get()[0] for handle in handles]

    for longest, sums in on_gpus(2, body, tmp_path, slow=0.0, **choose(transport)):
        assert longest <= 12 * MOST_UNDER_WAY
        assert sums == [4.0] * n


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_capture_is_not_disturbed_by_operations_under_way(transport, tmp_path):
    def body(rank):
        x = sim.array(np.ones(1000))
        rc.allreduce(x)
        rows = [rc.allgather_async(sim.array(np.ones((n, 2)))) for n in range(1, 5)]
        handles = [rc.allreduce_async(x, name=f"{i}") for i in range(4)]
        stream = x.gpu.new_stream()
        x.gpu.begin_capture(stream)
        for _ in range(10):
            rc.barrier()  # what is under way goes on meanwhile
        is_whole = x.gpu.end_capture(stream)
        sums = [handle.wait().get()[0] for handle in handles]
        return is_whole, sums, [len(each.wait().get()) for each in rows]

    for is_whole, sums, rows in on_gpus(2, body, tmp_path, **choose(transport)):
        assert is_whole
        assert sums == [2.0] * 4
        assert rows == [2, 4, 6, 8]


def test_a_query_would_disturb_a_capture(tmp_path):
    """The test above would see one."""
    gpu = sim.SimulatedGpu(tmp_path)
    gpu.begin_capture(7)
    gpu.query(gpu.new_event())
    assert not gpu.end_capture(7)
    gpu.close()


def test_operations_are_refused_while_their_stream_captures(tmp_path):
    def body(rank):
        x = sim.array(np.ones(10))
        rc.allreduce(x)
        pending = rc.allreduce_async(x)
        stream = x.gpu.new_stream()
        x.gpu.begin_capture(stream)
        with sim.on_stream(stream):
            for call in (lambda: rc.allreduce(x), pending.wait):
                with pytest.raises(rc.RingcommError, match="captures a CUDA graph, which cannot"):
                    call()
        assert x.gpu.end_capture(stream), "the refusal itself has ended the capture"
        return pending.wait().get()[0], rc.allreduce(x).get()[0]

    assert on_gpus(2, body, tmp_path) == [(2, 2)] * 2


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_no_thread_makes_a_context_on_gpu_0(transport, tmp_path):
    def body(rank):
        x = sim.array(np.ones((4, 2)))
        rc.allreduce(x)
        rc.grouped_allreduce([x, x, x])
        rc.allgather_async(x).wait()
        rc.alltoall_async(x).wait()
        rc.broadcast_async(x, 0).wait()
        rc.sendrecv(x, 1 - rank, x, 1 - rank)
        return x.gpu.strays

    assert on_gpus(2, body, tmp_path, **choose(transport)) == [0, 0]


def test_nccl_connects_before_the_first_operation(tmp_path, monkeypatch):
    """A connection blocks until all ranks call the same: none may be made by the launches."""
    monkeypatch.setattr(FakeCommunicator, "late_connections", [])

    def body(rank):
        x = sim.array(np.ones(6))
        rc.allreduce(x)
        rc.reduce(x)
        rc.broadcast(x, 0)
        rc.reduce_scatter(x)
        rc.allgather(x)

    on_gpus(3, body, tmp_path, **choose("nccl"))
    assert FakeCommunicator.late_connections == []


def test_a_death_ends_the_connection_of_nccl(tmp_path, monkeypatch):
    connect_all = NcclTransport.connect_all
    is_connecting, is_dead = threading.Event(), threading.Event()

    def connect(transport):
        if transport._rank == 1:
            is_connecting.set()
            assert is_dead.wait(120)
            return
        connect_all(transport)

    monkeypatch.setattr(NcclTransport, "connect_all", connect)

    def body(rank, gpu):
        x = sim.array(np.ones(6))
        if rank == 1:
            rc.allreduce_async(x)
            assert is_connecting.wait(120)
            raise ValueError("boom")
        with pytest.raises(rc.PeerFailedError, match="rank 1 raised ValueError: boom"):
            rc.allreduce(x)
        is_dead.set()
        for thread in threading.enumerate():
            if thread.name == "ringcomm-nccl":
                until_freed(thread)

    first, dead = with_fault(2, body, tmp_path, **choose("nccl"))
    assert isinstance(dead, ValueError)
    assert first is None, first


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
@pytest.mark.parametrize("late_s", [0.0, 0.03])
def test_groups_may_load_their_kernels_in_any_order(late_s, transport, tmp_path, monkeypatch):
    """A load waits until the stream is idle, which may wait for a rank that has to load, too."""
    load = IdleCalls.load

    async def load_late(calls, kernels):
        """Let the operation that needs no load here be enqueued first, if nothing prevents it."""
        if late_s and not all(calls._device.has_loaded(each) for each in kernels):
            end = time.monotonic() + late_s
            await Wait((Until(lambda: time.monotonic() > end),))
        await load(calls, kernels)

    monkeypatch.setattr(IdleCalls, "load", load_late)
    n_targets = {"ipc": 2, "nccl": 1}[transport]
    dtypes = ("uint8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16")
    dtypes = dtypes[:2] if late_s else dtypes

    def body(rank, gpu):
        groups = [rc.Group([0, 1]) for _ in range(2)]
        for each in groups:
            rc.broadcast(sim.array(np.ones(1)), 0, group=each)  # sets it up, and needs no kernel
        results = []
        for dtype in dtypes:
            for ops in ((rc.SUM, rc.PRODUCT), (rc.MAX, rc.MIN)):
                x = sim.array(np.full(100, 3 + rank, dtype))
                loaded = ReduceKernel((0, 0), (0,) * n_targets, 0, DTYPES[dtype], ops[rank])
                gpu.synchronize()  # this load is one of the test: it must not wait for a rank
                gpu.load(loaded)
                rc.barrier()
                each = zip(groups, ops, strict=True)
                options = {"deterministic": True}  # by NCCL, too, with a kernel of ringcomm's
                handles = [rc.allreduce_async(x, op, group=group, **options) for group, op in each]
                results.append([int(handle.wait().get()[0]) for handle in handles])
        return results

    expected = [[7, 12], [4, 3]] * len(dtypes)
    results = with_fault(2, body, tmp_path, timeout_s=20, **choose(transport))
    assert results == [expected, expected]


@pytest.mark.parametrize("is_known", [False, True])
def test_a_call_that_needs_idle_streams_waits_for_what_is_under_way(is_known):
    async def call(function):
        return function()

    made, over = [], []
    calls = IdleCalls(SimpleNamespace(has_loaded=lambda _: True), SimpleNamespace(call=call))
    calls.add_stream(lambda: bool(over))
    kernels, transport = LoadedKernels(), SimpleNamespace(kernels=lambda _: [], has_outlines=True)
    jobs = [Job(GpuReduce(Span(0, 1, DTYPES["int8"]), None, rc.SUM))]
    with pytest.raises(StopIteration):
        kernels.load(jobs, transport, calls, None).send(None)
    waiting = calls.call(lambda: made.append("the call"))
    waiting.send(None)
    # It has nothing to load, but would keep the streams busy.
    another = kernels.load(jobs, transport, calls, None) if is_known else calls.load([object()])
    another.send(None)
    assert made == []
    over.append(True)
    for each in (waiting, another):
        with pytest.raises(StopIteration):
            each.send(None)
    assert made == ["the call"]
