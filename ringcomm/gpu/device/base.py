"""The protocol of a GPU as one process uses it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from ringcomm.arrays.base import Bytes
from ringcomm.gpu.device.ipc_pool import Regions
from ringcomm.gpu.device.memory import Allocator
from ringcomm.gpu.device.pack_tables import Layouts
from ringcomm.gpu.kernels.base import Kernel


class Device(Allocator, Protocol):
    """One GPU, as one process uses it.

    Streams and events are handles of CUDA; 0 is the default stream. Methods that take a stream
    enqueue work on it and return at once. Any thread may call them inside `with device.active()`.

    Attributes:
        index: the GPU's number in this process, as CUDA counts.
        uuid: identifies the GPU; the same in every process.
        reaches: uuids of the GPUs of this host whose memory this GPU can reach, including its own.
        can_export: other processes can map its memory.
        has_stream_values: a stream can wait for values in host memory.
        regions: its memory that other processes can map.
        layouts: the chunk tables of the arrays that it packs.
    """

    index: int
    uuid: str
    reaches: tuple[str, ...]
    can_export: bool
    has_stream_values: bool
    regions: Regions
    layouts: Layouts

    def new_stream(self) -> int:
        """Return a stream of high priority that waits for no other stream."""

    def free_stream(self, stream: int) -> None:
        """Free a stream whose work is done."""

    def new_event(self) -> int:
        """Return an event; it counts as reached until it is recorded."""

    def record(self, event: int, stream: int) -> None:
        """Record an event, which is reached once the stream's work so far is done."""

    def await_event(self, stream: int, event: int) -> None:
        """Make the stream wait until the last recording of the event is reached."""

    def require_sound(self, stream: int) -> None:
        """Raise RingcommError if the GPU has failed; asks for the state of a stream."""

    def is_capturing(self, stream: int) -> bool: ...

    def copy(self, stream: int, target: int, source: int, nbytes: int) -> None:
        """Copy between addresses of GPU memory or of registered host memory."""

    def load(self, kernel: Kernel) -> None:
        """Compile and load a kernel, as launch() does; see executor/idle_calls.py.

        The driver may load it only once all streams are idle. Raises ConfigError if the kernel
        cannot be compiled.
        """

    def has_loaded(self, kernel: Kernel) -> bool:
        """Return True if a kernel is loaded. Calls no function of CUDA."""

    def shown_as(self, label: str) -> AbstractContextManager[object]:
        """Return a context whose calls NVIDIA's profilers show as one range, with their kernels."""

    def launch(self, stream: int, kernel: Kernel) -> None: ...

    def register(self, memory: Bytes) -> int:
        """Give the GPU access to host memory, and return the address that the GPU uses."""

    def write_value(self, stream: int, address: int, value: int) -> None:
        """Write 32 bits to registered host memory once the stream's work so far is done."""

    def write_and_await(self, stream: int, own: int, others: tuple[int, ...], value: int) -> None:
        """Do write_value() to `own`, then await_value() at all `others`, in one call of CUDA.

        Only the launcher's thread calls this.
        """

    def await_value(self, stream: int, address: int, value: int) -> None:
        """Make the stream wait until int32(*address - value) >= 0, in registered host memory."""

    def unregister(self, memory: Bytes) -> None:
        """Undo register(); by now no stream may use the memory."""
