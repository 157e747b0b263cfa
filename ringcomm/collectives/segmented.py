"""The ring of ring.py as it runs between hosts: host by host, and in segments.

While a segment is reduced, the next ones are on the wire. The ring visits all ranks of a host
before it goes on, so that each wire is crossed once; every rank owns the chunk of its own number
all the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ringcomm.arrays.base import Flat
from ringcomm.collectives.layout import host_order
from ringcomm.collectives.op import SUM, Op, combine, finish
from ringcomm.collectives.schedule import (
    SEGMENT_NBYTES,
    Step,
    allgather_steps,
    chunks,
    reduce_scatter_steps,
)
from ringcomm.transport.base import Request
from ringcomm.transport.channel import Channel

AHEAD = 4  # segments under way, in each direction


async def allreduce_(x: Flat, t: Channel, op: Op = SUM) -> None:
    """Replace x by its reduction over all ranks; all ranks end up with the same bits.

    Args:
        x: same count and dtype on every rank; not 16-bit floats, see direct.py.
        t: all ranks; 2 AHEAD messages in flight at a time.
        op: AVERAGE divides each chunk once, at its owner.

    Raises:
        PeerFailedError: a rank died; x is undefined.
        CommTimeoutError: a rank did not come in time; x is undefined.

    Cost: 2 (size - 1) / size * nbytes sent, AHEAD segments of scratch.
    """
    parts = chunks(x.count, t.size)
    await reduce_scatter_(x, parts, t, op)
    await allgather_(x, parts, t)


async def reduce_scatter_(x: Flat, parts: list[slice], t: Channel, op: Op = SUM) -> Flat:
    """Return this rank's reduced chunk, a view of x; the rest of x is left half-reduced."""
    own = x[parts[t.rank]]
    ring, cuts = _ring_of(x, parts, t)
    n_segments = len(cuts[0])
    ahead = min(AHEAD, n_segments)
    scratch = [x.like(max(cut[0].count for cut in cuts)) for _ in range(ahead)]
    moves = [
        Move(sent, scratch[n % ahead][: grows.count], grows)
        for n, (sent, grows) in enumerate(
            _segments(cuts, reduce_scatter_steps(ring.rank, ring.size))
        )
    ]

    def add(move: Move) -> None:
        with t.phase("reduce"):
            combine(move.target, move.arriving, op)

    await _flow(moves, ahead, ring, add)
    finish(own, op, t.size)
    return own


async def allgather_(x: Flat, parts: list[slice], t: Channel) -> None:
    """Fill x with every rank's chunk, this rank's being in its place already."""
    ring, cuts = _ring_of(x, parts, t)
    steps = allgather_steps(ring.rank, ring.size)
    moves = [Move(sent, filled, filled) for sent, filled in _segments(cuts, steps)]
    await _flow(moves, min(AHEAD, len(cuts[0])), ring, lambda _: None)


class Move(NamedTuple):
    """A segment that goes right, and where the one from the left arrives and ends up."""

    sent: Flat
    arriving: Flat
    target: Flat


async def _flow(
    moves: Iterable[Move], ahead: int, ring: Channel, arrived: Callable[[Move], None]
) -> None:
    """Carry out `moves` in order, `ahead` of them at a time, and call `arrived` after each.

    What arrives in one step goes right in the next: `ahead` must not exceed the segments of a step.
    """
    left, right = (ring.rank - 1) % ring.size, (ring.rank + 1) % ring.size
    under_way: deque[tuple[Move, Request, Request]] = deque()

    async def complete() -> None:
        move, *requests = under_way.popleft()
        await ring.wait(*requests)
        arrived(move)

    for move in moves:
        if len(under_way) == ahead:
            await complete()
        receive = ring.irecv(move.arriving.bytes, left)
        under_way.append((move, receive, ring.isend(move.sent.bytes, right)))
    while under_way:
        await complete()


def _ring_of(x: Flat, parts: list[slice], t: Channel) -> tuple[Channel, list[list[Flat]]]:
    """Return the ring, and the segments of each chunk in its order: as many of each."""
    order = host_order(t.nodes)
    longest = max(part.stop - part.start for part in parts) * x.dtype.itemsize
    n = max(1, -(-longest // SEGMENT_NBYTES))
    mine = [x[parts[rank]] for rank in order]
    return t.among(order), [[each[cut] for cut in chunks(each.count, n)] for each in mine]


def _segments(cuts: list[list[Flat]], steps: Iterable[Step]) -> Iterator[tuple[Flat, Flat]]:
    """Yield what goes right and what comes from the left, segment by segment, step by step."""
    for step in steps:
        yield from zip(cuts[step.send], cuts[step.receive], strict=True)
