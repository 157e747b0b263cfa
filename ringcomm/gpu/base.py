"""The seams of a GPU: what CUDA does for one process, and what moves data between processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ringcomm.arrays.base import Bytes, Span
from ringcomm.arrays.dtypes import DType
from ringcomm.collectives.op import Op
from ringcomm.gpu.kernels import Argument, Rule
from ringcomm.transport.node.steps import To

if TYPE_CHECKING:
    from ringcomm.gpu.regions import Regions


class Memory(Protocol):
    """Memory of a GPU that is its own allocation, so that it can be exported to other processes.

    Attributes:
        address: of its first byte.
        nbytes: its size.
    """

    @property
    def address(self) -> int:
        """See Attributes."""
        ...

    @property
    def nbytes(self) -> int:
        """See Attributes."""
        ...


class Device(Protocol):
    """One GPU, as one process sees it. Streams and events are handles, 0 the default stream.

    What takes a stream returns at once; it is carried out in the order of the stream. Any thread
    may call, inside `with device.active()`.

    Attributes:
        index: as CUDA counts in this process.
        uuid: the same in every process, for every GPU another.
        name: "NVIDIA H200".
        reaches: uuids of the GPUs of this host whose memory it can reach, its own among them.
        can_export: its memory can be mapped by other processes.
        has_stream_values: a stream can write and await values in host memory.
        regions: its memory that other processes can map.
    """

    index: int
    uuid: str
    name: str
    reaches: tuple[str, ...]
    can_export: bool
    has_stream_values: bool

    @property
    def regions(self) -> Regions:
        """See Attributes."""
        ...

    def active(self) -> AbstractContextManager[object]:
        """Return a context in which this is the calling thread's GPU."""
        ...

    def new_stream(self) -> int:
        """Return a stream of high priority that waits for no other."""
        ...

    def new_event(self) -> int:
        """Return an event, which counts as reached until it is recorded."""
        ...

    def free_event(self, event: int) -> None:
        """Let the event be used no more; what was put on streams is carried out all the same."""
        ...

    def record(self, event: int, stream: int) -> None:
        """Let `event` be reached once all is done that the stream has been given so far."""
        ...

    def await_event(self, stream: int, event: int) -> None:
        """Let what follows on the stream wait until the event, as last recorded, is reached."""
        ...

    def is_reached(self, event: int) -> bool:
        """Return True once the event is reached. Raises RingcommError: the GPU has failed."""
        ...

    def copy(self, stream: int, target: int, source: int, nbytes: int) -> None:
        """Copy between two addresses, of a GPU or of registered host memory."""
        ...

    def reduce(self, stream: int, what: KernelReduction) -> None:
        """Combine values of several ranks; see KernelReduction."""
        ...

    def update(self, stream: int, what: KernelUpdate) -> None:
        """Take a step of an optimizer; see KernelUpdate."""
        ...

    def pack(self, stream: int, what: KernelPack) -> bool:
        """Copy many arrays into a buffer, or out of it; False: nothing was done, copy each."""
        ...

    def allocate(self, nbytes: int) -> Memory:
        """Return memory. Raises MemoryError."""
        ...

    def export(self, memory: Memory) -> bytes:
        """Return what other processes of this host need to map `memory`."""
        ...

    def map(self, exported: bytes) -> int:
        """Return where memory of another process stands in this one."""
        ...

    def unmap(self, address: int) -> None:
        """Give it back."""
        ...

    def register(self, memory: Bytes) -> int:
        """Let the GPU reach host memory; return its address there. A second time is the same."""
        ...

    def write_value(self, stream: int, address: int, value: int) -> None:
        """Write 32 bits to registered host memory, after all that the stream did before."""
        ...

    def await_value(self, stream: int, address: int, value: int) -> None:
        """Let the stream wait until int32(*address - value) >= 0, in registered host memory."""
        ...

    def synchronize(self) -> None:
        """Return once everything is done that any stream has been given."""
        ...

    def unregister(self, memory: Bytes) -> None:
        """Let the GPU reach it no more; no stream uses it."""
        ...


@dataclass(frozen=True)
class KernelReduction:
    """targets[*][i] = round((sources[0][i] op sources[1][i] op ...) / divisor), once, for all i.

    16-bit floats are combined in float32. The arithmetic is that of the CPU's kernels, bit for bit.

    Attributes:
        sources: addresses, in the order in which they are combined.
        targets: addresses; may be among the sources.
        count: elements.
        dtype: of all of them.
        op: AVERAGE is SUM here, with a divisor.
        divisor: what the combination is divided by at the end.
    """

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    count: int
    dtype: DType
    op: Op
    divisor: int = 1


