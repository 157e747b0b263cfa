"""Records an algorithm once, so that C++ can carry it out without Python.

An algorithm is a coroutine, which runs in Python if the wire has no C++ runner. Its actions depend
on sizes, ranks and dtypes, never on values. So a recorder can replace the Channel: the recorder
gives the coroutine buffers without memory, and writes down each action.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Self, TypeVar, cast

from ringcomm._core import Schedule
from ringcomm.arrays.base import Bytes, Flat
from ringcomm.arrays.dtypes import DType
from ringcomm.collectives.message_patterns import Parts
from ringcomm.transport.base import WireRequest
from ringcomm.transport.channel import Channel
from ringcomm.transport.performer import Performer, Reduction

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
    if not isinstance(t, Channel) or hasattr(algorithm, "is_live") or t.transport.runner is None:
        return await algorithm(*args, t=t, **kwargs)
    values = (*args, *kwargs.values())
    spec = tuple(_key_of(value) for value in values)
    recording = _record(algorithm, t.rank, t.nodes, tuple(kwargs), spec)
    buffers = [value.bytes for value in values if isinstance(value, Flat)]
    await t.run(recording.schedule, buffers, recording.peers)
    return cast(R, recording.result_within(buffers))


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
    schedule = Schedule([each.nbytes for each in buffers])
    flats = (_flat(Paper(i, 0, each.nbytes), each.dtype) for i, each in enumerate(buffers))
    values = [next(flats) if isinstance(each, _Buffer) else each for each in spec]
    n_positional = len(values) - len(names)
    named = dict(zip(names, values[n_positional:], strict=True))
    recorder = _Recorder(schedule, rank, nodes)
    result = _run_through(algorithm(*values[:n_positional], t=recorder, **named))
    schedule.finish()
    return Recording(schedule, tuple(recorder.peers), result)


def _flat(paper: Paper, dtype: DType) -> Flat:
    return Flat(cast(Bytes, paper), dtype)


def _span(x: Flat | Bytes) -> tuple[int, int, int]:
    return cast(Paper, x.bytes if isinstance(x, Flat) else x).span


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


class _Recorder(Performer):
    def __init__(self, schedule: Schedule, rank: int, nodes: tuple[int, ...]) -> None:
        self.rank = rank
        self.size = len(nodes)
        self._members: tuple[int, ...] = tuple(range(len(nodes)))
        self._nodes = nodes
        self._schedule = schedule
        self.peers: dict[int, int] = {}  # rank -> its number

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(self._nodes[member] for member in self._members)

    def among(self, ranks: Sequence[int]) -> Self:
        part = copy.copy(self)
        part.rank = ranks.index(self.rank)
        part.size = len(ranks)
        part._members = tuple(self._members[rank] for rank in ranks)
        return part

    def isend(self, data: Bytes, dest: int) -> WireRequest:
        return _RecordedMessage(self._schedule.send(_span(data), self._number_of(dest)))

    def irecv(self, out: Bytes, source: int) -> WireRequest:
        return _RecordedMessage(self._schedule.receive(_span(out), self._number_of(source)))

    def _number_of(self, rank: int) -> int:
        return self.peers.setdefault(self._members[rank], len(self.peers))

    async def wait(self, *requests: WireRequest) -> None:
        self._schedule.wait([cast(_RecordedMessage, request).number for request in requests])

    def scratch(self, like: Flat, count: int) -> Flat:
        nbytes = count * like.dtype.itemsize
        return _flat(Paper(self._schedule.add_scratch(nbytes), 0, nbytes), like.dtype)

    def copy(self, out: Flat, x: Flat) -> None:
        self._schedule.copy(_span(out), _span(x))

    def combine(self, total: Flat, x: Flat, op: Reduction) -> None:
        self._schedule.combine(_span(total), _span(x), total.dtype.kernel, op.kernel)

    def divide(self, total: Flat, divisor: int) -> None:
        self._schedule.divide(_span(total), total.dtype.kernel, divisor)

    def combine_at_once(self, out: Flat, sources: list[Flat], op: Reduction, divisor: int) -> None:
        spans = [_span(source) for source in sources]
        self._schedule.combine_at_once(_span(out), spans, out.dtype.kernel, op.kernel, divisor)
