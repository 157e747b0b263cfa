"""Values that commands change: live parameters, and functions of the program. One per process."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol


class LiveParameters(Protocol):
    def read(self, name: str, text: str) -> Any:
        """Return the value that a text means. Raises ValueError; KeyError: not a live one."""

    def take(self, name: str, value: Any) -> None: ...

    @property
    def live_names(self) -> list[str]: ...


def _refuse_to_scale(n: int) -> None:
    raise RuntimeError(f"{n} ranks: this engine is not that of a job")


@dataclass
class Program:
    """Values that this program offers to commands, and the commands' requests.

    Attributes:
        checkpoints: the functions that @rc.on_checkpoint marks.
        parameters: of rc.Params.
        rates: functions that set the learning rate of an optimizer; they are used if no live
            parameter is called lr.
        scale: asks for another number of ranks; raises RuntimeError or ValueError. init() sets it.
        is_stopping: a stop command was taken.
        asks_to_stop: the program has called rc.should_stop().
        taken: the texts of all commands that were taken.
        n_steps: steps that this rank has completed, in all views of an elastic job.
        n_before: those before the present view: as many on all of its ranks.
    """

    checkpoints: list[Callable[[int], object]] = field(default_factory=list)
    parameters: list[weakref.ref[LiveParameters]] = field(default_factory=list)
    rates: list[Callable[[], Callable[[float], None] | None]] = field(default_factory=list)
    scale: Callable[[int], object] = _refuse_to_scale
    is_stopping: bool = False
    asks_to_stop: bool = False
    taken: list[str] = field(default_factory=list)
    n_steps: int = 0
    n_before: int = 0

    def checked(self, name: str, text: str) -> Callable[[], None]:
        """Return a function that gives a parameter a new value.

        Raises ValueError if there is no such parameter, or if it cannot have this value.
        """
        for reference in self.parameters:
            if (parameters := reference()) is not None and name in parameters.live_names:
                value = parameters.read(name, text)
                take = parameters.take
                return lambda: take(name, value)
        if name == "lr" and (setters := self._setters()):
            rate = _rate(text)
            return partial(_call_all, setters, rate)
        live = [each for r in self.parameters if (p := r()) is not None for each in p.live_names]
        if self._setters() and "lr" not in live:
            live.append("lr (of the optimizers)")
        known = f"those are {', '.join(live)}" if live else "there is none, see rc.Params"
        raise ValueError(f"{name} is no live parameter of this program; {known}")

    def add_rate(self, find: Callable[[], Callable[[float], None] | None]) -> None:
        """Add a learning rate: commands set it by the function that find() returns, unless None."""
        self.rates = [*(each for each in self.rates if each() is not None), find]

    def _setters(self) -> list[Callable[[float], None]]:
        return [found for reference in self.rates if (found := reference()) is not None]


def _call_all(setters: Sequence[Callable[[float], None]], rate: float) -> None:
    for each in setters:
        each(rate)


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError as error:
        raise ValueError(f"lr must be a number, not {text!r}") from error
    if not 0 <= rate < float("inf"):
        raise ValueError(f"lr must be 0 or more, not {text}")
    return rate


PROGRAM = Program()
