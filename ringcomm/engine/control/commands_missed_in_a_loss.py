"""After a loss: commands that some ranks have taken and others not, as a rank died between."""

from __future__ import annotations

from ringcomm.engine.api.collectives import allgather_object
from ringcomm.engine.control.commands import parse, split
from ringcomm.engine.control.live_parameters_and_callbacks import PROGRAM


def take_missed_commands() -> None:
    """Take the commands that other ranks have taken, and this one not. Collective.

    Only what lasts is taken: live parameters and `stop`. A pause is over.
    """
    taken = max(allgather_object(PROGRAM.taken, name="commands that were taken"), key=len)
    for text in taken[len(PROGRAM.taken) :]:
        command = parse(split(text))
        if command.word == "set":
            PROGRAM.checked(command.name, command.value)()
        elif command.word == "stop":
            PROGRAM.is_stopping = True
    PROGRAM.taken = taken
