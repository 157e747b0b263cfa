"""The protocol of a GPU as one process sees it, and what its kernels are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ringcomm.arrays.base import Bytes
from ringcomm.arrays.dtypes import DType
from ringcomm.collectives.op import Op
from ringcomm.gpu.device.memory import Allocator, MappableMemory
from ringcomm.gpu.kernels.kernel import Argument
from ringcomm.gpu.kernels.update import Rule


class Device(Allocator, Protocol):
    """One GPU, as one process sees it. Streams and events are handles, 0 the default stream.

    What takes a stream returns at once; it is carried out in the order of the stream. Any thread
    may call, inside `with device.active()`.

    Attributes:
        index: the GPU's number in this process, as CUDA counts.
        uuid: the same in every process, for every GPU another.
        name: "NVIDIA H200".
        reaches: uuids of the GPUs of this host whose memory it can reach, its own among them.
        can_export: its memory can be mapped by other processes.
        has_stream_values: a stream can write and await values in host memory.
    """

    index: int
    uuid: str
    name: str
    reaches: tuple[str, ...]
    can_export: bool
    has_stream_values: bool

    @property
    def regions(self) -> MappableMemory:
        """Its memory that other processes can map."""

    def new_stream(self) -> int:
        """Return a stream of high priority that waits for no other."""

    def free_stream(self, stream: int) -> None:
        """Free a stream that has nothing left to do."""

    def new_event(self) -> int:
        """Return an event, which counts as reached until it is recorded."""

    def free_event(self, event: int) -> None:
        """Free an event; streams that wait for it still do."""

    def record(self, event: int, stream: int) -> None:
        """Record an event: it is reached once all is done that the stream has been given so far."""

    def await_event(self, stream: int, event: int) -> None:
        """Make the stream wait until the event, as last recorded, is reached."""

    def is_reached(self, event: int) -> bool:
        """Return True once the event is reached. Raises RingcommError: the GPU has failed."""

    def copy(self, stream: int, target: int, source: int, nbytes: int) -> None:
        """Copy between two addresses, of a GPU or of registered host memory."""

    def reduce(self, stream: int, what: KernelReduction) -> None:
        """Combine values of several ranks; see KernelReduction."""

    def update(self, stream: int, what: KernelUpdate) -> None:
        """Take a step of an optimizer; see KernelUpdate."""

    def pack(self, stream: int, what: KernelPack) -> bool:
        """Copy many arrays into a buffer, or out of it; False: nothing was done, copy each."""

    def register(self, memory: Bytes) -> int:
        """Return where the GPU finds host memory, which it can reach from now on."""

    def write_value(self, stream: int, address: int, value: int) -> None:
        """Write 32 bits to registered host memory, after all that the stream did before."""

    def await_value(self, stream: int, address: int, value: int) -> None:
        """Make the stream wait until int32(*address - value) >= 0, in registered host memory."""

    def unregister(self, memory: Bytes) -> None:
        """Undo register(); no stream uses the memory."""


@dataclass(frozen=True)
class KernelReduction:
    """targets[*][i] = round((sources[0][i] op sources[1][i] op ...) / divisor), once, for all i.

    16-bit floats are combined in float32. The arithmetic is that of the CPU's kernels, bit for bit.
    """

    sources: tuple[int, ...]  # addresses, in the order in which they are combined
    targets: tuple[int, ...]  # addresses; may be among the sources
    count: int
    dtype: DType
    op: Op  # AVERAGE is SUM here, with a divisor
    divisor: int = 1  # what the combination is divided by at the end


@dataclass(frozen=True)
class KernelUpdate:
    """A launch of UpdateKernel for elements [0, count); see kernels/update.py.

    Attributes:
        sources: addresses of gradients, in the order in which they are summed, then scaled.
        targets: addresses of weights.
        owned: addresses of float32 arrays.
        gradient, weight: dtypes of the sources and of the targets.
        rule, numbers: of the optimizer.
    """

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    owned: tuple[int, ...]
    count: int
    gradient: DType
    weight: DType
    rule: Rule
    numbers: Argument
    scale: float


@dataclass(frozen=True)
class KernelPack:
    """Arrays that go into a buffer one behind the other, or come out of it."""

    arrays: tuple[int, ...]
    counts: tuple[int, ...]  # elements of each array
    buffer: int
    dtype: DType  # float16, float32 or float64, for elements of as many bytes
    unpacks: bool  # out of the buffer
