"""What `ringcomm run` says of a job that starts, and of one that has completed. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_NAMED: Final = 8  # ranks, in the sentence about those that were lost


@dataclass(frozen=True)
class Stages:
    """How many ranks have come how far.

    Attributes:
        size: number of ranks.
        started: have begun to run the program, or Python its imports.
        arrived: have come to ringcomm.init().
        through: have come through it.
    """

    size: int
    started: int = 0
    arrived: int = 0
    through: int = 0


def start_text(stages: Stages, seconds: float, init_s: float) -> str:
    """Return what a job does before the first line of its ranks.

    Args:
        stages: how far the ranks are.
        seconds: since the start of the launcher.
        init_s: since the first rank came to init(), or until the last one was through it.
    """
    size = stages.size
    ranks = f"{size} rank{'s' if size > 1 else ''}"
    if stages.through == size:
        after = f" after {seconds_text(init_s)}" if init_s >= 0.1 else ""
        return f"{ranks} through init(){after}; no output yet"
    if stages.arrived == size:
        return f"{stages.through} of {ranks} through init(), for {init_s:.0f} s"
    if stages.arrived:
        return f"{stages.arrived} of {ranks} in init(), for {init_s:.0f} s; the others import"
    if stages.started == size:
        return f"{ranks} started, importing; {seconds:.0f} s"
    return f"{stages.started} of {ranks} started; {seconds:.0f} s"


def seconds_text(seconds: float) -> str:
    """Return a duration in the unit that a reader would take."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 1000:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"


def lost_text(lost: Mapping[int, str]) -> str:
    """Return which ranks a job has lost, and how, as the end of a sentence; "" for none."""
    ranks_of: defaultdict[str, list[int]] = defaultdict(list)
    for rank, deed in sorted(lost.items()):
        ranks_of[deed].append(rank)
    texts = [f"{_ranks_text(ranks)} ({deed})" for deed, ranks in ranks_of.items()]
    return f"lost {' and '.join(texts)} on the way" if texts else ""


def _ranks_text(ranks: list[int]) -> str:
    named = ", ".join(map(str, ranks[:_NAMED]))
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {named}{more}"
