"""What a run found: rows, the table, and JSON. Pure."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringcomm.launch.bench.figure import Figure
from ringcomm.launch.bench.ps.cases import CASES
from ringcomm.launch.bench.statistics import percentile

_FORMAT = 1
_QUIET = 0.5


@dataclass(frozen=True)
class Row:
    """One operation of one contestant.

    Attributes:
        op: push or pull.
        case: a name of CASES.
        engine: ringcomm, torch-rpc, ... or memcpy.
        wrong: elements that were not the sum of all pushes, before and after timing, over all
            workers.
        p50_us, p95_us: of single calls of all workers.
        clients_us, server_us: CPU time per call, of the worker that made it and of the server:
            medians over rounds.
        calls: how many single calls.
    """

    op: str
    case: str
    engine: str
    wrong: int
    p50_us: float
    p95_us: float
    clients_us: float
    server_us: float
    calls: int

    @property
    def sum_us(self) -> float:
        """CPU time per call, of both."""
        return self.clients_us + self.server_us


@dataclass(frozen=True)
class Step:
    """A training step of 20 M parameters, by the server and by the ring.

    Attributes:
        parameters: of the model.
        ps_ms, ring_ms: medians over rounds of the slowest worker's step.
        ratio: median over rounds of one / the other.
        is_equal: after a step both have the same weights, but for rounding.
    """

    parameters: int
    ps_ms: float
    ring_ms: float
    ratio: float
    is_equal: bool


@dataclass(frozen=True)
class Report:
    """A run of `ringcomm bench ps`.

    Attributes:
        version: of ringcomm.
        workers: how many; there is one server.
        cores: that the ranks may use.
        load: load average over a minute, before the run.
        rounds: in which everybody had a turn.
        rows: what was found.
        step: None: not asked for.
        figures: the rows beside the goals.
    """

    version: str
    workers: int
    cores: int
    load: float
    rounds: int
    rows: list[Row]
    step: Step | None
    figures: list[Figure]

    @property
    def is_right(self) -> bool:
        """True if no value was wrong."""
        return not any(r.wrong for r in self.rows) and (self.step is None or self.step.is_equal)


def summarize(
    times_s: Sequence[Sequence[Sequence[float]]],
    clients_s: Sequence[Sequence[float]],
    server_s: Sequence[float],
) -> dict[str, Any]:
    """Return what the turns of one operation come to, named as in Row.

    Args:
        times_s: of each call, by worker and round, alike many.
        clients_s: CPU time of each worker's process, by worker and round.
        server_s: CPU time of the server, by round.
    """
    times = np.array(times_s)
    workers, _, calls = times.shape
    per_call = 1e6 / (workers * calls)
    return {
        "p50_us": percentile(times.ravel(), 50) * 1e6,
        "p95_us": percentile(times.ravel(), 95) * 1e6,
        "clients_us": float(np.median(np.sum(clients_s, axis=0))) * per_call,
        "server_us": float(np.median(server_s)) * per_call,
        "calls": times.size,
    }


# --- the table ------------------------------------------------------------------------------------
def preamble(report: Report) -> list[str]:
    """Return the lines that say what is run, and what speaks against trusting it."""
    workers = "1 worker" if report.workers == 1 else f"{report.workers} workers"
    text = [
        f"# ringcomm bench ps {report.version}: {workers} and a server, {report.cores} cores, "
        "one request outstanding per worker"
    ]
    if report.workers + 1 > report.cores:
        text.append("# more ranks than cores: times tell how they wait for each other, too")
    if report.load > _QUIET:
        text.append(
            f"# load average {report.load:.1f}: other programs run. Compare lines, not runs"
        )
    return text


def heading() -> list[str]:
    """Return the lines above the rows; their columns are those of line()."""
    return [
        f"#{'':30} {'by the clock (us)':^19} {'CPU time per call (us)':^29}",
        f"#{'op':<5} {'what':<10} {'engine':<13} {'p50':>9} {'p95':>9} {'clients':>9} {'server':>9}"
        f" {'sum':>9} {'#wrong':>6}",
    ]


def line(row: Row) -> str:
    """Return a row of the table."""
    figures = (row.p50_us, row.p95_us, row.clients_us, row.server_us, row.sum_us)
    numbers = " ".join(f"{x:>9.1f}" for x in figures)
    return f" {row.op:<5} {CASES[row.case].title:<10} {row.engine:<13} {numbers} {row.wrong:>6}"


def step_lines(step: Step) -> list[str]:
    """Return what is told of a training step."""
    text = [
        "#",
        f"# a training step, {step.parameters / 1e6:.1f} M parameters, mode sync",
        f" by the server {step.ps_ms:.1f} ms, by the ring {step.ring_ms:.1f} ms",
    ]
    return text if step.is_equal else [*text, "# WRONG: the weights of the two differ after a step"]


def figure_lines(figures: Sequence[Figure]) -> list[str]:
    """Return the figures, "!" behind each that misses its goal."""
    asked = [figure for figure in figures if figure.asked]
    met = sum(figure.is_met for figure in asked)
    found = ["#", f"# goals: {met} of {len(asked)} met"] if asked else []
    return found + [f" {f.name:<32} {f.value:>9.2f} {f.asked:<7} {_verdict(f)}" for f in figures]


def _verdict(figure: Figure) -> str:
    if not figure.asked:
        return ""
    return "met" if figure.is_met else "missed !"


def to_json(report: Report) -> str:
    """Return the report as JSON."""
    found = dataclasses.asdict(report)
    rows = [{**dataclasses.asdict(row), "sum_us": row.sum_us} for row in report.rows]
    figures = [{**dataclasses.asdict(f), "is_met": f.is_met} for f in report.figures]
    told = {"ringcomm_bench_ps": _FORMAT, **found, "rows": rows, "figures": figures}
    return json.dumps(told, indent=1)
