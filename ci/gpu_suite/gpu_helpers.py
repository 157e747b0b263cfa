"""Helpers for the jobs of the suite: arrays of cupy and torch, a slow kernel, and clocks."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import cupy
import ml_dtypes
import numpy as np
import torch
from gpu_suite.stage_runner import SKIP
from random_programs import Library

import ringcomm as rc

GIB = 1 << 30
SHARES_FROM = 23000  # the first NCCL whose ranks can share a GPU
CYCLES_PER_S = 2e9  # of the fastest GPU; others sleep longer


def figure(text: str) -> None:
    """Print the text of this stage's row in the table."""
    print(f"figure: {text}", flush=True)


def detail(line: str) -> None:
    """Print a line for the details below the table."""
    print(f"| {line}", flush=True)


def skip(reason: str) -> None:
    """End this stage as skipped; on all ranks, before rc.init()."""
    print(f"skip: {reason}", flush=True)
    sys.exit(SKIP)


def start() -> None:
    """Call rc.init(), and choose this rank's GPU."""
    rc.init()
    index = rc.local_rank() % torch.cuda.device_count()
    torch.cuda.set_device(index)
    cupy.cuda.Device(index).use()


class Arrays(Library):
    """Arrays of one kind on the GPU."""

    name: str

    def __repr__(self) -> str:
        return self.name


class CupyArrays(Arrays):
    """Arrays of cupy in its own memory pool."""

    name = "cupy"

    def of(self, x: np.ndarray) -> cupy.ndarray:
        return cupy.asarray(x, blocking=True)

    def read(self, x: cupy.ndarray) -> np.ndarray:
        return cupy.asnumpy(x)


class RegisteredArrays(CupyArrays):
    """Arrays of cupy in memory that the other ranks map."""

    name = "registered"

    def of(self, x: np.ndarray) -> cupy.ndarray:
        made = rc.empty(x.shape, x.dtype, device="cuda")
        made.set(np.ascontiguousarray(x).reshape(x.shape))
        cupy.cuda.get_current_stream().synchronize()
        return made


class TorchTensors(Arrays):
    """Tensors of torch in its own memory pool."""

    name = "torch"

    def of(self, x: np.ndarray) -> torch.Tensor:
        if x.dtype != ml_dtypes.bfloat16:
            return torch.from_numpy(x).cuda()
        return torch.from_numpy(x.view(np.int16)).cuda().view(torch.bfloat16)

    def read(self, x: torch.Tensor) -> np.ndarray:
        if x.dtype != torch.bfloat16:
            return x.cpu().numpy()
        return x.view(torch.int16).cpu().numpy().view(ml_dtypes.bfloat16)


LIBRARIES = (CupyArrays(), TorchTensors(), RegisteredArrays())


def sleep(seconds: float) -> None:
    """Keep torch's current stream busy for at least so long."""
    torch.cuda._sleep(int(seconds * CYCLES_PER_S))


@contextlib.contextmanager
def current(stream: cupy.cuda.Stream) -> Iterator[None]:
    """Make a stream of cupy the current one of both libraries."""
    with stream, torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
        yield


def event_seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Return the mean time on the GPU of calls that follow each other."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for call in calls:
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / len(calls)


def copy_ceiling(nbytes: int = 2 * GIB) -> float:
    """Return the bytes per second, read plus written, of a copy within the GPU's memory."""
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = [event_seconds([lambda: target.copy_(source)] * 3) for _ in range(8)]
    return 2 * nbytes / statistics.median(times[1:])


def highest(value: float) -> float:
    """Return the highest value of all ranks."""
    return float(rc.allreduce(np.array([value]), rc.MAX)[0])


def until(deadline: float) -> bool:
    """Return True, on all ranks or on none, while rank 0 has time left."""
    return bool(rc.broadcast_object(time.monotonic() < deadline if rc.rank() == 0 else None))
