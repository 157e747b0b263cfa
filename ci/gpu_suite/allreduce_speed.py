"""Measures an allreduce of ranks that share one GPU, beside gloo, MPI and NCCL.

usage: mpirun -np N python -m gpu_suite.allreduce_speed SECONDS

Summing N arrays of S bytes and writing the sum to N places moves at least 2 * N * S bytes through
the GPU's memory. The rate of these bytes, by CUDA events, is compared with that of a copy. All
peers take turns in each round. The buffers change from call to call, so that no peer gains from
caches.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import cupy
import ml_dtypes
import numpy as np
import torch
import torch.distributed as dist
from cupy.cuda import nccl
from gpu_suite.cuda_timing import copy_ceiling, event_seconds
from gpu_suite.gpu_helpers import SHARES_FROM, highest, start, until
from gpu_suite.outcome_lines import detail, figure

import ringcomm as rc

MIB = 1 << 20
SIZES = (64 * MIB, 1 * MIB, 16 * MIB, 256 * MIB)  # the most important one first
POOL = 256 * MIB  # of a rank; it is cut into buffers
GOAL, GOAL_FROM = 0.8, 64 * MIB
ROUNDS = 5
F32, BF16 = np.float32, ml_dtypes.bfloat16
NCCL_TYPES = {F32: 7, BF16: 9}  # the numbers of nccl.h


class Peer(Protocol):
    """One library that sums in place."""

    name: str
    is_on_gpu: bool
    pool: cupy.ndarray

    def can(self, dtype: type) -> bool:
        """Return True if it sums this dtype."""
        ...

    def bind(self, x: cupy.ndarray) -> Callable[[], object]:
        """Return a function that replaces x by its sum over all ranks."""
        ...


class Ringcomm:
    """rc.allreduce_."""

    is_on_gpu = True

    def __init__(self, name: str, pool: cupy.ndarray) -> None:
        self.name, self.pool = name, pool

    def can(self, dtype: type) -> bool:
        return True

    def bind(self, x: cupy.ndarray) -> Callable[[], object]:
        return lambda: rc.allreduce_(x)


class HostMpi:
    """A copy to the host, MPI's own allreduce, and a copy back."""

    name = "MPI through host"
    is_on_gpu = False

    def __init__(self, pool: cupy.ndarray) -> None:
        from mpi4py import MPI

        self.pool = pool
        self._in_place, self._sum = MPI.IN_PLACE, MPI.SUM
        self._comm = MPI.COMM_WORLD.Dup()
        memory = cupy.cuda.alloc_pinned_memory(POOL)
        self._host = np.frombuffer(memory, np.uint8, POOL)

    def can(self, dtype: type) -> bool:
        return dtype is F32

    def bind(self, x: cupy.ndarray) -> Callable[[], object]:
        host = self._host[: x.nbytes].view(x.dtype)

        def call() -> None:
            x.get(out=host)
            self._comm.Allreduce(self._in_place, host, self._sum)
            x.set(host)

        return call


class Gloo:
    """torch.distributed over gloo, on CUDA tensors."""

    name = "gloo"
    is_on_gpu = False

    def __init__(self, pool: cupy.ndarray) -> None:
        self.pool = pool
        store = f"file://{rc.broadcast_object(str(Path.cwd() / f'gloo.{rc.size()}'))}"
        dist.init_process_group("gloo", init_method=store, rank=rc.rank(), world_size=rc.size())

    def can(self, dtype: type) -> bool:
        return dtype is F32

    def bind(self, x: cupy.ndarray) -> Callable[[], object]:
        tensor = torch.as_tensor(x, device="cuda")
        return lambda: dist.all_reduce(tensor)


class Nccl:
    """NCCL, whose ranks share the GPU."""

    name = "NCCL"
    is_on_gpu = True

    def __init__(self, pool: cupy.ndarray) -> None:
        self.pool = pool
        unique_id = rc.broadcast_object(nccl.get_unique_id() if rc.rank() == 0 else None)
        self._comm = nccl.NcclCommunicator(rc.size(), unique_id, rc.rank())

    def can(self, dtype: type) -> bool:
        return dtype in NCCL_TYPES

    def bind(self, x: cupy.ndarray) -> Callable[[], object]:
        dtype, at = NCCL_TYPES[x.dtype.type], x.data.ptr
        stream = cupy.cuda.get_current_stream().ptr
        return lambda: self._comm.allReduce(at, at, x.size, dtype, nccl.NCCL_SUM, stream)


@dataclass
class Times:
    """Seconds per call of one peer in each round, by CUDA events and by the host's clock."""

    peer: Peer
    gpu: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)


