"""Ranks with a GPU each: NCCL moves the bytes, and reduces what it reduces as we promise.

NCCL rounds 16-bit sums at every hop, lets NaN lose in MIN and MAX, and combines in an order of its
own. Where that matters the owners of the elements combine them instead, with our own kernel, and
NCCL moves the parts to and from them: as many bytes as its own ring.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Protocol

from ringcomm.arrays.base import Span
from ringcomm.arrays.dtypes import DTYPES
from ringcomm.collectives.op import AVERAGE, MAX, MIN, PRODUCT, SUM
from ringcomm.errors import RingcommError
from ringcomm.gpu.device.base import Device, KernelReduction, Memory
from ringcomm.gpu.transports.base import Move, Reduce, Update, Work
from ringcomm.gpu.transports.slices import even_parts
from ringcomm.transport.node.steps import To

_BYTE = DTYPES["uint8"]
# As nccl.h numbers them. Complex sums are sums of twice as many reals.
DATA_TYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
}
SHARES_FROM = 23000  # an experiment of NCCL's, which wants NCCL_NVLS_ENABLE=0 besides
OPERATORS = {SUM: 0, AVERAGE: 0, PRODUCT: 1, MAX: 2, MIN: 3}


class Communicator(ABC):
    """One rank's end of a communicator. All but abort() put something on a stream and return."""

    @abstractmethod
    def call(self, function: str, *arguments: int) -> None:
        """Call a function of NCCL, without the communicator. Raises RingcommError: it refuses."""

    def all_reduce(
        self, source: int, target: int, count: int, dtype: int, op: int, stream: int
    ) -> None:
        """Reduce for all ranks."""
        self.call("ncclAllReduce", source, target, count, dtype, op, stream)

    def reduce(
        self, source: int, target: int, count: int, dtype: int, op: int, root: int, stream: int
    ) -> None:
        """Reduce for root, on which alone target is looked at."""
        self.call("ncclReduce", source, target, count, dtype, op, root, stream)

    def reduce_scatter(
        self, source: int, target: int, count: int, dtype: int, op: int, stream: int
    ) -> None:
        """Reduce, a part for each rank; count is that of the target."""
        self.call("ncclReduceScatter", source, target, count, dtype, op, stream)

    def broadcast(
        self, source: int, target: int, count: int, dtype: int, root: int, stream: int
    ) -> None:
        """Copy root's source to all targets."""
        self.call("ncclBroadcast", source, target, count, dtype, root, stream)

    def send(self, source: int, count: int, dtype: int, peer: int, stream: int) -> None:
        """Send to one rank, which receives."""
        self.call("ncclSend", source, count, dtype, peer, stream)

    def receive(self, target: int, count: int, dtype: int, peer: int, stream: int) -> None:
        """Receive what one rank sends."""
        self.call("ncclRecv", target, count, dtype, peer, stream)

    def begin_group(self) -> None:
        """Begin calls that are one."""
        self.call("ncclGroupStart")

    def end_group(self) -> None:
        """Carry out the calls since begin_group()."""
        self.call("ncclGroupEnd")

    def abort(self) -> None:
        """End what is under way, stuck kernels too; from any thread, once."""
        self.call("ncclCommAbort")

    def destroy(self) -> None:
        """Free it; nothing is under way."""
        self.call("ncclCommDestroy")


class Provider(Protocol):
    """A binding of NCCL.

    Attributes:
        name: "cupy" or "nccl4py".
        version: 22703.
        shares_gpus: several ranks of a communicator may be on one GPU.
    """

    name: str
    version: int
    shares_gpus: bool

    def unique_id(self) -> bytes:
        """Return what all ranks of a new communicator must know. See ncclGetUniqueId."""

    def connect(self, unique_id: bytes, rank: int, size: int) -> Communicator:
        """Return a communicator; blocks until all ranks call it. See ncclCommInitRank.

        Raises:
            RingcommError: NCCL refuses.
        """


