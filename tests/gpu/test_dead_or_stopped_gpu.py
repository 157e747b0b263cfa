"""A rank dies, or its GPU stands still: no stream of another is stuck, and the error names it."""

import threading
import time
from functools import partial

import numpy as np
import pytest
import simulated_gpu as sim
from gpu_ranks import choose, with_fault

import ringcomm as rc
from ringcomm.arrays import DTYPES
from ringcomm.gpu.executor import team as gpu_team
from ringcomm.gpu.transports import slices


def synchronize(gpu):
    """Wait for the default stream, as a user does who knows of nothing; return the seconds."""
    start = time.monotonic()
    gpu.finish(0)
    return time.monotonic() - start


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_a_death_frees_the_streams_of_the_others(transport, tmp_path):
    all_wait = threading.Barrier(3)  # which tells rank 1 that the others' streams wait for it

    def body(rank, gpu):
        x = sim.array(np.ones(1000))
        rc.allreduce_(x)
        if rank == 1:
            gpu.freeze()  # what it has been given is not carried out any more
        rc.allreduce_async_(x, name="gradient").wait()
        all_wait.wait(120)
        if rank == 1:
            raise ValueError("boom")
        seconds = synchronize(gpu)
        with pytest.raises(rc.PeerFailedError, match="rank 1 raised ValueError: boom"):
            rc.allreduce(x)
        return seconds

    first, dead, third = with_fault(3, body, tmp_path, **choose(transport))
    assert isinstance(dead, ValueError)
    assert max(first, third) < 10


def test_a_death_ends_what_goes_through_host_memory(tmp_path):
    def reduce_twice(x):
        rc.allreduce_(x)  # a rank may hear of the death before this has ended there
        rc.allreduce_(x)

    def body(rank, gpu):
        x = sim.array(np.ones(1000))
        if rank == 1:
            rc.allreduce_(x)
            raise ValueError("boom")
        with pytest.raises(rc.PeerFailedError, match="rank 1 raised ValueError: boom"):
            reduce_twice(x)
        return synchronize(gpu)

    first, _, third = with_fault(3, body, tmp_path, **choose("staged"))
    assert max(first, third) < 10


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_a_gpu_that_stands_still_is_a_timeout(transport, tmp_path):
    is_freed = threading.Event()

    def body(rank, gpu):
        x = sim.array(np.ones(1000))
        rc.allreduce_(x)
        gpu.synchronize()  # also what comes after the result
        rc.barrier()
        if rank == 1:
            gpu.freeze()
        handle = rc.allreduce_async_(x, name="gradient")
        handle.wait()  # the hosts have met: the rest is up to the streams
        if rank == 1:
            assert is_freed.wait(120)  # what stands still does not end by itself
            gpu.thaw()
        seconds = synchronize(gpu)
        is_freed.set()
        # The GPU of rank 1 goes on, and this rank may not have heard of rank 0's deadline yet.
        last = handle.wait if rank == 0 else rc.barrier
        with pytest.raises(rc.CommTimeoutError, match=r"allreduce_\[gradient\] on the GPU") as e:
            last()
        return seconds, str(e.value)

    results = with_fault(2, body, tmp_path, timeout_s=4, **choose(transport))
    assert not [each for each in results if isinstance(each, BaseException)], results
    assert results[0][0] < 12
    if transport == "ipc":
        assert "went no further: rank(s) 1." in results[0][1]


def test_a_rank_that_never_comes_is_named_before_anything_is_launched(tmp_path):
    told = threading.Semaphore(0)

    def body(rank, gpu):
        x = sim.array(np.ones(10))
        rc.allreduce_(x)
        if rank == 2:  # is somewhere else
            assert told.acquire(timeout=120)
            assert told.acquire(timeout=120)
            return None
        with pytest.raises(rc.CommTimeoutError, match=r"allreduce\[late\].* rank 2"):
            rc.allreduce(x, name="late")
        told.release()
        return synchronize(gpu)

    results = with_fault(3, body, tmp_path, timeout_s=1)
    assert not [each for each in results if isinstance(each, BaseException)], results


def test_a_kernel_that_fails_is_told_with_the_gpu(tmp_path):
    def body(rank, gpu):
        x = sim.array(np.ones(10))
        rc.allreduce_(x)
        if rank == 0:
            gpu.failure = MemoryError("an illegal address")
        rc.allreduce_(x)
        with pytest.raises(rc.RingcommError) as caught:
            meet_until_it_is_told()
        return str(caught.value)

    def meet_until_it_is_told():
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            rc.barrier()
            time.sleep(0.01)  # the failure is noticed beside what the host does

    first, second = with_fault(2, body, tmp_path)
    assert "the simulated GPU failed" in str(first)
    assert "rank 0" in str(second)


