"""Numbers of a group's distributed optimizers, and the weight of this rank in the current step."""

from __future__ import annotations

import math
from typing import Protocol
from weakref import WeakKeyDictionary, ref

from ringcomm.engine.core.engine import Engine
from ringcomm.engine.core.group import Group


class Weighed(Protocol):
    """An object that knows the number of samples whose mean is this rank's gradient."""

    @property
    def samples(self) -> float | None:
        """Number of samples; None: the gradient has no weight."""


_weighed: WeakKeyDictionary[Engine, ref[Weighed]] = WeakKeyDictionary()
_counts: WeakKeyDictionary[Group, int] = WeakKeyDictionary()


def next_number(group: Group) -> int:
    """Return a new number for an optimizer, which makes the names of its messages unique.

    It is the same on all ranks of the group, because numbers of dropped optimizers are not reused.
    """
    number = _counts.get(group, 0) + 1
    _counts[group] = number
    return number


def last_number(group: Group) -> int:
    return _counts.get(group, 0)


def go_on_from_number(group: Group, number: int) -> None:
    _counts[group] = number


def checked_samples(n: float) -> float:
    n = float(n)
    if not 0 <= n < math.inf:
        raise ValueError(f"set_samples({n:g}): a number of samples is finite and at least 0")
    return n


def note_samples(weighed: Weighed, engine: Engine) -> None:
    _weighed[engine] = ref(weighed)


def weight_of_step(engine: Engine) -> float:
    known = _weighed.get(engine)
    weighed = None if known is None else known()
    return 1.0 if weighed is None or weighed.samples is None else weighed.samples
