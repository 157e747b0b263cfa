"""step(), should_stop() and on_checkpoint(): where commands of `ringcomm ctl` meet the program."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Final, TypeVar

from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.control.live_parameters_and_callbacks import PROGRAM

C = TypeVar("C", bound=Callable[[int], Any])


class _OwnSteps:
    """The owner of the steps that step() counts."""


_THIS_PROGRAM: Final = _OwnSteps()
_MOST_STEPS: Final = 1 << 63


def step(step: int | None = None, /) -> None:
    """Complete a training step of this rank: commands of `ringcomm ctl` are taken here.

    For programs without a DistributedOptimizer, whose step() does the same, and for those with
    several that do not step in turn. Call it once per training step on every rank; of a job with
    parameter servers, on every worker. From the first call on, no optimizer does the same. It
    sends nothing, and waits for no rank, unless there is a command.

    Args:
        step: how many steps have been completed, the same number on every rank: pass it if the
            program has restored a checkpoint itself. One more than before if not given, or if it is
            fewer, as when steps are made again after a loss.

    Raises:
        TypeError: step is no whole number.
        ValueError: step is less than 1, or 2**63 or more.
        PeerFailedError: a rank died while this one waited at a command.
        CommTimeoutError: a rank did not answer to a command.
        NotInitializedError: init() has not run.
        SystemExit: with code 75, after `ringcomm ctl JOB stop`, SIGTERM or SIGUSR1, if the program
            has never called should_stop().
    """
    this = engine()
    if step is not None:
        step = operator.index(step)
        if not 1 <= step < _MOST_STEPS:
            raise ValueError(f"step: {step} is no number of completed steps, which is at least 1")
    this.control.complete_step_of(_THIS_PROGRAM, step)


def should_stop() -> bool:
    """Return True once the job is to stop: on every rank after the same step.

    That is after `ringcomm ctl JOB stop` and, in a job that can save a checkpoint, after SIGTERM or
    SIGUSR1 to any rank. A program that calls this ends by itself. Others end in step(), by
    SystemExit(75), after the functions of on_checkpoint().
    """
    PROGRAM.asks_to_stop = True
    return PROGRAM.is_stopping


def on_checkpoint(save: C) -> C:
    """Decorate a function that writes a checkpoint, which all ranks call after the same step.

    `ringcomm ctl JOB checkpoint` and `stop` call save(step), so do SIGTERM and SIGUSR1. It may use
    collectives. Its argument is the number of steps that the training has completed. A counter of
    the program that is raised after rc.step(), or after the step of an optimizer, is still one
    behind then: save the argument.

    The number goes on after a restart: from that of the checkpoint which hvd.Checkpoint.restore()
    loads, or the commit of keep_in(). A program that restores something else passes its number to
    rc.step(). In an elastic job, steps that were made again after a loss count again. So a later
    checkpoint has a larger number.
    """
    if not callable(save):
        raise TypeError(f"on_checkpoint: {save!r} is no function")
    PROGRAM.checkpoints.append(save)
    return save
