"""torch tensors in a GPU's memory. Imported when a program first uses one."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from ringcomm.arrays.base import DeviceAdapter, Span
from ringcomm.arrays.dtypes import DType
from ringcomm.arrays.torch import TorchTensors, interface_of


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
        self.__cuda_array_interface__ = interface_of(address, memory.nbytes)


TORCH_CUDA = _TorchCudaAdapter()
