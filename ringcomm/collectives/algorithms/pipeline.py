"""Chunks that travel in segments: while one is reduced, the next are on the wire."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ringcomm.arrays.base import Flat
from ringcomm.collectives.schedule import chunks, segment_count
from ringcomm.transport.base import Request
from ringcomm.transport.performer import Performer

AHEAD = 4  # segments under way; 2, 8 and 16 were no faster (measured as in schedule.py)


def cut(x: Flat, parts: list[slice], t: Performer) -> list[list[Flat]]:
    """Return each chunk's segments, equally many per chunk; see segment_count()."""
    longest = max(part.stop - part.start for part in parts) * x.dtype.itemsize
    n = segment_count(longest, t.nodes)
    return [[x[part][each] for each in chunks(x[part].count, n)] for part in parts]


class Pipeline:
    """Steps (messages put together) under way, completed in order; at most `depth`."""

    def __init__(self, t: Performer, depth: int) -> None:
        self._t = t
        self._depth = depth
        self._steps: deque[tuple[list[Request], Callable[[], None]]] = deque()

    async def make_room(self) -> None:
        """Return when another step may be started."""
        while len(self._steps) >= self._depth:
            await self._complete()

    def put(self, requests: list[Request], arrived: Callable[[], None]) -> None:
        """Add a step that has been started; once it is complete, `arrived` is called."""
        self._steps.append((requests, arrived))

    async def drain(self) -> None:
        """Return when nothing is under way."""
        while self._steps:
            await self._complete()

    async def _complete(self) -> None:
        requests, arrived = self._steps.popleft()
        await self._t.wait(*requests)
        arrived()
