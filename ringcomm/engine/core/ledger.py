"""Identities of a group's operations: the place if unnamed, else name and number of use. Pure.

Every rank of a group keeps a ledger. All ledgers get the same entries, because an entry depends
only on the operations that a rank enters and on what all ranks have agreed on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ringcomm.transport.node import N_NAMED, N_UNNAMED
from ringcomm.transport.tags import WIDEST, TagLayout

NO_GROUP = 1 << 32  # replaces the id of a group where there is no group
_ODD = 0x9E3779B97F4A7C15


class Ticket(NamedTuple):
    """The identity of an operation in its group.

    The number counts from 1: among unnamed operations, or among the uses of a name. Every use of a
    name that the ledger does not know has number 0.
    """

    name: str | None
    base: int  # a digest of the group and the name, the same on all ranks
    number: int
    is_once: bool = False  # no rank will use the name again

    @property
    def key(self) -> int:
        return (self.base + self.number * _ODD) % (1 << 64)


@dataclass(slots=True)
class Tally:
    """Counts the operations that this rank has begun, in one group or in several."""

    n_entered: int = 0


@dataclass(slots=True)
class _KnownName:
    """A name that all ranks of the group have used."""

    base: int  # see Ticket
    number: int = 1  # of the last use
    stream: int | None = None
    fingerprint: int | None = None  # of the call that all ranks agreed on, if any


class Ledger:
    """One rank's ledger of the operations of one group.

    The first half of the streams is for unnamed operations, by their place. The next streams are
    for cached names, and the last are for passing names, which keep no stream.

    Args:
        group_id: number of the group; two groups that share a rank never have the same one.
        is_first: this rank is the group's rank 0, which hands out the streams of names.
        context: part of the tags of the group's messages, and number of its shared-memory window.
        tally: counter of the operations that this rank begins; None: a new one.
        tags: layout of the tags; it gives the number of streams.
    """

    def __init__(
        self,
        group_id: int,
        *,
        is_first: bool,
        context: int = 0,
        tally: Tally | None = None,
        tags: TagLayout = WIDEST,
    ) -> None:
        self.group_id = group_id
        self.context = context
        self._is_first = is_first
        self.next_place = 1  # of the next unnamed operation
        self.tally = Tally() if tally is None else tally
        self.is_spoiled = False  # messages that no rank will receive may be under way
        self._unnamed = base_of(group_id, None)
        self._entries: dict[str, _KnownName] = {}
        self._by_base: dict[int, _KnownName] = {}
        self._pending: set[str] = set()
        self._n_streams, self._n_unnamed = tags.n_streams, tags.n_streams // 2
        self.n_cached = min(N_NAMED, tags.n_streams // 4)  # how many names can be cached
        self._first_passing = self._n_unnamed + self.n_cached
        self._next_cached = self._n_unnamed
        self._next_passing = self._first_passing
        self.has_overflown = False  # a name could not be cached

    def enter(self, name: str | None, *, is_once: bool = False) -> Ticket:
        """Return the ticket of an operation that begins on this rank.

        is_once: no rank will use the name again, so it is not cached. Raises ValueError if an
        operation of this name is pending.
        """
        if name is None:
            return self.unnamed(self.take_place())
        self.require_free(name)
        self._pending.add(name)
        self.tally.n_entered += 1
        entry = None if is_once else self._entries.get(name)
        if entry is None:
            return Ticket(name, base_of(self.group_id, name), 0, is_once)
        entry.number += 1
        return Ticket(name, entry.base, entry.number)

    def knows(self, name: str) -> bool:
        """Return True if all ranks have agreed on a call of this name before."""
        entry = self._entries.get(name)
        return entry is not None and entry.fingerprint is not None

    def next_ticket(self, name: str) -> Ticket:
        entry = self._entries.get(name)
        if entry is None:
            return Ticket(name, base_of(self.group_id, name), 0)
        return Ticket(name, entry.base, entry.number + 1)

    def require_free(self, name: str | None) -> None:
        if name in self._pending:
            raise ValueError(
                f"an operation named {name!r} is pending on this rank: wait for its handle first, "
                "or pass another name"
            )

    def take_place(self) -> int:
        place = self.next_place
        self.next_place = place + 1
        self.tally.n_entered += 1
        return place

    def unnamed(self, place: int) -> Ticket:
        return Ticket(None, self._unnamed, place)

    def is_pending(self, name: str) -> bool:
        return name in self._pending

    def is_next(self, name: str | None, number: int) -> bool:
        if name is None:
            return number == self.next_place
        entry = self._entries.get(name)
        return name not in self._pending and number == (0 if entry is None else entry.number + 1)

    def finish(self, ticket: Ticket) -> None:
        if ticket.name is not None:
            self._pending.discard(ticket.name)

    def is_cached(self, ticket: Ticket) -> bool:
        """Return True if all ranks have agreed on a call of this name before."""
        return ticket.name is not None and not ticket.is_once and self.knows(ticket.name)

    def cached_stream(self, ticket: Ticket, fingerprint: int) -> int | None:
        """Return the stream of the name if all ranks have agreed on this call before, else None."""
        if ticket.name is None or ticket.is_once:
            return None
        entry = self._entries.get(ticket.name)
        return entry.stream if entry and entry.fingerprint == fingerprint else None

    def proposal(self, ticket: Ticket) -> int:
        """Return the stream that this rank proposes; all ranks take the largest proposal."""
        if ticket.name is None:
            return ticket.number % self._n_unnamed
        if ticket.is_once:
            return self._new_passing() if self._is_first else 0
        entry = self._entries.get(ticket.name)
        if entry is not None and entry.stream is not None:
            return entry.stream
        return self._new_stream() if self._is_first else 0

    def slot(self, ticket: Ticket, stream: int) -> int | None:
        """Return the slot of shared memory where the ranks meet; None for a passing name."""
        if ticket.name is None:
            return ticket.number % N_UNNAMED
        if not self._n_unnamed <= stream < self._first_passing:
            return None
        return N_UNNAMED + stream - self._n_unnamed

    def settle(self, ticket: Ticket, stream: int, fingerprint: int | None) -> None:
        """Note the stream that all ranks use, and the fingerprint they agreed on, None if none.

        If they had agreed on the name before and disagree now, the name loses its stream, because
        messages that no rank will receive may be on it.
        """
        if ticket.name is None or ticket.is_once:
            return
        entry = self._entries.get(ticket.name)
        if entry is None:
            if stream >= self._first_passing:
                self.has_overflown = True
                return
            entry = self._entries[ticket.name] = _KnownName(ticket.base)
            self._by_base[ticket.base] = entry
        is_spoiled = fingerprint is None and entry.fingerprint is not None
        self.is_spoiled |= is_spoiled
        is_lasting = stream < self._first_passing and not is_spoiled
        entry.stream = stream if is_lasting else None
        entry.fingerprint = fingerprint if is_lasting else None

    def has_entered(self, base: int, number: int) -> bool:
        if base == self._unnamed:
            return number < self.next_place
        entry = self._by_base.get(base)
        return entry is not None and number <= entry.number

    def _new_stream(self) -> int:
        if self._next_cached < self._first_passing:
            self._next_cached += 1
            return self._next_cached - 1
        return self._new_passing()

    def _new_passing(self) -> int:
        stream = self._next_passing
        n_passing = self._n_streams - self._first_passing
        self._next_passing = self._first_passing + (stream + 1 - self._first_passing) % n_passing
        return stream


def base_of(group_id: int, name: str | None) -> int:
    import hashlib  # loads OpenSSL, 5 ms: not a cost of `import ringcomm`

    text = f"{group_id}" if name is None else f"{group_id}:{name}"
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
