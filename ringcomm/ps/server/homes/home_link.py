"""The wire of a home: what both copies of a server send leaves once, from the primary."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from ringcomm.ps.protocol.frames import (
    FrameHeader,
    FrameKind,
    Status,
)
from ringcomm.ps.server.homes.replication import Answers

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.placement.partitions import Partition
    from ringcomm.ps.protocol.body_memory import MemoryForBodies
    from ringcomm.ps.protocol.link import Link
    from ringcomm.ps.roles import Layout
    from ringcomm.ps.server.dense.partition import DensePartition
    from ringcomm.ps.server.homes.home_pushes import HomePushes

NO_BODY: Final = np.empty(0, np.uint8)


class Sent(NamedTuple):
    """A frame, to send it again."""

    header: FrameHeader
    meta: bytes
    body: Bytes


class HomeLink:
    """Sends what one copy of a home replies and orders, if it is the primary.

    What is for a home goes to the rank where that runs now.

    Args:
        home: its number.
        layout: who is who.
        link: the wire of this rank.
        pushes: those that C++ carries out.

    Attributes:
        is_primary: this copy answers.
        answers: what was replied to clients, and to other homes.
        outcome: a checksum of how all changes so far went; the same on both copies.
    """

    def __init__(
        self, home: int, layout: Layout, link: Link, pushes: HomePushes, *, is_primary: bool
    ) -> None:
        self._home, self._layout, self._link, self._pushes = home, layout, link, pushes
        self.is_primary = is_primary
        self.answers: Answers[Sent] = Answers()
        self.outcome = 0

    def send(
        self, dest: int, header: FrameHeader, meta: bytes = b"", body: Bytes = NO_BODY
    ) -> None:
        sent = Sent(header, meta, body)
        if header.home:
            self.outcome = zlib.crc32(meta, self.outcome)
        if header.kind == FrameKind.REPLY and header.status == Status.WRONG_VIEW:
            self.answers.give_back(dest, header.sequence)
        elif header.kind == FrameKind.REPLY:
            is_of_change = self.answers.note(dest, header.sequence, sent)
            if is_of_change and header.table:  # others are about files, which one copy touches
                self.note_outcome(header.status)
        if self.is_primary:
            self._send(dest, sent)

    def _send(self, dest: int, sent: Sent) -> None:
        home = sent.header.home
        self._link.send(self._layout.rank_of(home - 1) if home else dest, *sent)

    def note_outcome(self, how: int) -> None:
        """Take note of how a change went: a number up to 255, the same on both copies."""
        self.outcome = zlib.crc32(bytes([how]), self.outcome)

    def answer_again(self, client: int, sequence: int) -> None:
        self._send(client, self.answers.reply(client, sequence))

    # --- the wire of this rank ------------------------------------------------------------------
    @property
    def may_read(self) -> bool:
        """Ranks may read blocks: whichever server follows can withdraw them; see Link.forget()."""
        return all(self._link.shares_memory(rank) for rank in self._layout.servers)

    @property
    def memory_for_bodies(self) -> MemoryForBodies:
        return self._link.memory_for_bodies

    def shares_memory(self, rank: int) -> bool:
        if rank in self._layout.servers:
            rank = self._layout.rank_of(self._layout.number_of(rank))
        return self._link.shares_memory(rank)

    def place_of(self, x: Bytes) -> int:
        return self._link.place_of(x)

    def view(self, rank: int, place: int, nbytes: int) -> Bytes:
        return self._link.view(rank, place, nbytes)

    def open(self, partition: Partition, epoch: int, part: DensePartition) -> None:
        self._pushes.open(partition, epoch, part)

    def close(self, partition: Partition) -> None:
        self._link.close(partition)

    @property
    def carried_out(self) -> tuple[int, int]:
        return self._pushes.carried_out

    @property
    def n_queued(self) -> int:
        return self._link.n_queued
