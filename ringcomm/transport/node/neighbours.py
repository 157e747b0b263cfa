"""The other ranks of this node: their status pages, their memory, and their deaths."""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ringcomm._core import NodeMemory, StatusPage, open_pidfd
from ringcomm.open_errors import needed_for
from ringcomm.status.guardian import Ward


class Offer(NamedTuple):
    """The descriptors that a rank lets the other ranks of its host open."""

    pid: int  # process id of the rank
    nonce: int  # a secret in its page and memory: a process that reuses the pid lacks it
    page: int  # its status page
    lifeline: int  # hangs up when the rank dies
    board: int = -1  # its flags in shared memory; -1 if it shares no memory
    arena: int = -1  # its data in shared memory; -1 if it shares no memory

    @property
    def descriptors(self) -> list[int]:
        return [fd for fd in (self.page, self.lifeline, self.board, self.arena) if fd >= 0]


@dataclass(eq=False)
class Neighbour:
    """A rank whose status page this process has mapped."""

    offer: Offer
    page: StatusPage
    end: int  # a descriptor that epoll reports once the rank has died
    _lifeline: int | None = None  # the rank's descriptor, if it was handed over
    _memory: Sequence[int] = ()  # board and arena, if they were handed over

    @classmethod
    def reached(cls, offer: Offer) -> Neighbour:
        """Return a rank whose descriptors this process opens through /proc.

        Raises OSError if /proc refuses, and RuntimeError if the page is another process's.
        """
        end = _pidfd_or_none(offer.pid)  # before the page: another process may reuse the pid
        try:
            page = StatusPage.open(offer.pid, offer.page, offer.nonce)
            if end < 0:
                end = page.open_lifeline(offer.pid)
        except BaseException:
            _close(end)
            raise
        page.close_fd()
        return cls(offer, page, end)

    @classmethod
    def handed(cls, offer: Offer, seen_pid: int, descriptors: list[int]) -> Neighbour:
        """Return a rank that has handed over its descriptors, which this object will close.

        `descriptors` are in the order of `offer.descriptors`; `seen_pid` is the rank's pid in the
        pid namespace of this process.

        Raises OSError if the rank is in another pid namespace, and the errors of reached().
        """
        its_page, *others = descriptors
        try:
            page = StatusPage.adopt(its_page, offer.nonce)  # closes it in any case
            if seen_pid != offer.pid:
                raise OSError(errno.ESRCH, "it is in another pid namespace")
            end = _pidfd_or_none(offer.pid)
        except BaseException:
            _close(*others)
            raise
        lifeline, *memory = others
        return cls(offer, page, end if end >= 0 else lifeline, lifeline, memory)

    def memory(self) -> NodeMemory:
        """Map and return the rank's memory; call this once. Raises the errors of reached()."""
        its = self.offer
        if its.board < 0:
            raise OSError("it has none")
        if self._lifeline is None:
            return NodeMemory.open(its.pid, its.board, its.arena, its.nonce)
        (board, arena), self._memory = self._memory, ()
        return NodeMemory.adopt(board, arena, its.nonce)  # closes them in any case

    def ward(self) -> Ward:
        its = self.offer
        handed = () if self._lifeline is None else (self.page.fd, self._lifeline)
        return Ward(its.pid, its.page, its.nonce, handed)

    def close_handed(self) -> None:
        """Close the descriptors that only a guardian needs, once it has them."""
        if self._lifeline is not None:
            self.page.close_fd()
            _close(self._lifeline if self._lifeline != self.end else -1)
            self._lifeline = None

    def close(self) -> None:
        """Close the descriptors; page and memory stay mapped as long as they are used."""
        _close(*{self.end, *self._memory, -1 if self._lifeline is None else self._lifeline})


class Neighbours:
    """Ranks that this process watches; reports their deaths in the order in which they happen.

    Raises OSError if `ulimit -n` allows no more descriptors.
    """

    def __init__(self) -> None:
        with needed_for("the watch on the ranks of this node (epoll)"):
            self._deaths = select.epoll()
        self._met: dict[int, Neighbour] = {}
        self._watched: dict[int, int] = {}  # descriptor -> rank

    def __contains__(self, rank: int) -> bool:
        return rank in self._met

    def __getitem__(self, rank: int) -> Neighbour:
        return self._met[rank]

    @property
    def ranks(self) -> list[int]:
        """The ranks that were added, dead ones included."""
        return sorted(self._met)

    @property
    def watched(self) -> list[int]:
        return sorted(self._watched.values())

    def fileno(self) -> int:
        """Return a descriptor that epoll reports from a death until unwatch()."""
        return self._deaths.fileno()

    def add(self, rank: int, neighbour: Neighbour) -> None:
        """Watch a rank, and own `neighbour`. If that fails, close `neighbour` and raise OSError."""
        try:
            self._deaths.register(neighbour.end, select.EPOLLIN)  # reports a hang-up, too
        except OSError:
            neighbour.close()
            raise
        self._met[rank] = neighbour
        self._watched[neighbour.end] = rank

    def ended(self) -> list[int]:
        """Return the watched ranks that have died, in the order of their deaths."""
        # epoll reports events in the order in which they happened.
        return [self._watched[fd] for fd, _ in self._deaths.poll(0) if fd in self._watched]

    def unwatch(self, rank: int) -> None:
        if rank in self._met and self._watched.pop(self._met[rank].end, None) is not None:
            self._deaths.unregister(self._met[rank].end)

    def drop(self, rank: int) -> None:
        self.unwatch(rank)
        self._met.pop(rank).close()

    def close_handed(self) -> None:
        for neighbour in self._met.values():
            neighbour.close_handed()

    def close(self) -> None:
        for rank in self.ranks:
            self.drop(rank)
        self._deaths.close()


def _pidfd_or_none(pid: int) -> int:
    """Return a pidfd, -1 where the kernel or a sandbox has none. Raises OSError if pid is dead."""
    try:
        return open_pidfd(pid)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM):
            raise
        return -1


def _close(*descriptors: int) -> None:
    for each in descriptors:
        if each >= 0:
            os.close(each)
