"""The enums of the status page (csrc/status/page.hpp), and endings in words."""

from __future__ import annotations

import signal
from enum import IntEnum
from typing import Any


class State(IntEnum):
    """State of a rank."""

    STARTING = 0
    RUNNING = 1
    LEAVING = 2
    LEFT = 3


class OpState(IntEnum):
    """State of the operation on the page."""

    IDLE = 0
    RUNNING = 1
    FAILED = 2


class Ending(IntEnum):
    """How a rank ended."""

    NONE = 0
    EXCEPTION = 1
    SYS_EXIT = 2
    OS_EXIT = 3
    FATAL_SIGNAL = 4
    PEER_FAILED = 5
    INTERRUPTED = 6
    TERMINATED = 7


def how_it_ended(snapshot: dict[str, Any]) -> str:
    """Return how the rank of this page ended, in words ("raised ValueError: boom")."""
    kind, code, what = snapshot["end_kind"], snapshot["end_code"], snapshot["end_what"]
    last_line = (snapshot["end_where"].splitlines() or [what])[-1]
    words = {
        Ending.EXCEPTION: f"raised {last_line}",
        Ending.INTERRUPTED: f"raised {last_line}",
        Ending.SYS_EXIT: f"called sys.exit({code})",
        Ending.OS_EXIT: f"called os._exit({code})",
        Ending.PEER_FAILED: f"stopped because rank {code} failed",
        Ending.TERMINATED: "was ended by SIGTERM",
    }
    if kind == Ending.FATAL_SIGNAL:
        return f"died of {signal.Signals(code).name}"
    return words.get(kind, "died without a word (SIGKILL, out of memory, _exit or exec in C code)")
