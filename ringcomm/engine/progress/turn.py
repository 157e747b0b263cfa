"""Whose turn it is to carry out a rank's operations: one thread's at a time."""

from __future__ import annotations

import threading

from ringcomm.errors import RingcommError


class Mark:
    """One wait of one thread, for an operation or for the turn."""

    __slots__ = ("thread",)

    def __init__(self) -> None:
        self.thread = threading.get_ident()


def is_own_turn(driver: Mark | None) -> bool:
    """Return True if this thread carries out the operations; `driver`: see refuse_own_turn()."""
    return driver is not None and driver.thread == threading.get_ident()


def refuse_own_turn(driver: Mark | None, what: str) -> None:
    """Refuse a wait of the thread that carries out the operations: it would wait for itself.

    Args:
        driver: of the thread whose turn it is; None: nobody's.
        what: this thread is about to wait for.

    Raises:
        RingcommError: it is this thread's turn.
    """
    if is_own_turn(driver):
        raise RingcommError(
            f"{what}: waited for by thread {threading.current_thread().name!r} while it carries "
            "out this rank's operations, so that the wait would never end. A callback of "
            "when_done() must not wait, nor may reading an array that is passed to a collective: "
            "wait before the call, or in another thread"
        )
