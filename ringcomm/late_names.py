"""Finds the public names of a package, whose modules are imported when a name is first used."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Container, Sequence
from typing import Any


def find(package: str, name: str, public: Container[str], homes: Sequence[str]) -> Any:
    """Return what a package calls `name`; for its __getattr__().

    Args:
        public: names of the package.
        homes: its modules that define them, in the order in which they are imported. A name that
            none of them defines is itself a module.

    Raises:
        AttributeError: the package has no such name.
    """
    if name not in public:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    was_enabled = gc.isenabled()
    gc.disable()  # there is little garbage, and to look for it takes a tenth of the time
    try:
        for home in homes:
            module = importlib.import_module(f"{package}.{home}")
            if hasattr(module, name):
                return getattr(module, name)
        return importlib.import_module(f"{package}.{name}")
    finally:
        if was_enabled:
            gc.enable()
