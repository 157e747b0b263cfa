"""The wire over mpi4py: a communicator for data, and one for control messages.

Operations use point-to-point messages only. After a rank has died, MPI's collectives hang or return
wrong sums, while point-to-point messages fail or time out (measured, Open MPI 5).
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from ringcomm._core import Loop, NodeMemory, StatusPage, WireFault
from ringcomm.arrays.base import Bytes
from ringcomm.launched import is_fault_tolerant
from ringcomm.status.guardian import Ward
from ringcomm.status.page_enums import Ending, State, how_it_ended
from ringcomm.transport.base import ANY_SOURCE, Arrived, Died, Event, Request
from ringcomm.transport.failure_news import DIRECT
from ringcomm.transport.node.interruptible_sleep import Parking
from ringcomm.transport.node.neighbours import Neighbours, Offer
from ringcomm.transport.node.node_discovery import meet
from ringcomm.transport.node.shm import SharedNode, make_memory
from ringcomm.transport.start_mpi import agreed_tags, runner_over
from ringcomm.transport.unannounced_messages import ShortMessages

if TYPE_CHECKING:
    from ringcomm.transport.start_mpi import MPI

_log = logging.getLogger("ringcomm")
_CONTROL_TAG, _FIRST_SHORT_TAG = 1, 2
_CONTROL_MAX = 4096
_LOOK_FOR_DEATHS_S = 1e-3
_SEGMENT = 1 << 30  # MPI counts are C ints: a message of 2 GiB fails in mpi4py and in MPI-3

# Requests and buffers that MPI may touch after a failure, even when the transport is gone.
_grave: list[object] = []

# The place of a rank. node: the lowest rank of its node. machine: the lowest rank on the host that
# MPI reports; local_rank and local_size count the ranks of that host.
PLACE: Final = np.dtype(
    [("host", "S64"), ("pid", "i8")]
    + [(name, "i4") for name in ("node", "machine", "local_rank", "local_size")]
)


class _MpiRequest:
    __slots__ = ("_expected", "_is_receive", "_mpi", "_requests", "_status", "buffer")

    def __init__(
        self, mpi: Any, requests: list[MPI.Request], buffer: Bytes, *, is_receive: bool
    ) -> None:
        self._mpi = mpi
        self._requests = requests
        self._status = mpi.Status()
        self._is_receive = is_receive
        self._expected = buffer.nbytes if is_receive else 0
        self.buffer = buffer  # kept alive as long as MPI may touch it

    def test(self) -> bool:
        try:
            while self._requests:
                if not self._requests[-1].Test(self._status):
                    return False
                self._requests.pop()
                if self._expected:
                    self._expected -= self._status.Get_count(self._mpi.BYTE)
                    if self._expected and not self._requests:
                        raise WireFault(f"a message came {self._expected} bytes short")
        except self._mpi.Exception as error:
            raise WireFault(str(error)) from error
        return True

    def cancel(self) -> None:
        if not self._is_receive:
            return  # MPI-4 deprecates cancelling sends
        for request in self._requests:
            try:
                request.Cancel()
            except self._mpi.Exception:
                continue  # MPI may refuse if the peer is dead

    @property
    def source(self) -> int:
        return int(self._status.source)


class MpiTransport:
    """Transport over a duplicate of `comm`. Collective over the ranks of `comm`.

    Args:
        mpi: the module mpi4py.MPI.
        comm: an mpi4py communicator; None: the world.
        is_native: run recorded algorithms without Python.

    Attributes:
        places: the place of each rank, see PLACE.
        page: this rank's status page.
        is_fault_tolerant: MPI survives the death of a rank (ULFM).
        ring_epoch: number of earlier transports of this process on the same ranks.
    """

    incarnation = 0
    _control_of_world: ClassVar[tuple[MPI.Comm, int] | None] = None

    def __init__(self, mpi: Any, comm: MPI.Comm | None = None, *, is_native: bool = True) -> None:
        self._mpi = mpi
        self._is_of_world = comm is None
        parent = mpi.COMM_WORLD if comm is None else comm
        self._data: MPI.Comm = parent.Dup()
        self.tags = agreed_tags(mpi, self._data)
        self._control, self.ring_epoch = self._make_control(comm)
        for each in (mpi.COMM_SELF, self._data, self._control):
            each.Set_errhandler(mpi.ERRORS_RETURN)
        self.rank: int = self._data.rank
        self.size: int = self._data.size
        self.is_fault_tolerant = is_fault_tolerant()
        self.is_threaded = mpi.Query_thread() == mpi.THREAD_MULTIPLE
        self._thread = threading.get_ident()
        self._look_for_deaths_at = 0.0
        self._status = mpi.Status()
        self._outbox: list[tuple[MPI.Request, Bytes]] = []
        self._outbox_lock = threading.Lock()
        self._short_messages: ShortMessages | None = None
        self._dead: set[int] = set()
        self.runner = runner_over(mpi, self._data, _SEGMENT) if is_native else None
        self._settle()

    def _make_control(self, comm: MPI.Comm | None) -> tuple[MPI.Comm, int]:
        """Return the communicator of control messages, and how many transports used it before.

        The communicator of the world is kept for the next init(). Ranks may pass on messages of
        an earlier transport late; ring_epoch shows to which transport a message belongs.
        """
        cls = type(self)
        if comm is not None:
            return comm.Dup(), 0
        kept, epoch = cls._control_of_world or (self._mpi.COMM_WORLD.Dup(), 0)
        cls._control_of_world = kept, epoch + 1
        return kept, epoch

    def ranks_of(self, comm: MPI.Comm) -> tuple[int, ...]:
        if not isinstance(comm, self._mpi.Comm) or comm == self._mpi.COMM_NULL:
            raise ValueError(f"{comm!r} is no mpi4py communicator of this process")
        group, mine = comm.Get_group(), self._data.Get_group()
        ranks = tuple(group.Translate_ranks(list(range(group.size)), mine))
        group.Free()
        mine.Free()
        if self._mpi.UNDEFINED in ranks:
            raise ValueError("the communicator has a process that is not a rank of this job")
        return ranks

    def _settle(self) -> None:
        """Make the status page, exchange places, watch the ranks of this node, share memory."""
        candidates: MPI.Comm = self._data.Split_type(self._mpi.COMM_TYPE_SHARED)
        host, pid, nonce = socket.gethostname(), os.getpid(), secrets.randbits(63)
        job: str = self._data.bcast(secrets.token_hex(4))
        self.page = StatusPage.create(job, host, self.rank, self.size, candidates.rank, nonce)
        self._neighbours = Neighbours()
        self._parking = Parking(self._neighbours.fileno())
        memory = _memory_or_none(nonce, candidates.size) if candidates.size > 1 else None
        fds = (-1, -1) if memory is None else (memory.board_fd, memory.arena_fd)
        self._offer = Offer(pid, nonce, self.page.fd, self.page.lifeline_fd, *fds)
        node, separate = meet(candidates, self.rank, self._offer, self._neighbours)
        for text in separate:
            _log.warning("host %s: %s", host, text)
        machine = self.ranks_of(candidates)[0]
        mine = (host.encode(), pid, node[0], machine, candidates.rank, candidates.size)
        self.places = np.empty(self.size, PLACE)
        self._data.Allgather(np.array([mine], PLACE).view(np.uint8), self.places.view(np.uint8))
        self.nodes = tuple(self.places["node"].tolist())
        self.node = self._share_memory(candidates, node, memory)
        candidates.Free()
        is_crowded = len(node) > len(os.sched_getaffinity(0))
        self.loop = Loop(None if self.node is None else self.node.memory, is_crowded)
        self.loop.watch(self._neighbours.fileno())
        self.implementation = _first_clause(self._mpi.Get_library_version())

    def _share_memory(
        self, candidates: MPI.Comm, node: list[int], memory: NodeMemory | None
    ) -> SharedNode | None:
        """Map the memory of this node's other ranks; return None on all of them if one fails."""
        problem = "" if memory is not None else "a rank has none"
        shared = None if memory is None else SharedNode(memory, self.rank, len(node))
        for rank in node:
            if shared is None or rank == self.rank:
                continue
            try:
                shared.adopt(rank, self._neighbours[rank].memory())
            except (OSError, RuntimeError) as error:
                shared, problem = None, f"rank {rank}'s cannot be mapped: {error}"
        shares = dict(candidates.allgather((self.rank, shared is not None)))
        if len(node) == 1 or all(shares[rank] for rank in node):
            return shared
        if shared is None:
            _log.warning(
                "host %s: its ranks share no memory (%s): messages are used instead, which are "
                "several times slower",
                socket.gethostname(),
                problem,
            )
        return None

    def wards(self) -> list[Ward]:
        """Return the ranks of this node, for a guardian to watch."""
        me = self._offer
        others = [self._neighbours[rank].ward() for rank in self._neighbours.ranks]
        return [Ward(me.pid, me.page, me.nonce), *others]

    def close_handed(self) -> None:
        """Close the descriptors for the guardian: by now it has them, or it will never start."""
        self._neighbours.close_handed()

    def isend(self, data: Bytes, dest: int, tag: int) -> Request:
        return self._begin(self._data.Isend, data, dest, tag)

    def irecv(self, out: Bytes, source: int, tag: int) -> Request:
        source = self._mpi.ANY_SOURCE if source == ANY_SOURCE else source
        return self._begin(self._data.Irecv, out, source, tag, is_receive=True)

    def _begin(
        self, call: Any, buffer: Bytes, peer: int, tag: int, *, is_receive: bool = False
    ) -> Request:
        try:
            requests = [call(part, peer, tag) for part in _segments(buffer)]
        except self._mpi.Exception as error:
            raise WireFault(str(error)) from error
        return _MpiRequest(self._mpi, requests, buffer, is_receive=is_receive)

    def control(self, dest: int, message: bytes) -> None:
        if not self.is_threaded and threading.get_ident() != self._thread:
            return
        buffer = np.frombuffer(message[:_CONTROL_MAX], np.uint8)
        try:
            request = self._control.Isend(buffer, dest, _CONTROL_TAG)
            if request.Test():
                return
        except self._mpi.Exception:
            return  # poll() reports the death that causes this
        with self._outbox_lock:
            self._outbox.append((request, buffer))

    def short_messages(self) -> ShortMessages:
        if self._short_messages is None:  # MPI keeps the messages that come before this call
            self._short_messages = ShortMessages(
                self._mpi, self._control, _FIRST_SHORT_TAG + self.ring_epoch
            )
        return self._short_messages

    def poll(self) -> list[Event]:
        events = self._received()
        now = time.monotonic()
        if now < self._look_for_deaths_at:
            return events
        self._look_for_deaths_at = now + _LOOK_FOR_DEATHS_S
        dead = self._neighbours.ended() + self._failed_in_mpi()
        if dead:
            events += self._received()  # messages sent before the death have arrived by now
        for rank in dead:
            if rank not in self._dead:
                self._dead.add(rank)
                events += self._death(rank)
        return events

    def park(self, seconds: float) -> None:
        self._parking.sleep(seconds)

    def wake(self) -> None:
        self._parking.wake()

    def abandon(self, requests: list[Request]) -> None:
        unfinished = [request for request in requests if not _is_over(request)]
        for request in unfinished:
            request.cancel()
        _grave.extend(unfinished)

    def label(self, rank: int) -> str:
        place = self.places[rank]
        return f"rank {rank} (host {place['host'].decode()}, pid {place['pid']})"

    def close(self, *, is_clean: bool) -> None:
        self.loop.stop()
        self._parking.close()
        self._neighbours.close()
        if self.runner is not None:
            self.runner.close()
        if not is_clean:
            _grave.extend((self._outbox, self._short_messages))
            return
        if self._short_messages is not None:
            self._short_messages.close()
        for request, _ in self._outbox:
            request.Wait()
        self._outbox.clear()
        self._data.Free()
        if self._is_of_world or self.size > DIRECT:
            return  # keep _control: ranks may still pass on news to this one
        self._control.Free()

    def _received(self) -> list[Event]:
        events: list[Event] = []
        try:
            with self._outbox_lock:
                if self._outbox:
                    self._outbox = [each for each in self._outbox if not each[0].Test()]
            while message := self._control.Improbe(
                self._mpi.ANY_SOURCE, _CONTROL_TAG, self._status
            ):
                buffer = np.empty(self._status.Get_count(), np.uint8)
                source = self._status.source
                message.Recv(buffer)
                events.append(Arrived(source, buffer.tobytes()))
        except self._mpi.Exception:
            if self.is_fault_tolerant:
                self._control.Ack_failed()  # else a wildcard probe fails for ever
        return events

    def _failed_in_mpi(self) -> list[int]:
        if not self.is_fault_tolerant:
            return []
        failed: MPI.Group = self._control.Get_failed()
        if failed.size == 0:
            return []  # this is MPI_GROUP_EMPTY, which must not be freed
        everyone = self._control.Get_group()
        ranks = list(failed.Translate_ranks(None, everyone))
        failed.Free()
        everyone.Free()
        return ranks

    def _death(self, rank: int) -> list[Event]:
        self._neighbours.unwatch(rank)
        if rank not in self._neighbours:
            return [Died(rank, "died (so says MPI)", rank)]
        last_words = self._neighbours[rank].page.snapshot()
        if last_words["state"] == State.LEFT:
            return []  # it called shutdown(), so this is no failure
        blames = rank
        if last_words["end_kind"] == Ending.PEER_FAILED:
            blames = last_words["end_code"]
        return [Died(rank, how_it_ended(last_words), blames)]


def _memory_or_none(nonce: int, n_ranks: int) -> NodeMemory | None:
    try:
        return make_memory(nonce, n_ranks)
    except (OSError, RuntimeError) as error:
        _log.warning("no shared memory on this rank: %s", error)
        return None


def _is_over(request: Request) -> bool:
    try:
        return request.test()
    except WireFault:
        return False


def _first_clause(version_text: str) -> str:
    """Return "Open MPI v5.0.11" or the like from the version text of an MPI library."""
    return " ".join(version_text.replace("\0", "").partition("\n")[0].partition(",")[0].split())


def _segments(buffer: Bytes) -> list[Bytes]:
    if buffer.nbytes <= _SEGMENT:
        return [buffer]
    return [buffer[i : i + _SEGMENT] for i in range(0, buffer.nbytes, _SEGMENT)]
