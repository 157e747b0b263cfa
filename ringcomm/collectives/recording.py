"""Algorithms without Python: each is run once on paper, and what it does is carried out in C++.

The coroutines are the reference, and run as they are over a wire that only Python can use. What a
rank does in them depends on sizes, ranks and dtypes, never on values. So a recorder, which stands
in for a Channel, gives them buffers without memory, and writes down every step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self, TypeVar, cast

from ringcomm._core import Schedule
from ringcomm.arrays.base import Bytes, Flat
from ringcomm.arrays.dtypes import DType
from ringcomm.collectives.schedule import Parts
from ringcomm.transport.base import ANY_SOURCE, Request
from ringcomm.transport.channel import Channel
from ringcomm.transport.members import Hashed
from ringcomm.transport.performer import Performer, Reduction

R = TypeVar("R")
Algorithm = TypeVar("Algorithm", bound=Callable[..., Coroutine[Any, Any, Any]])
_MAX_RECORDINGS = 512


def live(algorithm: Algorithm) -> Algorithm:
    """Decorator: an algorithm that perform() does not record, for C++ carries out its parts."""
    vars(algorithm)["is_live"] = True
    return algorithm


async def perform(
    algorithm: Callable[..., Coroutine[Any, Any, R]], t: Performer, *args: Any, **kwargs: Any
) -> R:
    """Return await algorithm(*args, t=t, **kwargs), carried out without Python where possible.

    Args:
        algorithm: a coroutine function that does everything through its Performer `t`.
        t: the messages of this operation.
        args: Flats, lists of slices, and what can be a key of a dict; so are the kwargs.

    Returns:
        What the algorithm returns: a Flat, which is part of one of its arguments, or None.
    """
    if not isinstance(t, Channel) or hasattr(algorithm, "is_live") or t.transport.runner is None:
        return await algorithm(*args, t=t, **kwargs)
    values = (*args, *kwargs.values())
    spec = tuple(_outline(value) for value in values)
    recording = _record(algorithm, t.rank, t.nodes, tuple(kwargs), spec)
    buffers = [value.bytes for value in values if isinstance(value, Flat)]
    await t.run(recording.schedule, buffers, recording.peers)
    return cast(R, recording.result_within(buffers))


@dataclass(frozen=True)
class Recording:
    """The actions of one rank in an algorithm, for arguments of certain sizes."""

    schedule: Schedule
    peers: tuple[int, ...]  # the ranks that it speaks with, as the schedule numbers them
    result: Flat | None  # on paper

    def result_within(self, buffers: list[Bytes]) -> Flat | None:
        """Return the result for these arguments."""
        if self.result is None:
            return None
        at = cast(Paper, self.result.bytes)
        whole = buffers[at.buffer]
        return Flat(whole[at.offset : at.offset + at.nbytes], self.result.dtype)


@dataclass(frozen=True)
class Paper:
    """Stands for bytes of a numbered buffer: it can be cut, and has no values."""

    buffer: int
    offset: int
    nbytes: int

    def __getitem__(self, part: slice) -> Paper:
        start, stop, _ = part.indices(self.nbytes)
        return Paper(self.buffer, self.offset + start, max(stop - start, 0))

    @property
    def span(self) -> tuple[int, int, int]:
        """Buffer, offset and bytes, as a Schedule takes them."""
        return self.buffer, self.offset, self.nbytes


@dataclass(frozen=True)
class _Buffer:
    """A Flat, as far as a recording depends on it."""

    nbytes: int
    dtype: DType


@dataclass(frozen=True)
class _Parts:
    """A list of slices: start and stop of each."""

    bounds: Hashed


def _outline(value: Any) -> Any:
    if isinstance(value, Flat):
        return _Buffer(value.bytes.nbytes, value.dtype)
    if isinstance(value, list):
        return _Parts((value if isinstance(value, Parts) else Parts(value)).bounds)
    return value


@lru_cache(_MAX_RECORDINGS)
def _record(
    algorithm: Callable[..., Coroutine[Any, Any, Any]],
    rank: int,
    nodes: tuple[int, ...],
    names: tuple[str, ...],
    spec: tuple[Any, ...],
) -> Recording:
    schedule = Schedule([each.nbytes for each in spec if isinstance(each, _Buffer)])
    values = _on_paper(spec)
    n_positional = len(values) - len(names)
    named = dict(zip(names, values[n_positional:], strict=True))
    recorder = _Recorder(schedule, rank, nodes)
    result = _run_through(algorithm(*values[:n_positional], t=recorder, **named))
    schedule.finish()
    return Recording(schedule, tuple(recorder.peers), result)


def _on_paper(spec: tuple[Any, ...]) -> list[Any]:
    values: list[Any] = []
    n_buffers = 0
    for each in spec:
        if isinstance(each, _Buffer):
            values.append(_flat(Paper(n_buffers, 0, each.nbytes), each.dtype))
            n_buffers += 1
        elif isinstance(each, _Parts):
            pairs = zip(each.bounds[::2], each.bounds[1::2], strict=True)
            values.append([slice(start, stop) for start, stop in pairs])
        else:
            values.append(each)
    return values


def _flat(paper: Paper, dtype: DType) -> Flat:
    return Flat(cast(Bytes, paper), dtype)


def _span(x: Flat | Bytes) -> tuple[int, int, int]:
    return cast(Paper, x.bytes if isinstance(x, Flat) else x).span


def _run_through(strand: Coroutine[Any, Any, Any]) -> Any:
    try:
        strand.send(None)
    except StopIteration as stop:
        return stop.value
    strand.close()
    raise AssertionError("an algorithm awaits nothing but its Performer")


@dataclass(frozen=True)
class _Noted:
    """A message on paper."""

    number: int
    source: int = ANY_SOURCE

    def test(self) -> bool:
        return False

    def cancel(self) -> None:
        """Do nothing."""


class _Recorder(Performer):
    """Appends what an algorithm does to a schedule."""

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

    def isend(self, data: Bytes, dest: int) -> Request:
        return _Noted(self._schedule.send(_span(data), self._number_of(dest)))

    def irecv(self, out: Bytes, source: int) -> Request:
        return _Noted(self._schedule.receive(_span(out), self._number_of(source)))

    def _number_of(self, rank: int) -> int:
        return self.peers.setdefault(self._members[rank], len(self.peers))

    async def wait(self, *requests: Request) -> None:
        self._schedule.wait([cast(_Noted, request).number for request in requests])

    def scratch(self, like: Flat, count: int) -> Flat:
        nbytes = count * like.dtype.itemsize
        return _flat(Paper(self._schedule.add_scratch(nbytes), 0, nbytes), like.dtype)

    def copy(self, out: Flat, x: Flat) -> None:
        self._schedule.copy(_span(out), _span(x))

    def combine(self, total: Flat, x: Flat, op: Reduction) -> None:
        self._schedule.combine(_span(total), _span(x), total.dtype.kernel, op.kernel)

    def divide(self, total: Flat, divisor: int) -> None:
        self._schedule.divide(_span(total), total.dtype.kernel, divisor)

    def combine_rounded(self, out: Flat, sources: list[Flat], op: Reduction, divisor: int) -> None:
        spans = [_span(source) for source in sources]
        self._schedule.combine_rounded(_span(out), spans, out.dtype.kernel, op.kernel, divisor)
