"""Memory that other processes map: kept, found, and given back at any moment."""

import threading

import numpy as np
import pytest
import simulated_gpu as sim
from harness import wait_until

from ringcomm.gpu.device.memory_allocator_and_address import NOWHERE, Address
from ringcomm.gpu.device.shared_pinned_pool import HostPool


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
    gpu.garbage = gpu.regions.take(100)
    whole = gpu.regions.take(5 << 20)  # the collector drops the first one meanwhile
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
    span = gpu.regions.take(1000)
    found = gpu.regions.find(span[10:20])
    assert (found.region, found.offset) == (1, 10)
    assert Address.unpack(found.pack()) == found
    assert np.array_equal(gpu.map(found.exported) % 4096, 0)
    foreign = sim.GpuArray(gpu, span.dtype, (5,))
    assert gpu.regions.find(sim._Adapter().span(foreign)) == NOWHERE
    address = span.address
    del span, found
    kept = []

    def is_used_again():
        kept.append(gpu.regions.take(10))
        return kept[-1].address == address

    wait_until(is_used_again, "the memory is not used again")
    gpu.close()


def test_memory_is_taken_at_once_and_used_again_once_its_streams_are_through(tmp_path):
    gpu = sim.SimulatedGpu(tmp_path, slow=0)
    stream, flag = gpu.new_stream(), np.zeros(1024, np.uint32)
    gpu.await_value(stream, flag.ctypes.data, 1)  # as for another rank, which may need that take
    first = gpu.regions.take(10).address
    for _ in range(3):
        assert gpu.regions.take(10).address != first
    assert any(thread.name == "ringcomm-gpu-memory" for thread in threading.enumerate())
    flag[0] = 1
    kept = []

    def is_used_again():
        kept.append(gpu.regions.take(10))
        return first in [span.address for span in kept]

    wait_until(is_used_again, "the memory is not used again")
    gpu.close()


def test_a_full_gpu_waits_for_memory_that_was_given_back(tmp_path):
    gpu = sim.SimulatedGpu(tmp_path)
    address = gpu.regions.take(10).address

    def allocate(nbytes):
        raise MemoryError("full")

    gpu.allocate = allocate
    kept = gpu.regions.take(10)
    assert kept.address == address
    with pytest.raises(MemoryError, match="full"):
        gpu.regions.take(10)
    gpu.close()
