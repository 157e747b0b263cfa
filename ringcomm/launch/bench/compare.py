"""`ringcomm bench compare`: reports of several runs side by side, against the goals.

Two MPIs cannot share a process, so every time is first divided by the simultaneous memcpy of its
own run. "The fastest MPI" is the least of these quotients over all runs given; ours is divided by
its own run's memcpy, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ringcomm.errors import ConfigError
from ringcomm.launch.bench.figure import Figure
from ringcomm.launch.bench.goals import Goal, goal
from ringcomm.launch.bench.report import Report, Row, from_json

_16_BIT = ("float16", "bfloat16")
_16_BIT_GOAL = 1.5


@dataclass(frozen=True)
class Key:
    """What two lines must have in common to be compared."""

    size: int
    hosts: int
    collective: str
    dtype: str
    op: str
    in_place: bool
    nbytes: int


@dataclass(frozen=True)
class Timed:
    """A line and its run.

    Attributes:
        row: the line.
        report: the run.
        memcpy_us: the run's memcpy of that size.
    """

    row: Row
    report: Report
    memcpy_us: float

    @property
    def time_us(self) -> float:
        """The line's time."""
        assert self.row.time_us is not None
        return self.row.time_us

    @property
    def quotient(self) -> float:
        """Time in units of the memcpy."""
        return self.time_us / self.memcpy_us


@dataclass(frozen=True)
class Verdict:
    """One of our lines beside the fastest others; None: there is no such line, or no goal.

    Attributes:
        key: what was done.
        ours: our line.
        mpi, gloo: the fastest of them.
        goal: what is asked.
        as_float32: time per byte / that of float32 in the same run, of a 16-bit float.
    """

    key: Key
    ours: Timed
    mpi: Timed | None
    gloo: Timed | None
    goal: Goal
    as_float32: float | None = None

    def figures(self) -> list[Figure]:
        """Return all that can be told of this line."""
        ours, goal, row = self.ours, self.goal, self.ours.row
        found = [Figure("/memcpy", ours.quotient, at_most=goal.memcpy)]
        if self.mpi is not None:
            speedup = self.mpi.quotient / ours.quotient
            found.append(Figure("x MPI", speedup, at_least=goal.speedup_mpi))
            if goal.over_us is not None:
                over_us = ours.time_us - self.mpi.quotient * ours.memcpy_us
                found.append(Figure("us over MPI", over_us, at_most=goal.over_us))
        if self.gloo is not None:
            speedup = self.gloo.quotient / ours.quotient
            found.append(Figure("x gloo", speedup, at_least=goal.speedup_gloo))
        if row.p99_us is not None and row.call_p50_us:
            found.append(Figure("p99/p50", row.p99_us / row.call_p50_us, at_most=goal.p99))
        if row.wire_share is not None:
            found.append(Figure("of link", row.wire_share, at_least=goal.wire))
        if self.as_float32 is not None:
            found.append(Figure("/float32", self.as_float32, at_most=_16_BIT_GOAL))
        return found


