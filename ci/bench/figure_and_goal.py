"""Numbers beside the goals for them. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """A number, and between what it should be; None: no goal."""

    name: str
    value: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def is_met(self):
        is_enough = self.at_least is None or self.value >= self.at_least
        return is_enough and (self.at_most is None or self.value <= self.at_most)

    @property
    def asked(self):
        """The goal in words, " >=2 <=3"; "" if there is none."""
        goals = [(">=", self.at_least), ("<=", self.at_most)]
        return "".join(f" {sign}{goal:g}" for sign, goal in goals if goal is not None)

    def __str__(self):
        return f"{self.name} {self.value:.2f}{self.asked}{'' if self.is_met else ' !'}"


def verdict(figures):
    """Return how many goals are met, as a sentence."""
    asked = [figure for figure in figures if figure.asked]
    if not asked:
        return "No goal is set for these lines."
    missed = sum(not figure.is_met for figure in asked)
    text = f"; {missed} missed, marked with !" if missed else ""
    return f"{len(asked) - missed} of {len(asked)} goals are met{text}."
