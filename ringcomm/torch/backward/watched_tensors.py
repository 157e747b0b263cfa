"""Notices what a program does to a tensor: writes, moves, and references that it keeps.

Many tensors at once: _core.TensorSnapshot.
"""

from __future__ import annotations

import weakref
from sys import getrefcount
from types import SimpleNamespace
from typing import Final

import torch

_STRIDED: Final = torch.strided


class TensorMark:
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
        if x is None or self._x() is not x or x._version != self._version:
            return False
        return (x.data_ptr() if x.layout is _STRIDED else 0) == self._address


def address_of(x: torch.Tensor) -> int:
    return x.data_ptr() if x.layout is torch.strided else 0


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
