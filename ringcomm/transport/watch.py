"""Hears what the others say beside the data: who failed, who left, who waits."""

from __future__ import annotations

from ringcomm.transport.base import Arrived, Died, Transport
from ringcomm.transport.header import Header, Kind
from ringcomm.transport.peers import GaveUp, Obstacle, PeerTable


class Watch:
    """Feeds one PeerTable from the control channel and the deaths that the transport sees.

    Attributes:
        peers: what is known.
        sequence: the operation this rank is in, or was in last.
        own_failure: set when another thread of this rank failed; whoever waits stops.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.peers = PeerTable(transport.rank, transport.size)
        self.sequence = 0
        self.own_failure: str | None = None

    def poll(self) -> None:
        """Take in what has happened; never blocks."""
        for event in self.transport.poll():
            if isinstance(event, Died):
                self._forward(event)
                self.peers.note_dead(event.rank, event.reason, blames=event.blames)
            else:
                self._hear(event)

    def obstacle(self) -> Obstacle | None:
        """Return why the operation at hand cannot complete."""
        if self.own_failure is not None:
            return Obstacle(self.transport.rank, self.own_failure)
        return self.peers.obstacle(self.sequence)

    def ask_who_is_here(self) -> None:
        """Ask every rank whether it has entered this operation; the answers come by poll()."""
        self._tell_all(Header(Kind.ASK, *self._life, self.sequence))

    def announce_gave_up(self, missing: list[int], message: str) -> GaveUp:
        """Tell every rank that this one's deadline has passed, and return what they are told."""
        gave_up = GaveUp(self.sequence, tuple(missing), message)
        self._tell_all(Header(Kind.GAVE_UP, *self._life, self.sequence), gave_up.text())
        self.peers.note_gave_up(gave_up)
        return gave_up

    def announce_left(self, how: str) -> None:
        """Tell every rank that this one takes part in nothing more."""
        self._tell_all(Header(Kind.LEFT, *self._life, self.sequence), how)

    def announce_failed(self, rank: int, reason: str) -> None:
        """Tell every rank that `rank` (this one, or the one it followed) failed."""
        self._tell_all(Header(Kind.FAILED, *self._life, self.sequence, about=rank), reason)

    @property
    def _life(self) -> tuple[int, int]:
        return self.transport.ring_epoch, self.transport.incarnation

    def _tell_all(self, header: Header, text: str = "") -> None:
        message = header.pack(text)
        for rank in range(self.transport.size):
            if rank != self.transport.rank and rank not in self.peers.dead:
                self.transport.control(rank, message)

    def _forward(self, death: Died) -> None:
        """Other nodes cannot see this death: one who sees it tells them."""
        if death.rank not in self.peers.dead and death.blames == death.rank:
            self.announce_failed(death.rank, death.reason)

    def _hear(self, event: Arrived) -> None:
        header, text = Header.unpack(event.message)
        if header.ring_epoch != self.transport.ring_epoch:
            return  # a message from before the ring was repaired
        if header.kind is Kind.ASK:
            if self.sequence >= header.sequence:
                answer = Header(Kind.HERE, *self._life, self.sequence)
                self.transport.control(event.source, answer.pack())
        elif header.kind is Kind.HERE:
            self.peers.note_entered(event.source, header.sequence)
        elif header.kind is Kind.GAVE_UP:
            self.peers.note_gave_up(GaveUp.of_text(header.sequence, text))
        elif header.kind is Kind.LEFT:
            self.peers.note_left(event.source, header.sequence, text)
        elif header.kind is Kind.FAILED and header.about != self.transport.rank:
            self.peers.note_failed(header.about, text)
