"""Describes in words how a rank ended, from its status page."""

from __future__ import annotations

import signal
from typing import Any

from ringcomm.status.page_enums import Ending


def how_it_ended(snapshot: dict[str, Any]) -> str:
    """Return how the rank of this page ended, in words ("raised ValueError: boom")."""
    kind, code, what = snapshot["end_kind"], snapshot["end_code"], snapshot["end_what"]
    last_line = (snapshot["end_where"].splitlines() or [what])[-1]
    words = {
        Ending.EXCEPTION: f"raised {last_line}",
        Ending.INTERRUPTED: f"raised {last_line}",
        Ending.SYS_EXIT: f"called sys.exit({code})",
        Ending.OS_EXIT: f"called os._exit({code})",
        Ending.MPI_ABORT: f"called MPI_Abort({code})",
        Ending.PEER_FAILED: f"stopped because rank {code} failed",
        Ending.TERMINATED: "was ended by SIGTERM",
    }
    if kind == Ending.FATAL_SIGNAL:
        return f"died of {signal.Signals(code).name}"
    return words.get(kind, "died without a word (SIGKILL, out of memory, _exit or exec in C code)")
