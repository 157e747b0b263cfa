"""The transport over NCCL: NCCL moves the bytes, and also reduces if its arithmetic is right.

NCCL rounds 16-bit sums at every hop, drops a NaN in MIN and MAX, and combines in an order of its
own. Where this matters, the owners of the elements combine them with ringcomm's own kernel. Then
NCCL moves the elements to the owners and the results back: as many bytes as its own ring. Between
hosts that would be as many bytes for each GPU of a host; so an allreduce of 16-bit floats adds up
each host's values in float32 first.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from ringcomm.arrays.base import Span
from ringcomm.arrays.dtypes import DTYPES, DType
from ringcomm.collectives.operators import AVERAGE, MAX, MIN, PRODUCT, SUM
from ringcomm.gpu.device.base import Device
from ringcomm.gpu.kernels.base import Kernel
from ringcomm.gpu.kernels.reduce import ReduceKernel
from ringcomm.gpu.transports.nccl_16_bit import SumsByHost
from ringcomm.gpu.transports.nccl_base import Communicator
from ringcomm.gpu.transports.slices import even_parts, passes, staging_nbytes, whole_grains
from ringcomm.gpu.transports.works import GpuMove, GpuReduce, Work
from ringcomm.transport.node import To

_BYTE = DTYPES["uint8"]
_WARM_UP = 128  # bytes
# The numbers of nccl.h. A complex array is summed as twice as many reals.
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
OPERATORS = {SUM: 0, AVERAGE: 0, PRODUCT: 1, MAX: 2, MIN: 3}


class NcclTransport:
    """GpuTransport over NCCL.

    Args:
        device: this rank's GPU.
        communicator: the team's communicator.
        rank: number of this rank in the team.
        size: number of ranks.
        nodes: for each rank, a number that identifies its node; empty: all ranks are on one.
        adds_16bit: 16-bit floats are added by NCCL, which rounds them at every hop.
    """

    meets_on_stream = True
    has_outlines = False
    late: tuple[int, ...] = ()  # NCCL does not say which ranks are late

    def __init__(
        self,
        device: Device,
        communicator: Communicator,
        rank: int,
        size: int,
        *,
        nodes: tuple[int, ...] = (),
        adds_16bit: bool = False,
    ) -> None:
        self._adds_16bit = adds_16bit
        self._device = device
        self._comm = communicator
        self._rank = rank
        self._size = size
        self._others = [r for r in range(size) if r != rank]
        self._memory: dict[str, Span] = {}
        self._lock = threading.Lock()
        self._is_aborted = False
        self.stream = device.new_stream()
        nodes = nodes or (0,) * size
        self._by_host = SumsByHost(device, self.stream, rank, nodes, self._exchange, self._take)

    def connect_all(self) -> None:
        """Make the connections of all kinds of operations; blocks until all ranks do so.

        Else the first operation of a kind would block the thread that launches.
        """
        nbytes = _WARM_UP * self._size
        memory = self._take("pieces", nbytes)
        own, others = memory[:_WARM_UP], self._others
        at, one = memory.address, (_WARM_UP, DATA_TYPES["uint8"])
        add = OPERATORS[SUM]
        self._comm("ncclAllReduce", at, at, *one, add, self.stream)
        self._comm("ncclReduce", at, at, *one, add, 0, self.stream)
        self._comm("ncclReduceScatter", at, at, *one, add, self.stream)
        self._comm("ncclBroadcast", at, at, *one, 0, self.stream)
        self._exchange(
            [(own, r) for r in others],
            [(memory[_WARM_UP * k :][:_WARM_UP], r) for k, r in enumerate(others, 1)],
        )

    def kernels(self, work: Work) -> Sequence[Kernel]:
        """See GpuTransport; the same kernels on all ranks."""
        if not isinstance(work, GpuReduce):
            return []
        if not is_native(work, adds_16bit=self._adds_16bit):
            if self._by_host.is_fit(work):
                return self._by_host.kernels(work)
            divisor = work.op.divisor(self._size)
            return [ReduceKernel((0,) * self._size, (0,), 0, work.dtype, work.op, divisor)]
        if work.op is not AVERAGE:
            return []
        return [ReduceKernel((0,), (0,), 0, work.dtype, SUM, self._size)]

    def outline(self, work: Work) -> bytes:
        del work
        return b""

    def known_outline(self, work: Work) -> bytes:
        del work
        return b""

    def meet(self) -> None:
        """Do nothing: NCCL's kernels wait for each other."""

    def phases(self, work: Work, outlines: Sequence[bytes]) -> Iterator[None]:
        del outlines
        if isinstance(work, GpuMove):
            return self._in_one_phase(partial(self._move, work))
        if work.source.count == 0:
            return iter(())
        if is_native(work, adds_16bit=self._adds_16bit):
            reduce = self._reduce
        else:
            reduce = self._by_host.combine if self._by_host.is_fit(work) else self._combine
        return self._in_one_phase(partial(reduce, work))

    def _in_one_phase(self, enqueue: Callable[[], None]) -> Iterator[None]:
        enqueue()
        yield from ()

    @property
    def is_released(self) -> bool:
        """See GpuTransport; the abort of another rank completes nothing here."""
        return self._is_aborted

    def release(self) -> None:
        """Abort the communicator in a thread, because the abort may take long."""
        with self._lock:
            if self._is_aborted:
                return
            self._is_aborted = True
        threading.Thread(
            target=self._comm, args=("ncclCommAbort",), name="ringcomm-nccl-abort", daemon=True
        ).start()

    def scratch(self, nbytes: int) -> Span:
        return self._take("fused", nbytes)

    def close(self, *, is_clean: bool) -> None:
        if not is_clean:
            self.release()
        elif not self._is_aborted:
            with self._device.active():
                self._comm("ncclCommDestroy")
            self._device.free_stream(self.stream)
            self._memory.clear()

    # --- reductions by NCCL -----------------------------------------------------------------------
    def _reduce(self, work: GpuReduce) -> None:
        dtype, count = _as_nccl(work.source)
        op, source = OPERATORS[work.op], work.source.address
        target = 0 if work.target is None else work.target.address
        if work.to is To.ALL:
            self._comm("ncclAllReduce", source, target, count, dtype, op, self.stream)
        elif work.to is To.ROOT:
            self._comm("ncclReduce", source, target, count, dtype, op, work.root, self.stream)
        else:
            each = count // self._size
            self._comm("ncclReduceScatter", source, target, each, dtype, op, self.stream)
        if work.op is AVERAGE and work.target is not None and work.target.count:
            x = work.target
            division = _division(x.address, x.count, x.dtype, self._size)
            self._device.launch(self.stream, division)

    # --- reductions by the owners of the elements -------------------------------------------------
    def _combine(self, work: GpuReduce) -> None:
        """Send elements to their owners, which combine them and send the results.

        Works in passes, because an owner needs memory for the elements of all ranks.
        """
        item = work.dtype.itemsize
        parts = work.parts or even_parts(work.source.count, self._size, item)
        in_passes = [
            [slice(each.start, each.stop) for each in slices]
            for slices in passes(parts, item, staging_nbytes(self._size))
        ]
        longest = max((own.stop - own.start) * item for own in (p[self._rank] for p in in_passes))
        room = whole_grains(longest)
        received = self._take("pieces", max(1, room * self._size)).address
        pieces = [received + r * room for r in range(self._size)]
        divisor = work.op.divisor(self._size)
        for slices in in_passes:
            own = work.source[slices[self._rank]]
            self._exchange(
                [(work.source[slices[r]], r) for r in self._others],
                [(Span(pieces[r], own.nbytes, _BYTE), r) for r in self._others],
            )
            result = self._result(work, slices[self._rank], parts[self._rank].start)
            if own.count:
                here = tuple(own.address if r == self._rank else at for r, at in enumerate(pieces))
                to = (result.address,)
                kernel = ReduceKernel(here, to, own.count, work.dtype, work.op, divisor)
                self._device.launch(self.stream, kernel)
            if work.to is not To.OWNER:
                self._spread(work, slices, result)

    def _result(self, work: GpuReduce, own: slice, first: int) -> Span:
        """Return the memory for the results of elements that this rank owns, from `first` on."""
        if work.to is To.OWNER:
            assert work.target is not None
            return work.target[own.start - first : own.stop - first]
        if work.target is not None:
            return work.target[own]
        nbytes = (own.stop - own.start) * work.dtype.itemsize
        return Span(self._take("result", max(1, nbytes)).address, nbytes, _BYTE)

    def _spread(self, work: GpuReduce, slices: Sequence[slice], result: Span) -> None:
        ranks = range(self._size) if work.to is To.ALL else (work.root,)
        receives: list[tuple[Span, int]] = []
        if self._rank in ranks:
            assert work.target is not None
            receives = [(work.target[slices[r]], r) for r in self._others]
        self._exchange([(result, r) for r in ranks if r != self._rank], receives)

    # --- moves ------------------------------------------------------------------------------------
    def _move(self, work: GpuMove) -> None:
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
        """Send spans to ranks and receive spans from ranks, all at once."""
        self._comm("ncclGroupStart")
        for function, each in (("ncclSend", sends), ("ncclRecv", receives)):
            for span, peer in each:
                if span.nbytes:
                    self._comm(function, span.address, span.nbytes, 1, peer, self.stream)
        self._comm("ncclGroupEnd")

    def _broadcast(self, work: GpuMove, root: int) -> None:
        span = work.source if self._rank == root else work.target
        assert span is not None
        if span.nbytes:
            at = span.address
            self._comm("ncclBroadcast", at, at, span.nbytes, 1, root, self.stream)

    def _take(self, what: str, nbytes: int) -> Span:
        memory = self._memory.get(what)
        if memory is None or memory.nbytes < nbytes:
            grown = 0 if memory is None else 2 * memory.nbytes
            taken = self._device.regions.take(max(nbytes, grown), self.stream)
            memory = self._memory[what] = taken
        return memory[:nbytes]


