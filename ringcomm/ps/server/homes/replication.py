"""Two copies of a server do the same in one order: the follower first, the primary last. Pure.

| event at the primary | what follows |
|---|---|
| a request that changes something | it is sent to the follower, and kept until that has done it |
| a request that only reads | it is kept behind those before it; with none, carried out at once |
| the follower has done a request | what was kept up to it, and reads behind, are carried out |
| the follower died | all that was kept is carried out |
| it has done one with another outcome | it is dropped, and a copy is made anew: see below |
| there is no follower, and only requests are under way | another server becomes it: see below |
| a push to an open block, and nothing is kept | C++ does all of this for it, without Python |

All changes have numbers, in one order. Those of C++ are before what is kept here: while something
is, pushes take Python's way. What took one way at the primary takes it at the follower, too.

So what can be read at the primary, or was answered by it, is at the follower, too. Both are in the
same state after the same requests, and a follower whose primary died goes on in its place. Clients
send again all that is not answered: Answers knows which of it was carried out. Servers ask each
other in the same way: see ringcomm.ps.control.agreement.OrdersGiven.

One copy may fail where the other does not, for want of memory, or of a file. The outcome of all
requests so far is a checksum of which of those for values were refused, of which restores have
replaced values, and of what the copy has said to other servers. With each report the primary
compares the follower's with its own.

A new follower gets all that the primary has in pieces, one unit (see core.unit) after the other.
Meanwhile the primary is alone, and goes on: it carries out changes at once.

| what a change touches | what follows while pieces are sent; shards of hash tables go last |
|---|---|
| a unit that the follower has not got | it is carried out here alone, and is in that unit's piece |
| a unit that it has; no unit, like a worker's clock | it is sent, too, behind the pieces so far |
| a shard of which it has a part; or what is not one unit's | it waits, with all behind it |

The last piece has all replies. From then on changes have numbers, as above. So all copies of a unit
do the same to it in one order, and a follower with the last piece has what was answered before. One
without it cannot go on in the primary's place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

T = TypeVar("T")
R = TypeVar("R")

# Of one client no more replies than this are under way: its credit bounds what it has asked.
KEPT: Final = 8192


class _KeptReply(NamedTuple, Generic[T]):
    last: int  # the number of the last change up to here
    entry: T


class Numbers(Protocol):
    """Numbers the changes of a home, in one order; those that C++ carries out, too."""

    @property
    def last(self) -> int: ...

    @property
    def n_under_way(self) -> int:
        """Changes of C++ that the follower has not reported."""

    def next(self) -> int: ...


class Log(Generic[T]):
    """The frames that Python is about to carry out at a primary.

    Args:
        numbers: of all changes.
        has_follower: see below.

    Attributes:
        has_follower: there is another copy.
    """

    def __init__(self, numbers: Numbers, *, has_follower: bool) -> None:
        self.has_follower = has_follower
        self._numbers = numbers
        self._kept: deque[_KeptReply[T]] = deque()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def is_quiet(self) -> bool:
        return not self._kept and not self._numbers.n_under_way

    def add(self, entry: T) -> int:
        """Keep a change; return its index, with which it is sent to the follower."""
        number = self._numbers.next()
        self._kept.append(_KeptReply(number, entry))
        return number

    def add_read(self, entry: T) -> bool:
        """Return True if a read may be carried out at once; else keep it."""
        if self.is_quiet:
            return True
        self._kept.append(_KeptReply(self._numbers.last, entry))
        return False

    def done(self, index: int) -> Iterator[T]:
        """Yield what is to be carried out now: the follower has done all up to an index."""
        while self._kept and self._kept[0].last <= index:
            yield self._kept.popleft().entry

    def gain_follower(self) -> None:
        """Keep all changes from now on until the follower has done them."""
        self.has_follower = True

    def lose_follower(self) -> Iterator[T]:
        """Yield what was kept: there is no other copy any more."""
        self.has_follower = False
        yield from self.done(self._numbers.last)


class Way(Enum):
    """Says who carries out a change while all that a primary has is sent to a new follower."""

    HERE = 0  # the primary: what it changes is yet to be sent
    BOTH = 1  # the follower, too: it has what that changes
    LATER = 2  # nobody yet


class SentUnits(Generic[T]):
    """Which units of a home a new follower has got.

    Args:
        units: of the home.
    """

    def __init__(self, units: Iterable[T]) -> None:
        self._to_send, self._begun = {*units}, set[T]()

    def begin(self, unit: T) -> None:
        """Take note that the follower has a part of a unit: nothing changes that until the end."""
        self._to_send.discard(unit)
        self._begun.add(unit)

    def end(self, unit: T) -> None:
        self._to_send.discard(unit)
        self._begun.discard(unit)

    def way_of(self, unit: T) -> Way:
        return Way.HERE if unit in self._to_send else Way.LATER if unit in self._begun else Way.BOTH


class Came(Enum):
    """Says whether a request of a client is new, waits, or was answered."""

    FIRST = 0
    WAITS = 1  # its reply is to come
    ANSWERED = 2


class Answers(Generic[R]):
    """The requests of clients and servers, and the replies to them: for when they come again."""

    def __init__(self) -> None:
        self._waiting: dict[int, set[int]] = {}  # by client: numbers of requests
        self._replies: dict[int, dict[int, R]] = {}  # likewise, in the order of the replies

    def came(self, client: int, sequence: int) -> Came:
        """Take note of a request; return whether it came before."""
        if sequence in self._replies.get(client, ()):
            return Came.ANSWERED
        waiting = self._waiting.setdefault(client, set())
        if sequence in waiting:
            return Came.WAITS
        waiting.add(sequence)
        return Came.FIRST

    def note(self, client: int, sequence: int, reply: R) -> bool:
        """Keep a reply, if it is to a request that came(); return whether it is."""
        waiting = self._waiting.get(client)
        if waiting is None or sequence not in waiting:
            return False
        waiting.discard(sequence)
        replies = self._replies.setdefault(client, {})
        replies[sequence] = reply
        if len(replies) > KEPT:
            del replies[next(iter(replies))]
        return True

    def give_back(self, client: int, sequence: int) -> None:
        """Forget a request that was sent back: it may come again, and is not carried out yet."""
        self._waiting.get(client, set()).discard(sequence)

    def waiting(self) -> set[tuple[int, int]]:
        return {(client, each) for client, waiting in self._waiting.items() for each in waiting}

    def replies(self) -> list[tuple[int, R]]:
        of_clients = self._replies.items()
        return [(client, reply) for client, replies in of_clients for reply in replies.values()]

    def load(self, replies: Iterable[tuple[int, int, R]]) -> None:
        self._replies.clear()
        for client, sequence, reply in replies:
            self._replies.setdefault(client, {})[sequence] = reply

    def reply(self, client: int, sequence: int) -> R:
        """Return the reply to a request that was ANSWERED."""
        return self._replies[client][sequence]

    def forget(self, client: int) -> None:
        self._waiting.pop(client, None)
        self._replies.pop(client, None)
