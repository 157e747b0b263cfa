"""The speed of packing many gradients into one buffer, scaled and cast, beside torch's own."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import accumulate

import cupy
import numpy as np
import torch
from gpu_suite.gpu import copy_ceiling, detail, event_seconds, figure

from ringcomm.arrays import DTYPES
from ringcomm.gpu.kernels.compiling import Kernels
from ringcomm.gpu.kernels.pack import PackKernel, chunk_table

# 24 layers of a transformer, and its embedding: 97 tensors, 164 M elements.
COUNTS = [2048 * 2048, 2048, 8192, 2048 * 512] * 24 + [50257 * 768]
PLACES = [0, *accumulate(-(-count // 8) * 8 for count in COUNTS)]
SCALE = 0.25


def main() -> None:
    torch.manual_seed(0)
    ceiling = copy_ceiling()
    tensors = [torch.randn(count, device="cuda") for count in COUNTS]
    cells = []
    for target in (torch.bfloat16, torch.float32):
        buffer = torch.empty(PLACES[-1], device="cuda", dtype=target)
        views = [buffer[at : at + n] for at, n in zip(PLACES, COUNTS, strict=False)]
        nbytes = sum(COUNTS) * (4 + buffer.itemsize)
        ways = {"one kernel": packing(tensors, buffer), "foreach": by_foreach(tensors, views)}
        for name, call in ways.items():
            buffer.fill_(float("nan"))
            call()
            for view, tensor in zip(views, tensors, strict=True):
                assert torch.equal(view, (tensor * SCALE).to(target)), f"{name} is wrong"
            seconds = statistics.median(event_seconds([call] * 5) for _ in range(8))
            rate = nbytes / seconds
            detail(
                f"float32 to {str(target)[6:]:<9} {name:<11} {seconds * 1e6:8.1f} us "
                f"{rate / 1e12:5.2f} TB/s {rate / ceiling:5.0%} of a copy"
            )
            cells.append(f"{seconds * 1e6:.0f}")
    figure(f"to bfloat16 {cells[0]} us, foreach {cells[1]}; to float32 {cells[2]} us, {cells[3]}")


def packing(tensors: Sequence[torch.Tensor], buffer: torch.Tensor) -> Callable[[], object]:
    """Return what packs with one kernel."""
    kernel = PackKernel(DTYPES["float32"], DTYPES[str(buffer.dtype).removeprefix("torch.")])
    table = chunk_table(COUNTS, PLACES[:-1])
    on_gpu = cupy.asarray(table.view(np.uint8), blocking=True)
    arguments = kernel.pack_arguments(
        [tensor.data_ptr() for tensor in tensors],
        buffer.data_ptr(),
        chunks=on_gpu.data.ptr,
        n_chunks=table.size,
        scale=SCALE,
    )
    kernels = Kernels(0)

    def call(keeps: cupy.ndarray = on_gpu) -> None:
        del keeps
        stream = torch.cuda.current_stream().cuda_stream
        kernels.launch(stream, kernel, arguments, table.size)

    return call


def by_foreach(tensors: list[torch.Tensor], views: list[torch.Tensor]) -> Callable[[], object]:
    """Return what packs with torch: a copy that casts, then a product in place."""

    def call() -> None:
        torch._foreach_copy_(views, tensors)
        torch._foreach_mul_(views, SCALE)

    return call


if __name__ == "__main__":
    main()
