"""Letters: small messages of any length, for what does not know who writes next, or how much."""

from __future__ import annotations

from collections import deque
from typing import Any, Final, NamedTuple, TypeAlias

from ringcomm._core import WireFault
from ringcomm.errors import RingcommError

# Of mpi4py.MPI, which mpi_library.py alone imports.
Comm: TypeAlias = Any
Request: TypeAlias = Any

LETTER_MAX: Final = 1 << 14  # bytes
_N_RECEIVES: Final = 8  # waiting at a time: those of a burst need not be copied twice by MPI


class Letter(NamedTuple):
    """A message that has arrived."""

    source: int  # rank that sent it
    data: bytes  # its bytes; the receiver's own


def require_fit(data: bytes, dest: int) -> None:
    """Raise RingcommError if a letter is too long: where it arrives nobody could tell why."""
    if len(data) > LETTER_MAX:
        raise RingcommError(
            f"a letter of {len(data)} bytes to rank {dest}; {LETTER_MAX} are the most. This is a "
            "defect"
        )


class Mail:
    """A channel of letters between all ranks. Those of one sender arrive in order.

    Nothing blocks. For one thread at a time, like the Transport that it belongs to.

    Args:
        mpi: the module mpi4py.MPI.
        comm: nobody else may receive this tag.
        tag: see comm.
    """

    def __init__(self, mpi: Any, comm: Comm, tag: int) -> None:
        self._mpi = mpi
        self._comm = comm
        self._tag = tag
        self._status = mpi.Status()
        self._unsent: list[tuple[Request, bytes]] = []
        self._buffers = [bytearray(LETTER_MAX) for _ in range(_N_RECEIVES)]
        # MPI matches letters with the receives in the order in which both were posted.
        self._receives: deque[tuple[Request, bytearray]] = deque(
            (self._receive(buffer), buffer) for buffer in self._buffers
        )

    def _receive(self, buffer: bytearray) -> Request:
        return self._comm.Irecv([buffer, self._mpi.BYTE], self._mpi.ANY_SOURCE, self._tag)

    def send(self, dest: int, data: bytes) -> None:
        """Send at most LETTER_MAX bytes, else RingcommError; to a dead rank, nothing."""
        require_fit(data, dest)
        try:
            request = self._comm.Isend([data, self._mpi.BYTE], dest, self._tag)
            if not request.Test():
                self._unsent.append((request, data))
        except self._mpi.Exception as error:
            raise WireFault(str(error)) from error

    def collect(self) -> list[Letter]:
        """Return what has arrived."""
        letters: list[Letter] = []
        try:
            if self._unsent:
                self._unsent = [each for each in self._unsent if not each[0].Test()]
            while self._receives[0][0].Test(self._status):
                _, buffer = self._receives.popleft()
                nbytes = self._status.Get_count(self._mpi.BYTE)
                letters.append(Letter(self._status.source, bytes(memoryview(buffer)[:nbytes])))
                self._receives.append((self._receive(buffer), buffer))
        except self._mpi.Exception as error:
            raise WireFault(str(error)) from error
        return letters

    @property
    def n_unsent(self) -> int:
        """How many letters the wire has not taken yet."""
        return len(self._unsent)

    def close(self) -> None:
        """Cancel what is waited for."""
        for request, _ in self._receives:
            request.Cancel()
            request.Wait()
        self._receives.clear()
