"""The transport over NCCL, which moves the bytes, and reduces where its arithmetic will do.

NCCL rounds 16-bit sums at every hop, lets NaN lose in MIN and MAX, and combines in an order of its
own. Where that matters the owners of the elements combine them instead, with our own kernel, and
NCCL moves the parts to and from them: as many bytes as its own ring.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Protocol

from ringcomm.arrays.base import Span
from ringcomm.arrays.dtypes import DTYPES
from ringcomm.collectives.op import AVERAGE, MAX, MIN, PRODUCT, SUM
from ringcomm.errors import RingcommError
from ringcomm.gpu.device.base import Device, KernelReduction
from ringcomm.gpu.transports.base import Move, Reduce, Update, Work
from ringcomm.gpu.transports.slices import even_parts
from ringcomm.transport.node import To

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


class Communicator(Protocol):
    """One rank's end of a communicator."""

    def call(self, function: str, *arguments: int) -> None:
        """Call a function of NCCL, without the communicator among its arguments.

        All but ncclCommAbort and ncclCommDestroy put something on a stream and return.

        Raises:
            RingcommError: NCCL refuses.
        """


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
        """Return the id of a new communicator, for all of its ranks. See ncclGetUniqueId."""

    def connect(self, unique_id: bytes, rank: int, size: int) -> Communicator:
        """Return a communicator; blocks until all ranks call it. See ncclCommInitRank.

        Raises:
            RingcommError: NCCL refuses.
        """


class NcclTransport:
    """GpuTransport over a communicator of the team."""

    name = "nccl"
    meets_on_stream = True
    late: tuple[int, ...] = ()  # NCCL does not tell

    def __init__(self, device: Device, communicator: Communicator, rank: int, size: int) -> None:
        self._device = device
        self._comm = communicator
        self._rank = rank
        self._size = size
        self._others = [r for r in range(size) if r != rank]
        self._memory: dict[str, Span] = {}
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
        """See GpuTransport; nothing is left to wait for."""
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
        threading.Thread(
            target=self._comm.call, args=("ncclCommAbort",), name="ringcomm-nccl-abort", daemon=True
        ).start()

    def scratch(self, nbytes: int) -> Span:
        """Return memory; see GpuTransport."""
        return self._take("fused", nbytes)

    def close(self, *, is_clean: bool) -> None:
        """Destroy the communicator, or abort it."""
        if not is_clean:
            self.release()
        elif not self._is_aborted:
            with self._device.active():
                self._comm.call("ncclCommDestroy")
            self._device.free_stream(self.stream)
            self._memory.clear()

    # --- reductions that are NCCL's own -----------------------------------------------------------
    def _reduce(self, work: Reduce) -> None:
        dtype, count = _as_nccl(work.source)
        op, source = OPERATORS[work.op], work.source.address
        target = 0 if work.target is None else work.target.address
        if work.to is To.ALL:
            self._comm.call("ncclAllReduce", source, target, count, dtype, op, self.stream)
        elif work.to is To.ROOT:
            self._comm.call("ncclReduce", source, target, count, dtype, op, work.root, self.stream)
        else:
            each = count // self._size
            self._comm.call("ncclReduceScatter", source, target, each, dtype, op, self.stream)
        if work.op is AVERAGE and work.target is not None:
            self._divide(work.target)

    def _divide(self, x: Span) -> None:
        what = KernelReduction((x.address,), (x.address,), x.count, x.dtype, SUM, self._size)
        if x.count:
            self._device.reduce(self.stream, what)

    # --- reductions by the owners of the elements -------------------------------------------------
    def _combine(self, work: Reduce) -> None:
        """Send elements to their owners, who combine and pass them on."""
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
        self._exchange(
            [(work.source[parts[r]], r) for r in self._others],
            [(Span(received + r * room, own.nbytes, _BYTE), r) for r in self._others],
        )
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
        receives: list[tuple[Span, int]] = []
        if self._rank in ranks:
            assert work.target is not None
            receives = [(work.target[parts[r]], r) for r in self._others]
        self._exchange([(result, r) for r in ranks if r != self._rank], receives)

    # --- moves ------------------------------------------------------------------------------------
    def _move(self, work: Move) -> None:
        root = _root_of(work, self._size)
        if root is not None:
            self._broadcast(work, root)
            return
        sends, receives = [], []
        for pull in work.pulls:
            source = target = None
            nbytes = pull.stop - pull.start
            if pull.source == self._rank:
                assert work.source is not None
                source = Span(work.source.address + pull.start, nbytes, _BYTE)
            if pull.dest == self._rank:
                assert work.target is not None
                target = Span(work.target.address + pull.at, nbytes, _BYTE)
            if source and target and nbytes:
                self._device.copy(self.stream, target.address, source.address, nbytes)
            elif source:
                sends.append((source, pull.dest))
            elif target:
                receives.append((target, pull.source))
        self._exchange(sends, receives)

    def _exchange(
        self, sends: Sequence[tuple[Span, int]], receives: Sequence[tuple[Span, int]]
    ) -> None:
        """Send bytes to ranks, and receive from ranks, all at once."""
        self._comm.call("ncclGroupStart")
        for function, each in (("ncclSend", sends), ("ncclRecv", receives)):
            for span, peer in each:
                if span.nbytes:
                    self._comm.call(function, span.address, span.nbytes, 1, peer, self.stream)
        self._comm.call("ncclGroupEnd")

    def _broadcast(self, work: Move, root: int) -> None:
        span = work.source if self._rank == root else work.target
        assert span is not None
        if span.nbytes:
            at = span.address
            self._comm.call("ncclBroadcast", at, at, span.nbytes, 1, root, self.stream)

    def _take(self, what: str, nbytes: int) -> Span:
        """Return memory for one purpose, which grows as it is needed."""
        memory = self._memory.get(what)
        if memory is None or memory.nbytes < nbytes:
            grown = 0 if memory is None else 2 * memory.nbytes
            memory = self._memory[what] = self._device.regions.take(max(nbytes, grown))
        return memory[:nbytes]


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
    """Return the rank that gives all it shows to all others, if that is all that a Work does."""
    pulls = work.pulls
    if len(pulls) != size - 1 or len({pull.dest for pull in pulls}) != size - 1:
        return None
    same = {(pull.source, pull.start, pull.stop, pull.at) for pull in pulls}
    if len(same) != 1 or pulls[0].start or pulls[0].at:
        return None
    return pulls[0].source if all(pull.dest != pulls[0].source for pull in pulls) else None
