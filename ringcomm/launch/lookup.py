"""Things by name, so that a table of them imports none."""

from __future__ import annotations

import importlib
from typing import Any


def lookup(target: str) -> Any:
    """Return what "module:name" means; the module is imported now."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