def main(argv: Sequence[str]) -> int:
    """Print how the reports named in `argv` stand to the goals; return 0.

    Raises:
        ConfigError: a file is no report.
    """
    parser = argparse.ArgumentParser(
        prog="ringcomm bench compare",
        description="Put reports of `ringcomm bench --json` side by side, against the goals.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    args = parser.parse_args(argv)
    verdicts = judge([_read(path) for path in args.files])
    print(*lines(verdicts), "", _in_a_sentence(verdicts), sep="\n")
    return 0


def judge(reports: Sequence[Report]) -> list[Verdict]:
    """Return a verdict for each correct line of ringcomm, in the order of the reports."""
    timed = [each for report in reports for each in _timed(report)]
    fastest = {name: _fastest(timed, name) for name in ("native", "gloo")}
    return [
        Verdict(
            key := _key(each),
            each,
            fastest["native"].get(key),
            fastest["gloo"].get(key),
            _goal(key, each.row),
            _as_float32(each, timed),
        )
        for each in timed
        if each.row.engine == "ringcomm"
    ]


def lines(verdicts: Iterable[Verdict]) -> list[str]:
    """Return the table: a line per verdict, "!" behind each figure that misses its goal."""
    text: list[str] = []
    verdicts = list(verdicts)
    width = max((len(str(figure)) for v in verdicts for figure in v.figures()), default=0)
    in_order = sorted(verdicts, key=lambda v: (_title(v.key), v.ours.row.label, v.key.nbytes))
    for title, group in itertools.groupby(in_order, lambda v: _title(v.key)):
        text += ["", f"# {title}", *(_line(each, width) for each in group)]
    return text[1:] or ["no line of ringcomm with a memcpy beside it"]


def _in_a_sentence(verdicts: Sequence[Verdict]) -> str:
    asked = [figure for v in verdicts for figure in v.figures() if figure.asked]
    if not asked:
        return "No goal is set for these lines."
    n_missed = sum(not figure.is_met for figure in asked)
    missed = f"; {n_missed} missed, marked with !" if n_missed else ""
    return f"{len(asked) - n_missed} of {len(asked)} goals are met{missed}."


def _read(path: Path) -> Report:
    try:
        return from_json(path.read_text(), source=str(path))
    except OSError as error:
        raise ConfigError(str(error)) from error


def _timed(report: Report) -> list[Timed]:
    memcpy = {
        (row.collective, row.dtype, row.op, row.nbytes): row.time_us
        for row in report.rows
        if row.engine == "memcpy"
    }
    found = []
    for row in report.rows:
        memcpy_us = memcpy.get((row.collective, row.dtype, row.op, row.nbytes))
        if row.engine != "memcpy" and row.time_us is not None and memcpy_us:
            found.append(Timed(row, report, memcpy_us))
    return found


def _key(each: Timed) -> Key:
    row, report = each.row, each.report
    what = (row.collective, row.dtype, row.op, row.in_place, row.nbytes)
    return Key(report.size, report.hosts, *what)


def _fastest(timed: Iterable[Timed], engine: str) -> dict[Key, Timed]:
    best: dict[Key, Timed] = {}
    for each in timed:
        key = _key(each)
        if each.row.engine == engine and (key not in best or each.quotient < best[key].quotient):
            best[key] = each
    return best


def _goal(key: Key, row: Row) -> Goal:
    if (key.collective, key.dtype, key.op, key.in_place) != (
        "allreduce",
        "float32",
        "sum",
        True,
    ):
        return Goal()
    is_registered = row.buffers == "registered"
    return goal(key.nbytes, size=key.size, hosts=key.hosts, is_registered=is_registered)


def _as_float32(each: Timed, timed: Iterable[Timed]) -> float | None:
    if each.row.dtype not in _16_BIT:
        return None
    wanted = _but_for_time(dataclasses.replace(each.row, dtype="float32"))
    for other in timed:
        if other.report is each.report and _but_for_time(other.row) == wanted:
            return each.time_us / other.time_us
    return None


def _but_for_time(row: Row) -> tuple[object, ...]:
    return (row.engine, row.buffers, row.collective, row.dtype, row.op, row.in_place, row.nbytes)


def _title(key: Key) -> str:
    form = "in place" if key.in_place else "out of place"
    hosts = "1 host" if key.hosts == 1 else f"{key.hosts} hosts"
    what = " ".join(filter(None, (key.collective, key.dtype, key.op, form)))
    return f"{what}, {key.size} ranks on {hosts}"


def _line(verdict: Verdict, width: int) -> str:
    row = verdict.ours.row
    figures = "".join(f"{figure!s:<{width}}  " for figure in verdict.figures())
    fastest = "" if verdict.mpi is None else f"[{_who(verdict.mpi)}]"
    return f"{row.nbytes:>10}  {row.label:<12}  {figures}{fastest}".rstrip()


def _who(mpi: Timed) -> str:
    settings = "defaults" if mpi.report.is_mpi_default else "our settings"
    return f"{mpi.report.mpi}, {settings}"
