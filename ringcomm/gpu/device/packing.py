"""Copies many arrays to a buffer, or from it: one kernel does that faster than many copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ringcomm.arrays.base import Span
from ringcomm.collectives.message_patterns import consecutive
from ringcomm.gpu.device.base import Device
from ringcomm.gpu.kernels.pack import PACKED_ITEMSIZES, PackKernel

_WORTH_A_KERNEL: Final = 3  # arrays


def pack(device: Device, stream: int, arrays: Sequence[Span], buffer: Span) -> None:
    """Copy arrays to a buffer of their dtype, one behind the other."""
    _copy(device, stream, arrays, buffer, unpacks=False)


def unpack(device: Device, stream: int, arrays: Sequence[Span], buffer: Span) -> None:
    _copy(device, stream, arrays, buffer, unpacks=True)


def kernels(itemsize: int) -> list[PackKernel]:
    both = (False, True) if itemsize in PACKED_ITEMSIZES else ()
    return [PackKernel((), 0, itemsize, unpacks, 0, 0) for unpacks in both]


def _copy(
    device: Device, stream: int, arrays: Sequence[Span], buffer: Span, *, unpacks: bool
) -> None:
    counts = [array.count for array in arrays]
    itemsize = buffer.dtype.itemsize
    if len(arrays) >= _WORTH_A_KERNEL and itemsize in PACKED_ITEMSIZES:
        addresses = [array.address for array in arrays]
        launches = device.layouts.kernels(
            addresses, counts, buffer.address, itemsize, unpacks=unpacks
        )
        if launches is not None:
            for kernel in launches:
                device.launch(stream, kernel)
            return
    for array, part in zip(arrays, consecutive(counts), strict=True):
        piece = buffer[part]
        target, source = (array, piece) if unpacks else (piece, array)
        if source.nbytes:
            device.copy(stream, target.address, source.address, source.nbytes)
