"""A rank dies, or its GPU stands still: no stream of another is stuck, and the error names it."""

import time

import numpy as np
import pytest
import simulated_gpu as sim
from gpu_ranks import begin, choose
from harness import outcomes

import ringcomm as rc
from ringcomm.config import Settings


def with_fault(size, body, folder, *, timeout_s=20, **options):
    """Return each rank's result or exception; GPUs are closed when all are through."""
    gpus = {}

    def main(rank):
        gpus[rank] = begin(rank, folder, **options)
        return body(rank, gpus[rank])

    try:
        return outcomes(size, main, settings=Settings(timeout_s=timeout_s))
    finally:
        for gpu in gpus.values():
            gpu.close()


def synchronize(gpu):
    """Wait for the default stream, as a user does who knows of nothing; return the seconds."""
    start = time.monotonic()
    gpu.finish(0)
    return time.monotonic() - start


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_a_death_frees_the_streams_of_the_others(transport, tmp_path):
    def body(rank, gpu):
        x = sim.array(np.ones(1000))
        rc.allreduce_(x)
        if rank == 1:
            gpu.freeze()  # what it has been given is not carried out any more
        rc.allreduce_async_(x, name="gradient").wait()
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
    def body(rank, gpu):
        x = sim.array(np.ones(1000))
        rc.allreduce_(x)
        if rank == 1:
            raise ValueError("boom")
        with pytest.raises(rc.PeerFailedError, match="rank 1 raised ValueError: boom"):
            rc.allreduce_(x)
        return synchronize(gpu)

    first, _, third = with_fault(3, body, tmp_path, **choose("staged"))
    assert max(first, third) < 10


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_a_gpu_that_stands_still_is_a_timeout(transport, tmp_path):
    def body(rank, gpu):
        x = sim.array(np.ones(1000))
        rc.allreduce_(x)
        gpu.finish(0)
        rc.barrier()
        if rank == 1:
            gpu.freeze()
        handle = rc.allreduce_async_(x, name="gradient")
        handle.wait()  # the hosts have met: the rest is up to the streams
        if rank == 1:
            time.sleep(2.5)  # what stands still does not end by itself
            gpu.thaw()
        seconds = synchronize(gpu)
        with pytest.raises(rc.CommTimeoutError, match=r"allreduce_\[gradient\] on the GPU") as e:
            handle.wait()
        return seconds, str(e.value)

    results = with_fault(2, body, tmp_path, timeout_s=1, **choose(transport))
    assert not [each for each in results if isinstance(each, BaseException)], results
    assert results[0][0] < 5
    if transport == "ipc":
        assert "went no further: rank(s) 1." in results[0][1]


def test_a_rank_that_never_comes_is_named_before_anything_is_launched(tmp_path):
    def body(rank, gpu):
        x = sim.array(np.ones(10))
        rc.allreduce_(x)
        if rank == 2:
            time.sleep(2.5)  # somewhere else
            return None
        with pytest.raises(rc.CommTimeoutError, match=r"allreduce\[late\].* rank 2"):
            rc.allreduce(x, name="late")
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
        from ringcomm.engine.world import engine

        xs = [sim.array(np.full(1000, rank + 1.0)) for _ in range(5)]
        for i, x in enumerate(xs):
            rc.allreduce_async_(x, name=f"bucket {i}")
        engine().leave("is done", keeps_wire=True)
        return [float(np.frombuffer(x.memory.map, np.float64)[0]) for x in xs]

    assert with_fault(3, body, tmp_path, seed=3) == [[6.0] * 5] * 3
