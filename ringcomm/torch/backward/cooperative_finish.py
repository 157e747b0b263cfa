"""Runs collective tasks side by side, each as soon as what it waits for has arrived.

Gradients of two optimizers may come in one backward(), in another order on another rank. If one
were waited for before the other begins, two ranks could wait for each other for ever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch

from ringcomm.engine.core.handle import Handle
from ringcomm.errors import RingcommError
from ringcomm.torch.backward import autograd

R = TypeVar("R")
CollectiveTask = Generator[Handle[Any], None, R]  # yields what it waits for

_GLANCE_S, _LONGEST_GLANCE_S = 1e-3, 0.1  # a wait that ends in vain asks the other ranks why


@torch.no_grad()
def finish_together(works: Sequence[CollectiveTask[None]]) -> None:
    """Carry out all of these, then raise the first error."""
    waiting: list[tuple[CollectiveTask[None], Handle[Any]]] = []
    errors: list[Exception] = []

    def advance(work: CollectiveTask[None]) -> None:
        try:
            waiting.append((work, next(work)))
        except StopIteration:
            return
        except Exception as error:  # noqa: BLE001 - raised when the others are done
            errors.append(error)

    try:
        for work in works:
            advance(work)
        while waiting:
            advance(waiting.pop(_next_ready([handle for _, handle in waiting]))[0])
    finally:  # an interrupt: close() lets each of them take note
        for work, _ in waiting:
            work.close()
    if errors:
        raise errors[0]


def at_end_of_this_run(work: CollectiveTask[None]) -> None:
    """Carry out `work` with all else that ends with this run; it is dropped if the run fails."""
    run = autograd.current_run()
    ending = _endings.get(run)
    if ending is None:
        _endings[run] = ending = _Ending()
        autograd.at_end_of_run(ending.finish_together)
    ending.works.append(work)


class _Ending:
    """Tasks that end with one run; only autograd refers to it."""

    def __init__(self) -> None:
        self.works: list[CollectiveTask[None]] = []

    def finish_together(self) -> None:
        finish_together(self.works)


_endings: WeakValueDictionary[int, _Ending] = WeakValueDictionary()


def _next_ready(handles: Sequence[Handle[Any]]) -> int:
    """Wait until one of these is over, and return its place."""
    glance_s = _GLANCE_S
    while True:
        for place, handle in enumerate(handles):
            if handle.done():
                return place
        with contextlib.suppress(RingcommError):  # the work asks again, and raises
            handles[0].wait(glance_s if len(handles) > 1 else None)
        glance_s = min(2 * glance_s, _LONGEST_GLANCE_S)