def main() -> None:
    deadline = time.monotonic() + float(sys.argv[1])
    start()
    ceiling = rc.broadcast_object(copy_ceiling() if rc.rank() == 0 else None)
    rc.barrier()
    peers = list(all_peers())
    say(f"{'ranks':>5} {'dtype':<8} {'MiB':>4} {'arrays':<17} {'events us':>10} {'host us':>10} ")
    best: dict[str, float] = {}
    for nbytes in SIZES:
        for dtype in (F32, BF16):
            if not until(deadline):
                say(f"no time was left for {nbytes // MIB} MiB of {np.dtype(dtype).name}")
                continue
            for times in measure([p for p in peers if p.can(dtype)], dtype, nbytes, deadline):
                share = print_row(times, dtype, nbytes, ceiling)
                if nbytes == GOAL_FROM and dtype is F32 and times.peer.is_on_gpu:
                    best[times.peer.name] = share
    assert best, "no time was left to measure anything"
    if rc.rank() == 0:
        reached = ", ".join(f"{name} {share:.0%}" for name, share in best.items())
        figure(f"64 MiB: {reached} of a copy's {ceiling / 1e12:.2f} TB/s (goal {GOAL:.0%})")
    dist.destroy_process_group()


def say(line: str) -> None:
    if rc.rank() == 0:
        detail(line)


def all_peers() -> Iterator[Peer]:
    """Yield the peers that this machine has. Collective."""
    private = cupy.empty(POOL, np.uint8)
    yield Ringcomm("registered", rc.empty(POOL, np.uint8, device="cuda"))
    yield Ringcomm("private", private)
    yield Gloo(private)
    yield HostMpi(private)
    if nccl.available and nccl.get_version() >= SHARES_FROM:
        yield Nccl(private)


def measure(peers: Sequence[Peer], dtype: type, nbytes: int, deadline: float) -> list[Times]:
    """Return the times of all peers, which take turns; fail if a sum is wrong."""
    every = [Times(peer) for peer in peers]
    for times in every:
        check(times.peer, dtype, nbytes)
    for turn in range(ROUNDS):
        for times in every if turn % 2 == 0 else reversed(every):
            if turn == 0 or (until(deadline) and (times.peer.is_on_gpu or turn < 2)):
                one_round(times, dtype, nbytes)
    return every


def check(peer: Peer, dtype: type, nbytes: int) -> None:
    """Check a sum of small integers, which is exact in every dtype; also warms up."""
    parts = buffers(peer, dtype, nbytes)
    for x in {0: parts[0], len(parts) - 1: parts[-1]}.values():
        unsigned = x.view(f"u{x.itemsize}")  # cupy cannot do all of this with bfloat16
        unsigned[...] = _bits(rc.rank() + 1, dtype)
        peer.bind(x)()
        total = _bits(rc.size() * (rc.size() + 1) // 2, dtype)
        assert bool((unsigned == total).all()), f"{peer.name}: a wrong sum"


def _bits(value: int, dtype: type) -> int:
    one = np.array([value], dtype)
    return int(one.view(f"u{one.itemsize}")[0])


def one_round(times: Times, dtype: type, nbytes: int) -> None:
    peer = times.peer
    calls = [peer.bind(x) for x in buffers(peer, dtype, nbytes)]
    n = max(3, min(20, 512 * MIB // nbytes)) if peer.is_on_gpu else 1
    fill(peer.pool)
    torch.cuda.synchronize()
    rc.barrier()
    calls[-1]()  # aligns the ranks
    begin = time.perf_counter()
    gpu = event_seconds([calls[i % len(calls)] for i in range(n)])
    host = (time.perf_counter() - begin) / n
    times.gpu.append(highest(gpu))
    times.host.append(highest(host))


def fill(pool: cupy.ndarray) -> None:
    """Write numbers between 1e-29 and 2, which stay finite after 21 sums of 8 ranks."""
    period = np.random.default_rng(1).integers(16, 64, 1 << 20, np.uint8)
    pool.reshape(-1, period.size)[...] = cupy.asarray(period, blocking=True)


def buffers(peer: Peer, dtype: type, nbytes: int) -> list[cupy.ndarray]:
    """Return the parts of the pool."""
    parts = range(0, peer.pool.size, nbytes)
    return [peer.pool[at : at + nbytes].view(dtype) for at in parts]


def print_row(times: Times, dtype: type, nbytes: int, ceiling: float) -> float:
    """Print a row, and return the rate as a share of the ceiling."""
    gpu, host = statistics.median(times.gpu), statistics.median(times.host)
    share = 2 * rc.size() * nbytes / gpu / ceiling
    row = f"{rc.size():>5} {np.dtype(dtype).name:<8} {nbytes // MIB:>4} {times.peer.name:<17} "
    row += f"{gpu * 1e6:>10.1f} {host * 1e6:>10.1f} "
    if times.peer.is_on_gpu:
        row += f"{2 * rc.size() * nbytes / gpu / 1e12:>6.2f} TB/s {share:>5.0%} of a copy"
        row += f", goal {GOAL:.0%}" if nbytes >= GOAL_FROM else ""
    say(row)
    return share


if __name__ == "__main__":
    main()