class NcclMover:
    """Mover over a communicator.

    Args:
        device: this rank's.
        communicator: of the team.
        rank: index of this rank in it.
        size: number of ranks.
    """

    name = "nccl"
    meets_on_stream = True
    late: tuple[int, ...] = ()  # NCCL does not tell

    def __init__(self, device: Device, communicator: Communicator, rank: int, size: int) -> None:
        self._device = device
        self._comm = communicator
        self._rank = rank
        self._size = size
        self._memory: dict[str, Memory] = {}
        self._outgrown: list[Memory] = []
        self._lock = threading.Lock()
        self._is_aborted = False
        self.stream = device.new_stream()

    def outline(self, work: Work) -> bytes:
        """Return nothing: NCCL knows by itself."""
        del work
        return b""

    def meet(self) -> None:
        """Do nothing: NCCL's kernels meet."""

    def phases(self, work: Work, outlines: Sequence[bytes]) -> Iterator[None]:
        """See Mover; nothing is left to wait for."""
        del outlines
        if isinstance(work, Update):
            raise RingcommError("NCCL takes no step of an optimizer: ipc alone does")
        if isinstance(work, Move):
            self._move(work)
        elif work.source.count == 0:
            pass
        elif is_native(work):
            self._reduce(work)
        else:
            self._combine(work)
        return iter(())

    def release(self) -> None:
        """Abort the communicator, in a thread, for that may take long."""
        with self._lock:
            if self._is_aborted:
                return
            self._is_aborted = True
        threading.Thread(target=self._comm.abort, name="ringcomm-nccl-abort", daemon=True).start()

    def scratch(self, nbytes: int) -> Span:
        """Return memory that grows as it is needed."""
        return self._take("fused", nbytes)

    def close(self, *, is_clean: bool) -> None:
        """Destroy the communicator, or abort it."""
        if not is_clean:
            self.release()
        elif not self._is_aborted:
            self._comm.destroy()

    # --- reductions that are NCCL's own -----------------------------------------------------------
    def _reduce(self, work: Reduce) -> None:
        dtype, count = _as_nccl(work.source)
        op, source = OPERATORS[work.op], work.source.address
        target = 0 if work.target is None else work.target.address
        if work.to is To.ALL:
            self._comm.all_reduce(source, target, count, dtype, op, self.stream)
        elif work.to is To.ROOT:
            self._comm.reduce(source, target, count, dtype, op, work.root, self.stream)
        else:
            each = count // self._size
            self._comm.reduce_scatter(source, target, each, dtype, op, self.stream)
        if work.op is AVERAGE and work.target is not None:
            self._divide(work.target)

    def _divide(self, x: Span) -> None:
        what = KernelReduction((x.address,), (x.address,), x.count, x.dtype, SUM, self._size)
        if x.count:
            self._device.reduce(self.stream, what)

    # --- reductions by the owners of the elements -------------------------------------------------
    def _combine(self, work: Reduce) -> None:
        """Let every rank's elements come to their owners, who combine and pass them on."""
        item = work.dtype.itemsize
        parts = work.parts or even_parts(work.source.count, self._size, item)
        own = parts[self._rank]
        count = own.stop - own.start
        pieces = self._gather_pieces(work, parts)
        result = self._result(work, own)
        if count:
            what = KernelReduction(
                sources=pieces,
                targets=(result.address,),
                count=count,
                dtype=work.dtype,
                op=SUM if work.op is AVERAGE else work.op,
                divisor=work.op.divisor(self._size),
            )
            self._device.reduce(self.stream, what)
        if work.to is not To.OWNER:
            self._spread(work, parts, result)

    def _gather_pieces(self, work: Reduce, parts: Sequence[slice]) -> tuple[int, ...]:
        """Bring this rank's elements of all ranks together; return where each rank's are."""
        own = work.source[parts[self._rank]]
        room = -(-own.nbytes // 256) * 256
        received = self._take("pieces", max(1, room * self._size)).address
        self._comm.begin_group()
        for r in range(self._size):
            if r == self._rank:
                continue
            theirs = work.source[parts[r]]
            if theirs.count:
                self._comm.send(theirs.address, theirs.nbytes, 1, r, self.stream)
            if own.count:
                self._comm.receive(received + r * room, own.nbytes, 1, r, self.stream)
        self._comm.end_group()
        return tuple(
            own.address if r == self._rank else received + r * room for r in range(self._size)
        )

    def _result(self, work: Reduce, own: slice) -> Span:
        if work.to is To.OWNER:
            assert work.target is not None
            return work.target
        if work.target is not None:
            return work.target[own]
        nbytes = (own.stop - own.start) * work.dtype.itemsize
        return Span(self._take("result", max(1, nbytes)).address, nbytes, _BYTE)

    def _spread(self, work: Reduce, parts: Sequence[slice], result: Span) -> None:
        """Bring the owners' results to all, or to the root."""
        ranks = range(self._size) if work.to is To.ALL else (work.root,)
        self._comm.begin_group()
        for r in ranks:
            if r != self._rank and result.nbytes:
                self._comm.send(result.address, result.nbytes, 1, r, self.stream)
        if self._rank in ranks:
            assert work.target is not None
            for r in range(self._size):
                theirs = work.target[parts[r]]
                if r != self._rank and theirs.count:
                    self._comm.receive(theirs.address, theirs.nbytes, 1, r, self.stream)
        self._comm.end_group()

    # --- moves ------------------------------------------------------------------------------------
    def _move(self, work: Move) -> None:
        root = _root_of(work, self._size)
        if root is not None:
            self._broadcast(work, root)
            return
        pulls = [pull for pull in work.pulls if pull.stop > pull.start]
        for pull in pulls:
            if pull.source == pull.dest == self._rank:
                assert work.source is not None
                assert work.target is not None
                at, start = work.target.address + pull.at, work.source.address + pull.start
                self._device.copy(self.stream, at, start, pull.stop - pull.start)
        self._comm.begin_group()
        for pull in pulls:
            if pull.source == pull.dest:
                continue
            nbytes = pull.stop - pull.start
            if pull.source == self._rank:
                assert work.source is not None
                at = work.source.address + pull.start
                self._comm.send(at, nbytes, 1, pull.dest, self.stream)
            elif pull.dest == self._rank:
                assert work.target is not None
                at = work.target.address + pull.at
                self._comm.receive(at, nbytes, 1, pull.source, self.stream)
        self._comm.end_group()

    def _broadcast(self, work: Move, root: int) -> None:
        span = work.source if self._rank == root else work.target
        assert span is not None
        if span.nbytes:
            at = span.address
            self._comm.broadcast(at, at, span.nbytes, 1, root, self.stream)

    def _take(self, what: str, nbytes: int) -> Span:
        """Return memory for one purpose; what the stream still uses of smaller one is kept."""
        memory = self._memory.get(what)
        if memory is None or memory.nbytes < nbytes:
            if memory is not None:
                self._outgrown.append(memory)
            grown = 2 * memory.nbytes if memory is not None else 1 << 20
            memory = self._memory[what] = self._device.allocate(max(nbytes, grown))
        return Span(memory.address, nbytes, _BYTE, memory)


def is_native(work: Reduce) -> bool:
    """Return True if NCCL's own reduction keeps what ringcomm promises; pure."""
    dtype, op = work.dtype, work.op
    if work.is_deterministic or dtype.is_16bit_float or op not in OPERATORS:
        return False
    if dtype.is_complex:
        return op in (SUM, AVERAGE) and _is_even(work)
    if op in (MIN, MAX) and dtype.is_float:
        return False  # NaN would lose
    return dtype.name in DATA_TYPES and _is_even(work)


def _is_even(work: Reduce) -> bool:
    lengths = {part.stop - part.start for part in work.parts}
    return work.to is not To.OWNER or len(lengths) == 1


def _as_nccl(x: Span) -> tuple[int, int]:
    """Return NCCL's number of the dtype, and the count in it."""
    if x.dtype.is_complex:
        return DATA_TYPES["float32" if x.dtype.itemsize == 8 else "float64"], 2 * x.count
    return DATA_TYPES[x.dtype.name], x.count


def _root_of(work: Move, size: int) -> int | None:
    """Return the rank that gives all it shows to all others, if that is what a work comes to."""
    pulls = work.pulls
    if len(pulls) != size - 1 or len({pull.dest for pull in pulls}) != size - 1:
        return None
    same = {(pull.source, pull.start, pull.stop, pull.at) for pull in pulls}
    if len(same) != 1 or pulls[0].start or pulls[0].at:
        return None
    return pulls[0].source if all(pull.dest != pulls[0].source for pull in pulls) else None
