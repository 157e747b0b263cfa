"""One adapter per array library. The functions here find the adapter of an array."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np

from ringcomm.arrays.base import AnyAdapter, Array, ArrayAdapter, Bytes, DeviceAdapter, Flat, Span
from ringcomm.arrays.dtypes import DTYPES, DType
from ringcomm.arrays.host_mirror import MIRROR, Mirror
from ringcomm.arrays.numpy import NUMPY

__all__ = [
    "DTYPES", "AnyAdapter", "Array", "ArrayAdapter", "Bytes", "DType", "DeviceAdapter", "Flat",
    "Span", "adapter_for", "adapter_of_kind", "add_device_adapter", "any_adapter_for", "arrived",
    "device_adapter_for", "device_adapter_of_kind", "first_device_kind", "is_device_kind",
]  # fmt: skip

_added: list[tuple[Callable[[Array], bool], DeviceAdapter]] = []


def adapter_for(x: Array) -> ArrayAdapter:
    """Return the adapter of an array in host memory.

    Raises TypeError if x is not an array that ringcomm knows, or is on a GPU.
    """
    if isinstance(x, np.ndarray):
        return NUMPY
    torch = sys.modules.get("torch")  # if x is a tensor, torch has been imported
    if torch is not None and isinstance(x, torch.Tensor):
        from ringcomm.arrays.torch import TORCH

        return TORCH
    if isinstance(x, Mirror):
        return MIRROR
    kind = f"{type(x).__module__}.{type(x).__qualname__}"
    if device_adapter_for(x) is not None:
        raise TypeError(
            f"cannot communicate a {kind} here, where arrays are in host memory: pass arrays of "
            "one kind, or a copy in host memory"
        )
    raise TypeError(
        f"cannot communicate a {kind}: pass a numpy array, a torch tensor or a cupy array "
        "(numpy.asarray(x) for numbers and lists)"
    )


def arrived(x: Array) -> Array:
    """Return x; for an AsyncCollectiveTensor, wait for it and return the plain tensor.

    The functional collectives of torch return such tensors, which wait when they are read. So the
    thread that calls a collective reads them; the progress loop would wait for itself.

    Args:
        x: an array, or a list or tuple of arrays, lists and tuples; other objects stay.
    """
    if type(x) is np.ndarray:
        return x
    if isinstance(x, list | tuple):
        return [arrived(each) for each in x]
    wait = getattr(type(x), "trigger_wait", None)
    return x if wait is None else wait(x)


def device_adapter_for(x: Array) -> DeviceAdapter | None:
    """Return the adapter of x if it is an array in a GPU's memory, else None."""
    if type(x) is np.ndarray and not _added:
        return None
    for is_its_own, adapter in _added:
        if is_its_own(x):
            return adapter
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and isinstance(x, torch.Tensor):
        return _torch_cuda() if x.is_cuda else None
    if cupy is not None and isinstance(x, cupy.ndarray):
        return _cupy()
    return None


def any_adapter_for(x: Array) -> AnyAdapter:
    if type(x) is np.ndarray:
        return NUMPY
    return device_adapter_for(x) or adapter_for(x)


def adapter_of_kind(kind: str) -> ArrayAdapter:
    """Return the adapter whose `kind` is "numpy" or "torch"; imports that library.

    Raises TypeError if the library is not installed here.
    """
    if kind == NUMPY.kind:
        return NUMPY
    try:
        from ringcomm.arrays.torch import TORCH
    except ModuleNotFoundError as error:
        raise _missing(kind, error) from error
    return TORCH


def is_device_kind(kind: str) -> bool:
    return kind in ("cupy", "torch cuda") or any(kind == each.kind for _, each in _added)


def device_adapter_of_kind(kind: str) -> DeviceAdapter:
    """Return the adapter of this kind; imports its library, or raises TypeError."""
    for _, adapter in _added:
        if adapter.kind == kind:
            return adapter
    try:
        return _cupy() if kind == "cupy" else _torch_cuda()
    except ModuleNotFoundError as error:
        raise _missing(kind, error) from error


def first_device_kind() -> str:
    """Return the kind of arrays that ringcomm makes on a GPU by default."""
    return _added[0][1].kind if _added else "cupy"


def current_gpu() -> int | None:
    """Return the number of the calling thread's GPU, None if no library uses a GPU yet."""
    if _added:
        return _added[0][1].current_device()
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and torch.cuda.is_initialized():
        return _torch_cuda().current_device()
    if cupy is not None and cupy.cuda.is_available():
        return _cupy().current_device()
    return None


def add_device_adapter(is_its_own: Callable[[Array], bool], adapter: DeviceAdapter) -> None:
    _added.append((is_its_own, adapter))


def _torch_cuda() -> DeviceAdapter:
    from ringcomm.arrays.torch import TORCH_CUDA

    return TORCH_CUDA


def _cupy() -> DeviceAdapter:
    from ringcomm.arrays.cupy import CUPY

    return CUPY


def _missing(kind: str, error: ModuleNotFoundError) -> TypeError:
    return TypeError(f"another rank sent a {kind} array, but {error.name} is missing here")
