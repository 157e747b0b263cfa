"""`ringcomm bench`: measures the collectives, prints a table and writes it as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

import ringcomm as rc
from ringcomm import config
from ringcomm.arrays import adapter_of_kind
from ringcomm.arrays.dtypes import DTYPES
from ringcomm.collectives.operators import Op
from ringcomm.engine.api.explain import bytes_text
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.errors import ConfigError
from ringcomm.launch.bench import table
from ringcomm.launch.bench.cases import COLLECTIVES, BenchCase, make_case, parse_sizes, wire_bytes
from ringcomm.launch.bench.runner import (
    MODES,
    Array,
    Bind,
    Contender,
    best_gbps,
    measure,
    memcpy,
    ringcomm_in,
    take_turns,
)
from ringcomm.launch.usable_cores import usable_cores
from ringcomm.progress_bar import progress_bar
from ringcomm.system_text import read_text

_OF_INTEREST = ("RINGCOMM_", "OMPI_MCA_", "MPIR_CVAR_")
_OF_THE_LAUNCHER = ("PREFIXES", "cpu_type", "initial_wdir", "num_procs")  # mpirun sets OMPI_MCA_*
_BUFFERS: Final = ("registered", "private")
_ALIGNMENT = 64  # bytes: each private buffer begins at a cache line
# Bytes of a rank's memory per byte of the largest buffer: private buffers for send and receive, a
# registered one, the result, the expected result, and copies inside the engines.
_MEMORY_FACTOR = 8
_LINK_NBYTES, _LINK_BATCHES = 4 << 20, 8
_QUIET_LOAD = 0.5


def main(argv: Sequence[str]) -> int:
    """Measure the cases of `argv`; return 0, 1 after a wrong result, or 2 if it cannot measure.

    Collective, except for --help.
    """
    args = parser().parse_args(argv)
    try:
        return finish(args, measure_all(args))
    except ConfigError as error:
        if not rc.is_initialized() or rc.rank() == 0:
            print(f"ringcomm bench: {error}", file=sys.stderr, flush=True)
        rc.shutdown()
        return 2


def measure_all(args: Namespace, others: Callable[[], Mapping[str, Bind]] = dict) -> dict[str, Any]:
    """Return the facts about this run and its "rows", the same on all ranks; rank 0 prints both.

    Args:
        args: the command line, parsed by parser().
        others: function that returns other engines to measure, by name; called after rc.init().

    Raises:
        ConfigError: there is one rank, or a dtype needs a package that is missing.
    """
    dtypes = [_dtype(name) for name in args.dtype]
    before = {"load": os.getloadavg()[0], "settings": _settings()}  # init() adds settings
    rc.init()
    if rc.size() == 1:
        raise ConfigError("1 rank, and a collective needs two: ringcomm run -np 2 ringcomm bench")
    report: dict[str, Any] = {"ringcomm_bench": 2, **before, **_facts(args), "rows": []}
    _say(*_preamble(report))
    _measure(args, dtypes, others(), report)
    return report


def finish(args: Namespace, report: dict[str, Any]) -> int:
    """Write the JSON and shut down; return 1 if a result was wrong, else 0."""
    wrong = sum(row["wrong"] for row in report["rows"])
    _say(f"# wrong elements: {wrong}")
    if rc.rank() == 0 and args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    rc.shutdown()
    return 1 if wrong else 0


def _dtype(name: str) -> np.dtype[Any]:
    try:
        like: Array = adapter_of_kind("numpy").make(DTYPES[name], (0,))
    except TypeError as error:
        raise ConfigError(str(error)) from error
    return like.dtype


def _facts(args: Namespace) -> dict[str, Any]:
    """Return the facts about this run for the JSON. Collective."""
    leaders = [r for r, local in enumerate(rc.allgather_object(rc.local_rank())) if local == 0]
    cpus = rc.allgather_object(os.sched_getaffinity(0))  # mpirun may bind each rank to one
    return {
        "version": rc.__version__,
        "size": rc.size(),
        "hosts": len(leaders),
        "cores": usable_cores(cpus[: rc.local_size()]),
        "mpi": engine().transport.implementation,
        "mode": args.mode,
        "link_gbps": _link_gbps(leaders),
    }


def _settings() -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(config.environment().items())
        if name.startswith(_OF_INTEREST) and not name.endswith(_OF_THE_LAUNCHER)
    }


def _link_gbps(leaders: list[int]) -> float | None:
    """Return the GB/s that each host can send while it receives; None on one host. Collective.

    The first ranks of all hosts form a ring. In turn, each sends 4 MiB to the next one while it
    receives as much; to the previous one; and all take part in an allgather, whose messages are
    shorter. Calls follow each other as those of the collectives do; the best of all counts.
    """
    if len(leaders) == 1:
        return None
    data, out = np.ones(_LINK_NBYTES, np.uint8), np.empty(_LINK_NBYTES, np.uint8)
    hosts, group = len(leaders), rc.Group(leaders)
    calls: list[Callable[[], object]] = [lambda: None] * 3
    if rc.rank() in leaders:
        place = leaders.index(rc.rank())
        after, before = leaders[(place + 1) % hosts], leaders[place - 1]
        part = data[: _LINK_NBYTES // (hosts - 1)]  # so each rank sends and receives 4 MiB
        calls = [
            lambda: rc.sendrecv(data, after, out, before),
            lambda: rc.sendrecv(data, before, out, after),
            lambda: rc.allgather(part, group=group),
        ]
    return best_gbps(_LINK_NBYTES, take_turns(calls, 0.0, _LINK_BATCHES))


def _preamble(report: Mapping[str, Any]) -> Iterator[str]:
    size, hosts, cores, load = (report[name] for name in ("size", "hosts", "cores", "load"))
    yield (
        f"# ringcomm bench {report['version']}: {size} ranks on {hosts} host{'s' * (hosts > 1)}, "
        f"{cores} cores for the ranks of rank 0's host, mode {report['mode']}"
    )
    yield f"# {report['mpi']}"
    yield from (f"# {name}={value}" for name, value in report["settings"].items())
    if report["link_gbps"] is not None:
        yield f"# link between hosts: {report['link_gbps'] * 1e3:.1f} MB/s each way, measured"
    if size > cores * hosts:
        yield "# more ranks than cores: times also depend on how ranks wait for each other"
    if load > _QUIET_LOAD:
        yield f"# load average {load:.1f}: other programs are running. Compare lines, not runs"


def _measure(
    args: Namespace, dtypes: list[np.dtype[Any]], others: Mapping[str, Bind], report: dict[str, Any]
) -> None:
    """Append the rows to `report`, and print them."""
    series = list(_series(args, dtypes))
    largest = max((case.nbytes for cases in series for case in cases), default=0)
    send, recv = _private(largest), _private(largest)  # for all engines, so caches are equal
    ours = ringcomm_in(args.mode)
    contenders = [
        Contender("ringcomm", each, ours, send if each == "private" else _registered(largest), recv)
        for each in args.buffers
    ]
    contenders += [Contender(name, "private", bind, send, recv) for name, bind in others.items()]
    contenders.append(Contender("memcpy", "private", memcpy, send, recv))
    link, hosts = report["link_gbps"], report["hosts"]
    with progress_bar("bench", sum(map(len, series)), shows=rc.rank() == 0) as bar:
        for cases in series:
            first, has_wire = cases[0], link is not None
            title = " ".join(filter(None, (first.collective, first.dtype.name, first.op)))
            heading = ["#", f"# {title}", *table.heading(has_wire=has_wire)]
            _say(*map(bar.over, heading))
            for case in cases:
                rows = measure(
                    case, contenders, forms=args.forms, seconds=args.seconds,
                    batches=args.iterations,
                )  # fmt: skip
                for row in rows:
                    if link is not None and row.time_us is not None and row.engine != "memcpy":
                        row.wire_share = wire_bytes(case, hosts) / (row.time_us * 1e3) / link
                lines = [*_note_algorithm(case, rows), *table.lines(rows, has_wire=has_wire)]
                _say(*map(bar.over, lines))
                report["rows"] += [dataclasses.asdict(row) for row in rows]
                bar.advance(1)


def _series(args: Namespace, dtypes: list[np.dtype[Any]]) -> Iterator[list[BenchCase]]:
    fitting = _fitting(args.sizes)
    for name, dtype in itertools.product(args.collective, dtypes):
        if name == "barrier" and dtype != dtypes[0]:
            continue  # a barrier has no dtype
        for op in args.op if COLLECTIVES[name].is_reduction else [""]:
            try:
                if op:
                    rc.Op(op).require(DTYPES[dtype.name])
            except TypeError as error:
                _say(f"# left out: {error}")
                continue
            cases = [make_case(name, op, dtype, nbytes, rc.size()) for nbytes in fitting]
            yield list(dict.fromkeys(cases))


def _fitting(sizes: Sequence[int]) -> list[int]:
    """Return the sizes that fit in the memory of every host, or the smallest if none fits."""
    lines = dict(line.split(":") for line in read_text("/proc/meminfo").splitlines())
    available = int(lines["MemAvailable"].split()[0]) * 1024
    limit = min(rc.allgather_object(available // rc.local_size())) // _MEMORY_FACTOR
    fitting = [size for size in sizes if size <= limit] or [min(sizes)]
    if len(fitting) < len(sizes):
        _say(f"# sizes above {bytes_text(limit)} are left out: MemAvailable")
    return fitting


def _private(nbytes: int) -> Array:
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + nbytes]


def _registered(nbytes: int) -> Array:
    memory: Array = rc.empty((nbytes,), np.uint8)
    return memory


def _note_algorithm(case: BenchCase, rows: list[table.BenchRow]) -> list[str]:
    ours = [row for row in rows if (row.engine, row.collective) == ("ringcomm", "allreduce")]
    if not ours:
        return []
    text = str(rc.explain(case.nbytes, case.dtype.name)).partition("\n")[0]
    for row in ours:
        row.algorithm = text
    return [f"# {bytes_text(case.nbytes)}: {text}"]


def _say(*lines: str) -> None:
    if rc.rank() == 0:
        print(*lines, sep="\n", flush=True)


# --- the command line ---------------------------------------------------------------------------
def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="ringcomm bench",
        usage="ringcomm run -np N ringcomm bench [options]",
        description="Measure the collectives on this job's ranks, beside a simultaneous memcpy. "
        "Each size is checked bit by bit; the exit code is 1 if any result was wrong. "
        "docs/benchmarks.md explains the table, and how to compare with other libraries.",
    )
    add = options.add_argument
    for option, known, default in (
        ("--collective", tuple(COLLECTIVES), ("allreduce",)),
        ("--dtype", tuple(DTYPES), ("float32",)),
        ("--op", tuple(op.value for op in Op), ("sum",)),
        ("--buffers", _BUFFERS, _BUFFERS),
    ):
        add(option, type=names_of(known), default=default, metavar="NAME,...",
            help=f"{', '.join(known)} or all; default {', '.join(default)}")  # fmt: skip
    add("--sizes", type=parse_sizes, default=parse_sizes("8:64M"), metavar="8:256M[:4],...",
        help="ranges by powers of 2 (or another factor), single sizes; default 8:64M")  # fmt: skip
    add("--mode", choices=MODES, default="sync",
        help="allreduce(x), allreduce_async(x).wait(), or the same with a name")  # fmt: skip
    for option, form in (("--in-place", True), ("--out-of-place", False)):
        add(option, dest="forms", action="store_const", const=(form,), default=(False, True),
            help="only that form")  # fmt: skip
    add("--seconds", type=above_zero(float), default=2.0, help="for each size; default 2")
    add("--iterations", type=above_zero(int), help="batches of each line, instead of --seconds")
    add("--json", type=new_file, metavar="FILE", help="write all results to this file")
    return options


def names_of(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    """Return an argparse type for "A,B,C" of the known names, or "all"."""

    def parse(text: str) -> tuple[str, ...]:
        names = known if text == "all" else tuple(dict.fromkeys(text.split(",")))
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(known)}")
        return names

    return parse


def above_zero(kind: type[float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise ArgumentTypeError(f"{text} is not a number above 0")
        return value

    return parse


def new_file(text: str) -> Path:
    """Return a path whose folder exists: a typo must not cost minutes of measuring."""
    path = Path(text)
    if not path.parent.is_dir():
        raise ArgumentTypeError(f"there is no folder {path.parent}")
    if path.is_dir():
        raise ArgumentTypeError(f"{path} is a folder: name a file in it")
    return path
