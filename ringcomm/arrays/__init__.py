"""One adapter per array library, found by the array itself."""

from __future__ import annotations

import sys

import numpy as np

from ringcomm.arrays.base import Array, ArrayAdapter, Bytes, Flat
from ringcomm.arrays.dtypes import DTYPES, DType
from ringcomm.arrays.numpy import NumpyAdapter

__all__ = [
    "DTYPES",
    "Array",
    "ArrayAdapter",
    "Bytes",
    "DType",
    "Flat",
    "adapter_for",
    "adapter_of_kind",
]

_NUMPY = NumpyAdapter()


def adapter_for(x: Array) -> ArrayAdapter:
    """Return the adapter of x's library.

    Raises:
        TypeError: x is no array that ringcomm knows.
    """
    if isinstance(x, np.ndarray):
        return _NUMPY
    torch = sys.modules.get("torch")  # a tensor can only come from a torch that is imported
    if torch is not None and isinstance(x, torch.Tensor):
        from ringcomm.arrays.torch import TORCH

        return TORCH
    raise TypeError(
        f"cannot communicate a {type(x).__module__}.{type(x).__qualname__}: pass a numpy array or "
        "a torch CPU tensor (numpy.asarray(x) for numbers and lists)"
    )


def adapter_of_kind(kind: str) -> ArrayAdapter:
    """Return the adapter whose `kind` is "numpy" or "torch"; imports that library.

    Raises:
        TypeError: the library is not installed here.
    """
    if kind == _NUMPY.kind:
        return _NUMPY
    try:
        from ringcomm.arrays.torch import TORCH
    except ModuleNotFoundError as error:
        raise TypeError(
            f"another rank sent a {kind} tensor, and {error.name} is missing"
        ) from error
    return TORCH
