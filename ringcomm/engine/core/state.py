"""The state of an engine: usable, broken or closed, and only in the process of its rank."""

from __future__ import annotations

import copy
import os

from ringcomm.errors import (
    CommTimeoutError,
    NotInitializedError,
    PeerFailedError,
    RingcommError,
)
from ringcomm.transport.watch import Watch

_n_forks = 0


def n_forks() -> int:
    """Return how many forks lie between this process and the one that imported ringcomm.

    To ask for the process id is a system call, which for the shortest operations is too much.
    """
    return _n_forks


def _count() -> None:
    global _n_forks  # noqa: PLW0603 - a fact of the process
    _n_forks += 1


os.register_at_fork(after_in_child=_count)


class EngineState:
    """The state of one engine; any thread may ask."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._pid, self.n_forks = os.getpid(), n_forks()
        self.is_closed = False  # this rank is leaving, or has left
        self.error: RingcommError | None = None  # broke the engine; every later call raises it
        self.broke_while_leaving: RingcommError | None = None  # kept what was begun from its end

    def require_own_process(self) -> None:
        """Raise NotInitializedError in a child of the rank."""
        if self.n_forks != n_forks():
            raise NotInitializedError(
                f"this process (pid {os.getpid()}) is a child of rank {self._watch.transport.rank} "
                f"(pid {self._pid}); only the rank itself can communicate. Do it there, and hand "
                "the result to the child"
            )

    def require_usable(self) -> None:
        """Raise what an operation would, if the engine was shut down or is broken."""
        if self.is_closed:
            raise NotInitializedError("ringcomm was shut down: call ringcomm.init() again first")
        if self.error is not None:
            self.require_unbroken()

    def require_unbroken(self) -> None:
        """Raise what broke the engine, if anything did."""
        if self.error is not None:
            raise copy.copy(self.error) from self.error

    @property
    def is_broken(self) -> bool:
        """True once it cannot be used any more."""
        return self.error is not None

    @property
    def has_waited_in_vain(self) -> bool:
        """True if that is all that went wrong: no rank is known to have failed."""
        is_others_fault = isinstance(self.error, CommTimeoutError | PeerFailedError)
        has_failed = self._watch.own_failure is not None or bool(self._watch.peers.dead)
        return is_others_fault and not has_failed

    def break_off(self, label: str, error: BaseException) -> bool:
        """Make the engine unusable and tell the other ranks; return False if it was so before."""
        if self.error is not None:
            return False
        self.error = _lasting(label, error)
        watch, transport = self._watch, self._watch.transport
        if isinstance(error, PeerFailedError):
            watch.announce_broken(error.rank, error.reason)
        elif not isinstance(error, CommTimeoutError):
            watch.announce_failed(transport.rank, f"broke off {label}: {_text_of(error)}")
        if transport.node is not None:
            transport.node.abandon()  # behind the words: who meets with it knows why by then
        return True

    def copy_of_error(self) -> RingcommError:
        """Return an error of its own for one of the operations that end."""
        return copy.copy(self.error or RingcommError("the engine is unusable"))


def _lasting(label: str, error: BaseException) -> RingcommError:
    """Return what every later call raises."""
    if isinstance(error, RingcommError):
        return error
    return RingcommError(
        f"{label}: was broken off by {_text_of(error)}; the engine cannot be "
        "used any more. End this job"
    )


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
