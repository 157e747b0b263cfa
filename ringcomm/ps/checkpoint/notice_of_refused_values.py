"""Lets all ranks know that one of them could not restore a checkpoint, or open a table.

Where a job goes on after deaths, the end of this rank would be taken for one. The others would
train from the first values, or with another table, and their saves would remove the checkpoints. So
while its error may end it, the job does not go on without this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

REFUSED: Final = 2  # options of FrameKind.REPLACED, beside those of notice_of_replaced_values
KNOWN: Final = 3  # to that rank: this one knows
GOES_ON: Final = 4  # its program has caught the error, and trains


class Refusals:
    """Knows which ranks may not die, and for whose answer this rank waits, if it is one of them.

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
        if option == KNOWN:
            self._awaited.discard(source)
            return
        self.needed = self.needed | {source} if option == REFUSED else self.needed - {source}
        self._on_change()
        if option == REFUSED:
            self._send(source, KNOWN)
