"""Notices what a program does to a tensor: writes, moves, and references that it keeps."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from ctypes import Array, c_char, string_at
from operator import attrgetter
from sys import getrefcount
from types import SimpleNamespace
from typing import Any, Final

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

    It keeps them alive until forget(). Of writes through .data, which torch does not count, it
    notices those to its samples: all elements of a tensor of up to 16 KiB; of a larger one 16
    pieces of 1 KiB at equal distances.
    """

    def __init__(self) -> None:
        self._tensors: Sequence[torch.Tensor | None] | None = None
        self._memory: list[list[int]] = []  # the addresses and sizes to which these belong:
        self._whole: list[Array[c_char]] = []  # the elements of small tensors
        self._places: list[int] = []  # of those tensors
        self._others: list[int] = []  # the places of tensors that need more

    def take(self, tensors: Sequence[torch.Tensor | None], turn: int | None) -> None:
        """Take note of tensors as they are now.

        Args:
            tensors: None for one that is missing.
            turn: of a larger tensor other pieces are taken in each turn; None: take no samples.
        """
        self._tensors, self._turn, self._marks = tensors, turn, _marks(tensors)
        if turn is not None:
            self._find_memory(tensors, self._marks[2])
            self._samples = self._read(tensors, turn)

    def forget(self) -> None:
        """Keep no tensors: changed() finds nothing until take()."""
        self._tensors = None

    @property
    def is_taken(self) -> bool:
        """True between take() and forget()."""
        return self._tensors is not None

    def changed(
        self, tensors: Sequence[torch.Tensor | None], *, is_thorough: bool = True
    ) -> int | None:
        """Return the place of the first tensor that is another one or has changed; None: none is.

        is_thorough: compare the samples, too.
        """
        if self._tensors is None:
            return None
        marks = _marks(tensors)
        if marks != self._marks:
            return min(_first_difference(*each) for each in zip(marks, self._marks, strict=True))
        if self._turn is None or not is_thorough:
            return None
        samples = self._read(tensors, self._turn)
        if samples == self._samples:
            return None
        return [*self._places, *self._others][_first_difference(samples, self._samples)]

    def _find_memory(self, tensors: Sequence[torch.Tensor | None], addresses: list[int]) -> None:
        """Find what to read. Most tensors, also new ones, lie where they lay in the last step."""
        if 0 not in addresses:
            memory = [addresses, [*map(_NBYTES, tensors)], [*map(_IS_CONTIGUOUS, tensors)]]
            if memory == self._memory:
                return
        else:  # one is missing, sparse or empty
            memory = []
        self._memory, self._whole, self._places, self._others = memory, [], [], []
        for place, x in enumerate(tensors):
            if x is None or x.layout is not _STRIDED:
                continue
            if x.nbytes <= _N_PIECES * _PIECE and x.is_contiguous():
                self._whole.append((c_char * x.nbytes).from_address(x.data_ptr()))
                self._places.append(place)
            else:
                self._others.append(place)

    def _read(self, tensors: Sequence[torch.Tensor | None], turn: int) -> list[bytes]:
        return [*map(_RAW, self._whole), *[_sample(tensors[place], turn) for place in self._others]]


def _marks(tensors: Sequence[torch.Tensor | None]) -> list[list[int]]:
    """Return what identifies the tensors, their versions, and the addresses of their elements."""
    try:
        return [[*map(id, tensors)], [*map(_VERSION, tensors)], [*map(_ADDRESS, tensors)]]
    except (AttributeError, TypeError, RuntimeError):  # one is missing or sparse
        return [
            [*map(id, tensors)],
            [-1 if x is None else x._version for x in tensors],
            [0 if x is None else address_of(x) for x in tensors],
        ]


def _sample(x: torch.Tensor | None, turn: int) -> bytes:
    """Return elements of a strided tensor; see Snapshot."""
    assert x is not None
    x = x if x.is_contiguous() else x.detach().contiguous()
    nbytes = x.nbytes
    if nbytes <= _N_PIECES * _PIECE:
        return string_at(x.data_ptr(), nbytes)
    step, address = nbytes // _N_PIECES, x.data_ptr()
    first = address + turn * _PIECE % (step - _PIECE + 1)
    places = range(first, first + _N_PIECES * step, step)
    return b"".join([string_at(place, _PIECE) for place in places])


def _first_difference(some: Sequence[object], others: Sequence[object]) -> int:
    """Return the place of the first difference; the length if there is none."""
    pairs = enumerate(zip(some, others, strict=True))
    return next((k for k, (x, y) in pairs if x != y), len(some))


_N_PIECES, _PIECE = 16, 1024
_NBYTES, _RAW, _VERSION = attrgetter("nbytes"), attrgetter("raw"), attrgetter("_version")
_ADDRESS: Final[Any] = torch.Tensor.data_ptr
_IS_CONTIGUOUS: Final[Any] = torch.Tensor.is_contiguous


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
