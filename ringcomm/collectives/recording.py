"""Records an algorithm once, so that C++ can carry it out without Python.

An algorithm is a coroutine, which runs in Python if the wire has no C++ runner. Its actions depend
on sizes, ranks and dtypes, never on values. So a recorder can replace the Channel: the recorder
gives the coroutine buffers without memory, and writes down each action.

Likewise the whole of a call, with the copies before and after its algorithms: then the buffers are
arrays, of which nothing is read or written.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar, cast

import numpy as np

from ringcomm._core import Schedule
from ringcomm.arrays.base import Bytes, Flat
from ringcomm.arrays.dtypes import DType
from ringcomm.collectives.message_patterns import Parts
from ringcomm.transport.base import WireRequest
from ringcomm.transport.channel import Channel
from ringcomm.transport.performer import Performer, Reduction

if TYPE_CHECKING:
    from ringcomm._core import Span

R = TypeVar("R")
Algorithm = TypeVar("Algorithm", bound=Callable[..., Coroutine[Any, Any, Any]])
_MAX_RECORDINGS = 512


def live(algorithm: Algorithm) -> Algorithm:
    """Decorator for an algorithm that perform() does not record: C++ carries out its parts."""
    vars(algorithm)["is_live"] = True
    return algorithm


async def perform(
    algorithm: Callable[..., Coroutine[Any, Any, R]], t: Performer, *args: Any, **kwargs: Any
) -> R:
    """Return the result of algorithm(*args, t=t, **kwargs), which C++ carries out if possible.

    Args:
        algorithm: a coroutine function that acts through its Performer `t` alone. It returns a part
            of one of its arguments, or None.
        t: the Channel of this operation, or another Performer.
        args: Flats, lists of slices, and hashable objects; likewise kwargs.
    """
    is_live = hasattr(algorithm, "is_live")
    if is_live and isinstance(t, _Recorder):
        raise CannotRecord
    if not isinstance(t, Channel) or is_live or t.transport.runner is None:
        return await algorithm(*args, t=t, **kwargs)
    values = (*args, *kwargs.values())
    spec = tuple(_key_of(value) for value in values)
    recording = _record(algorithm, t.rank, t.nodes, tuple(kwargs), spec)
    buffers = [value.bytes for value in values if isinstance(value, Flat)]
    await t.run(recording.schedule, buffers, recording.peers)
    return cast(R, recording.result_within(buffers))


class CannotRecord(Exception):
    """C++ cannot do all of it."""


class Recording(NamedTuple):
    """The actions of one rank in an algorithm, for arguments of certain sizes."""

    schedule: Schedule
    peers: tuple[int, ...]  # the rank for each peer number of the schedule
    result: Flat | None  # its bytes are a part of a Paper

    def result_within(self, buffers: list[Bytes]) -> Flat | None:
        if self.result is None:
            return None
        at = cast(Paper, self.result.bytes)
        whole = buffers[at.buffer]
        return Flat(whole[at.offset : at.offset + at.nbytes], self.result.dtype)


@dataclass(frozen=True)
class Paper:
    """Stands for bytes of a numbered buffer; has slices, but no values."""

    buffer: int
    offset: int
    nbytes: int

    def __getitem__(self, part: slice) -> Paper:
        start, stop, _ = part.indices(self.nbytes)
        return Paper(self.buffer, self.offset + start, max(stop - start, 0))

    @property
    def span(self) -> tuple[int, int, int]:
        return self.buffer, self.offset, self.nbytes


class _Buffer(NamedTuple):
    nbytes: int
    dtype: DType


def _key_of(value: Any) -> Any:
    """Return a hashable object with the properties of an argument that a recording depends on."""
    if isinstance(value, Flat):
        return _Buffer(value.bytes.nbytes, value.dtype)
    return Parts(value) if type(value) is list else value


@lru_cache(_MAX_RECORDINGS)
def _record(
    algorithm: Callable[..., Coroutine[Any, Any, Any]],
    rank: int,
    nodes: tuple[int, ...],
    names: tuple[str, ...],
    spec: tuple[Any, ...],
) -> Recording:
    buffers = [each for each in spec if isinstance(each, _Buffer)]
    flats = (_flat(Paper(i, 0, each.nbytes), each.dtype) for i, each in enumerate(buffers))
    values = [next(flats) if isinstance(each, _Buffer) else each for each in spec]
    n_positional = len(values) - len(names)
    named = dict(zip(names, values[n_positional:], strict=True))
    recorder = _Recorder(rank, nodes, len(buffers))
    result = _run_through(algorithm(*values[:n_positional], t=recorder, **named))
    schedule = Schedule([each.nbytes for each in buffers])
    for nbytes in recorder.scratches:
        schedule.add_scratch(nbytes)
    for each in recorder.actions:
        each.write(schedule, lambda memory: cast(Paper, memory).span)
    schedule.finish()
    return Recording(schedule, tuple(recorder.peers), result)


class CallRecording(NamedTuple):
    """The actions of one rank in a call, for its array x and its result.

    Attributes:
        schedule: its arguments are x and the result. If they are the same array, it is the result
            if the call writes to it, else x; the other argument then has no bytes.
        peers: the rank for each peer number of the schedule.
        writes_x: the call writes to x.
    """

    schedule: Schedule
    peers: tuple[int, ...]
    writes_x: bool


def record_call(
    run: Callable[[Any], Coroutine[Any, Any, Any]],
    t: Channel,
    x: Bytes | None,
    result_of: Callable[[Any], Bytes | None],
) -> CallRecording:
    """Return what a call has done that acted through t alone.

    Args:
        run: carries the call out, given a Performer. It is run again, and moves nothing.
        t: through which it was carried out.
        x: the memory of its array; None: it has none.
        result_of: returns the memory of what run() returns.

    Raises CannotRecord, also if the call reads what it has not written.
    """
    recorder = _CallRecorder(t.rank, t.nodes)
    result = result_of(_run_through(run(recorder)))
    written = [memory for each in recorder.actions for memory in each.writes]
    writes_x = x is not None and any(np.may_share_memory(each, x) for each in written)
    if x is not None and result is not None and _extent(x) == _extent(result):
        x, result = (None, result) if writes_x else (x, None)
    arrays = _Arrays(x, result)
    for each in recorder.actions:
        for memory in each.reads:
            arrays.require_defined(memory)
        for memory in each.writes:
            arrays.define(memory)
    schedule = Schedule(arrays.nbytes[:2])
    for nbytes in arrays.nbytes[2:]:
        schedule.add_scratch(nbytes)
    for each in recorder.actions:
        each.write(schedule, arrays.span_of)
    schedule.finish()
    return CallRecording(schedule, tuple(recorder.peers), writes_x)


def _flat(paper: Paper, dtype: DType) -> Flat:
    return Flat(cast(Bytes, paper), dtype)


def _run_through(coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    coroutine.close()
    raise AssertionError("an algorithm may await nothing but its Performer")


@dataclass(frozen=True)
class _RecordedMessage(WireRequest):
    number: int  # its number in the schedule

    def test(self) -> bool:
        return False


class _Action(NamedTuple):
    """One action: how it is written into a schedule, given the span of each memory."""

    write: Callable[[Schedule, Callable[[Bytes], Span]], object]
    reads: tuple[Bytes, ...] = ()
    writes: tuple[Bytes, ...] = ()


class _Recorder(Performer):
    meeting = None  # what is recorded is messages
    takes_steps = False

    def __init__(self, rank: int, nodes: tuple[int, ...], n_arguments: int) -> None:
        self.rank = rank
        self.size = len(nodes)
        self._members: tuple[int, ...] = tuple(range(len(nodes)))
        self._nodes = nodes
        self._n_arguments = n_arguments
        self.peers: dict[int, int] = {}  # rank -> its number
        self.actions: list[_Action] = []
        self.scratches: list[int] = []  # bytes of each
        self._messages: list[_RecordedMessage] = []

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(self._nodes[member] for member in self._members)

    def among(self, ranks: Sequence[int]) -> Self:
        part = copy.copy(self)  # with the same lists
        part.rank = ranks.index(self.rank)
        part.size = len(ranks)
        part._members = tuple(self._members[rank] for rank in ranks)
        return part

    def phase(self, name: str) -> AbstractContextManager[None]:
        del name
        return contextlib.nullcontext()

    def isend(self, data: Bytes, dest: int) -> WireRequest:
        peer = self._number_of(dest)
        self.actions.append(_Action(lambda s, at: s.send(at(data), peer), (data,)))
        return self._message()

    def irecv(self, out: Bytes, source: int) -> WireRequest:
        peer = self._number_of(source)
        self.actions.append(_Action(lambda s, at: s.receive(at(out), peer), (), (out,)))
        return self._message()

    def _message(self) -> WireRequest:
        self._messages.append(_RecordedMessage(len(self._messages)))
        return self._messages[-1]

    def _number_of(self, rank: int) -> int:
        return self.peers.setdefault(self._members[rank], len(self.peers))

    async def wait(self, *requests: WireRequest) -> None:
        numbers = [cast(_RecordedMessage, request).number for request in requests]
        self.actions.append(_Action(lambda s, _: s.wait(numbers)))

    def scratch(self, like: Flat, count: int) -> Flat:
        nbytes = count * like.dtype.itemsize
        self.scratches.append(nbytes)
        number = self._n_arguments + len(self.scratches) - 1
        return _flat(Paper(number, 0, nbytes), like.dtype)

    def copy(self, out: Flat, x: Flat) -> None:
        to, of = out.bytes, x.bytes
        self.actions.append(_Action(lambda s, at: s.copy(at(to), at(of)), (of,), (to,)))

    def combine(self, total: Flat, x: Flat, op: Reduction) -> None:
        to, of, kernels = total.bytes, x.bytes, (total.dtype.kernel, op.kernel)
        self.actions.append(
            _Action(lambda s, at: s.combine(at(to), at(of), *kernels), (to, of), (to,))
        )

    def divide(self, total: Flat, divisor: int) -> None:
        to, dtype = total.bytes, total.dtype.kernel
        self.actions.append(_Action(lambda s, at: s.divide(at(to), dtype, divisor), (to,), (to,)))

    def combine_at_once(self, out: Flat, sources: list[Flat], op: Reduction, divisor: int) -> None:
        to, of, kernels = out.bytes, [x.bytes for x in sources], (out.dtype.kernel, op.kernel)
        self.actions.append(
            _Action(
                lambda s, at: s.combine_at_once(at(to), [at(x) for x in of], *kernels, divisor),
                tuple(of),
                (to,),
            )
        )


class _CallRecorder(_Recorder):
    def __init__(self, rank: int, nodes: tuple[int, ...]) -> None:
        super().__init__(rank, nodes, 2)

    def scratch(self, like: Flat, count: int) -> Flat:
        return like.like(count)


def _extent(memory: Bytes) -> tuple[int, int]:
    return memory.ctypes.data, memory.nbytes


class _Arrays:
    """The arrays of a call: x, the result, and others, whose bytes become scratch memory.

    Args:
        x: its values may be read; None: there is none.
        result: is undefined at first, unless there is no x.
    """

    def __init__(self, x: Bytes | None, result: Bytes | None) -> None:
        self._begins: list[tuple[int, int]] = []  # address and bytes of each
        self._defined: list[list[tuple[int, int]]] = []  # of each, the parts that have values
        for each in (x, result):
            self._add(each)
        if x is not None or result is not None:
            nbytes = self.nbytes[0 if x is not None else 1]
            self._defined[0 if x is not None else 1].append((0, nbytes))

    @property
    def nbytes(self) -> list[int]:
        return [nbytes for _, nbytes in self._begins]

    def _add(self, array: Bytes | None) -> None:
        self._begins.append((0, 0) if array is None else _extent(array))
        self._defined.append([])

    def span_of(self, memory: Bytes) -> Span:
        """Return the number of the array, the offset in it, and the bytes."""
        begin, nbytes = _extent(memory)
        if nbytes == 0:
            return 0, 0, 0
        for number, (first, total) in enumerate(self._begins):
            if first <= begin and begin + nbytes <= first + total:
                return number, begin - first, nbytes
        whole: Any = memory
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        self._add(whole)
        return len(self._begins) - 1, begin - whole.ctypes.data, nbytes

    def require_defined(self, memory: Bytes) -> None:
        """Raise CannotRecord if a part of it has no value yet."""
        number, begin, nbytes = self.span_of(memory)
        for first, end in self._defined[number]:
            if first <= begin and begin + nbytes <= end:
                return
        if nbytes:
            raise CannotRecord

    def define(self, memory: Bytes) -> None:
        number, begin, nbytes = self.span_of(memory)
        end, apart = begin + nbytes, []
        for other in self._defined[number]:
            if other[0] <= end and begin <= other[1]:
                begin, end = min(begin, other[0]), max(end, other[1])
            else:
                apart.append(other)
        self._defined[number] = [*apart, (begin, end)]
