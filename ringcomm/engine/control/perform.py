"""Carries out commands on this rank; all ranks do so after the same step."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ringcomm.engine.progress.timeline import Timeline
from ringcomm.launched.child_marks import create_run_file, run_file

if TYPE_CHECKING:
    from ringcomm.engine.control.commands import Command
    from ringcomm.engine.control.live_parameters_and_callbacks import Program
    from ringcomm.engine.core.context import EngineContext

_NO_CHECKPOINT = "the program has no function that @rc.on_checkpoint marks"
STOPPED = "stopped"  # a file in the folder of the run
# No command of users: a layer of the job proposes it, whose ranks cannot go on. `ringcomm run` may
# start such a job again, so there is no such file.
END = "end"


class Answer(NamedTuple):
    """The receiver of a command's outcome; `step` is the number of complete steps."""

    step: int
    tell: Callable[[str], None]

    def give(self, what: str) -> None:
        self.tell(f"ok {what} after step {self.step}")

    def refuse(self, why: str) -> None:
        self.tell(f"no {why} (after step {self.step})")


def refusal(
    command: Command,
    program: Program,
    engine: EngineContext,
    *,
    is_paused: bool,
    can_save: bool,
) -> str:
    """Return why this program cannot take a command; "" if it can."""
    timeline = engine.pending.timeline
    why = {
        "pause": "the job is paused already" if is_paused else "",
        "resume": "" if is_paused else "the job is not paused",
        "checkpoint": "" if can_save else _NO_CHECKPOINT,
    }
    if command.word == "timeline" and command.value == "stop":
        return "no timeline is recorded" if timeline is None else ""
    if command.word == "timeline" and timeline is not None and timeline.is_open:
        # Its file would be begun anew.
        return f"a timeline is recorded already, in {timeline.path}"
    if command.word == "set":
        try:
            program.checked(command.name, command.value)
        except ValueError as error:
            return str(error)
    return why.get(command.word, "")


def perform(
    command: Command,
    program: Program,
    savers: Sequence[Callable[[int], object]],
    engine: EngineContext,
    answer: Answer,
    *,
    is_first: bool,
) -> None:
    """Carry out a command other than pause and resume.

    Args:
        command: the command.
        program: what it may change.
        savers: functions that save a checkpoint.
        engine: of this rank.
        answer: takes the outcome.
        is_first: no rank of the default group that lives has a lower number.

    Raises what the program's own functions raise; SystemExit(75) after `stop`, if the program has
    never called rc.should_stop().
    """
    if command.word == "set":
        _set(command, program, answer)
    elif command.word == "checkpoint":
        _save(savers, answer)
        answer.give("checkpoint written")
    elif command.word == "stop":
        _stop(program, savers, answer, is_first=is_first)
    elif command.word == "scale":
        _scale(command.n, program, answer)
    else:
        _record(command.value, engine, answer)


def _set(command: Command, program: Program, answer: Answer) -> None:
    try:
        program.checked(command.name, command.value)()
    except ValueError as error:  # this rank's program is not that of the others
        answer.refuse(str(error))
    else:
        answer.give(f"{command.name} is {command.value}")


def _save(savers: Sequence[Callable[[int], object]], answer: Answer) -> None:
    try:
        for save in savers:
            save(answer.step)
    except BaseException as error:
        answer.refuse(f"the checkpoint failed: {type(error).__name__}: {error}")
        raise


def _stop(
    program: Program,
    savers: Sequence[Callable[[int], object]],
    answer: Answer,
    *,
    is_first: bool,
) -> None:
    if program.is_stopping:  # several ranks have got a signal
        answer.give("stops")
        return
    if is_first and (path := run_file(STOPPED)):
        with open(create_run_file(path), "wb") as file:
            file.write(b"%d\n" % answer.step)
    end(program, savers, answer)


def end(program: Program, savers: Sequence[Callable[[int], object]], answer: Answer) -> None:
    """Save a checkpoint, and end this rank's program; raises what perform() does."""
    if program.is_stopping:
        return
    program.is_stopping = True
    _save(savers, answer)
    answer.give("stops")
    if not program.asks_to_stop:
        raise SystemExit(os.EX_TEMPFAIL)


def _scale(n: int, program: Program, answer: Answer) -> None:
    try:
        program.scale(n)
    except (RuntimeError, ValueError) as error:  # the same on all ranks
        answer.refuse(str(error))
    else:
        answer.give(f"{n} ranks are asked for")


def _record(value: str, engine: EngineContext, answer: Answer) -> None:
    if value == "stop":
        engine.pending.record(None)
        answer.give("the timeline ends")
        return
    own = engine.pending.timeline
    if own is not None and own.is_open:  # the rank that was asked has none
        answer.give(f"operations are recorded in {own.path}")
        return
    prefix = run_file("timeline") or "timeline"
    try:
        timeline = Timeline(prefix, engine.job_rank, engine.transport.view)
    except OSError as error:
        answer.refuse(f"{prefix}: {error.strerror}")
        return
    engine.pending.record(timeline)
    answer.give(f"operations are recorded in {timeline.path}")
