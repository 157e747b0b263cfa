"""Memory that other processes map: kept, found, and given back at any moment."""

import random
import threading
import weakref

import numpy as np
import pytest
import simulated_gpu as sim
from harness import wait_until

from ringcomm.gpu.device.memory import NOWHERE, Address
from ringcomm.gpu.device.pinned_pool import HostPool


class Interrupted(sim.SimulatedGpu):
    """A GPU in whose allocations and registrations the garbage collector runs."""

    garbage = None

    def allocate(self, nbytes):
        self.garbage = None
        return super().allocate(nbytes)

    def register(self, memory):
        self.garbage = None
        return super().register(memory)


def test_memory_may_be_given_back_while_more_is_taken(tmp_path):
    gpu = Interrupted(tmp_path)
    gpu.garbage = gpu.regions.take(100, 0)
    whole = gpu.regions.take(5 << 20, 0)  # the collector drops the first one meanwhile
    pool = HostPool(gpu, lambda _: None)
    block = pool.take(10)
    gpu.garbage = type("Lease", (), {"__del__": lambda _: pool.give_back(block)})()
    other = pool.take(3 << 20)
    at = pool.address(other)
    assert gpu.regions.find(whole).offset == 0
    assert pool.address(pool.take(10)) == pool.address(block) != at
    gpu.close()


def test_memory_is_found_by_any_part_of_it_and_used_again(tmp_path):
    gpu = sim.SimulatedGpu(tmp_path)
    span = gpu.regions.take(1000, 0)
    found = gpu.regions.find(span[10:20])
    assert (found.region, found.offset) == (1, 10)
    assert Address.unpack(found.pack()) == found
    assert np.array_equal(gpu.map(found.exported) % 4096, 0)
    foreign = sim.GpuArray(gpu, span.dtype, (5,))
    assert gpu.regions.find(sim._Adapter().span(foreign)) == NOWHERE
    address = span.address
    del span, found
    assert gpu.regions.take(10, 0).address == address
    gpu.close()


def is_taken(gpu, address, stream):
    """Return a function that tells whether a take() for a stream has returned this memory."""
    kept = []

    def is_there():
        kept.append(gpu.regions.take(10, stream))
        return kept[-1].address == address

    return is_there


def stuck_stream(gpu):
    """Return a stream that waits, as for another rank, and the word that ends it if it is 1."""
    stream, flag = gpu.new_stream(), np.zeros(1024, np.uint32)
    gpu.await_value(stream, flag.ctypes.data, 1)
    return stream, flag


def test_a_stream_gets_its_memory_back_at_once(tmp_path):
    gpu = sim.SimulatedGpu(tmp_path, slow=0)
    stream, flag = stuck_stream(gpu)
    address = gpu.regions.take(10, stream).address
    for _ in range(3):
        assert gpu.regions.take(10, stream).address == address
    assert not any(thread.name == "ringcomm-gpu-memory" for thread in threading.enumerate())
    flag[0] = 1
    gpu.close()


def test_another_stream_gets_memory_once_the_former_one_is_through(tmp_path):
    gpu = sim.SimulatedGpu(tmp_path, slow=0)
    (stream, flag), (other, never) = stuck_stream(gpu), stuck_stream(gpu)
    here, there = (gpu.regions.take(10, each) for each in (stream, other))
    address, held = here.address, there.address
    del here, there
    kept = [gpu.regions.take(10, 0) for _ in range(3)]  # at once: the rank may be needed for them
    assert not {address, held} & {span.address for span in kept}
    flag[0] = 1
    wait_until(is_taken(gpu, address, 0), "the memory is not used again")
    assert gpu.regions.take(10, other).address == held, "the other stream is not through"
    never[0] = 1
    gpu.close()


def test_memory_that_is_used_by_its_stream_again_is_not_free_for_others(tmp_path):
    gpu = sim.SimulatedGpu(tmp_path, slow=0)
    stream, flag = stuck_stream(gpu)
    address = gpu.regions.take(10, stream).address
    gpu.regions.take(10, 0)  # begins to wait for what the stream has been given so far
    mine = gpu.regions.take(10, stream)
    assert mine.address == address
    later = np.zeros(1024, np.uint32)
    gpu.await_value(stream, later.ctypes.data, 1)
    flag[0] = 1
    wait_until(lambda: not gpu.regions._waiting, "the wait does not end")
    del mine
    assert gpu.regions.take(10, 0).address != address
    later[0] = 1
    wait_until(is_taken(gpu, address, 0), "the memory is not used again")
    gpu.close()


