"""Short messages whose sender and length the receiver does not know in advance."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ringcomm._core import WireFault
from ringcomm.errors import RingcommError

if TYPE_CHECKING:
    from ringcomm.transport.start_mpi import MPI

SHORT_MESSAGE_MAX: Final = 1 << 14  # bytes
_N_RECEIVES: Final = 8  # posted at a time: MPI copies a message twice if it finds no receive


class ShortMessage(NamedTuple):
    source: int
    data: bytes


def require_fit(data: bytes, dest: int) -> None:
    """Raise RingcommError if a message is too long: MPI's error would not name the message."""
    if len(data) > SHORT_MESSAGE_MAX:
        raise RingcommError(
            f"a message of {len(data)} bytes to rank {dest}; {SHORT_MESSAGE_MAX} are the most. "
            "This is a defect"
        )


class ShortMessages:
    """A channel of short messages between all ranks. Those of one sender arrive in order.

    No method blocks. One thread at a time may use it, as with the Transport that owns it. Only
    this object may receive messages with `tag` on `comm`.
    """

    def __init__(self, mpi: Any, comm: MPI.Comm, tag: int) -> None:
        self._mpi = mpi
        self._comm = comm
        self._tag = tag
        self._status = mpi.Status()
        self._unsent: list[tuple[MPI.Request, bytes]] = []
        # MPI matches messages with the receives in the order in which both were posted.
        self._receives: deque[tuple[MPI.Request, bytearray]] = deque(
            (self._receive(buffer), buffer)
            for buffer in (bytearray(SHORT_MESSAGE_MAX) for _ in range(_N_RECEIVES))
        )

    def _receive(self, buffer: bytearray) -> MPI.Request:
        return self._comm.Irecv([buffer, self._mpi.BYTE], self._mpi.ANY_SOURCE, self._tag)

    def send(self, dest: int, data: bytes) -> None:
        """Send a message of at most SHORT_MESSAGE_MAX bytes. Messages to dead ranks are lost.

        Raises RingcommError if the message is longer, and WireFault if MPI fails.
        """
        require_fit(data, dest)
        try:
            request = self._comm.Isend([data, self._mpi.BYTE], dest, self._tag)
            if not self._is_sent(request):
                self._unsent.append((request, data))
        except self._mpi.Exception as error:
            if not self._is_of_a_death(error):
                raise WireFault(str(error)) from error

    def collect(self) -> list[ShortMessage]:
        """Return the messages that have arrived. Raises WireFault."""
        messages: list[ShortMessage] = []
        try:
            if self._unsent:
                self._unsent = [each for each in self._unsent if not self._is_sent(each[0])]
            while self._has_come(self._receives[0][0]):
                _, buffer = self._receives.popleft()
                nbytes = self._status.Get_count(self._mpi.BYTE)
                messages.append(
                    ShortMessage(self._status.source, bytes(memoryview(buffer)[:nbytes]))
                )
                self._receives.append((self._receive(buffer), buffer))
        except self._mpi.Exception as error:
            raise WireFault(str(error)) from error
        return messages

    def _has_come(self, request: MPI.Request) -> bool:
        try:
            return bool(request.Test(self._status))
        except self._mpi.Exception as error:
            if not self._is_of_a_death(error):
                raise
            self._comm.Ack_failed()  # the receive goes on; without this it never would
            # Open MPI leaves the error in a receive that a message has completed meanwhile.
            return bool(request.Get_status(self._status))

    def _is_sent(self, request: MPI.Request) -> bool:
        try:
            return bool(request.Test())
        except self._mpi.Exception as error:
            if self._is_of_a_death(error):
                return True  # it is lost
            raise

    def _is_of_a_death(self, error: MPI.Exception) -> bool:
        """Return True if MPI survives the death of a rank (ULFM), and reports one."""
        names = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING")
        return error.Get_error_class() in [getattr(self._mpi, name, None) for name in names]

    @property
    def n_unsent(self) -> int:
        return len(self._unsent)

    def close(self) -> None:
        for request, _ in self._receives:
            request.Cancel()
            request.Wait()
        self._receives.clear()
