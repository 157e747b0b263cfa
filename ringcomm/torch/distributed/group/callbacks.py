"""Names for operations that callbacks of Futures start: ranks match them by their path.

Callbacks run when their operation is over, in threads of their own or at once: in an order that
differs from rank to rank. Hooks of DDP communicate in them (PowerSGD), for several buckets at a
time. So an operation that a callback starts has a name, the way to it from the operation whose end
ran the callback:

    allreduce_[#12>compute_qs:592>1]

is the first that the function compute_qs, of line 592, starts in the chain of callbacks behind
operation #12 of the group. No rank need start it before or after any other.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from ringcomm.torch.distributed import compat

_LONGEST = 200  # characters of a path: a callback may start what runs a callback, and so on


class Path(NamedTuple):
    """The way to an operation or a callback from an operation of this group; alike on all ranks."""

    group: int
    steps: str

    def then(self, step: str) -> Path:
        """Return the way that goes on by `step`."""
        steps = f"{self.steps}>{step}"
        if len(steps) > _LONGEST:
            digest = hashlib.blake2b(steps.encode(), digest_size=12).hexdigest()
            steps = f"{self.steps[:20]}...{digest}>{step[-80:]}"
        return Path(self.group, steps)

    def name_in(self, group: int) -> str:
        """Return the name of an operation in `group`, to which this is the way."""
        return self.steps if group == self.group else f"group {self.group}, {self.steps}"


@dataclass
class _Callback:
    """A callback at work: the way to it, and how many operations it has started in each group."""

    path: Path | None
    counts: Counter[int] = field(default_factory=Counter)


@dataclass
class _Followed:
    """A Future: the way to its operation, or to the callback whose result it is."""

    path: Path | None
    labels: Counter[str] = field(default_factory=Counter)


class _Here(threading.local):
    callback: _Callback | None = None


_here = _Here()
_futures: WeakKeyDictionary[Any, _Followed] = WeakKeyDictionary()


def path_here(group: int) -> Path | None:
    """Return the way to the operation that this thread starts now; None outside of callbacks."""
    callback = _here.callback
    if callback is None or callback.path is None:
        return None
    callback.counts[group] += 1
    return callback.path.then(str(callback.counts[group]))


def is_in_callback() -> bool:
    """Return True if what this thread starts now has a name."""
    return _here.callback is not None and _here.callback.path is not None


@compat.untraced
def follow(future: Any, path: Path | None) -> None:
    """Name the operations that callbacks of a new Future start; without a path, order matches."""
    compat.wrap_callbacks(_wrapped)
    _futures[future] = _Followed(path)


@compat.untraced
def _wrapped(future: Any, callback: Any) -> tuple[Any, Callable[[Any], None] | None]:
    """Return what is to run in place of a callback, and what is to see the Future of its result."""
    followed = _futures.get(future)
    if followed is None:
        return callback, None
    path = None
    if followed.path is not None:
        label = _label(callback)
        followed.labels[label] += 1
        n = followed.labels[label]
        path = followed.path.then(label if n == 1 else f"{label}({n})")
    call = functools.partial(_run, callback, path, followed)
    return call, lambda result: follow(result, path)


def _run(callback: Any, path: Path | None, followed: _Followed, ended: Any) -> Any:
    if ended not in _futures:  # nobody holds the object that then() was called on
        _futures[ended] = followed
    before, _here.callback = _here.callback, _Callback(path)
    try:
        return callback(ended)
    finally:
        _here.callback = before


_run = compat.untraced(_run, with_callees=False)


def _label(callback: Any) -> str:
    """Return "compute_qs:592".

    Not a number: a rank may give callbacks to a Future that others do not, to write a log.
    """
    while isinstance(callback, functools.partial):
        callback = callback.func
    callback = getattr(callback, "__func__", callback)
    name = getattr(callback, "__qualname__", type(callback).__qualname__).rpartition(".")[2]
    code = getattr(callback, "__code__", None)
    return name if code is None else f"{name}:{code.co_firstlineno}"
