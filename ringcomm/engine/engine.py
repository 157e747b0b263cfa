"""Runs one collective at a time: agree, carry out, and know whether the next one can be trusted."""

from __future__ import annotations

import copy
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ringcomm._core import StatusPage
from ringcomm.config import Settings
from ringcomm.engine.agreement import agree
from ringcomm.engine.call import Call
from ringcomm.engine.timeline import Timeline
from ringcomm.errors import (
    CommTimeoutError,
    MismatchError,
    NotInitializedError,
    PeerFailedError,
    RingcommError,
)
from ringcomm.status.page import OpState, State
from ringcomm.transport.base import AGREE, DATA, Transport
from ringcomm.transport.channel import Channel, Operation
from ringcomm.transport.watch import Watch

_log = logging.getLogger("ringcomm")
_FAREWELL_NAP_S = 1e-3
R = TypeVar("R")


@dataclass(frozen=True)
class Plan(Generic[R]):
    """A collective that this rank is ready to carry out.

    Attributes:
        call: what all ranks must agree on.
        nbytes: size of the payload, for reports.
        run: moves the payload and returns the result.
    """

    call: Call
    nbytes: int
    run: Callable[[Channel], R]


@dataclass(frozen=True)
class Topology:
    """Where a rank stands. local: among the ranks of its host. cross: among hosts.

    Attributes:
        local_rank: index among the ranks of this host.
        local_size: number of ranks on this host.
        cross_rank: index of this host among the hosts that have this local_rank.
        cross_size: number of those hosts.
    """

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


