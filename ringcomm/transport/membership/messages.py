"""The messages by which processes agree on the members of their job. Pure."""

from __future__ import annotations

from enum import IntEnum
from itertools import islice
from typing import NamedTuple

from ringcomm.transport.membership.view import Changes, View


class MembershipKind(IntEnum):
    STOPPED = 1  # the sender does not work, was in `view` at last, and knows `changes`
    CLEARED = 2  # all have sent STOPPED with `changes`, and the sender has cleared its memory
    DONE = 3  # run number `run` is done, in `view`
    OVER = 4  # that run is over
    GONE = 5  # the sender takes part no more
    LEAVES = 6  # the sender will work no more; to processes that are no members
    AGREED = 7  # the sender works in `view`, of which the receiver is a member
    SIZE = 8  # somebody wants another number of members; it is among `changes`
    KILL = 9  # whoever is on the host of `changes.lost` must kill them
    ENDS = 10  # the sender has given up: nobody goes on


class MembershipMessage(NamedTuple):
    kind: MembershipKind
    view: View  # of the sender
    run: int = 0  # number of the sender's runs that are over
    changes: Changes = Changes()

    def numbers(self) -> list[int]:
        """Return the wire form."""
        view, (lost, arrived, requests) = self.view, self.changes
        head = [self.kind, self.run, view.number, view.size, len(lost), len(arrived)]
        flat = [number for request in sorted(requests) for number in request]
        return [*head, *view.members, *sorted(lost), *sorted(arrived), *flat]

    @classmethod
    def of(cls, numbers: list[int]) -> MembershipMessage:
        kind, run, number, size, n_lost, n_arrived, *rest = numbers
        values = iter(rest)
        members = tuple(islice(values, size))
        lost, arrived = frozenset(islice(values, n_lost)), frozenset(islice(values, n_arrived))
        changes = Changes(lost, arrived, frozenset(zip(values, values, strict=True)))
        return cls(MembershipKind(kind), View(number, members), run, changes)
