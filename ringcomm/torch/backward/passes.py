"""Finds the begin and the end of a user's backward(), whatever runs are nested in it."""

from __future__ import annotations

import functools
import weakref
from typing import Protocol

from ringcomm.torch.backward import autograd
from ringcomm.torch.backward.cooperative_finish import CollectiveTask, at_end_of_this_run


class Owner(Protocol):
    """Acts on the begin and the end of passes."""

    def begin_pass(self) -> None:
        """The first gradient of a backward() is about to arrive."""
        ...

    def end_pass(self) -> CollectiveTask[None]:
        """The outermost run has ended well; return what is to be done before backward() returns."""
        ...


class _Pass:
    """One backward(). Only what autograd is still to call refers to it: it dies if that fails."""

    def __init__(self) -> None:
        self.runs: set[int] = set()


class Passes:
    """The backward() calls of an optimizer, one at a time."""

    def __init__(self) -> None:
        self._current: weakref.ref[_Pass] | None = None

    @property
    def has_failed(self) -> bool:
        """True from the end of a backward() that raised until forget()."""
        return self._current is not None and self._current() is None

    def enter(self, owner: Owner) -> None:
        """Note that a hook was called."""
        current = None if self._current is None else self._current()
        if current is None:
            owner.begin_pass()
            current = _Pass()
            self._current = weakref.ref(current)
        run = autograd.current_run()
        if run not in current.runs:
            current.runs.add(run)
            autograd.at_end_of_run(functools.partial(self._end_run, owner, current))

    def forget(self) -> None:
        """Forget what was under way."""
        self._current = None

    def _end_run(self, owner: Owner, which: _Pass) -> None:
        if not self._is_current(which):
            return
        if not autograd.within_outer_run(functools.partial(self._go_on, owner, which)):
            at_end_of_this_run(self._end_pass(owner, which))

    def _go_on(self, owner: Owner, which: _Pass) -> None:
        if self._is_current(which):
            self.enter(owner)

    def _end_pass(self, owner: Owner, which: _Pass) -> CollectiveTask[None]:
        """End the pass; until this is carried out it keeps `which` alive."""
        yield from owner.end_pass()
        if self._is_current(which):
            self.forget()

    def _is_current(self, which: _Pass) -> bool:
        return self._current is not None and self._current() is which
