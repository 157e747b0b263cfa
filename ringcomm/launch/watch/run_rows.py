"""Rows of `ringcomm runs`, and how a run ended in words. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ringcomm.foreign_text import printable
from ringcomm.launch.job.records import RunConfig, RunEnd
from ringcomm.launch.job.run_words import lost_text, seconds_text
from ringcomm.launch.job.verdict import SIGNAL_NAMES, STOPPED_IN_ORDER

RUNNING: Final = "running"
FINISHING: Final = "finishing"
PAUSED: Final = "paused"
_PROGRAM: Final = 32
_PYTHON: Final = re.compile(r"(?:.*/)?python[0-9.]*")
_FLAGS: Final = re.compile(r"-[BEIOPSsu]+")  # of Python, without a value
_TIME: Final = re.compile(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)[+-]\d{4}", re.ASCII)


@dataclass(frozen=True)
class MetricValues:
    """What a run has logged under one name: the last value, and the best one if it is known."""

    last: float
    best: float | None


@dataclass(frozen=True)
class RunFacts:
    """A run, or a live job without a folder.

    Attributes:
        name: by which commands know it.
        place: of its folder, or where it works.
        has_folder: False under plain mpirun.
        config: how it was started.
        end: how it ended; None: it has left no record of that.
        is_live: None: only its own hosts know.
        is_finishing: it lives, but each rank has ended, or has left the job.
        is_paused: its ranks wait for the command `resume`.
        n_gone: how many of its ranks are lost, or have ended, while it lives.
        jobs: the names of its live jobs, as far as this host has ranks of them.
        metric: of the chosen name; None: it has logged no such value.
        problems: why files of it do not count.
    """

    name: str
    place: str
    has_folder: bool
    config: RunConfig
    end: RunEnd | None = None
    is_live: bool | None = False
    jobs: tuple[str, ...] = ()
    metric: MetricValues | None = None
    problems: tuple[str, ...] = field(default=())
    is_finishing: bool = False
    is_paused: bool = False
    n_gone: int = 0

    @property
    def state(self) -> str:
        if self.end is None and self.is_finishing:
            return FINISHING
        if self.is_live and self.is_paused:
            return PAUSED
        if self.end is None:
            return {True: RUNNING, False: "lost", None: "not seen"}[self.is_live]
        if self.end.code == 0:
            return "completed"
        stopping = (STOPPED_IN_ORDER, *(128 + number for number in SIGNAL_NAMES))
        is_asked = self.end.code in stopping and self.end.rank is None
        return "stopped" if is_asked else "failed"

    @property
    def n_live(self) -> int | None:
        """How many ranks live; None: it does not live, or that is not known."""
        if self.is_live is not True or self.config.ranks is None:
            return None
        return self.config.ranks - self.n_gone

    @property
    def ranks(self) -> str:
        """How many ranks it has, and how many of them live if some do not; "": not known."""
        if self.config.ranks is None:
            return ""
        live = f"{self.n_live} of " if self.n_live is not None and self.n_gone else ""
        return f"{live}{self.config.ranks}"

    @property
    def lost(self) -> str:
        """Which ranks it has lost on the way; "" for none, or if it has failed."""
        if self.end is None or self.state == "failed":
            return ""
        return lost_text(self.end.lost)

    @property
    def how(self) -> str:
        """How it ended; "" while it runs."""
        if self.end is None:
            return {
                True: "",
                False: "left no record of its end, as after a kill of `ringcomm run`",
                None: f"only {self.config.host or 'its host'} knows",
            }[self.is_live]
        after = "" if self.end.seconds is None else f"after {seconds_text(self.end.seconds)}"
        what = () if self.end.code == 0 else (self.end.what, f"exit {self.end.code}")
        return ", ".join(filter(None, (*what, after, self.lost)))


def over_text(facts: RunFacts) -> str:
    """Return how and when a run ended, as a sentence about it; it does not live."""
    return f"the run {facts.place} {what_became_of(facts)}"


def what_became_of(facts: RunFacts) -> str:
    """Return the same in words that follow the name of the run."""
    if facts.end is None:
        return facts.how
    at = f" at {shown_time(facts.end.ended)}" if facts.end.ended else ""
    how = facts.how if facts.state != "completed" else f"completed {facts.how}".rstrip()
    return f"ended{at}: {how}"


def shown_time(text: str) -> str:
    """Return a time of a record as a reader writes it, without the zone."""
    found = _TIME.fullmatch(text)
    return f"{found[1]} {found[2]}" if found else text


def program_words(program: Sequence[str]) -> list[str]:
    """Return the command of a rank without its interpreter."""
    words = list(program)
    if len(words) > 1 and _PYTHON.fullmatch(words[0]):
        words = words[1:]
        while len(words) > 1 and _FLAGS.fullmatch(words[0]):
            words = words[1:]
    return words


def program_text(program: Sequence[str]) -> str:
    """Return the command of a rank without its interpreter, shortened."""
    text = printable(shlex.join(program_words(program)))
    return text if len(text) <= _PROGRAM else f"{text[: _PROGRAM - 3]}..."


def table(runs: Sequence[RunFacts], metric: str) -> str:
    """Return the list for a terminal; a column that no run fills is left out."""
    heads = ("run", "program", "state", "ranks", "started", "how it ended",
             f"{metric}: last", "best", "where")  # fmt: skip
    rows = [_row(each) for each in runs]
    columns = list(zip(heads, *rows, strict=True))
    columns = [each for each in columns if any(each[1:]) or each[0] in heads[:5]]
    widths = [max(map(len, each)) for each in columns]
    lines = zip(*columns, strict=True)
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _row(run: RunFacts) -> tuple[str, ...]:
    last, best = ("", "") if run.metric is None else map(_number, _values(run.metric))
    texts = (
        run.name,
        program_text(run.config.program),
        run.state,
        run.ranks,
        shown_time(run.config.started),
        run.how,
        last,
        best,
        _where(run),
    )
    return tuple(map(printable, texts))


def _where(run: RunFacts) -> str:
    """Return where a run is that is none of the listed folder."""
    if not run.has_folder:
        return f"{run.place}, under mpirun: listed while it lives"
    return "" if run.name == run.place.rpartition("/")[2] else run.place


def _values(metric: MetricValues) -> tuple[float, float | None]:
    return metric.last, metric.best


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def as_json(run: RunFacts, metric: str) -> dict[str, Any]:
    end = run.end
    return {
        "name": run.name,
        "folder": run.place if run.has_folder else None,
        "jobs": list(run.jobs),
        "program": list(run.config.program),
        "state": run.state,
        "ranks": run.config.ranks,
        "live_ranks": run.n_live,
        "started": run.config.started or None,
        "ended": (end.ended or None) if end else None,
        "seconds": end.seconds if end else None,
        "exit_code": end.code if end else None,
        "how": end.what if end else None,
        "lost": {str(rank): deed for rank, deed in end.lost.items()} if end else {},
        "metric": metric,
        "last": run.metric.last if run.metric else None,
        "best": run.metric.best if run.metric else None,
    }
