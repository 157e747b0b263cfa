"""This process in its job: what lasts while the views of the job, and with them transports, change.

A Presence is made once per init(), by MPI's collectives. After a death these hang, so it also makes
the communicators of all views that may follow: from then on point-to-point messages are enough.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
import time
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ringcomm._core import NodeMemory, StatusPage
from ringcomm.errors import ConfigError, MismatchError
from ringcomm.launched.launcher import is_fault_tolerant
from ringcomm.open_errors import needed_for
from ringcomm.status.ending_text import how_it_ended
from ringcomm.status.guardian import Ward
from ringcomm.status.page_enums import Ending, PageState
from ringcomm.status.stacks import offer_stacks, where_is
from ringcomm.system_text import bytes_of, host_name, text_of
from ringcomm.transport.base import PeerDied
from ringcomm.transport.failure_news import DIRECT
from ringcomm.transport.membership.events_and_actions import (
    Lost,
)
from ringcomm.transport.membership.service import MembershipService
from ringcomm.transport.membership.view import View
from ringcomm.transport.node.neighbours import Neighbours, Offer
from ringcomm.transport.node.node_discovery import meet
from ringcomm.transport.node.shared_memory import SharedNode, make_memory
from ringcomm.transport.start_mpi import agreed_tags

if TYPE_CHECKING:
    from ringcomm.transport.start_mpi import MPI

T = TypeVar("T")
_log = logging.getLogger("ringcomm")
_LOOK_S = 1e-3  # between two looks for deaths
_EPOLL_S = 1e-3  # epoll counts whole milliseconds
_WITHDREW = "takes part no more, or died (so says another rank)"

# The place of a rank. node: the lowest rank of its node. machine: the lowest rank on the host that
# MPI reports; local_rank and local_size count the ranks of that host.
PLACE: Final = np.dtype(
    [("host", "S64"), ("pid", "i8")]
    + [(name, "i4") for name in ("node", "machine", "local_rank", "local_size")]
)


class Line(NamedTuple):
    """The communicators of one view."""

    data: MPI.Comm
    control: MPI.Comm


class Parking:
    """Sleeps until the time is over, another thread calls wake(), or a descriptor has an event.

    Events of the descriptor `news` end only sleeps of at least 1 ms. Raises OSError if `ulimit -n`
    allows no more descriptors.
    """

    def __init__(self, news: int) -> None:
        self._short = threading.Lock()  # for sleeps of less than 1 ms: wake() releases it
        self._short.acquire()
        with needed_for("what wakes this rank (epoll, eventfd)"):
            self._poller = select.epoll()
            self._long = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # for longer sleeps
            self._poller.register(news, select.EPOLLIN)
            self._poller.register(self._long, select.EPOLLIN)

    def sleep(self, seconds: float) -> None:
        """Sleep for at most `seconds`."""
        if seconds < _EPOLL_S:
            self._short.acquire(timeout=seconds)
            return
        if any(fd == self._long for fd, _ in self._poller.poll(seconds)):
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._long)

    def wake(self) -> None:
        """End the sleep of another thread, or else the next sleep. Any thread may call this."""
        with contextlib.suppress(RuntimeError):  # released already
            self._short.release()
        with contextlib.suppress(OSError, ValueError):  # closed: no thread sleeps any more
            os.eventfd_write(self._long, 1)

    def close(self) -> None:
        self._poller.close()
        os.close(self._long)
        self._long = -1


class Presence:
    """This process among the processes of a communicator. Collective over them.

    Here a process has the number that it had in the first view; see View.

    Args:
        mpi: the module mpi4py.MPI.
        comm: an mpi4py communicator; None: the world.
        n_losses: how many processes the job may lose and go on, and requests for another size; 0:
            its members never change.
        n_spares, n_reserves: how many processes wait for a place, and how many sleep.

    Raises:
        MismatchError: these numbers differ.
        ConfigError: no process would be left.

    Attributes:
        number, size: the number of this process, and how many there were at first.
        n_losses: see above; 0 if there is one process.
        places: the place of each process, see PLACE.
        page: the status page of this process.
        membership: agrees with the others on the next view; None: members never change.
        is_fault_tolerant: MPI survives the death of a rank (ULFM).
        ring_epoch: number of earlier presences of this process in the same job.
        views: the views in which this process has worked, the last one is of now. That of a process
            which has had no place has all processes; nobody works in it.
        deaths: the processes that have died, in the order in which this one noticed it.
    """

    _control_of_world: ClassVar[tuple[MPI.Comm, int] | None] = None

    def __init__(
        self,
        mpi: Any,
        comm: MPI.Comm | None = None,
        *,
        n_losses: int = 0,
        n_spares: int = 0,
        n_reserves: int = 0,
    ) -> None:
        self.mpi = mpi
        self.is_of_world = comm is None
        parent = mpi.COMM_WORLD if comm is None else comm
        data: MPI.Comm = parent.Dup()
        self.number: int = data.rank
        self.size: int = data.size
        self.tags = agreed_tags(mpi, data)
        control, self.ring_epoch = self._make_control(comm)
        _agree_on_changes(data, n_losses, n_spares, n_reserves)
        n_members = self.size - n_spares - n_reserves
        self.n_losses = n_losses if self.size > 1 else 0  # nobody would be left
        n_more = self.n_losses + n_spares + n_reserves
        later = [Line(data.Dup(), data.Dup()) for _ in range(n_more)]
        self.lines = [Line(data, control), *later]
        own = [data.Dup()] if n_more else []  # of the membership
        for each in (mpi.COMM_SELF, *own, *(comm for line in self.lines for comm in line)):
            each.Set_errhandler(mpi.ERRORS_RETURN)
        self.is_fault_tolerant = is_fault_tolerant()
        self.is_threaded = mpi.Query_thread() == mpi.THREAD_MULTIPLE
        self.membership: MembershipService | None = None
        if own:
            self.membership = MembershipService(
                mpi, own[0], n_spares, n_reserves, is_fault_tolerant=self.is_fault_tolerant
            )
        self.views = [View.first(n_members if self.number < n_members else self.size)]
        self.deaths: list[PeerDied] = []
        self._ended: set[int] = set()
        self._look_at = 0.0
        self._lock = threading.Lock()
        self._settle(data)

    def _make_control(self, comm: MPI.Comm | None) -> tuple[MPI.Comm, int]:
        """Return the communicator of control messages, and how many presences used it before.

        The communicator of the world is kept for the next init(). Ranks may pass on messages of
        an earlier transport late; ring_epoch shows to which transport a message belongs.
        """
        cls = type(self)
        if comm is not None:
            return comm.Dup(), 0
        kept, epoch = cls._control_of_world or (self.mpi.COMM_WORLD.Dup(), 0)
        cls._control_of_world = kept, epoch + 1
        return kept, epoch

    def _settle(self, data: MPI.Comm) -> None:
        """Make the status page, exchange places, watch the ranks of this node, share memory."""
        candidates: MPI.Comm = data.Split_type(self.mpi.COMM_TYPE_SHARED)
        host, pid, nonce = host_name(), os.getpid(), int.from_bytes(os.urandom(7))
        job: str = data.bcast(os.urandom(4).hex())
        self.page = StatusPage.create(job, host, self.number, self.size, candidates.rank, nonce)
        offer_stacks(self.page)
        self._neighbours = Neighbours()
        self.parking = Parking(self._neighbours.fileno())
        memory = _memory_or_none(nonce, candidates.size) if candidates.size > 1 else None
        fds = (-1, -1) if memory is None else (memory.board_fd, memory.arena_fd)
        self._offer = Offer(pid, nonce, self.page.fd, self.page.lifeline_fd, *fds)
        node, separate = meet(candidates, self.number, self._offer, self._neighbours)
        for text in separate:
            _log.warning("host %s: %s", host, text)
        machine = self.numbers_of(candidates)[0]
        mine = (bytes_of(host), pid, node[0], machine, candidates.rank, candidates.size)
        self.places = np.empty(self.size, PLACE)
        data.Allgather(np.array([mine], PLACE).view(np.uint8), self.places.view(np.uint8))
        self._memories = self._share_memory(candidates, node, memory)
        candidates.Free()
        self.implementation = _first_clause(self.mpi.Get_library_version())

    def _share_memory(
        self, candidates: MPI.Comm, node: list[int], memory: NodeMemory | None
    ) -> dict[int, NodeMemory]:
        """Map the memory of this node's other ranks; return {} on all of them if one fails."""
        problem = "" if memory is not None else "a rank has none"
        shared = {} if memory is None else {self.number: memory}
        for number in node:
            if not shared or number == self.number:
                continue
            try:
                shared[number] = self._neighbours[number].memory()
            except (OSError, RuntimeError) as error:
                shared, problem = {}, f"rank {number}'s cannot be mapped: {error}"
        shares = dict(candidates.allgather((self.number, bool(shared))))
        if len(node) == 1 or all(shares[number] for number in node):
            return shared
        if not shared:
            _log.warning(
                "host %s: its ranks share no memory (%s): messages are used instead, which are "
                "several times slower",
                host_name(),
                problem,
            )
        return {}

    def allgather_object(self, mine: T) -> list[T]:
        """Return the objects of all processes. Collective, before anybody may die: by MPI alone."""
        found: list[T] = self.lines[0].data.allgather(mine)
        return found

    def numbers_of(self, comm: MPI.Comm) -> tuple[int, ...]:
        """Return the processes of a communicator. Raises ValueError if one is not of the job."""
        if not isinstance(comm, self.mpi.Comm) or comm == self.mpi.COMM_NULL:
            raise ValueError(f"{comm!r} is no mpi4py communicator of this process")
        group, mine = comm.Get_group(), self.lines[0].data.Get_group()
        numbers = tuple(group.Translate_ranks(list(range(group.size)), mine))
        group.Free()
        mine.Free()
        if self.mpi.UNDEFINED in numbers:
            raise ValueError("the communicator has a process that is not a rank of this job")
        return numbers

    def number_of(self, rank: int, view_number: int) -> int:
        """Return the number of the process that was a rank of a view; `rank` if there was none."""
        of_view = (v.members[rank] for v in self.views if v.number == view_number)
        return next(of_view, rank)

    def places_in(self, view: View) -> NDArray[Any]:
        """Return the places of the ranks of a view, in its numbers."""
        places = self.places[list(view.members)]
        for name in ("node", "machine"):
            first = places[name].tolist()
            places[name] = [first.index(each) for each in first]
        machines = places["machine"].tolist()
        places["local_rank"] = [machines[:i].count(each) for i, each in enumerate(machines)]
        places["local_size"] = [machines.count(each) for each in machines]
        return places

    def node_in(self, view: View) -> SharedNode | None:
        """Return the memory that the ranks of this node share, by their ranks in a view."""
        if self.number not in self._memories:
            return None
        ranks = {view.rank_of(number): memory for number, memory in self._memories.items()}
        here = {rank: memory for rank, memory in ranks.items() if rank is not None}
        me = view.members.index(self.number)
        node = SharedNode(here[me], me, len(here))
        for rank, memory in here.items():
            if rank != me:
                node.adopt(rank, memory)
        return node

    def death_watch(self) -> int:
        """Return a descriptor that epoll reports from a death until look() has noted it."""
        return self._neighbours.fileno()

    def wards(self) -> list[Ward]:
        me = self._offer
        others = [self._neighbours[number].ward() for number in self._neighbours.ranks]
        return [Ward(me.pid, me.page, me.nonce), *others]

    def close_handed(self) -> None:
        """Close the descriptors for the guardian: by now it has them, or it will never start."""
        self._neighbours.close_handed()

    def label(self, number: int) -> str:
        place = self.places[number]
        return f"host {text_of(place['host'])}, pid {place['pid']}"

    def look(self, *, at_once: bool = False) -> bool:
        """Note the processes that have died; return True if there are any.

        Without at_once, look only if the last look was a millisecond ago.
        """
        now = time.monotonic()
        if now < self._look_at and not at_once:
            return False
        with self._lock:
            self._look_at = now + _LOOK_S
            n_before = len(self.deaths)
            ended = [
                number
                for number in self._neighbours.ended() + self._failed_in_mpi()
                if number not in self._ended
            ]
            if ended and self.membership is not None:
                self.membership.poll()  # who takes part no more has said so before it ended
            for number in ended:
                self._note_end(number)
            if self.membership is not None:
                self._hear_of_members(self.membership, ended)
            return len(self.deaths) > n_before

    def _failed_in_mpi(self) -> list[int]:
        return _failed_in(self.lines[0].control) if self.is_fault_tolerant else []

    def where_is(self, number: int) -> str:
        if number not in self._neighbours:
            return ""
        return where_is(self._neighbours[number].page.snapshot())

    @property
    def near(self) -> frozenset[int]:
        """The other processes of this node that have not ended, as far as this one knows."""
        return frozenset(self._neighbours.ranks) - self._ended

    def is_at_end(self, number: int) -> bool:
        return self._neighbours[number].page.snapshot()["state"] in (
            PageState.LEAVING,
            PageState.LEFT,
        )

    def _note_end(self, number: int) -> None:
        self._ended.add(number)
        self._neighbours.unwatch(number)
        if number not in self._neighbours:
            self.deaths.append(PeerDied(number, "died (so says MPI)", number))
            return
        last_words = self._neighbours[number].page.snapshot()
        if last_words["state"] == PageState.LEFT:
            # It called shutdown(), so this is no failure, or it takes part no more. Then it has not
            # called MPI_Finalize, which would wait for it.
            if self.membership is not None and number in self.membership.state.changes.lost:
                self.deaths.append(PeerDied(number, _WITHDREW, number))
            return
        blames = number
        if last_words["end_kind"] == Ending.PEER_FAILED:
            blames = last_words["end_code"]
        self.deaths.append(PeerDied(number, how_it_ended(last_words), blames))

    def _kill(self, number: int) -> None:
        if number == self.number or number in self._ended or number not in self._neighbours:
            return
        pid = self._neighbours[number].offer.pid
        _log.warning(
            "elastic.run: rank %d at first (%s) is killed, because it hangs",
            number,
            self.label(number),
        )
        with contextlib.suppress(OSError):  # it has ended just now
            os.kill(pid, signal.SIGKILL)  # it is watched, so the pid is its own

    def _hear_of_members(self, membership: MembershipService, ended: list[int]) -> None:
        """Tell the membership who has ended; note whom it knows to be lost."""
        if ended:
            membership.handle(Lost(frozenset(ended)))
        membership.poll()
        for number in sorted(membership.state.changes.lost - self._ended):
            self._ended.add(number)
            self._neighbours.unwatch(number)
            self.deaths.append(PeerDied(number, _WITHDREW, number))
        while membership.gone_on:
            number = membership.gone_on.pop()
            self.deaths.append(PeerDied(number, "goes on without this rank, which leaves", number))
        while membership.to_kill:
            self._kill(membership.to_kill.pop())

    def close(self, *, is_clean: bool) -> None:
        """Free what lasts; a collective call if is_clean."""
        self.parking.close()
        self._neighbours.close()
        if not is_clean:
            return
        for line in self.lines[1:]:
            line.data.Free()
            line.control.Free()
        if self.membership is not None:
            self.membership.close()
        self.lines[0].data.Free()
        if self.is_of_world or self.size > DIRECT:
            return  # keep its control: ranks may still pass on news to this one
        self.lines[0].control.Free()


