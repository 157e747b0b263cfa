"""Times by the events of CUDA, and the speed of a copy; needs torch alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

GIB = 1 << 30


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
