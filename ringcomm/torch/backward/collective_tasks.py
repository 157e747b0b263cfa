"""Runs collective tasks side by side: a task continues as soon as its handle is done.

One backward() may compute gradients of two optimizers, in another order on another rank. If a rank
finished one optimizer before it began the other, two ranks could wait for each other for ever.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator, Sequence
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch

from ringcomm.engine.core.handle import Handle
from ringcomm.errors import RingcommError
from ringcomm.torch.backward import autograd_hooks

R = TypeVar("R")
CollectiveTask = Generator[Handle[Any], None, R]  # yields the handles that it waits for

# Time limits of one wait. After each of them a rank asks the other ranks why they are late.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1e-3, 0.1


@torch.no_grad()
def finish_together(tasks: Sequence[CollectiveTask[None]]) -> None:
    """Run all tasks to their end, then raise the first error."""
    waiting: list[tuple[CollectiveTask[None], Handle[Any]]] = []
    errors: list[Exception] = []

    def advance(task: CollectiveTask[None]) -> None:
        try:
            waiting.append((task, next(task)))
        except StopIteration:
            return
        except Exception as error:  # noqa: BLE001 - raised when the other tasks have ended
            errors.append(error)

    try:
        for task in tasks:
            advance(task)
        while waiting:
            advance(waiting.pop(_next_ready([handle for _, handle in waiting]))[0])
    finally:  # after an interrupt, close() raises GeneratorExit in each task
        for task, _ in waiting:
            task.close()
    if errors:
        raise errors[0]


class _TasksOfRun(list[CollectiveTask[None]]):
    """Tasks that end with one run; only autograd holds a strong reference to this list."""


_tasks_of_runs: WeakValueDictionary[int, _TasksOfRun] = WeakValueDictionary()


def finish_with_this_run(task: CollectiveTask[None]) -> None:
    """Run `task` together with all others that end with the current run; not if the run fails."""
    run = autograd_hooks.current_run()
    tasks = _tasks_of_runs.get(run)
    if tasks is None:
        _tasks_of_runs[run] = tasks = _TasksOfRun()
        autograd_hooks.at_end_of_run(functools.partial(finish_together, tasks))
    tasks.append(task)


def _next_ready(handles: Sequence[Handle[Any]]) -> int:
    """Wait until one of the handles is done, and return its index."""
    wait_s = _FIRST_WAIT_S
    while True:
        for index, handle in enumerate(handles):
            if handle.done():
                return index
        with contextlib.suppress(RingcommError):  # the task waits for the handle again, and raises
            if len(handles) > 1:
                handles[0].wait_briefly(wait_s)
            else:
                handles[0].wait()
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
