"""The library by which prterun lets in its own user alone: csrc/launcher_door.cpp."""

from __future__ import annotations

import importlib.util
import os
from typing import Final

PRELOAD: Final = "LD_PRELOAD"
_NAME: Final = "ringcomm-launcher-door.so"  # as in rank_program.py, which takes it from ranks


def with_door(preload: str) -> str:
    """Return the value of LD_PRELOAD with the library last; "" if it cannot be there."""
    core = importlib.util.find_spec("ringcomm._core")  # loads nothing, which takes 10 ms
    if core is None or core.origin is None:
        return ""
    path = os.path.join(os.path.dirname(core.origin), _NAME)
    if not os.path.exists(path) or {*path} & {*": \t\n"}:  # which part the paths
        return ""
    return f"{preload}:{path}" if preload else path
