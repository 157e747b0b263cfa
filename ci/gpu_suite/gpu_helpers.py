"""Helpers for the jobs of the suite: arrays of cupy and torch, and a slow kernel."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import cupy
import ml_dtypes
import numpy as np
import torch
from random_programs import Library

import ringcomm as rc

SHARES_FROM = 23000  # the first NCCL whose ranks can share a GPU
CYCLES_PER_S = 2e9  # of the fastest GPU; others sleep longer


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


def highest(value: float) -> float:
    """Return the highest value of all ranks."""
    return float(rc.allreduce(np.array([value]), rc.MAX)[0])


def until(deadline: float) -> bool:
    """Return True, on all ranks or on none, while rank 0 has time left."""
    return bool(rc.broadcast_object(time.monotonic() < deadline if rc.rank() == 0 else None))
