"""Identities of a group's operations: the order of unnamed ones, the uses of names. Pure.

Every rank of a group keeps one ledger, and all come to the same entries: what is written here
depends only on what a rank enters and on what all agreed to.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringcomm.transport.node import N_NAMED, N_UNNAMED
from ringcomm.transport.tags import WIDEST, TagLayout

NO_GROUP = 1 << 32  # stands for the id of a group in what is no operation of one
_ODD = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Ticket:
    """One operation of a group: the number-th without a name, or the number-th use of a name.

    Numbers begin with 1; 0 is every use of a name that is not cached.
    """

    name: str | None
    base: int  # 64 bits for the group and the name, the same on all ranks
    number: int
    is_once: bool = False  # the name will not come again, so it is not worth keeping

    @property
    def key(self) -> int:
        """64 bits for this very operation."""
        return (self.base + self.number * _ODD) % (1 << 64)


@dataclass(slots=True)
class Tally:
    """How many operations this rank has begun, in one group or in several."""

    n_entered: int = 0


@dataclass(slots=True)
class _KnownName:
    """A name that all ranks know: its last use, its stream, and the call agreed on, if any."""

    number: int = 1
    stream: int | None = None
    fingerprint: int | None = None


class Ledger:
    """The operations of one group, as one of its ranks keeps them.

    Args:
        group_id: names the operations of the group; never used again.
        is_first: this rank is the group's rank 0, which hands out the streams of names.
        context: of the group's messages and of its window of shared memory.
        tally: counts what this rank begins; None: a new one.
        tags: whose streams there are: half of them for unnamed operations, by their place, then
            those of names that are cached, then those of other names.

    Attributes:
        n_cached: how many names are.
        next_place: of the next unnamed operation.
        is_spoiled: messages that nobody will take may be under way in this context.
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
        self.next_place = 1
        self.tally = Tally() if tally is None else tally
        self.is_spoiled = False
        self._unnamed = base_of(group_id, None)
        self._entries: dict[str, _KnownName] = {}
        self._bases: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._pending: set[str] = set()
        self._n_streams, self._n_unnamed = tags.n_streams, tags.n_streams // 2
        self.n_cached = min(N_NAMED, tags.n_streams // 4)
        self._first_passing = self._n_unnamed + self.n_cached
        self._next_cached = self._n_unnamed
        self._next_passing = self._first_passing
        self.has_overflown = False

    def enter(self, name: str | None, *, is_once: bool = False) -> Ticket:
        """Return the ticket of an operation that begins on this rank.

        Args:
            name: of it, or None.
            is_once: the name will not come again, on any rank: it takes no room among those that
                are cached.

        Raises:
            ValueError: an operation of this name is pending.
        """
        if name is None:
            return self.unnamed(self.take_place())
        self.require_free(name)
        self._pending.add(name)
        self.tally.n_entered += 1
        if is_once:
            return Ticket(name, base_of(self.group_id, name), 0, is_once=True)
        entry = self._entries.get(name)
        if entry is None:
            return Ticket(name, base_of(self.group_id, name), 0)
        entry.number += 1
        return Ticket(name, self._bases[name], entry.number)

    def require_free(self, name: str | None) -> None:
        """Raise ValueError if an operation of this name is pending."""
        if name in self._pending:
            raise ValueError(
                f"an operation named {name!r} is pending on this rank: wait for its handle first, "
                "or pass another name"
            )

    def take_place(self) -> int:
        """Return the place of an unnamed operation that begins on this rank."""
        place = self.next_place
        self.next_place = place + 1
        self.tally.n_entered += 1
        return place

    def unnamed(self, place: int) -> Ticket:
        """Return the ticket of the unnamed operation at this place."""
        return Ticket(None, self._unnamed, place)

    def is_next(self, name: str | None, number: int) -> bool:
        """Return True if enter() would return the ticket of this number."""
        if name is None:
            return number == self.next_place
        entry = self._entries.get(name)
        return name not in self._pending and number == (0 if entry is None else entry.number + 1)

    def finish(self, ticket: Ticket) -> None:
        """The operation is over on this rank."""
        if ticket.name is not None:
            self._pending.discard(ticket.name)

    def is_cached(self, ticket: Ticket) -> bool:
        """Return True if all ranks have agreed on a call of this name before."""
        if ticket.name is None or ticket.is_once:
            return False
        entry = self._entries.get(ticket.name)
        return entry is not None and entry.fingerprint is not None

    def cached_stream(self, ticket: Ticket, fingerprint: int) -> int | None:
        """Return the stream of a call that all ranks have agreed on before, else None."""
        if ticket.name is None or ticket.is_once:
            return None
        entry = self._entries.get(ticket.name)
        return entry.stream if entry and entry.fingerprint == fingerprint else None

    def proposal(self, ticket: Ticket) -> int:
        """Return the stream that this rank proposes; the largest of all ranks' is taken."""
        if ticket.name is None:
            return ticket.number % self._n_unnamed
        if ticket.is_once:
            return self._new_passing() if self._is_first else 0
        entry = self._entries.get(ticket.name)
        if entry is not None and entry.stream is not None:
            return entry.stream
        return self._new_stream() if self._is_first else 0

    def slot(self, ticket: Ticket, stream: int) -> int | None:
        """Return where in shared memory the ranks meet; None for a stream that does not last."""
        if ticket.name is None:
            return ticket.number % N_UNNAMED
        if not self._n_unnamed <= stream < self._first_passing:
            return None
        return N_UNNAMED + stream - self._n_unnamed

    def settle(self, ticket: Ticket, stream: int, fingerprint: int | None) -> None:
        """All ranks have taken `stream`; they agreed on a call, or on none (None).

        A name that was agreed on before and is not now loses its stream, for messages that nobody
        will take may be on it.
        """
        if ticket.name is None or ticket.is_once:
            return
        entry = self._entries.get(ticket.name)
        if entry is None:
            if stream >= self._first_passing:
                self.has_overflown = True
                return
            entry = self._entries[ticket.name] = _KnownName()
            self._bases[ticket.name] = ticket.base
            self._names[ticket.base] = ticket.name
        is_spoiled = fingerprint is None and entry.fingerprint is not None
        self.is_spoiled |= is_spoiled
        is_lasting = stream < self._first_passing and not is_spoiled
        entry.stream = stream if is_lasting else None
        entry.fingerprint = fingerprint if is_lasting else None

    def has_entered(self, base: int, number: int) -> bool:
        """Return True if this rank is, or was, in that operation, as far as it is remembered."""
        if base == self._unnamed:
            return number < self.next_place
        name = self._names.get(base)
        return name is not None and number <= self._entries[name].number

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
    """Return 64 bits for a name in a group, or for its unnamed operations."""
    import hashlib  # loads OpenSSL, 5 ms: not a cost of `import ringcomm`

    text = f"{group_id}" if name is None else f"{group_id}:{name}"
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
