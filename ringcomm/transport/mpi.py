"""The wire over mpi4py: a communicator for data, and one for control messages.

Operations use point-to-point messages only. After a rank has died, MPI's collectives hang or return
wrong sums, while point-to-point messages fail or time out (measured, Open MPI 5).
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from ringcomm._core import Loop, WireFault
from ringcomm.arrays.base import Bytes
from ringcomm.errors import ConfigError
from ringcomm.open_errors import needed_for
from ringcomm.transport.base import ArrivedMessage, Event, PeerDied, WireRequest
from ringcomm.transport.channel import StepRequest
from ringcomm.transport.peer_messages import make_peer_messages
from ringcomm.transport.presence import Presence
from ringcomm.transport.start_mpi import runner_over
from ringcomm.transport.unannounced_messages import ShortMessages

if TYPE_CHECKING:
    from ringcomm._core import PeerMessages
    from ringcomm.transport.start_mpi import MPI

_CONTROL_TAG, _FIRST_SHORT_TAG = 1, 2
_CONTROL_MAX = 4096
_LAST_MESSAGES_S = 5.0  # for what is on its way when all ranks have left
_SEGMENT = 1 << 30  # MPI counts are C ints: a message of 2 GiB fails in mpi4py and in MPI-3

# Requests and buffers that MPI may touch after a failure, even when the transport is gone.
_grave: list[object] = []


class _MpiRequest:
    __slots__ = ("_expected", "_is_receive", "_mpi", "_requests", "_status", "buffer")

    def __init__(
        self,
        mpi: Any,
        requests: list[MPI.Request],
        buffer: Bytes,
        *,
        is_receive: bool,
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


class MpiTransport:
    """Transport between the members of a view, over communicators that a Presence has made.

    Not collective. Only the members communicate, and MPI's collectives are not used: other ranks of
    the communicators may be dead.

    Args:
        presence: this process in its job; the transport is for its last view.
        is_native: run recorded algorithms without Python.

    Attributes:
        places: the place of each rank, see PLACE.
        page: this rank's status page.
    """

    def __init__(self, presence: Presence, *, is_native: bool = True) -> None:
        self.presence = presence
        self.view = view = presence.views[-1]
        self._mpi = presence.mpi
        self._data, self._control = presence.lines[view.number]
        self._rank_of = {number: rank for rank, number in enumerate(view.members)}
        self.rank, self.size = self._rank_of[presence.number], view.size
        self.tags, self.ring_epoch = presence.tags, presence.ring_epoch + view.number
        self.is_threaded, self.implementation = presence.is_threaded, presence.implementation
        self.page = presence.page
        self._thread = threading.get_ident()
        self._status = self._mpi.Status()
        self._outbox: list[tuple[MPI.Request, Bytes]] = []
        self._outbox_lock = threading.Lock()
        self._short_messages: ShortMessages | None = None
        self._n_deaths = 0  # of presence.deaths, those that poll() has returned
        self._stopped: set[int] = set()  # members whose stop poll() has reported
        self._abandoned: list[WireRequest] = []
        if view.number and presence.is_fault_tolerant:
            for comm in (self._data, self._control):
                comm.Ack_failed()  # else receives from any rank fail
        self._runner = runner_over(self._mpi, self._data, _SEGMENT)
        self.runner = self._runner if is_native else None
        self._messages: PeerMessages | None = None
        self.places = presence.places_in(view)
        self.nodes = tuple(self.places["node"].tolist())
        self.node = presence.node_in(view)
        is_crowded = self.nodes.count(self.nodes[self.rank]) > len(os.sched_getaffinity(0))
        self.loop = Loop(None if self.node is None else self.node.memory, is_crowded)
        with needed_for("the threads of this rank"):
            self.loop.watch(presence.death_watch())

    def wire_ranks(self, ranks: list[int]) -> list[int]:
        return [self.view.members[rank] for rank in ranks]

    def messages(self, *, may_read: bool) -> PeerMessages:
        if self._messages is None:
            self._messages = make_peer_messages(self, self._runner, may_read=may_read)
        return self._messages

    def clear_memory(self) -> None:
        """Prepare what the ranks of this node share for the next view; no rank uses it any more."""
        if self._messages is not None:
            self._messages.retire()
        if self.node is not None:
            self.node.clear_all()

    def ranks_of(self, comm: MPI.Comm) -> tuple[int, ...]:
        ranks = [self._rank_of.get(number) for number in self.presence.numbers_of(comm)]
        if None in ranks:
            raise ValueError("the communicator has a process that is lost")
        return tuple(rank for rank in ranks if rank is not None)

    def isend(self, data: Bytes, dest: int, tag: int) -> WireRequest:
        return self._begin(self._data.Isend, data, self.view.members[dest], tag)

    def irecv(self, out: Bytes, source: int, tag: int) -> WireRequest:
        return self._begin(self._data.Irecv, out, self.view.members[source], tag, is_receive=True)

    def _begin(
        self, call: Any, buffer: Bytes, peer: int, tag: int, *, is_receive: bool = False
    ) -> WireRequest:
        requests: list[MPI.Request] = []
        begun = _MpiRequest(self._mpi, requests, buffer, is_receive=is_receive)
        try:
            for part in _segments(buffer):
                requests.append(call(part, peer, tag))
        except self._mpi.Exception as error:
            self.abandon([begun])  # of the segments before, MPI still uses the memory
            raise WireFault(str(error)) from error
        return begun

    def control(self, dest: int, message: bytes) -> None:
        if not self.is_threaded and threading.get_ident() != self._thread:
            return
        buffer = np.frombuffer(message[:_CONTROL_MAX], np.uint8)
        try:
            request = self._control.Isend(buffer, self.view.members[dest], _CONTROL_TAG)
            if request.Test():
                return
        except self._mpi.Exception:
            return  # poll() reports the death that causes this
        with self._outbox_lock:
            self._outbox.append((request, buffer))

    def short_messages(self) -> ShortMessages:
        if self.view.number:
            raise ConfigError(
                f"the parameter server works in view 0 of a job, and this is view "
                f"{self.view.number}: the job has lost ranks. Start it again"
            )
        if self._short_messages is None:  # MPI keeps the messages that come before this call
            self._short_messages = ShortMessages(
                self._mpi, self._control, _FIRST_SHORT_TAG + self.ring_epoch
            )
        return self._short_messages

    def poll(self) -> list[Event]:
        events = self._received()
        self.presence.look()
        deaths = self.presence.deaths
        if self._n_deaths == len(deaths):
            return events + self._stops()
        events += self._received()  # messages sent before the death have arrived by now
        while self._n_deaths < len(deaths):
            died = deaths[self._n_deaths]
            self._n_deaths += 1
            rank = self._rank_of.get(died.rank)
            if rank is not None:
                events.append(PeerDied(rank, died.reason, self._rank_of.get(died.blames, rank)))
        return events

    def _stops(self) -> list[Event]:
        """Return as dead the members that have stopped: for who is lost, or is to join or leave.

        If one is lost, it is blamed. An operation that did not need it may need those.
        """
        membership = self.presence.membership
        if membership is None or not membership.state.must_follow:
            return []
        state = membership.state
        news = set(state.stopped) - self._stopped
        self._stopped |= news
        lost = min((self._rank_of[each] for each in state.lost_members), default=None)
        reason = "has stopped, so that ranks can join or leave"
        ranks = sorted(self._rank_of[each] for each in news)
        return [PeerDied(rank, reason, rank if lost is None else lost) for rank in ranks]

    def park(self, seconds: float) -> None:
        self.presence.parking.sleep(seconds)

    def wake(self) -> None:
        self.presence.parking.wake()

    def abandon(self, requests: list[WireRequest]) -> None:
        unfinished = [request for request in requests if not _is_over(request)]
        for request in unfinished:
            request.cancel()
        self._abandoned.extend(unfinished)

    def label(self, rank: int) -> str:
        number = self.view.members[rank]
        before = f"started as rank {number}, " if self.view.number else ""
        return f"rank {rank} ({before}{self.presence.label(number)})"

    def close(self, *, is_clean: bool) -> None:
        if is_clean and self._messages is not None:
            self._messages.close_wires(_LAST_MESSAGES_S)
        self.stop()
        if is_clean:
            if self._short_messages is not None:
                self._short_messages.close()
            for request, _ in self._outbox:
                request.Wait()
            self._outbox, self._short_messages = [], None
        self.bury()
        # After a death, MPI could not free a communicator: that is collective over the dead, too.
        is_whole = not self.view.number and not self.presence.deaths
        self.presence.close(is_clean=is_clean and is_whole)

    def stop(self) -> None:
        """Stop to advance operations. What is sent to this rank from now on is not received."""
        self.loop.stop()
        if self._messages is not None:
            self._messages.close_wires(0.0)
        self._runner.close()

    def bury(self) -> None:
        """Keep for ever what other ranks may still use: messages that were given up."""
        kept = (self._abandoned, self._outbox, self._short_messages)
        _grave.extend(each for each in kept if each)
        self._abandoned = []

    def forget_steps(self) -> None:
        """Drop the steps in shared memory that were given up; no rank may use them any more."""
        self._abandoned = [r for r in self._abandoned if not isinstance(r, StepRequest)]

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
                source = self._rank_of.get(self._status.source)
                message.Recv(buffer)
                if source is not None:  # else a spare that fails: its end is seen as well
                    events.append(ArrivedMessage(source, buffer.tobytes()))
        except self._mpi.Exception:
            if self.presence.is_fault_tolerant:
                self._control.Ack_failed()  # else a wildcard probe fails for ever
        return events


def _is_over(request: WireRequest) -> bool:
    try:
        return request.test()
    except WireFault:
        return False


def _segments(buffer: Bytes) -> list[Bytes]:
    if buffer.nbytes <= _SEGMENT:
        return [buffer]
    return [buffer[i : i + _SEGMENT] for i in range(0, buffer.nbytes, _SEGMENT)]
