"""Checks what ps.save() and the functions that read checkpoints are called with."""

from __future__ import annotations

import operator
import os
from numbers import Real
from pathlib import Path
from typing import Any

from ringcomm.integers import is_integer
from ringcomm.ps.protocol.frames import STEPS_MAX


def path_of(label: str, path: object, what: str = "path") -> Path:
    """Return a path of the user. Raises TypeError, ValueError: "" would be the present folder."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str):
        raise TypeError(f"{label}: {what} is {path!r}; it must be a str or a Path")
    if not text or "\0" in text:
        raise ValueError(
            f"{label}: {what} is {text!r}, which names nothing; the present folder is '.'"
        )
    return Path(text)


def folder_of(label: str, path: object) -> Path:
    return path_of(label, path).resolve()


def step_of(step: Any) -> int | None:
    """Return the step of a checkpoint. Raises TypeError, ValueError: no worker can go on there."""
    if step is None:
        return None
    number = _whole("step", step)
    if not 0 <= number < STEPS_MAX:
        raise ValueError(
            f"ps.save: step is {number}; it must be from 0 to {STEPS_MAX - 1}, or None"
        )
    return number


def require_keep(keep: Any) -> None:
    """Raise TypeError or ValueError unless so many checkpoints can be kept; None: all."""
    if keep is not None and _whole("keep", keep) < 1:
        raise ValueError(f"ps.save: keep is {keep}; it must be 1 or more, or None")


def require_periods(every_s: Any, every_steps: Any) -> None:
    """Raise TypeError or ValueError unless these can be between two checkpoints; None: unused."""
    if every_s is not None and (isinstance(every_s, bool) or not isinstance(every_s, Real)):
        raise TypeError(f"ps.save: every_s is {every_s!r}; it must be a number of seconds")
    if every_steps is not None:
        _whole("every_steps", every_steps)
    for name, value in (("every_s", every_s), ("every_steps", every_steps)):
        if value is not None and not float(value) > 0:
            raise ValueError(f"ps.save: {name} is {value!r}; it must be more than 0")


def _whole(name: str, value: Any) -> int:
    if not is_integer(value):
        raise TypeError(f"ps.save: {name} is {value!r}; it must be an integer")
    return operator.index(value)
