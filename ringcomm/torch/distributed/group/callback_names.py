"""Gives names to operations that callbacks of Futures start, so that ranks can match these.

A callback runs when its operation is over, in another thread or at once. So ranks run the callbacks
of several operations in different orders, and the operations that these callbacks start cannot be
matched by order. (Hooks of DDP such as PowerSGD start operations for several buckets at a time.)
Such an operation gets a name: its path from the operation that the callback belongs to. The name

    allreduce_[#12>compute_qs:592>1]

is that of the first operation that the function compute_qs, at line 592, starts as a callback of
operation #12 of the group.
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

from ringcomm.torch.distributed.compat import wrap_callbacks
from ringcomm.torch.untraced import untraced

_LONGEST = 200  # characters of a path, which grows with each callback of a callback's operation


class Path(NamedTuple):
    """The path from an operation of a group to a callback or operation; the same on all ranks."""

    group: int
    steps: str

    def then(self, step: str) -> Path:
        steps = f"{self.steps}>{step}"
        if len(steps) > _LONGEST:
            digest = hashlib.blake2b(steps.encode(), digest_size=12).hexdigest()
            steps = f"{self.steps[:20]}...{digest}>{step[-80:]}"
        return Path(self.group, steps)

    def name_in(self, group: int) -> str:
        return self.steps if group == self.group else f"group {self.group}, {self.steps}"


@dataclass
class _Counted:
    """The path of a callback or Future, with counts of the steps that follow it.

    A callback counts the operations that it starts, by group; a Future counts its callbacks, by
    label. The path of a Future is that of its operation, or of the callback that returns its value.
    """

    path: Path | None
    counts: Counter[int | str] = field(default_factory=Counter)


class _CallbackThread(threading.local):
    callback: _Counted | None = None


_this_thread = _CallbackThread()
_futures: WeakKeyDictionary[Any, _Counted] = WeakKeyDictionary()


def path_here(group: int) -> Path | None:
    """Return the path of the operation that this thread starts now; None outside of callbacks."""
    callback = _this_thread.callback
    if callback is None or callback.path is None:
        return None
    callback.counts[group] += 1
    return callback.path.then(str(callback.counts[group]))


def is_in_callback() -> bool:
    return _this_thread.callback is not None and _this_thread.callback.path is not None


@untraced
def follow(future: Any, path: Path | None) -> None:
    """Give names to operations that callbacks of a new Future start, unless `path` is None."""
    wrap_callbacks(_wrapped)
    _futures[future] = _Counted(path)


@untraced
def _wrapped(future: Any, callback: Any) -> tuple[Any, Callable[[Any], None] | None]:
    """Return the function that replaces a callback, and one to call with the Future of then()."""
    followed = _futures.get(future)
    if followed is None:
        return callback, None
    path = None
    if followed.path is not None:
        label = _label(callback)
        followed.counts[label] += 1
        n = followed.counts[label]
        path = followed.path.then(label if n == 1 else f"{label}({n})")
    call = functools.partial(_run, callback, path, followed)
    return call, lambda result: follow(result, path)


def _run(callback: Any, path: Path | None, followed: _Counted, ended: Any) -> Any:
    if ended not in _futures:  # the Python object that then() was called on is gone
        _futures[ended] = followed
    before, _this_thread.callback = _this_thread.callback, _Counted(path)
    try:
        return callback(ended)
    finally:
        _this_thread.callback = before


_run = untraced(_run, with_callees=False)


def _label(callback: Any) -> str:
    """Return a label such as "compute_qs:592".

    A label is not a number, because one rank alone may add a callback, such as one that logs.
    """
    while isinstance(callback, functools.partial):
        callback = callback.func
    callback = getattr(callback, "__func__", callback)
    name = getattr(callback, "__qualname__", type(callback).__qualname__).rpartition(".")[2]
    code = getattr(callback, "__code__", None)
    return name if code is None else f"{name}:{code.co_firstlineno}"
