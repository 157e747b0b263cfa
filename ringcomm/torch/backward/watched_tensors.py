"""Notices what a program does to a tensor: writes, moves, and references that it keeps."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from ctypes import string_at
from sys import getrefcount
from types import SimpleNamespace
from typing import Final

import torch

_STRIDED: Final = torch.strided


class Mark:
    """Recognizes a tensor as long as nobody has written to it or moved it; keeps none alive.

    torch counts writes to a tensor, but neither an assignment to x.data, which changes the address
    of the elements, nor writes through x.data, which this class does not see.
    """

    __slots__ = ("_address", "_version", "_x")

    def __init__(self, x: torch.Tensor) -> None:
        self._x = weakref.ref(x)
        self._version = x._version
        self._address = x.data_ptr() if x.layout is _STRIDED else 0  # address_of() would cost more

    def is_of(self, x: torch.Tensor | None) -> bool:
        """Return True if x is the same object, and nobody has written to it or moved it."""
        if x is None or self._x() is not x or x._version != self._version:
            return False
        return (x.data_ptr() if x.layout is _STRIDED else 0) == self._address


def address_of(x: torch.Tensor) -> int:
    """Return the address of the first element; 0 if x is sparse."""
    return x.data_ptr() if x.layout is torch.strided else 0


class Snapshot:
    """Tensors at one moment, to notice which of them the program exchanges, writes to or moves.

    It keeps them alive. Of writes through .data, which torch does not count, it notices those to
    its samples: all elements of a tensor of up to 16 KiB; of a larger one 16 pieces of 1 KiB at
    equal distances.

    Args:
        tensors: None for one that is missing.
        turn: of a larger tensor other pieces are taken in each turn; None: take no samples.
    """

    __slots__ = ("_marks", "_samples", "_tensors", "_turn")

    def __init__(self, tensors: Sequence[torch.Tensor | None], turn: int | None) -> None:
        self._tensors, self._turn = tensors, turn
        self._marks = _marks(tensors)
        self._samples = [] if turn is None else [_sample(x, turn) for x in tensors]

    def changed(
        self, tensors: Sequence[torch.Tensor | None], *, is_thorough: bool = True
    ) -> int | None:
        """Return the place of the first tensor that is another one or has changed; None: none is.

        is_thorough: compare the samples, too.
        """
        marks = _marks(tensors)
        if marks != self._marks:
            return _first_difference(marks, self._marks)
        if self._turn is None or not is_thorough:
            return None
        samples = [_sample(x, self._turn) for x in tensors]
        return None if samples == self._samples else _first_difference(samples, self._samples)


def _marks(tensors: Sequence[torch.Tensor | None]) -> list[tuple[int, int, int] | None]:
    """Return what identifies each tensor, its version and its memory."""
    return [
        None if x is None else (id(x), x._version, x.data_ptr() if x.layout is _STRIDED else 0)
        for x in tensors
    ]


def _sample(x: torch.Tensor | None, turn: int) -> bytes:
    """Return elements of a tensor; see Snapshot."""
    if x is None or x.layout is not _STRIDED:
        return b""
    x = x if x.is_contiguous() else x.detach().contiguous()
    nbytes = x.nbytes
    if nbytes <= _N_PIECES * _PIECE:
        return string_at(x.data_ptr(), nbytes)
    step, address = nbytes // _N_PIECES, x.data_ptr()
    first = address + turn * _PIECE % (step - _PIECE + 1)
    places = range(first, first + _N_PIECES * step, step)
    return b"".join([string_at(place, _PIECE) for place in places])


def _first_difference(some: Sequence[object], others: Sequence[object]) -> int:
    return next(k for k, (x, y) in enumerate(zip(some, others, strict=True)) if x != y)


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
