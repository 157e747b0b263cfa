"""One operation's view of the wire, and the one loop in which this library waits.

Test, back off, and every few polls look around: control messages, deaths, the deadline. So a rank
that waits for a live one hears of a third's death, and no wait outlasts RINGCOMM_TIMEOUT_S.
"""

from __future__ import annotations

import contextlib
import logging
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NoReturn, Protocol

from ringcomm.arrays.base import Bytes
from ringcomm.errors import CommTimeoutError, PeerFailedError, RingcommError
from ringcomm.transport.base import DATA, Request, Transport, WireFault
from ringcomm.transport.watch import Watch

_log = logging.getLogger("ringcomm")

_SPINS = 64  # polls before the first nap; about 30 us over MPI
_LOOK_EVERY = 16
# A nap of 20 us burns 26-38 % of a core, 200 us 5 %, 1 ms 2 % (measured over Open MPI).
_NAP_S, _LONGEST_NAP_S = 20e-6, 1e-3
_ANSWER_S = 0.5  # time for "who is here?" to be answered before a warning or an error names ranks
_CONFIRM_S = 2.0  # time for a refused message to turn out as a death


@dataclass(frozen=True)
class Operation:
    """What is waited for, in the words of the user.

    Attributes:
        label: "allreduce[layer3.weight]".
        sequence: its number, alike on all ranks.
        timeout_s: deadline of each wait in it; math.inf = none.
        stall_warning_s: a wait of this long is reported; math.inf = never.
    """

    label: str
    sequence: int
    timeout_s: float
    stall_warning_s: float


class Phases(Protocol):
    """Who keeps the time of what an operation does; see ringcomm.engine.timeline."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context that records its block."""
        ...


_UNSEEN = contextlib.nullcontext()


class Channel:
    """Messages of one operation among all ranks."""

    def __init__(
        self,
        transport: Transport,
        watch: Watch,
        operation: Operation,
        tag: int = DATA,
        phases: Phases | None = None,
    ) -> None:
        self.rank = transport.rank
        self.size = transport.size
        self.transport = transport
        self.operation = operation
        self._watch = watch
        self._tag = tag
        self._phases = phases
        self._posted: set[Request] = set()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context that puts its block on the timeline: "wait", "reduce", "copy"."""
        return _UNSEEN if self._phases is None else self._phases.phase(name)

    def isend(self, data: Bytes, dest: int) -> Request:
        """Start to send `data`, which must not change until wait() has returned."""
        try:
            return self._remember(self.transport.isend(data, dest, self._tag))
        except WireFault as fault:
            self._explain(fault)

    def irecv(self, out: Bytes, source: int) -> Request:
        """Start to receive exactly out.nbytes bytes."""
        try:
            return self._remember(self.transport.irecv(out, source, self._tag))
        except WireFault as fault:
            self._explain(fault)

    def exchange(self, data: Bytes, dest: int, out: Bytes, source: int) -> None:
        """Send to one rank while receiving from another; return when both are done."""
        self.wait(self.irecv(out, source), self.isend(data, dest))

    def wait(self, *requests: Request) -> None:
        """Return when all requests are complete.

        Raises:
            PeerFailedError: a rank of this operation died, failed or left.
            CommTimeoutError: the deadline passed.
        """
        try:
            with self.phase("wait"):
                self._wait(list(requests))
        except WireFault as fault:
            self._explain(fault)
        self._posted.difference_update(requests)

    def abandon(self) -> None:
        """Give up on whatever is under way, after any error: its buffers must stay alive."""
        self.transport.abandon(list(self._posted))
        self._posted.clear()

    def _remember(self, request: Request) -> Request:
        self._posted.add(request)
        return request

    def _wait(self, pending: list[Request]) -> None:
        start = time.monotonic()
        patience = _Patience(self.operation, self._watch, start)
        polls, nap = 0, _NAP_S
        while True:
            pending[:] = [request for request in pending if not request.test()]
            if not pending:
                return
            polls += 1
            if polls < _SPINS and polls % _LOOK_EVERY:
                continue
            self._watch.poll()
            patience.check(time.monotonic())
            self._raise_if_hopeless()
            if polls >= _SPINS:
                self.transport.park(nap)
                nap = min(nap * 1.5, _LONGEST_NAP_S)

    def _raise_if_hopeless(self, cause: Exception | None = None) -> None:
        gave_up = self._watch.peers.gave_up
        if gave_up is not None and gave_up.sequence <= self.operation.sequence:
            raise CommTimeoutError(gave_up.message, missing=gave_up.missing)
        obstacle = self._watch.obstacle()
        if obstacle is None:
            return
        who = "this rank"
        if obstacle.rank != self.rank:
            who = self.transport.label(obstacle.rank)
        raise PeerFailedError(
            f"{self.operation.label}: {who} {obstacle.reason}; the operation cannot complete. "
            "Mend that rank's failure first; this rank only waited for it.",
            rank=obstacle.rank,
            reason=obstacle.reason,
        ) from cause

    def _explain(self, fault: WireFault) -> NoReturn:
        deadline = time.monotonic() + _CONFIRM_S
        while time.monotonic() < deadline:
            self._watch.poll()
            self._raise_if_hopeless(fault)
            self.transport.park(_LONGEST_NAP_S)
        raise RingcommError(
            f"{self.operation.label}: the wire refused a message and no rank is known to be dead: "
            f"{fault}. The engine cannot be used any more; end this job."
        ) from fault


class _Patience:
    """Warns once, then gives up for all ranks; asks around first, so that both name the missing."""

    def __init__(self, operation: Operation, watch: Watch, start: float) -> None:
        self._operation = operation
        self._watch = watch
        self._start = start
        self._ask_at = self._start + operation.stall_warning_s
        self._warn_at: float | None = None
        self._deadline = self._start + operation.timeout_s
        self._give_up_at: float | None = None

    def check(self, now: float) -> None:
        if now >= self._ask_at:
            self._ask_at = float("inf")
            self._warn_at = now + _ANSWER_S
            self._watch.ask_who_is_here()
        if self._warn_at is not None and now >= self._warn_at:
            self._warn_at = None
            _log.warning("%s", self._text(now))
        if now >= self._deadline:
            self._deadline = float("inf")
            self._give_up_at = now + min(_ANSWER_S, self._operation.timeout_s)
            self._watch.ask_who_is_here()
        if self._give_up_at is not None and now >= self._give_up_at:
            message = (
                f"{self._text(now)} RINGCOMM_TIMEOUT_S={self._operation.timeout_s:g} is over. "
                "The engine cannot be used any more; end this job, or raise the limit."
            )
            missing = self._watch.peers.missing(self._operation.sequence)
            self._watch.announce_gave_up(missing, message)

    def _text(self, now: float) -> str:
        waited = (
            f"{self._operation.label}: rank {self._watch.transport.rank} has waited "
            f"{now - self._start:.1f} s"
        )
        missing = self._watch.peers.missing(self._operation.sequence)
        if not missing:
            return f"{waited}; all ranks have entered it, so the network or a rank is slow."
        ranks = ", ".join(map(str, missing))
        plural = "s" if len(missing) > 1 else ""
        return f"{waited} for rank{plural} {ranks}, which did not answer or did not enter it."
