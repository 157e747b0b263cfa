"""Carries out the decisions of state_machine.py over a communicator of its own."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ringcomm.transport.membership.events_and_actions import (
    Clear,
    EndRun,
    Event,
    GoneOn,
    Heard,
    Install,
    KillHere,
    SendMessage,
)
from ringcomm.transport.membership.messages import MembershipMessage
from ringcomm.transport.membership.state_machine import Membership, handle

if TYPE_CHECKING:
    from ringcomm.transport.start_mpi import MPI

_TAG = 1


class MembershipService:
    """The membership of this rank. Any thread may call a method; none blocks.

    Attributes:
        must_clear: the next view needs that this rank clears its shared memory and reports Cleared.
        gone_on: processes that go on without this one.
        to_kill: processes that hang, and must be killed if they are on this host.
    """

    def __init__(
        self, mpi: Any, comm: MPI.Comm, n_spares: int, n_reserves: int, *, is_fault_tolerant: bool
    ) -> None:
        self._mpi = mpi
        self._comm = comm
        self._is_fault_tolerant = is_fault_tolerant
        self._state = Membership.first(comm.rank, comm.size, n_spares, n_reserves)
        self._lock = threading.Lock()
        self._status = mpi.Status()
        self._unsent: list[tuple[MPI.Request, NDArray[np.int32]]] = []
        self.must_clear = False
        self.gone_on: list[int] = []
        self.to_kill: set[int] = set()

    @property
    def state(self) -> Membership:
        return self._state

    def handle(self, event: Event) -> None:
        """Take note of an event, and send the messages that it calls for."""
        with self._lock:
            self._handle(event)

    def poll(self) -> None:
        with self._lock:
            for source, message in self._received():
                self._handle(Heard(source, message))

    def _handle(self, event: Event) -> None:
        self._state, actions = handle(self._state, event)
        for action in actions:
            match action:
                case SendMessage(to, message):
                    for process in to:
                        self._send(process, message)
                case Clear():
                    self.must_clear = True
                case GoneOn(process):
                    self.gone_on.append(process)
                case KillHere(processes):
                    self.to_kill |= processes
                case Install() | EndRun():  # `state` shows it
                    self.must_clear = False

    def _send(self, process: int, message: MembershipMessage) -> None:
        buffer = np.array(message.numbers(), np.int32)
        try:
            request = self._comm.Isend(buffer, process, _TAG)
            if not request.Test():
                self._unsent.append((request, buffer))
        except self._mpi.Exception:
            return  # it is dead, which this rank will see

    def _received(self) -> list[tuple[int, MembershipMessage]]:
        messages: list[tuple[int, MembershipMessage]] = []
        try:
            if self._unsent:
                self._unsent = [each for each in self._unsent if not _is_sent(self._mpi, each[0])]
            while message := self._comm.Improbe(self._mpi.ANY_SOURCE, _TAG, self._status):
                buffer = np.empty(self._status.Get_count(self._mpi.INT), np.int32)
                source = self._status.source
                message.Recv(buffer)
                messages.append((source, MembershipMessage.of(buffer.tolist())))
        except self._mpi.Exception:
            if self._is_fault_tolerant:
                self._comm.Ack_failed()  # else a wildcard probe fails for ever
        return messages

    def close(self) -> None:
        """Free the communicator; all ranks call this, and none is lost."""
        for request, _ in self._unsent:
            request.Wait()
        self._unsent.clear()
        self._comm.Free()


def _is_sent(mpi: Any, request: MPI.Request) -> bool:
    """Return True also if the receiver is dead. A request that MPI has given up is freed."""
    try:
        return bool(request.Test())
    except mpi.Exception:
        return True
