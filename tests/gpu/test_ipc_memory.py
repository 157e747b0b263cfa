"""Memory that other processes map: kept, found, and given back at any moment."""

import numpy as np
import simulated_gpu as sim

from ringcomm.gpu.device.ipc_allocator_and_address import NOWHERE, Address
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
    assert gpu.regions.take(10).address == address
    gpu.close()
