"""A number beside the goal for it. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """A number, and between what it should be; None: nothing is asked."""

    name: str
    value: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def is_met(self) -> bool:
        """False if a goal is missed."""
        is_enough = self.at_least is None or self.value >= self.at_least
        return is_enough and (self.at_most is None or self.value <= self.at_most)

    @property
    def asked(self) -> str:
        """The goal in words, " >=2 <=3"; "" if nothing is asked."""
        goals = [(">=", self.at_least), ("<=", self.at_most)]
        return "".join(f" {sign}{goal:g}" for sign, goal in goals if goal is not None)

    def __str__(self) -> str:
        return f"{self.name} {self.value:.2f}{self.asked}{'' if self.is_met else ' !'}"