class Engine:
    """The collectives of one rank.

    Attributes:
        rank: of this process, 0..size-1.
        size: number of ranks.
        topology: ranks of this host, and hosts.
        settings: deadlines and bucket size.
        watch: what is known of the other ranks.
        timeline: where its operations are recorded, or None.
    """

    def __init__(
        self,
        transport: Transport,
        settings: Settings,
        topology: Topology | None = None,
        page: StatusPage | None = None,
    ) -> None:
        self.rank = transport.rank
        self.size = transport.size
        self.topology = topology or Topology(self.rank, self.size, 0, 1)
        self.settings = settings
        self.watch = Watch(transport)
        self.timeline = Timeline(settings.timeline, self.rank) if settings.timeline else None
        self._transport = transport
        self._page = page
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._broken: RingcommError | None = None
        self._is_closed = False

    def execute(self, kind: str, name: str | None, plan: Callable[[], Plan[R]]) -> R:
        """Carry out one collective; blocks. Collective: every rank calls it.

        Args:
            kind: name of the collective, for a rank whose plan() fails.
            name: the user's name for it.
            plan: checks the arguments and says what to do. If it raises, this rank still takes
                part in the agreement, so that the others get a MismatchError instead of waiting.

        Raises:
            TypeError, ValueError, ...: plan() raised, in the same way on every rank.
            MismatchError: ranks disagree; the same on every rank; the engine works on.
            PeerFailedError: a rank died or left.
            CommTimeoutError: a rank did not come within RINGCOMM_TIMEOUT_S.
            NotInitializedError: after shutdown(), or in a child of this rank.
        """
        self._require_own_process()
        with self._lock:
            self._require_usable()
            self.watch.sequence += 1
            sequence = self.watch.sequence
            label = kind
            channels: list[Channel] = []
            problem: Exception | None = None
            try:
                ready, problem = _try(kind, name, plan)
                label = ready.call.label(sequence)
                self._begin(label, sequence, ready.nbytes)
                channels += [self._channel(label, sequence, tag) for tag in (AGREE, DATA)]
                with channels[0].phase("negotiation"):
                    agree(ready.call, channels[0])
                if problem is None:
                    result = ready.run(channels[1])
            except BaseException as error:
                for channel in channels:
                    channel.abandon()
                self._fail(label, error)
                if problem is not None:
                    raise error from problem
                raise
            self._end(OpState.IDLE, "done" if problem is None else "refused")
            if problem is not None:
                raise problem
            return result

    def meet(self, version: str) -> None:
        """Return when every rank runs this version and its guardian watches; first call of all."""
        call = Call("init", f"ringcomm {version}")
        self.execute("init", call.name, lambda: Plan(call, 0, lambda _: None))

    def note_step(self, step: int) -> None:
        """Write the number of completed training steps to the status page."""
        if self._page is not None:
            self._page.set_step(step)

    def record(self, timeline: Timeline | None) -> None:
        """Record operations from now on in `timeline`, or nowhere; closes the one before."""
        before, self.timeline = self.timeline, timeline
        if before is not None:
            before.close()

    def leave(self, how: str) -> bool:
        """Say that this rank takes part in nothing more; return when no other does.

        There is no deadline: a rank may evaluate for hours after the others are done. Whoever
        needs this rank after all gets a PeerFailedError, and a death ends this wait.

        Returns:
            True if every rank left in order, so that MPI can be finalized.
        """
        if self._is_closed or os.getpid() != self._pid:
            return False
        self._is_closed = True
        self._set_state(State.LEAVING)
        self.record(None)
        self.watch.announce_left(how)
        if self._broken is None:
            while self.watch.peers.still_here and not self.watch.peers.dead:
                self._transport.park(_FAREWELL_NAP_S)
                self.watch.poll()
        is_clean = self._broken is None and not self.watch.peers.dead
        self._transport.close(is_clean=is_clean)
        return is_clean

    def _require_own_process(self) -> None:
        if os.getpid() != self._pid:
            raise NotInitializedError(
                f"this process (pid {os.getpid()}) is a child of rank {self.rank} "
                f"(pid {self._pid}); only the rank itself can communicate. Do it there, and hand "
                "the result to the child"
            )

    def _require_usable(self) -> None:
        if self._is_closed:
            raise NotInitializedError("ringcomm was shut down: call ringcomm.init() again first")
        if self._broken is not None:
            raise copy.copy(self._broken) from self._broken

    def _channel(self, label: str, sequence: int, tag: int) -> Channel:
        operation = Operation(
            label,
            sequence,
            timeout_s=self.settings.timeout_or_inf,
            stall_warning_s=self.settings.stall_warning_or_inf,
        )
        return Channel(self._transport, self.watch, operation, tag, self.timeline)

    def _begin(self, label: str, sequence: int, nbytes: int) -> None:
        if self._page is not None:
            label = label.encode(errors="replace").decode()  # a lone surrogate has no UTF-8
            self._page.begin_op(label, sequence, nbytes)
        if self.timeline is not None:
            self.timeline.begin(label, nbytes)

    def _end(self, state: OpState, outcome: str) -> None:
        if self.timeline is not None:
            self.timeline.end(outcome)
        if self._page is not None:
            self._page.end_op(state)

    def _set_state(self, state: State) -> None:
        if self._page is not None:
            self._page.set_state(state)

    def _fail(self, label: str, error: BaseException) -> None:
        """Decide whether the engine survives `error`, which came out of an operation."""
        if isinstance(error, MismatchError):
            self._end(OpState.IDLE, "mismatch")
            return  # agreed on by all: no message is left over
        self._end(OpState.FAILED, "failed")
        if isinstance(error, RingcommError):
            self._broken = error
        else:
            self._broken = RingcommError(
                f"{label}: was broken off by {type(error).__name__}: {error}; the engine cannot be "
                "used any more. End this job"
            )
        if not isinstance(error, PeerFailedError | CommTimeoutError):
            self.watch.announce_failed(
                self.rank, f"broke off {label}: {type(error).__name__}: {error}"
            )


def _try(
    kind: str, name: str | None, plan: Callable[[], Plan[R]]
) -> tuple[Plan[R], Exception | None]:
    try:
        _require_name(name)
        return plan(), None
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
        name = name if isinstance(name, str) else None
        call = Call(kind, name, error=f"{type(error).__name__}: {error}")
        return Plan(call, 0, _never_run), error


def _require_name(name: object) -> None:
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be a str or None, not {name!r}")


def _never_run(_: Channel) -> Any:
    raise AssertionError("a call that could not be planned must not run")
