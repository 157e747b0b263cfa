"""Commands that some ranks have taken and others not: one has died between, or has come late."""

from __future__ import annotations

from collections.abc import Sequence

from ringcomm.engine.api.collectives import allgather_object
from ringcomm.engine.control.commands import parse, split
from ringcomm.engine.control.live_parameters_and_callbacks import PROGRAM


def take_missed_commands(*, in_new_view: bool) -> None:
    """Take the commands that other ranks have taken, and this one not. Collective.

    Only what lasts is taken: live parameters and `stop`. A pause is over. In a new view, steps are
    counted on from those of the rank that has completed most: no later checkpoint has the number
    of an earlier one.

    Raises ValueError if this program has no such parameter.
    """
    mine = PROGRAM.taken, PROGRAM.n_steps
    of_ranks = allgather_object(mine, name="commands that were taken")
    if in_new_view:
        PROGRAM.n_steps = PROGRAM.n_before = max(n_steps for _, n_steps in of_ranks)
    if why := take_missed(max((each for each, _ in of_ranks), key=len)):
        raise ValueError(why)


def take_missed(taken: Sequence[str]) -> str:
    """Take those of `taken` that this rank has not; return why one cannot be taken, or ""."""
    why = ""
    for text in taken[len(PROGRAM.taken) :]:
        command = parse(split(text))
        if command.word == "set":
            try:
                PROGRAM.checked(command.name, command.value)()
            except ValueError as error:
                why = str(error)
        elif command.word == "stop":
            PROGRAM.is_stopping = True
    PROGRAM.taken = [*taken]
    return why
