"""The wire of a home: what both copies of a server send leaves once, from the primary."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from ringcomm.ps.protocol.frames import (
    CopyOption,
    FrameHeader,
    FrameKind,
    OrderOption,
    Status,
    StepOption,
)
from ringcomm.ps.server.homes.replication import Answers, Letters

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
    """Sends what one copy of a home replies and says, if it is the primary; else keeps it.

    A rank that is the address of a home stands for that home, wherever it runs.

    Args:
        home: its number.
        layout: who is who.
        link: the wire of this rank.
        pushes: those that C++ carries out.

    Attributes:
        is_primary: this copy answers.
        answers: what was replied to clients.
        letters: to and from other homes.
        outcome: a checksum of how all changes so far went; the same on both copies.
    """

    def __init__(
        self, home: int, layout: Layout, link: Link, pushes: HomePushes, *, is_primary: bool
    ) -> None:
        self._home, self._layout, self._link, self._pushes = home, layout, link, pushes
        self.is_primary = is_primary
        self.answers: Answers[Sent] = Answers()
        self.letters: Letters[Sent] = Letters()
        self.outcome = 0

    def send(
        self, dest: int, header: FrameHeader, meta: bytes = b"", body: Bytes = NO_BODY
    ) -> None:
        sent = Sent(header, meta, body)
        if dest in self._layout.servers and not _is_order_to_a_rank(header):
            home = self._layout.number_of(dest)
            number = self.letters.write(home, sent)
            self.outcome = zlib.crc32(meta, self.outcome)
            if self.is_primary:
                self._post(home, number, sent)
            return
        if header.kind == FrameKind.REPLY and header.status == Status.WRONG_VIEW:
            self.answers.give_back(dest, header.sequence)
        elif header.kind == FrameKind.REPLY:
            is_of_change = self.answers.note(dest, header.sequence, sent)
            if is_of_change and header.table:  # others are about files, which one copy touches
                self.note_outcome(header.status)
        if self.is_primary:
            self._link.send(dest, *sent)

    def note_outcome(self, how: int) -> None:
        """Take note of how a change went: a number up to 255, the same on both copies."""
        self.outcome = zlib.crc32(bytes([how]), self.outcome)

    def answer_again(self, client: int, sequence: int) -> None:
        self._link.send(client, *self.answers.reply(client, sequence))

    def post_again(self, home: int) -> None:
        for number, sent in self.letters.unconfirmed(home):
            self._post(home, number, sent)

    def _post(self, home: int, number: int, sent: Sent) -> None:
        header = sent.header._replace(status=home + 1, letter=number)
        self._link.send(self._layout.rank_of(home), header, sent.meta, sent.body)

    def is_new(self, header: FrameHeader) -> bool:
        """Take note of a message of a home that comes to the primary; return False if it came."""
        home = self._layout.number_of(header.origin)
        if self.letters.is_new(home, header.letter):
            return True
        if self.letters.is_done(home, header.letter):  # else it is confirmed once it is
            self._confirm(home, header.letter)
        return False

    def carried_out_letter(self, home: int, number: int) -> None:
        self.letters.carried_out(home, number)
        self._confirm(home, number)

    def _confirm(self, home: int, number: int) -> None:
        if self.is_primary:
            header = FrameHeader(
                FrameKind.RECORD, status=home + 1, option=CopyOption.CONFIRM, clock=number,
                origin=self._layout.servers[self._home],
            )  # fmt: skip
            self._link.send(self._layout.rank_of(home), header)

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


def is_letter(header: FrameHeader) -> bool:
    """Return True for a message of a home to another."""
    if header.kind in (FrameKind.ORDER, FrameKind.ANSWER):
        return header.option == OrderOption.SERVER
    return header.kind == FrameKind.MOVE and header.option == StepOption.SERVERS


def _is_order_to_a_rank(header: FrameHeader) -> bool:
    return header.kind == FrameKind.ORDER and header.option == OrderOption.RANK
