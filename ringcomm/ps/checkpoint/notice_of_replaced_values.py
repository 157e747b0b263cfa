"""Lets workers know that the chief has replaced values of tables, by ps.restore() or ps.load().

Whoever computes with values that it fetched before would go on with stale ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

NEWS: Final = 0  # options of FrameKind.REPLACED: the chief has replaced values
KNOWN: Final = 1  # to the chief: this worker knows


class Replacements:
    """Counts replacements of values on this rank, and knows for whom the chief waits.

    Args:
        me: this rank.
        send: sends a frame of FrameKind.REPLACED: to whom, and its option.
        on_news: called when values were replaced; in the thread that drives.

    Attributes:
        count: how often.
    """

    def __init__(
        self, me: int, send: Callable[[int, int], object], on_news: Callable[[], object]
    ) -> None:
        self._me, self._send, self._on_news = me, send, on_news
        self._awaited: set[int] = set()
        self.count = 0

    def begin(self, workers: Collection[int]) -> None:
        """Tell workers that values were replaced; on the chief."""
        self._note()
        self._awaited = {*workers} - {self._me}
        for rank in sorted(self._awaited):
            self._send(rank, NEWS)

    def unaware(self, gone: Collection[int]) -> list[int]:
        return sorted(self._awaited - {*gone})

    def on_frame(self, source: int, option: int) -> None:
        if option == KNOWN:
            self._awaited.discard(source)
        else:
            self._note()
            self._send(source, KNOWN)

    def _note(self) -> None:
        self.count += 1
        self._on_news()
