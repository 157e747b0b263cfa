"""Measures how fast one kernel packs many gradients into a buffer, beside torch's copies."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import accumulate

import cupy
import numpy as np
import torch
from gpu_suite.cuda_timing import copy_ceiling, event_seconds
from gpu_suite.outcome_lines import detail, figure

from ringcomm.gpu.device.driver import CudaDriver
from ringcomm.gpu.kernels.compiling import Kernels
from ringcomm.gpu.kernels.pack import PackKernel, chunk_table

# 24 layers of a transformer, and its embedding: 97 tensors, 164 M elements.
COUNTS = [2048 * 2048, 2048, 8192, 2048 * 512] * 24 + [50257 * 768]
PLACES = [0, *accumulate(-(-count // 8) * 8 for count in COUNTS)]


def main() -> None:
    torch.manual_seed(0)
    ceiling = copy_ceiling()
    cells = []
    for dtype in (torch.bfloat16, torch.float32):
        tensors = [torch.randn(count, device="cuda", dtype=dtype) for count in COUNTS]
        buffer = torch.empty(PLACES[-1], device="cuda", dtype=dtype)
        views = [buffer[at : at + n] for at, n in zip(PLACES, COUNTS, strict=False)]
        ways: dict[str, Callable[[], object]] = {
            "one kernel": packing(tensors, buffer),
            "foreach": lambda views=views, tensors=tensors: torch._foreach_copy_(views, tensors),
        }
        for name, call in ways.items():
            buffer.fill_(float("nan"))
            call()
            for view, tensor in zip(views, tensors, strict=True):
                assert torch.equal(view, tensor), f"{name} is wrong"
            seconds = statistics.median(event_seconds([call] * 5) for _ in range(8))
            rate = 2 * sum(COUNTS) * buffer.itemsize / seconds
            detail(
                f"{str(dtype)[6:]:<9} {name:<11} {seconds * 1e6:8.1f} us "
                f"{rate / 1e12:5.2f} TB/s {rate / ceiling:5.0%} of a copy"
            )
            cells.append(f"{seconds * 1e6:.0f}")
    figure(f"bfloat16 {cells[0]} us, foreach {cells[1]}; float32 {cells[2]} us, {cells[3]}")


def packing(tensors: Sequence[torch.Tensor], buffer: torch.Tensor) -> Callable[[], object]:
    """Return a function that packs with one kernel."""
    table = chunk_table(COUNTS, PLACES[:-1])
    on_gpu = cupy.asarray(table.view(np.uint8), blocking=True)
    kernel = PackKernel(
        tensors=tuple(tensor.data_ptr() for tensor in tensors),
        buffer=buffer.data_ptr(),
        itemsize=buffer.itemsize,
        unpacks=False,
        chunks=on_gpu.data.ptr,
        n_chunks=table.size,
    )
    kernels = Kernels(0, CudaDriver())

    def call(keeps: cupy.ndarray = on_gpu) -> None:
        del keeps
        stream = torch.cuda.current_stream().cuda_stream
        kernels.launch(stream, kernel)

    return call


if __name__ == "__main__":
    main()