def test_memory_of_a_stream_that_is_freed_is_free_for_all(tmp_path):
    gpu = sim.SimulatedGpu(tmp_path)
    stream = gpu.new_stream()
    address = gpu.regions.take(10, stream).address
    gpu.free_stream(stream)
    assert gpu.regions.take(10, 0).address == address
    gpu.close()


def test_memory_keeps_its_stream_alive_until_it_has_another_one(tmp_path):
    gpu = sim.SimulatedGpu(tmp_path)
    owner = type("Stream", (), {})()
    is_alive = weakref.ref(owner)
    span = gpu.regions.take(10, 0, owner)
    del owner, span
    assert is_alive() is not None
    taken = gpu.regions.take(10, 0)
    assert taken.nbytes == 10
    assert is_alive() is None
    gpu.close()


def test_each_thread_has_its_own_memory_of_the_stream_per_thread(tmp_path):
    per_thread = 2  # cudaStreamPerThread
    gpu = sim.SimulatedGpu(tmp_path)
    address = gpu.regions.take(10, per_thread).address
    others = []
    thread = threading.Thread(target=lambda: others.append(gpu.regions.take(10, per_thread)))
    thread.start()
    thread.join(120)
    assert others[0].address != address
    assert gpu.regions.take(10, per_thread).address == address
    gpu.close()


def test_no_capture_is_disturbed_by_memory_that_is_taken_again(tmp_path):
    gpu = sim.SimulatedGpu(tmp_path)
    first, second, capturing = (gpu.new_stream() for _ in range(3))
    gpu.allocate = gpu._allocate  # what cudaMalloc() does to a capture is not of this test
    gpu.begin_capture(capturing)
    address = gpu.regions.take(10, first).address
    wait_until(is_taken(gpu, address, second), "the memory is not used again")
    assert gpu.end_capture(capturing)
    gpu.close()


def test_memory_of_a_stream_that_captures_waits_for_the_end_of_that(tmp_path):
    gpu = sim.SimulatedGpu(tmp_path)
    stream = gpu.new_stream()
    address = gpu.regions.take(10, stream).address
    gpu.allocate = gpu._allocate  # as above
    gpu.begin_capture(stream)
    for _ in range(3):
        assert gpu.regions.take(10, 0).address != address
        wait_until(lambda: not gpu.regions._waiting, "the wait does not end")
    assert gpu.end_capture(stream)
    wait_until(is_taken(gpu, address, 0), "the memory is not used again")
    gpu.close()


@pytest.mark.parametrize("seed", range(20))
def test_owners_of_the_same_memory_do_not_meet(seed, tmp_path):
    gpu = sim.SimulatedGpu(tmp_path, seed, slow=0.5)
    choice = random.Random(seed)
    streams = [0, gpu.new_stream(), gpu.new_stream()]
    found, wanted, used = [], [], set()
    for number in range(40):
        stream = choice.choice(streams)
        span = gpu.regions.take(choice.choice([10, 3 << 20]), stream)
        used.add(span.address)
        at = sim.bytes_at(span.address, 10)
        gpu.enqueue(stream, lambda at=at, n=number: at.fill(n))
        gpu.enqueue(stream, lambda: None)
        gpu.enqueue(stream, lambda at=at: found.append(set(at.tolist())))
        wanted.append({number})
    gpu.synchronize()
    assert sorted(found, key=min) == wanted
    assert len(used) < 30, "nothing was used again"
    gpu.close()


@pytest.mark.parametrize("stream", [0, 1])
def test_a_full_gpu_waits_for_memory_that_was_given_back(stream, tmp_path):
    gpu = sim.SimulatedGpu(tmp_path)
    address = gpu.regions.take(10, 0).address

    def allocate(nbytes):
        raise MemoryError("full")

    gpu.allocate = allocate
    kept = gpu.regions.take(10, stream)
    assert kept.address == address
    with pytest.raises(MemoryError, match="full"):
        gpu.regions.take(10, 0)
    gpu.close()


def test_a_full_gpu_does_not_wait_for_a_stream_that_captures(tmp_path):
    gpu = sim.SimulatedGpu(tmp_path)
    stream = gpu.new_stream()
    gpu.regions.take(10, stream)
    gpu.begin_capture(stream)

    def allocate(nbytes):
        raise MemoryError("full")

    gpu.allocate = allocate
    with pytest.raises(MemoryError, match="full"):
        gpu.regions.take(10, 0)
    gpu.close()
