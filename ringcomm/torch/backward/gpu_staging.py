"""Host memory for a bucket on a GPU, which copies on a stream of its own, beside backward()."""

from __future__ import annotations

import time
from typing import Final

import torch

from ringcomm.arrays.base import DeviceAdapter
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.gpu.executor.engine_gpus import Gpus
from ringcomm.gpu.executor.streams import Event, Reached

_LOOK_EVERY_S: Final = 2e-5


class GradientStaging:
    """Registered host memory, and the copy to or from it that is under way.

    Args:
        adapter: of tensors on the GPU.
        like: a tensor on the GPU.
        count: elements.
        dtype: of the elements, on both sides.

    Attributes:
        host: the memory, flat.
    """

    def __init__(
        self, adapter: DeviceAdapter, like: torch.Tensor, count: int, dtype: torch.dtype
    ) -> None:
        self._adapter, self._index = adapter, adapter.device(like)
        self._memory = Gpus.of(engine()).memory(self._index)
        self._nbytes = count * dtype.itemsize
        self._block = self._memory.host.take(self._nbytes)
        self.host = torch.from_numpy(self._block.bytes).view(dtype)
        self._copied: Reached | None = None
        self._kept: torch.Tensor | None = None  # until it is copied

    def fetch(self, source: torch.Tensor) -> None:
        """Begin to copy from a flat tensor of the GPU, as the current stream leaves it."""
        self._copy(source, to_host=True)

    def bring(self, target: torch.Tensor) -> None:
        """Begin to copy to a flat tensor of the GPU, for which the current stream waits."""
        end = self._copy(target, to_host=False)
        device = self._memory.device
        with device.active():
            device.await_event(self._adapter.stream(self._index), end.handle)

    def _copy(self, x: torch.Tensor, *, to_host: bool) -> Event:
        """Begin to copy; return the event behind it."""
        memory, device = self._memory, self._memory.device
        stream = memory.copy_stream
        with device.active():
            ready = Event(memory, self._adapter.stream(self._index))
            device.await_event(stream, ready.handle)
            if self._nbytes:
                host, gpu = memory.host.address(self._block), x.data_ptr()
                target, source = (host, gpu) if to_host else (gpu, host)
                device.copy(stream, target, source, self._nbytes)
            self._copied, self._kept = Reached(memory.copies.make()), x
            return Event(memory, stream)

    @property
    def is_idle(self) -> bool:
        """True if no copy is under way. Raises RingcommError if the GPU has failed."""
        if self._copied is not None and self._copied.test():
            self._copied = self._kept = None
        return self._copied is None

    def wait(self) -> torch.Tensor:
        while not self.is_idle:
            time.sleep(_LOOK_EVERY_S)
        return self.host

    def __del__(self) -> None:
        if hasattr(self, "_copied") and self._copied is None:  # else the GPU still uses it
            self._memory.host.give_back(self._block)
