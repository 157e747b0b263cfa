"""The enums of the status page (csrc/status/page.hpp). Pure."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

BUSY: Final = "busy_s"  # the scalar of a server by which `ringcomm top` tells that it is slow

SPARE, RESERVE = "spare", "reserve"  # roles of processes without a place in an elastic job


class PageState(IntEnum):
    STARTING = 0
    RUNNING = 1
    LEAVING = 2
    LEFT = 3


class OpState(IntEnum):
    IDLE = 0
    RUNNING = 1
    FAILED = 2


class Ending(IntEnum):
    NONE = 0
    EXCEPTION = 1
    SYS_EXIT = 2
    OS_EXIT = 3
    FATAL_SIGNAL = 4
    PEER_FAILED = 5
    INTERRUPTED = 6
    TERMINATED = 7
    MPI_ABORT = 8


class Mail(IntEnum):
    """State of the mailbox of `ringcomm ctl`."""

    FREE = 0
    WRITTEN = 1
    ASKED = 2
    TAKEN = 3
    ANSWERED = 4