@dataclass(frozen=True)
class KernelUpdate:
    """What UpdateKernel is asked for, for elements [0, count); see ringcomm.gpu.kernels.

    Attributes:
        sources: addresses of gradients, in the order in which they are summed.
        targets: addresses of weights.
        owned: addresses of float32 arrays.
        count: elements.
        gradient: dtype of the sources.
        weight: dtype of the targets.
        rule: of the optimizer.
        numbers: of the rule.
        scale: of the sum.
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
    """Arrays that go into a buffer one behind the other, or come out of it.

    Attributes:
        arrays: their addresses.
        counts: elements of each.
        buffer: its address.
        dtype: float16, float32 or float64, for elements of as many bytes.
        unpacks: out of the buffer.
    """

    arrays: tuple[int, ...]
    counts: tuple[int, ...]
    buffer: int
    dtype: DType
    unpacks: bool


@dataclass(frozen=True)
class Reduce:
    """A reduction over the ranks of a team, as one of them sees it.

    Attributes:
        source: this rank's values.
        target: where its result goes; may be the source; None if it gets none.
        op: the operator.
        to: who gets the result.
        root: the rank that does, for To.ROOT.
        parts: of each rank: its part of the elements, for To.OWNER.
        is_deterministic: values are to be combined in the order of ranks.
    """

    source: Span
    target: Span | None
    op: Op
    to: To = To.ALL
    root: int = 0
    parts: tuple[slice, ...] = ()
    is_deterministic: bool = False

    @property
    def dtype(self) -> DType:
        """Of the elements."""
        return self.source.dtype


@dataclass(frozen=True)
class Pull:
    """Bytes [start, stop) of what rank `source` shows go to `dest`, to its target at `at`."""

    source: int
    dest: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class Move:
    """Bytes that go from rank to rank, as one of them sees it.

    Attributes:
        source: what this rank shows; None: nothing.
        target: where what it gets goes; None: it gets nothing.
        pulls: of all ranks, alike on all.
    """

    source: Span | None
    target: Span | None
    pulls: tuple[Pull, ...]


@dataclass(frozen=True)
class UpdatePiece:
    """Elements of the weights that this rank updates with one set of numbers.

    Attributes:
        start: first element, in gradients and weights alike.
        stop: behind the last.
        owned: float32 arrays of as many elements, this rank's alone: master weights, then the
            rule's states.
        rule: of the optimizer.
        numbers: of the rule, for this step; see ringcomm.gpu.kernels.
    """

    start: int
    stop: int
    owned: tuple[Span, ...]
    rule: Rule
    numbers: Argument


@dataclass(frozen=True)
class Update:
    """A step of an optimizer whose state is spread over the ranks: reduce, update, push, in one.

    Every element is read from the gradients of all ranks, summed in float32 in rank order, scaled,
    and its new weight is written to all ranks, by the one that owns it.

    Attributes:
        source: this rank's gradients.
        target: this rank's weights, all of them, updated by whoever owns them.
        pieces: of this rank. Those of all ranks do not overlap.
        scale: of the sum of gradients.
        is_reduced: this rank's gradients are the sum already, where its pieces are.
    """

    source: Span
    target: Span
    pieces: tuple[UpdatePiece, ...]
    scale: float
    is_reduced: bool = False


Work = Reduce | Move | Update


@dataclass(frozen=True)
class Job:
    """What one operation puts on the stream: a work, and what this rank does around it.

    Attributes:
        work: what the ranks do together.
        packed: arrays that are copied first, one behind the other, into `buffer`.
        unpacked: arrays that are copied last, likewise, out of it.
        buffer: of the work; None: nothing is packed.
    """

    work: Work
    packed: Sequence[Span] = field(default=())
    unpacked: Sequence[Span] = field(default=())
    buffer: Span | None = None


class Mover(Protocol):
    """Carries out works among the ranks of a team, on one stream of each.

    Attributes:
        name: "nccl" or "ipc".
        stream: everything happens on it.
        meets_on_stream: where all ranks must meet, their streams do; else their hosts must.
    """

    name: str
    stream: int
    meets_on_stream: bool

    def outline(self, work: Work) -> bytes:
        """Return what the others need to know of this rank's part: as many bytes on each rank."""
        ...

    def phases(self, work: Work, outlines: Sequence[bytes]) -> Iterator[None]:
        """Put this rank's part on the stream; all ranks do so in the same order of works.

        Yields where all ranks must have come before any goes on.

        Args:
            work: what is to be done.
            outlines: of all ranks; empty if outline() returns nothing.
        """
        ...

    def meet(self) -> None:
        """Let the stream wait until those of all ranks are here; see meets_on_stream."""
        ...

    def release(self) -> None:
        """Let nothing on the stream wait for another rank any more; any thread, again and again."""
        ...

    @property
    def late(self) -> tuple[int, ...]:
        """Ranks of the team that this one's stream waits for, as far as it is known."""
        ...

    def scratch(self, nbytes: int) -> Span:
        """Return memory in which arrays can be fused; the stream may use it until the next call."""
        ...

    def close(self, *, is_clean: bool) -> None:
        """Give everything back.

        Args:
            is_clean: nothing is under way on any rank.
        """
        ...
