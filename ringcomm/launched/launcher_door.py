"""The library by which prterun and prted let in their own user alone: csrc/launcher_door.cpp."""

from __future__ import annotations

import importlib.util
import os
import re
from typing import Final

PRELOAD: Final = "LD_PRELOAD"
LAUNCH_AGENT: Final = "PRTE_MCA_prte_launch_agent"  # of Open MPI 5: what starts prted elsewhere
_NAME: Final = "ringcomm-launcher-door.so"  # as in rank_program.py, which takes it from ranks
_SCRIPT: Final = "prted_with_door.sh"
# Shells of other hosts read the paths; PRRTE 3 forwards none behind "=" from daemon to daemon.
_PLAIN: Final = re.compile(r"[\w./+,@%-]+")


def with_door(preload: str) -> str:
    """Return the value of LD_PRELOAD with the library last; "" if it cannot be there."""
    path = _library()
    if {*path} & {*": \t\n"}:  # which part the paths
        return ""
    return f"{preload}:{path}" if path and preload else path


def agent_with_door(agent: str) -> str:
    """Return the command that starts prted on another host with the library; "" if none can.

    Args:
        agent: the command that would start it without; "": prted.
    """
    path, script = _library(), os.path.join(os.path.dirname(os.path.abspath(__file__)), _SCRIPT)
    if not all(map(_PLAIN.fullmatch, (path, script))):
        return ""
    return f"/bin/sh {script} {path} {agent or 'prted'}"


def _library() -> str:
    core = importlib.util.find_spec("ringcomm._core")  # loads nothing, which takes 10 ms
    if core is None or core.origin is None:
        return ""
    path = os.path.join(os.path.dirname(core.origin), _NAME)
    return path if os.path.exists(path) else ""
