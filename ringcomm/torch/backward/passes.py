"""Finds the beginning and the end of a user's backward(), even if runs are nested in it."""

from __future__ import annotations

import functools
import weakref
from typing import Protocol

from ringcomm.torch.backward import autograd_hooks
from ringcomm.torch.backward.collective_tasks import CollectiveTask, finish_with_this_run


class PassListener(Protocol):
    """An object whose methods are called at the beginning and end of each pass (one backward())."""

    def begin_pass(self) -> None: ...

    def end_pass(self) -> CollectiveTask[None]:
        """Return the task that must end before backward() returns; not called after a failure."""


class _Pass(set[int]):
    """Runs of one backward(). Only autograd's callbacks refer to this set: a failure deletes it."""


class Passes:
    """The backward() calls of an optimizer, one at a time."""

    def __init__(self) -> None:
        self._current: weakref.ref[_Pass] | None = None

    @property
    def has_failed(self) -> bool:
        """True after a backward() that raised, until forget()."""
        return self._current is not None and self._current() is None

    def enter(self, listener: PassListener) -> None:
        """Note that autograd has called a hook; begin a pass if none is in progress."""
        current = None if self._current is None else self._current()
        if current is None:
            listener.begin_pass()
            current = _Pass()
            self._current = weakref.ref(current)
        run = autograd_hooks.current_run()
        if run not in current:
            current.add(run)
            autograd_hooks.at_end_of_run(functools.partial(self._end_run, listener, current))

    def forget(self) -> None:
        self._current = None

    def _end_run(self, listener: PassListener, which: _Pass) -> None:
        if not self._is_current(which):
            return
        if not autograd_hooks.within_outer_run(functools.partial(self._go_on, listener, which)):
            finish_with_this_run(self._end_pass(listener, which))

    def _go_on(self, listener: PassListener, which: _Pass) -> None:
        if self._is_current(which):
            self.enter(listener)

    def _end_pass(self, listener: PassListener, which: _Pass) -> CollectiveTask[None]:
        """End the pass. This task keeps `which` alive until it has ended."""
        yield from listener.end_pass()
        if self._is_current(which):
            self.forget()

    def _is_current(self, which: _Pass) -> bool:
        return self._current is not None and self._current() is which
