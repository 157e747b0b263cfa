"""`ringcomm bench ps`: start the server, measure case by case, print and write the result."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Sequence
from typing import Final

import ringcomm as rc
from ringcomm import ps
from ringcomm.errors import ConfigError
from ringcomm.launch.bench.ps import goals, report
from ringcomm.launch.bench.ps.options import Options, parse
from ringcomm.launch.bench.ps.ours import Memcpy, Ours
from ringcomm.launch.bench.ps.peer import Peer
from ringcomm.launch.bench.ps.report import Report, Row, Step
from ringcomm.launch.bench.ps.runner import Contestant, measure
from ringcomm.launch.cores import own_cpus, usable_cores
from ringcomm.launch.lookup import lookup

_STEP: Final = "ringcomm.torch.ps.bench:measure_step"
_WITH_MEMCPY: Final = "4M"


def main(argv: Sequence[str]) -> int:
    """Measure what `argv` says; return 1 if a value was wrong, else 0. Collective.

    On the last rank, the server, this ends with SystemExit(0).

    Raises:
        ConfigError: there are too few ranks, or too many hosts, or no torch.
    """
    wanted = parse(argv)
    _require_torch(wanted)
    load = os.getloadavg()[0]
    rc.init()
    _require_ranks()
    pids: list[int] = rc.allgather_object(os.getpid())
    ps.init(1)
    found = Report(
        version=rc.__version__,
        workers=ps.size(),
        cores=usable_cores(rc.allgather_object(own_cpus())),
        load=load,
        rounds=wanted.rounds,
        rows=[],
        step=None,
        figures=[],
    )
    found = _measure(wanted, found, server_pid=pids[-1])
    if ps.is_chief() and wanted.json is not None:
        wanted.json.write_text(report.to_json(found) + "\n")
    # No rc.shutdown(): servers leave when programs end, and until then it would wait for them.
    return 0 if found.is_right else 1


def _require_torch(wanted: Options) -> None:
    needs = [f"--against {name}" for name in wanted.against] + ["--step"] * wanted.has_step
    if needs and importlib.util.find_spec("torch") is None:
        raise ConfigError(f"{needs[0]} needs torch: pip install 'ringcomm[torch]'")


def _require_ranks() -> None:
    if rc.size() < 2:
        raise ConfigError(
            "ps: 1 rank, and it takes a worker and a server: mpirun -np 2 ringcomm bench ps"
        )
    if rc.local_size() < rc.size():
        raise ConfigError(
            f"ps: {rc.size()} ranks, {rc.local_size()} of them on the host of rank {rc.rank()}. It "
            "reads the server's CPU clock: start all ranks on one host"
        )


def _measure(wanted: Options, found: Report, *, server_pid: int) -> Report:
    _say(*report.preamble(found))
    rows: list[Row] = []
    if wanted.cases:
        contestants: list[Contestant] = [Ours(server_pid)]
        contestants += [Peer(name, ps.rank(), ps.size()) for name in wanted.against]
        rows = _rows(wanted, contestants)
        for each in contestants:
            each.close()
    step = _step(wanted) if wanted.has_step else None
    figures = goals.judge(rows, step, workers=found.workers)
    _say(*report.figure_lines(figures))
    return dataclasses.replace(found, rows=rows, step=step, figures=figures)


def _rows(wanted: Options, contestants: list[Contestant]) -> list[Row]:
    found: list[Row] = []
    _say(*report.heading())
    for case in wanted.cases:
        memcpy = Memcpy() if case.name == _WITH_MEMCPY else None
        rows = measure(case, contestants, memcpy, wanted.rounds)
        _say(*map(report.line, rows))
        found += rows
    return found


def _step(wanted: Options) -> Step:
    step = Step(**lookup(_STEP)(wanted.steps))
    _say(*report.step_lines(step))
    return step


def _say(*lines: str) -> None:
    if ps.is_chief():
        print(*lines, sep="\n", flush=True)