def test_operations_under_way_are_completed_by_shutdown(tmp_path):
    """leave() waits for the streams, too: the memory may be gone afterwards."""

    def body(rank, gpu):
        from ringcomm.engine.api.init_rank_size import engine
        from ringcomm.engine.core.meet_and_leave import leave

        xs = [sim.array(np.full(1000, rank + 1.0)) for _ in range(5)]
        for i, x in enumerate(xs):
            rc.allreduce_async_(x, name=f"bucket {i}")
        leave(engine(), "is done", keeps_wire=True)
        return [float(np.frombuffer(x.memory.map, np.float64)[0]) for x in xs]

    assert with_fault(3, body, tmp_path, seed=3) == [[6.0] * 5] * 3


def test_what_is_half_on_a_stream_when_a_rank_dies_ends(tmp_path, monkeypatch):
    """No operation is there to follow it; the stream must not stand for ever behind it."""
    put = gpu_team.GpuTeam.put

    def body(rank, gpu):
        xs = [sim.array(np.full(1000, 1.0)) for _ in range(3)]
        rc.grouped_allreduce(xs)
        gpu.synchronize()
        rc.barrier()
        n_put = 0

        async def put_two(team, t, *job, **end):
            nonlocal n_put
            n_put += 1
            if rank == 1 and n_put == 2:
                raise ValueError("boom")
            return await put(team, t, *job, **end)

        by_rank[rank] = put_two
        if rank == 1:
            gpu.freeze()
        rc.barrier()
        with pytest.raises((rc.PeerFailedError, ValueError)) as caught:
            rc.grouped_allreduce_(xs)
        if rank == 1:
            raise caught.value
        start = time.monotonic()
        gpu.synchronize()  # the stream of the team, too
        return n_put, time.monotonic() - start, str(caught.value)

    by_rank = {}

    async def put_by_rank(team, t, *job, **end):
        return await by_rank.get(t.rank, partial(put))(team, t, *job, **end)

    monkeypatch.setattr(gpu_team.GpuTeam, "put", put_by_rank)
    first, _, third = with_fault(3, body, tmp_path, settings={"fusion_mib": 0.008}, **choose("ipc"))
    for n_put, seconds, why in (first, third):
        assert n_put == 2
        assert seconds < 60
        assert "boom" in why


def test_a_stream_that_stands_still_is_not_filled(tmp_path, monkeypatch):
    """A stream takes about a thousand entries, and then it blocks whoever gives it more."""
    monkeypatch.setattr(slices, "STAGING_NBYTES", 4096)

    def body(rank, gpu):
        x = sim.array(np.full(100_000, rank + 1.0))  # through 4 kB at a time
        total = rc.allreduce(x).get()
        return bool((total == 3).all()), gpu.longest

    for is_right, longest in with_fault(2, body, tmp_path, slow=0.8, **choose("ipc")):
        assert is_right
        assert 30 < longest < 200


def test_arrays_on_another_gpu_than_before_are_refused(tmp_path):
    def body(rank, gpu):
        rc.allreduce_(sim.array(np.ones(10)))
        other = sim.SimulatedGpu(tmp_path, 7)
        sim.use(other)
        try:
            return rc.allreduce_(sim.array(np.ones(10)))
        finally:
            other.close()

    for error in with_fault(2, body, tmp_path):
        assert isinstance(error, rc.RingcommError)
        assert "A rank uses one GPU per group" in str(error)


def test_lists_of_arrays_of_several_places_are_refused_and_break_nothing(tmp_path):
    def body(rank, gpu):
        other = sim.SimulatedGpu(tmp_path, 7)
        try:
            here, there = sim.array(np.ones(4)), sim.GpuArray(other, DTYPES["float64"], (4,))
            for xs, why in [
                ([here, np.ones(4)], "array 0 is on a GPU, array 1 is in host memory"),
                ([np.ones(4), here], "array 0 is in host memory, array 1 is on a GPU"),
                ([here, there], "one call takes arrays of one GPU"),
            ]:
                with pytest.raises((TypeError, ValueError), match=why):
                    rc.grouped_allreduce(xs)
            return rc.allreduce(here).get()[0]
        finally:
            other.close()

    assert with_fault(2, body, tmp_path) == [2, 2]
