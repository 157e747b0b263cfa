"""The messages by which processes agree on the members of their job. Pure."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from ringcomm.transport.membership.view import Changes, View


class Kind(IntEnum):
    """Kinds of messages."""

    STOPPED = 1  # the sender does not work, was in `view` at last, and knows `changes`
    CLEARED = 2  # all have sent STOPPED with `changes`, and the sender has cleared its memory
    DONE = 3  # run number `run` is done, in `view`
    OVER = 4  # that run is over
    GONE = 5  # the sender takes part no more
    LEAVES = 6  # the sender will work no more; to processes that are no members
    AGREED = 7  # the sender works in `view`, of which the receiver is a member
    KILL = 8  # whoever is on the host of `changes.lost` must kill them


class Message(NamedTuple):
    """A message to another process."""

    kind: Kind
    view: View  # of the sender
    run: int = 0  # number of the sender's runs that are over
    changes: Changes = Changes()

    def numbers(self) -> list[int]:
        """Return the wire form."""
        view, (lost, arrived) = self.view, self.changes
        head = [self.kind, self.run, view.number, view.size, len(lost)]
        return [*head, *view.members, *view.incarnations, *sorted(lost), *sorted(arrived)]

    @classmethod
    def of(cls, numbers: list[int]) -> Message:
        """Read the wire form."""
        kind, run, number, size, n_lost, *rest = numbers
        view = View(number, tuple(rest[:size]), tuple(rest[size : 2 * size]))
        lost, arrived = rest[2 * size :][:n_lost], rest[2 * size + n_lost :]
        return cls(Kind(kind), view, run, Changes(frozenset(lost), frozenset(arrived)))
