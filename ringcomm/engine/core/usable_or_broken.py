"""The state of an engine: usable, broken or closed; unusable in children of its process."""

from __future__ import annotations

import copy
import os
from weakref import WeakSet

from ringcomm.errors import CommTimeoutError, NotInitializedError, PeerFailedError, RingcommError
from ringcomm.transport.control_messages import Watch

_states: WeakSet[EngineState] = WeakSet()


def _note_fork() -> None:
    for state in _states:
        state.is_in_child, state.is_usable = True, False


os.register_at_fork(after_in_child=_note_fork)


class EngineState:
    """The state of one engine; any thread may read it.

    Attributes:
        is_usable: it is not in a child, closed or broken. The shortest operations look at this
            alone: a call of getpid(), or three comparisons, would be slow for them.
        is_in_child: this process is a child of the rank.
        is_closed: this rank is leaving, or has left.
        error: that broke the engine.
        broke_while_leaving: the error of leave(), if any.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._pid = os.getpid()
        self.is_usable, self.is_in_child, self.is_closed = True, False, False
        self.error: RingcommError | None = None
        self.broke_while_leaving: RingcommError | None = None
        _states.add(self)

    def close(self) -> None:
        self.is_closed, self.is_usable = True, False

    def fail(self, error: RingcommError) -> None:
        self.error, self.is_usable = self.error or error, False

    def require_own_process(self) -> None:
        if self.is_in_child:
            raise NotInitializedError(
                f"this process (pid {os.getpid()}) is a child of rank {self._watch.transport.rank} "
                f"(pid {self._pid}); only the rank itself can communicate. Do so there, and pass "
                "the result to the child"
            )

    def require_usable(self) -> None:
        if self.is_usable:
            return
        self.require_own_process()
        if self.is_closed:
            raise NotInitializedError("ringcomm was shut down: call ringcomm.init() again first")
        self.require_unbroken()

    def require_unbroken(self) -> None:
        if self.error is not None:
            raise copy.copy(self.error) from self.error

    @property
    def is_broken(self) -> bool:
        return self.error is not None

    @property
    def has_waited_in_vain(self) -> bool:
        """True if a wait for others broke the engine, and no rank is known to have failed."""
        is_others_fault = isinstance(self.error, CommTimeoutError | PeerFailedError)
        has_failed = self._watch.own_failure is not None or bool(self._watch.peers.dead)
        return is_others_fault and not has_failed

    def break_off(self, label: str, error: BaseException) -> bool:
        """Make the engine unusable and announce that; return False if it was unusable already."""
        if self.error is not None:
            return False
        text = f"{label}: was broken off by {_text_of(error)}; the engine cannot be used any more. "
        lasting = (
            error if isinstance(error, RingcommError) else RingcommError(f"{text}End this job")
        )
        self.fail(lasting)  # every later call raises it
        watch, transport = self._watch, self._watch.transport
        if isinstance(error, PeerFailedError):
            watch.announce_broken(error.rank, error.reason)
        elif not isinstance(error, CommTimeoutError):
            watch.announce_failed(transport.rank, f"broke off {label}: {_text_of(error)}")
        if transport.node is not None:
            transport.node.abandon()  # after the announcement, so that the others know why
        return True

    def copy_of_error(self) -> RingcommError:
        return copy.copy(self.error or RingcommError("the engine is unusable"))


def _text_of(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return ", ".join([text, *getattr(error, "__notes__", ())])