def _failed_in(comm: MPI.Comm) -> list[int]:
    failed: MPI.Group = comm.Get_failed()
    if failed.size == 0:
        return []  # this is MPI_GROUP_EMPTY, which must not be freed
    everyone = comm.Get_group()
    numbers = list(failed.Translate_ranks(None, everyone))
    failed.Free()
    everyone.Free()
    return numbers


def _agree_on_changes(comm: MPI.Comm, *mine: int) -> None:
    every = comm.allgather(mine)
    names = (
        "RINGCOMM_ELASTIC_LOSSES (0 without RINGCOMM_ELASTIC=1)",
        "RINGCOMM_SPARES",
        "RINGCOMM_RESERVES",
    )
    for name, values in zip(names, zip(*every, strict=True), strict=True):
        if len(set(values)) > 1:
            odd = next(rank for rank, value in enumerate(values) if value != values[0])
            raise MismatchError(
                f"init: ranks differ in {name}: rank 0 has {values[0]}, rank {odd} has "
                f"{values[odd]}. Set it to the same value on all ranks"
            )
    _, n_spares, n_reserves = mine
    if n_spares + n_reserves >= comm.size:
        raise ConfigError(
            f"RINGCOMM_SPARES is {n_spares}, RINGCOMM_RESERVES is {n_reserves}, and the job has "
            f"{comm.size} processes: at least one must be neither. Start more"
        )


def _memory_or_none(nonce: int, n_ranks: int) -> NodeMemory | None:
    try:
        return make_memory(nonce, n_ranks)
    except (OSError, RuntimeError) as error:
        _log.warning("no shared memory on this rank: %s", error)
        return None


def _first_clause(version_text: str) -> str:
    """Return "Open MPI v5.0.11" or the like from the version text of an MPI library."""
    return " ".join(version_text.replace("\0", "").partition("\n")[0].partition(",")[0].split())
