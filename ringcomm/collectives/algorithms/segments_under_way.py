"""Sends chunks in segments: while a rank reduces one segment, the next are on the wire."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ringcomm.arrays.base import Flat
from ringcomm.collectives.message_patterns import chunks, segment_count
from ringcomm.transport.base import WireRequest
from ringcomm.transport.performer import Performer

AHEAD = (
    4  # segments on the wire at a time; 2, 8 and 16 were no faster (measured: message_patterns.py)
)


def cut(x: Flat, parts: list[slice], t: Performer) -> list[list[Flat]]:
    longest = max(part.stop - part.start for part in parts) * x.dtype.itemsize
    n = segment_count(longest, t.nodes)
    return [[x[part][each] for each in chunks(x[part].count, n)] for part in parts]


class Pipeline:
    """Steps under way, at most `depth`, which complete in order. A step is several messages."""

    def __init__(self, t: Performer, depth: int) -> None:
        self._t = t
        self._depth = depth
        self._steps: deque[tuple[list[WireRequest], Callable[[], None] | None]] = deque()

    async def make_room(self) -> None:
        await self._shorten(self._depth - 1)

    def put(
        self, requests: list[WireRequest], when_complete: Callable[[], None] | None = None
    ) -> None:
        self._steps.append((requests, when_complete))

    async def drain(self) -> None:
        await self._shorten(0)

    async def _shorten(self, length: int) -> None:
        while len(self._steps) > length:
            requests, when_complete = self._steps.popleft()
            await self._t.wait(*requests)
            if when_complete is not None:
                when_complete()
