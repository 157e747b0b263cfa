"""Notices of the chief, which has replaced values, and of ranks that could not restore them.

The chief replaces values of tables by ps.restore() or ps.load(): whoever computes with those that
it fetched before would go on with stale ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

NEWS: Final = 0  # options of FrameKind.REPLACED: the chief has replaced values
KNOWN: Final = 1  # to the chief: this worker knows
REFUSED: Final = 2  # a rank could not restore a checkpoint, or open a table
REFUSAL_KNOWN: Final = 3  # to that rank: this one knows
GOES_ON: Final = 4  # its program has caught the error, and trains


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


class Refusals:
    """Knows which ranks may not die, and for whose answer this rank waits, if it is one of them.

    They could not restore a checkpoint, or open a table. Where a job goes on after deaths, the end
    of such a rank would be taken for one: the others would train from the first values, or with
    another table, and their saves would remove the checkpoints. So while its error may end it, the
    job does not go on without this rank.

    Args:
        me: this rank.
        send: sends a frame of FrameKind.REPLACED: to whom, and its option.
        on_change: called when `needed` has changed; in the thread that drives, or that begins.

    Attributes:
        needed: ranks whose end ends the job.
    """

    def __init__(
        self, me: int, send: Callable[[int, int], object], on_change: Callable[[], object]
    ) -> None:
        self._me, self._send, self._on_change = me, send, on_change
        self._told: set[int] = set()
        self._awaited: set[int] = set()
        self.needed: frozenset[int] = frozenset()

    def begin(self, ranks: Collection[int]) -> None:
        self._told = {*ranks} - {self._me}
        self._awaited = {*self._told}
        for rank in sorted(self._told):
            self._send(rank, REFUSED)

    def unaware(self, gone: Collection[int]) -> list[int]:
        return sorted(self._awaited - {*gone})

    def end(self) -> None:
        for rank in sorted(self._told):
            self._send(rank, GOES_ON)
        self._told.clear()

    def on_frame(self, source: int, option: int) -> None:
        if option == REFUSAL_KNOWN:
            self._awaited.discard(source)
            return
        self.needed = self.needed | {source} if option == REFUSED else self.needed - {source}
        self._on_change()
        if option == REFUSED:
            self._send(source, REFUSAL_KNOWN)
