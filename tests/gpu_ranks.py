"""Ranks as threads, each with a simulated GPU."""

import simulated_gpu as sim
from simulated_nccl import FakeNccl

from ringcomm.engine.api.init_rank_size import engine
from ringcomm.gpu.executor.engine_gpus import Gpus

TRANSPORTS = ["ipc", "nccl", "staged"]


def on_gpus(size, body, folder, *, transport="auto", seed=0, settings=None, nodes=None, **options):
    """Run body(rank) on ranks that each have a simulated GPU; return the results.

    nodes: of each rank, as for a LoopbackHub; None: all ranks are on one.
    """

    from harness import run_ranks  # here, for ranks of a job do not need pytest
    from loopback import LoopbackHub

    def main(rank):
        gpu = begin(rank, folder, transport, seed, **options)
        try:
            result = body(rank)
            gpu.synchronize()  # others may still need what its streams do
            return result
        finally:
            gpu.close()

    hub = None if nodes is None else LoopbackHub(size, nodes)
    return run_ranks(size, main, settings=settings, hub=hub)


def with_fault(size, body, folder, *, timeout_s=120, settings=None, **options):
    """Return each rank's result or exception; GPUs are closed when all are through."""
    from harness import outcomes

    from ringcomm.config import Settings

    gpus = {}

    def main(rank):
        gpus[rank] = begin(rank, folder, **options)
        return body(rank, gpus[rank])

    try:
        return outcomes(size, main, settings=Settings(timeout_s=timeout_s, **settings or {}))
    finally:
        for gpu in gpus.values():
            gpu.close()


def begin(rank, folder, transport="auto", seed=0, **options):
    """Let this rank have a simulated GPU."""
    # Without NCCL, ranks 0, 2, 4 ... share a GPU, and so do the others.
    own = {"uuid": f"gpu-{rank % 2}", "reaches": ("gpu-0", "gpu-1")}
    if transport == "nccl":
        own = {"uuid": f"gpu-{rank}"}
    gpu = sim.SimulatedGpu(folder, 1000 * seed + rank, **own | options)
    sim.use(gpu)
    nccl = FakeNccl(gpu, folder) if transport == "nccl" else None
    Gpus.use(engine(), sim.drivers(nccl))
    return gpu


def choose(transport):
    """Return options under which this transport is chosen."""
    return {"transport": transport, "can_export": transport != "staged"}
