"""Notices what a program does to a tensor: writes, moves, and references that it keeps."""

from __future__ import annotations

import weakref
from ctypes import string_at
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

    All elements of a tensor of up to 16 KiB; of a larger one 16 pieces of 1 KiB at equal
    distances, others in each `turn`.
    """

    def __init__(self, x: torch.Tensor, turn: int) -> None:
        nbytes = x.numel() * x.element_size()
        step = max(nbytes // _N_PIECES, _PIECE)
        first = turn * _PIECE % (step - _PIECE + 1)
        self._pieces = [(first + k * step, _PIECE) for k in range(_N_PIECES)]
        if nbytes <= _N_PIECES * _PIECE:
            self._pieces = [(0, nbytes)]
        self._bytes = self._taken(x)

    def is_of(self, x: torch.Tensor) -> bool:
        """Return True if these elements of x, which has the same shape and dtype, are the same."""
        return self._taken(x) == self._bytes

    def _taken(self, x: torch.Tensor) -> bytes:
        x = x if x.is_contiguous() else x.detach().contiguous()
        address = x.data_ptr()
        return b"".join([string_at(address + first, n) for first, n in self._pieces])


_N_PIECES, _PIECE = 16, 1024


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
