"""The adapters of torch tensors; imported when a program first uses a tensor."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from ringcomm.arrays.base import AnyAdapter, ArrayAdapter, DeviceAdapter, Flat, Span
from ringcomm.arrays.dtypes import DTYPES, DType
from ringcomm.arrays.self_overlap import overlaps

_KNOWN = {getattr(torch, name): dtype for name, dtype in DTYPES.items() if hasattr(torch, name)}


def writing(x: torch.Tensor) -> AbstractContextManager[object]:
    """Return a context in which any thread may write x, without autograd.

    A tensor made in inference mode may be written in that mode alone, and each thread has its own
    mode: an operation may end in another thread than began it.
    """
    return torch.inference_mode() if x.is_inference() else torch.no_grad()


def advice_for(device_type: str) -> str:
    if device_type != "meta":
        return "Use .cpu()"
    return (
        "It has no values yet: give it memory, such as by model.to_empty(device='cpu') or "
        "torch.empty_like(x, device='cpu'), and fill it"
    )


class TorchTensors(AnyAdapter):
    """Base of the adapters of dense tensors. Results have no autograd history."""

    device_type: str  # "cpu" or "cuda"

    def dtype(self, x: torch.Tensor) -> DType:
        if x.layout is not torch.strided:
            raise TypeError(f"cannot communicate a {x.layout} tensor: use .to_dense()")
        if x.device.type != self.device_type:
            raise TypeError(
                f"cannot communicate a tensor on {x.device} here. {advice_for(x.device.type)}"
            )
        known = _KNOWN.get(x.dtype)
        if known is None:
            raise TypeError(f"cannot communicate dtype {x.dtype}; known: {', '.join(DTYPES)}")
        return known

    def is_contiguous(self, x: torch.Tensor) -> bool:
        is_aligned = x.data_ptr() % x.element_size() == 0
        return x.is_contiguous() and is_aligned and not x.is_conj() and not x.is_neg()

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        plain = x.detach().resolve_conj().resolve_neg()
        return plain.clone(memory_format=torch.contiguous_format)

    def empty(self, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=like.dtype, device=like.device)

    def assign(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with writing(target):
            target.copy_(source)

    def require_writable(self, x: torch.Tensor) -> None:
        if not x.is_contiguous() and overlaps(x.shape, x.stride()):  # expand(), as_strided()
            raise ValueError("cannot write in place: elements overlap in memory. Pass a copy")

    def written(self, x: torch.Tensor) -> None:
        # Autograd refuses a backward pass through values that have changed.
        if not x.is_inference():  # those are no part of a graph
            torch.autograd.graph.increment_version(x)


class _TorchAdapter(TorchTensors, ArrayAdapter):
    kind = "torch"
    device_type = "cpu"

    def make(self, dtype: DType, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype.name))

    def flat(self, x: torch.Tensor) -> Flat:
        dtype = self.dtype(x)
        return Flat(np.asarray(_TorchInterface(x)), dtype)


class _TorchInterface:
    """Makes np.asarray() return the bytes of a contiguous tensor, and keeps its memory alive.

    After Tensor.numpy() a tensor could not be resized any more; DLPack takes 3 times as long.

    Raises:
        TypeError: x has less memory than its shape needs.
    """

    __slots__ = ("__array_interface__", "_storage")

    def __init__(self, x: torch.Tensor) -> None:
        self._storage = storage = x.untyped_storage()  # x may get another storage at any time
        address, nbytes = x.data_ptr(), x.nbytes
        if nbytes and (not address or address + nbytes > storage.data_ptr() + storage.nbytes()):
            raise TypeError(
                f"cannot communicate a {type(x).__name__} {tuple(x.shape)} without memory: if "
                "its storage was resized, resize it back; for a DTensor, pass .to_local()"
            )
        self.__array_interface__ = _interface(address, nbytes)


class _TorchCudaAdapter(TorchTensors, DeviceAdapter):
    kind = "torch cuda"
    device_type = "cuda"

    def make(self, dtype: DType, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype.name), device="cuda")

    def span(self, x: torch.Tensor) -> Span:
        return Span(x.data_ptr(), x.numel(), self.dtype(x), x)

    def device(self, x: torch.Tensor) -> int:
        return x.device.index

    def wrap(self, memory: Span, shape: tuple[int, ...], device: int) -> torch.Tensor:
        line = torch.as_tensor(_CudaInterface(memory), device=f"cuda:{device}")
        return line.view(getattr(torch, memory.dtype.name)).view(shape)

    def current_device(self) -> int:
        return torch.cuda.current_device()

    def stream(self, device: int) -> int:
        return int(torch.cuda.current_stream(device).cuda_stream)

    def stream_owner(self, device: int) -> object:
        return torch.cuda.current_stream(device)

    def on_stream(self, device: int, stream: int) -> AbstractContextManager[object]:
        if stream == 0:  # ExternalStream(0) is some stream of torch's pool, pytorch#182960
            return torch.cuda.stream(torch.cuda.default_stream(device))
        external = torch.cuda.ExternalStream(stream, device=device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(external)


class _CudaInterface:
    """Shows memory as bytes, in the protocol by which libraries exchange arrays on GPUs."""

    def __init__(self, memory: Span) -> None:
        self._owner = memory.owner  # torch keeps this object
        address = memory.address if memory.nbytes else 0
        self.__cuda_array_interface__ = _interface(address, memory.nbytes)


def _interface(address: int, nbytes: int) -> dict[str, Any]:
    return {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


TORCH = _TorchAdapter()
TORCH_CUDA = _TorchCudaAdapter()
