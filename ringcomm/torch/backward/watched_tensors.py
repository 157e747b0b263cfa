"""Notices what a program does to a tensor: writes, moves, and references that it keeps."""

from __future__ import annotations

import weakref
from sys import getrefcount
from types import SimpleNamespace
from typing import Final

import torch


class Mark:
    """Recognizes a tensor as long as nobody has written to it or moved it; keeps none alive.

    torch counts writes to a tensor, but neither an assignment to x.data, which changes the address
    of the elements, nor writes through x.data, which this class does not see.
    """

    __slots__ = ("_address", "_version", "_x")

    def __init__(self, x: torch.Tensor) -> None:
        self._x = weakref.ref(x)
        self._version = x._version
        self._address = address_of(x)

    def is_of(self, x: torch.Tensor | None) -> bool:
        """Return True if x is the same object, and nobody has written to it or moved it."""
        is_same = x is not None and self._x() is x and x._version == self._version
        return is_same and x is not None and address_of(x) == self._address


def address_of(x: torch.Tensor) -> int:
    """Return the address of the first element; 0 if x is sparse."""
    return x.data_ptr() if x.layout is torch.strided else 0


class Sample:
    """Elements of a tensor, to notice writes through .data, which torch does not count.

    All elements of a small tensor; of a large one N_SAMPLED at equal distances, others each time.
    """

    def __init__(self, x: torch.Tensor, turn: int) -> None:
        self._step = max(1, x.numel() // N_SAMPLED)
        self._first = turn % self._step
        self._bits = self._taken(x).clone()

    def is_of(self, x: torch.Tensor) -> bool:
        """Return True if these elements of x, which has the same shape and dtype, are the same."""
        return torch.equal(self._taken(x), self._bits)

    def _taken(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach()
        if not x.is_contiguous():
            x = x.permute(sorted(range(x.dim()), key=x.stride, reverse=True))
        bits = x.reshape(-1).view(torch.int64 if x.itemsize == 8 else torch.int32)  # NaN, too
        return bits[self._first :: self._step] if self._step > 1 else bits


N_SAMPLED: Final = 1 << 14


def n_storage_references(x: torch.Tensor) -> int:
    """Return the number of tensors that use the memory of x, and one more."""
    return int(torch._C._storage_Use_Count(x.untyped_storage()._cdata))


def can_hold(x: torch.Tensor, total: torch.Tensor) -> bool:
    """Return True if `total` can be written to x, which is strided, element by element."""
    is_alike = (x.shape, x.dtype, x.device) == (total.shape, total.dtype, total.device)
    is_expanded = any(n > 1 and not stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return is_alike and total.layout is torch.strided and not (x.requires_grad or is_expanded)


def is_held_elsewhere(x: torch.Tensor) -> bool:
    """Return True if a program has other references to a .grad.

    The caller has it as an attribute and as a local variable.
    """
    return getrefcount(x) > _N_OWN


def _count_own() -> int:
    """Return what getrefcount() is in is_held_elsewhere() if a program has no reference."""

    def as_is_held_elsewhere(x: torch.Tensor) -> int:
        return getrefcount(x)

    parameter = torch.nn.Parameter(torch.empty(1))
    parameter.grad = torch.empty(1)
    owner = SimpleNamespace(x=parameter.grad)
    x = owner.x
    return as_is_held_elsewhere(x)


_N_OWN: Final = _count_own()
