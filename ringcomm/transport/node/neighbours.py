"""The other ranks of this rank's node: their pages and memory, and news of their deaths."""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Sequence
from dataclasses import dataclass

from ringcomm._core import NodeMemory, StatusPage, open_pidfd
from ringcomm.descriptors import needed_for
from ringcomm.status.guardian import Ward


@dataclass(frozen=True)
class Offer:
    """The files that a rank lets the others of its host open, by its own descriptors."""

    pid: int  # of the rank
    nonce: int  # tells its pages from those of a recycled pid; a secret of the job
    page: int  # its status page
    lifeline: int  # hangs up when it dies
    board: int = -1  # its flags in shared memory; -1: it shares none
    arena: int = -1  # the data

    @property
    def descriptors(self) -> list[int]:
        """Those that there are."""
        return [fd for fd in (self.page, self.lifeline, self.board, self.arena) if fd >= 0]


class Neighbour:
    """A rank whose page this process has mapped.

    Attributes:
        offer: what it said, with its own numbers.
        page: its status page.
        end: a descriptor that has an event once it has died.
    """

    def __init__(
        self,
        offer: Offer,
        page: StatusPage,
        end: int,
        lifeline: int | None = None,
        memory: Sequence[int] = (),
    ) -> None:
        self.offer = offer
        self.page = page
        self.end = end
        self._lifeline = lifeline  # handed over, as are these
        self._memory = memory

    @classmethod
    def reached(cls, offer: Offer) -> Neighbour:
        """Return it by what /proc lets this process open.

        Raises:
            OSError: it cannot be reached.
            RuntimeError: the descriptor is of another process.
        """
        end = _pidfd_or_none(offer.pid)  # before the page: the pid may change hands
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
        """Return it by descriptors of its offer that have been handed over; takes them.

        Args:
            offer: what it said, with its own numbers.
            seen_pid: of who sent them, as this process sees it.
            descriptors: in the order of `offer.descriptors`.

        Raises:
            OSError: this process cannot see the other.
            RuntimeError: they are of another process.
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
        """Return what it shares, mapped; to be called once. Raises: see reached()."""
        its = self.offer
        if self._lifeline is None:
            return NodeMemory.open(its.pid, its.board, its.arena, its.nonce)
        if not self._memory:
            raise OSError("it shares none")
        (board, arena), self._memory = self._memory, ()
        return NodeMemory.adopt(board, arena, its.nonce)  # closes them in any case

    def ward(self) -> Ward:
        """Return what a guardian must know of it."""
        its = self.offer
        handed = () if self._lifeline is None else (self.page.fd, self._lifeline)
        return Ward(its.pid, its.page, its.nonce, handed)

    def close_handed(self) -> None:
        """Close what a guardian alone needs, and it has been given."""
        if self._lifeline is not None:
            self.page.close_fd()
            _close(self._lifeline if self._lifeline != self.end else -1)
            self._lifeline = None

    def close(self) -> None:
        """Give the descriptors back; page and memory stay mapped as long as they are used."""
        _close(*{self.end, *self._memory, -1 if self._lifeline is None else self._lifeline})


class Neighbours:
    """Ranks that are watched, and their deaths in the order in which they happened.

    Raises:
        OSError: there are no descriptors left.
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
        """Those that were met, dead ones among them."""
        return sorted(self._met)

    @property
    def watched(self) -> list[int]:
        """The neighbours whose death has not been reported yet."""
        return sorted(self._watched.values())

    def fileno(self) -> int:
        """Return what has an event as long as a death has not been taken note of."""
        return self._deaths.fileno()

    def add(self, rank: int, neighbour: Neighbour) -> None:
        """Watch it from now on; it belongs to this object then.

        Raises:
            OSError: it cannot be watched, and is closed.
        """
        try:
            self._deaths.register(neighbour.end, select.EPOLLIN)  # reports a hang-up, too
        except OSError:
            neighbour.close()
            raise
        self._met[rank] = neighbour
        self._watched[neighbour.end] = rank

    def ended(self) -> list[int]:
        """Return those that have died, in the order of their deaths, which is what epoll keeps."""
        return [self._watched[fd] for fd, _ in self._deaths.poll(0) if fd in self._watched]

    def unwatch(self, rank: int) -> None:
        """Tell no more of this death."""
        if rank in self._met and self._watched.pop(self._met[rank].end, None) is not None:
            self._deaths.unregister(self._met[rank].end)

    def drop(self, rank: int) -> None:
        """Forget a rank."""
        self.unwatch(rank)
        self._met.pop(rank).close()

    def close_handed(self) -> None:
        """Close what no more than a guardian needs of them."""
        for neighbour in self._met.values():
            neighbour.close_handed()

    def close(self) -> None:
        """Forget all."""
        for rank in self.ranks:
            self.drop(rank)
        self._deaths.close()


def _pidfd_or_none(pid: int) -> int:
    """Return a pidfd, -1 where the kernel or a sandbox has none. Raises OSError: it has died."""
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