def is_native(work: GpuReduce, *, adds_16bit: bool = False) -> bool:
    """Return True if NCCL's own reduction gives the results that ringcomm promises.

    Or, if `adds_16bit`, sums of 16-bit floats that it has rounded at every hop.
    """
    dtype, op = work.dtype, work.op
    if adds_16bit and dtype.is_16bit_float and op in (SUM, AVERAGE) and not work.is_deterministic:
        return _is_even(work)
    if work.is_deterministic or op.is_at_once(dtype) or op not in OPERATORS:
        return False
    if dtype.is_complex:
        return op in (SUM, AVERAGE) and _is_even(work)
    if op in (MIN, MAX) and dtype.is_float:
        return False  # NCCL would drop a NaN
    return dtype.name in DATA_TYPES and _is_even(work)


@functools.lru_cache(maxsize=512)  # a kernel that is launched again has its parameters packed
def _division(address: int, count: int, dtype: DType, size: int) -> ReduceKernel:
    return ReduceKernel((address,), (address,), count, dtype, SUM, size)


def _is_even(work: GpuReduce) -> bool:
    return work.to is not To.OWNER or len({part.stop - part.start for part in work.parts}) == 1


def _as_nccl(x: Span) -> tuple[int, int]:
    if x.dtype.is_complex:
        return DATA_TYPES["float32" if x.dtype.itemsize == 8 else "float64"], 2 * x.count
    return DATA_TYPES[x.dtype.name], x.count


def _root_of(work: GpuMove, size: int) -> int | None:
    """Return the root if a Move is a broadcast, else None."""
    pulls = work.pulls
    if len(pulls) != size - 1 or len({pull.dest for pull in pulls}) != size - 1:
        return None
    same = {(pull.source, pull.start, pull.stop, pull.at) for pull in pulls}
    if len(same) != 1 or pulls[0].start or pulls[0].at:
        return None
    return pulls[0].source if all(pull.dest != pulls[0].source for pull in pulls) else None
