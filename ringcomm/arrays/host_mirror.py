"""Host memory that holds the values of a GPU's array while the CPU's collectives use them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ringcomm.arrays.base import ArrayAdapter, Bytes, Flat
from ringcomm.arrays.dtypes import DType


@dataclass(frozen=True)
class Mirror:
    """An array in host memory that the GPU can access; take() returns more such memory."""

    flat: Flat
    shape: tuple[int, ...]
    take: Callable[[int], Bytes]

    @classmethod
    def make(cls, dtype: DType, shape: tuple[int, ...], take: Callable[[int], Bytes]) -> Mirror:
        return cls(Flat(take(math.prod(shape) * dtype.itemsize), dtype), shape, take)

    def line(self, part: slice) -> Mirror:
        flat = self.flat[part]
        return Mirror(flat, (flat.count,), self.take)

    def __getitem__(self, rows: slice) -> Mirror:
        start, stop, _ = rows.indices(self.shape[0])
        width = math.prod(self.shape[1:])
        part = self.flat[start * width : stop * width]
        return Mirror(part, (stop - start, *self.shape[1:]), self.take)


class _MirrorAdapter(ArrayAdapter):
    kind = "mirror"

    def dtype(self, x: Mirror) -> DType:
        return x.flat.dtype

    def is_contiguous(self, x: Mirror) -> bool:
        del x
        return True

    def copy(self, x: Mirror) -> Mirror:
        made = Mirror.make(x.flat.dtype, x.shape, x.take)
        made.flat.bytes[:] = x.flat.bytes
        return made

    def empty(self, like: Mirror, shape: tuple[int, ...]) -> Mirror:
        return Mirror.make(like.flat.dtype, shape, like.take)

    def make(self, dtype: DType, shape: tuple[int, ...]) -> Mirror:
        raise TypeError(f"a mirror cannot be made from {dtype} {shape} alone")

    def flat(self, x: Mirror) -> Flat:
        return x.flat

    def assign(self, target: Mirror, source: Mirror) -> None:
        target.flat.bytes[:] = source.flat.bytes


MIRROR = _MirrorAdapter()
