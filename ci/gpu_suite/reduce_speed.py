"""Measures the kernel that reduces, alone, beside a copy: the ceiling of the transport ipc.

It reads N arrays and writes N: what N ranks that share a GPU do together.
"""

from __future__ import annotations

import statistics

import torch
from gpu_suite.cuda_timing import copy_ceiling, event_seconds
from gpu_suite.outcome_lines import detail, figure

from ringcomm.arrays.dtypes import DTYPES
from ringcomm.collectives.operators import SUM
from ringcomm.gpu.device.driver import CudaDriver
from ringcomm.gpu.kernels.compiling import Kernels
from ringcomm.gpu.kernels.reduce import ReduceKernel

MIB = 1 << 20
SIZES = (1 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)


def main() -> None:
    ceiling, kernels = copy_ceiling(), Kernels(0, CudaDriver())
    shares: dict[int, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for n_ranks in (2, 4, 8):
            for nbytes in SIZES:
                seconds = measure(kernels, dtype, n_ranks, nbytes)
                rate = 2 * n_ranks * nbytes / seconds
                detail(
                    f"{str(dtype)[6:]:<9} {n_ranks} arrays of {nbytes // MIB:>3} MiB "
                    f"{seconds * 1e6:8.1f} us {rate / 1e12:5.2f} TB/s {rate / ceiling:5.0%} of a "
                    "copy"
                )
                if dtype is torch.float32 and nbytes == SIZES[-1]:
                    shares[n_ranks] = rate / ceiling
    text = ", ".join(f"N={n_ranks} {share:.0%}" for n_ranks, share in shares.items())
    figure(f"float32, 256 MiB: {text} of a copy's {ceiling / 1e12:.2f} TB/s (goal 80%)")


def measure(kernels: Kernels, dtype: torch.dtype, n_ranks: int, nbytes: int) -> float:
    """Return the seconds of a sum in place of n_ranks arrays; fail if it is wrong."""
    count = nbytes // dtype.itemsize
    arrays = [torch.full((count,), rank + 1, dtype=dtype, device="cuda") for rank in range(n_ranks)]
    places = tuple(array.data_ptr() for array in arrays)
    kernel = ReduceKernel(places, places, count, DTYPES[str(dtype)[6:]], SUM)
    stream = torch.cuda.current_stream().cuda_stream
    kernels.launch(stream, kernel)
    total = n_ranks * (n_ranks + 1) // 2
    for array in arrays:
        assert bool((array == total).all()), f"a wrong sum: {array.unique()[:5]} is not {total}"
        array.zero_()  # repeated sums stay finite
    times = [event_seconds([lambda: kernels.launch(stream, kernel)] * 5) for _ in range(6)]
    return statistics.median(times[1:])


if __name__ == "__main__":
    main()
