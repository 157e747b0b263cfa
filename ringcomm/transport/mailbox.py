"""Questions to rank 0 at any time, over a communicator of their own: small, rare, and slow.

Beside the engine: it needs no agreement, and a rank need not take part in anything to be answered.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from ringcomm.errors import CommTimeoutError, ConfigError
from ringcomm.transport.mpi_library import start_mpi

_QUESTION, _ANSWER = 1, 2
_NAP_S, _LONGEST_NAP_S = 1e-3, 20e-3  # of rank 0's thread: 0.1 % of a core when nobody asks
_GROWTH = 1.05


class Mailbox:
    """This rank's end. Collective to make, on all ranks of MPI's world.

    Attributes:
        rank: of this process.

    Raises:
        ConfigError: MPI was started without support for threads.
    """

    def __init__(self) -> None:
        self._mpi = start_mpi().mpi
        if self._mpi.Query_thread() < self._mpi.THREAD_MULTIPLE:
            raise ConfigError(
                "mpi-nosock:// needs MPI started with THREAD_MULTIPLE: let ringcomm start MPI, or "
                'use init_method="mpi://"'
            )
        self._comm = self._mpi.COMM_WORLD.Dup()
        self.rank: int = self._comm.Get_rank()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def serve(self, answer: Callable[[bytes], bytes]) -> None:
        """On rank 0: let a thread answer what the others ask, as long as `answer`'s owner lives."""
        method = weakref.WeakMethod(answer)
        self._thread = threading.Thread(
            target=_serve,
            args=(self._mpi, self._comm, self._closed, method),
            name="ringcomm-store",
            daemon=True,
        )
        self._thread.start()
        atexit.register(self.close)  # before MPI ends, for exit handlers run in reverse order

    def ask(self, question: bytes, timeout_s: float) -> bytes:
        """Return rank 0's answer; one thread at a time.

        Raises:
            CommTimeoutError: there is none within timeout_s.
        """
        sending = self._comm.Isend(np.frombuffer(question, np.uint8), 0, _QUESTION)
        deadline, nap = time.monotonic() + timeout_s, _NAP_S / 10
        status = self._mpi.Status()
        while (message := self._comm.Improbe(0, _ANSWER, status)) is None:
            if time.monotonic() >= deadline:
                raise CommTimeoutError(
                    f"rank {self.rank} has waited {timeout_s:g} s for rank 0 to answer, which "
                    "keeps the store: it has ended, or hangs",
                    missing=[0],
                )
            time.sleep(nap)
            nap = min(nap * _GROWTH, _LONGEST_NAP_S)
        buffer = np.empty(status.Get_count(), np.uint8)
        message.Recv(buffer)
        sending.Wait()
        return buffer.tobytes()

    def close(self) -> None:
        """Answer nobody any more."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(timeout=5)


def _serve(mpi: Any, comm: Any, closed: threading.Event, answer: Any) -> None:
    nap, status = _NAP_S, mpi.Status()
    sending: list[tuple[Any, Any]] = []  # a request, and what it sends
    # What MPI raises is a death, which the engine hears of and tells.
    with contextlib.suppress(mpi.Exception):
        while not closed.is_set() and (method := answer()) is not None:
            message = comm.Improbe(mpi.ANY_SOURCE, _QUESTION, status)
            if message is None:
                del method
                closed.wait(nap)
                nap = min(nap * _GROWTH, _LONGEST_NAP_S)
                continue
            nap = _NAP_S
            source = status.Get_source()
            buffer = np.empty(status.Get_count(), np.uint8)
            message.Recv(buffer)
            reply = np.frombuffer(method(buffer.tobytes()), np.uint8)
            sending = [each for each in sending if not each[0].Test()]
            sending.append((comm.Isend(reply, source, _ANSWER), reply))
