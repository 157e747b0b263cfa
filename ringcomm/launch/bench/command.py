"""`ringcomm bench`: start the ranks' engines, measure case by case, print and write the result."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

import ringcomm as rc
from ringcomm import config
from ringcomm.arrays import adapter_of_kind
from ringcomm.arrays.dtypes import DTYPES
from ringcomm.errors import ConfigError
from ringcomm.launch.bench import engines, options, runner, sizes, table
from ringcomm.launch.bench.bandwidth import COLLECTIVES
from ringcomm.launch.bench.case import Case, make_case
from ringcomm.launch.bench.engines import Array, Engine, MemcpyEngine, RingcommEngine
from ringcomm.launch.bench.options import Options
from ringcomm.launch.bench.report import Report, Row, to_json
from ringcomm.launch.bench.runner import Contender
from ringcomm.launch.bench.wire import measure_link
from ringcomm.launch.cores import own_cpus, usable_cores
from ringcomm.launch.kind import kind_of_library
from ringcomm.launch.lookup import lookup
from ringcomm.transport.native import NativeMpi, start_native

_SUBCOMMANDS: Final = {
    "compare": "ringcomm.launch.bench.compare:main",
    "optimizer": "ringcomm.torch.bench:main",
    "ddp": "ringcomm.torch.distributed.bench:main",
    "ps": "ringcomm.launch.bench.ps.command:main",
}
_OF_INTEREST = ("RINGCOMM_", "OMPI_MCA_", "MPIR_CVAR_")
_OF_THE_LAUNCHER = ("PREFIXES", "cpu_type", "initial_wdir", "num_procs")  # OMPI_MCA_, by mpirun
_ALIGNMENT = 64  # of private buffers: a cache line


def main(argv: Sequence[str]) -> int:
    """Measure what `argv` says; return 1 if a result was wrong, 2 if it cannot be done, else 0.

    Collective, except for `compare` and --help.
    """
    try:
        if argv and argv[0] in _SUBCOMMANDS:
            code: int = lookup(_SUBCOMMANDS[argv[0]])(argv[1:])
            return code
        return _run(options.parse(argv))
    except (ConfigError, ModuleNotFoundError) as error:
        if not rc.is_initialized() or rc.rank() == 0:
            print(f"ringcomm bench: {error}", file=sys.stderr, flush=True)
        rc.shutdown()
        return 2


def _run(wanted: Options) -> int:
    dtypes = [_dtype(name) for name in wanted.dtypes]
    if wanted.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'ringcomm[plot]'")
    facts = _facts(wanted)
    if not wanted.is_mpi_default:
        rc.init()
    native = start_native(with_settings=not wanted.is_mpi_default)
    if native.size == 1:
        raise ConfigError("1 rank, and a collective takes two: mpirun -np 2 ringcomm bench")
    report = _measure_all(wanted, dtypes, native, facts)
    if native.rank == 0:
        _write(wanted, report)
    wrong = native.total(report.wrong)
    if wanted.is_mpi_default:
        native.finalize()
    rc.shutdown()
    return 1 if wrong else 0


def _dtype(name: str) -> np.dtype[Any]:
    try:
        like: Array = adapter_of_kind("numpy").make(DTYPES[name], (0,))
    except TypeError as error:
        raise ConfigError(str(error)) from error
    return like.dtype


def _facts(wanted: Options) -> dict[str, Any]:
    """Return what is to be known of this run before MPI and its environment are set up."""
    return {
        "version": rc.__version__,
        "load": os.getloadavg()[0],
        "is_mpi_default": wanted.is_mpi_default,
        "mode": wanted.mode,
        "settings": _settings(),
    }


def _cores(native: NativeMpi) -> int:
    """Return how many cores the ranks of rank 0's host may use, on rank 0; 0 on the others."""
    found = native.gather((socket.gethostname(), own_cpus()))
    return 0 if found is None else usable_cores(cpus for host, cpus in found if host == found[0][0])


def _settings() -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(config.environment().items())
        if name.startswith(_OF_INTEREST) and not name.endswith(_OF_THE_LAUNCHER)
    }


def _measure_all(
    wanted: Options, dtypes: list[np.dtype[Any]], native: NativeMpi, facts: dict[str, Any]
) -> Report:
    """Return the report, with rows on rank 0 only, where they are printed as they come."""
    link = measure_link(native)
    report = Report(
        size=native.size,
        hosts=len(native.leaders),
        cores=_cores(native),
        mpi=str(kind_of_library(native.implementation)),
        link_gbps=None if link is None else link / 1e9,
        rows=[],
        **facts,
    )
    _say(native, *table.preamble(report))
    series = list(_series(wanted, dtypes, native))
    largest = max((case.nbytes for cases in series for case in cases), default=0)
    send, recv = _private(largest), _private(largest)
    contenders = _contenders(wanted, send, recv, native)
    memcpy = Contender(MemcpyEngine(), "private", send, recv)
    effort = runner.Effort(wanted.seconds, wanted.iterations)
    for cases in series:
        _say(native, *_refusals(cases[0], contenders), *table.heading(has_wire=link is not None))
        for case in cases:
            rows = runner.measure(
                case, contenders, memcpy, native, effort, forms=wanted.forms, link_bytes_s=link
            )
            rows = _with_algorithm(case, rows)
            report.rows.extend(rows)
            _say(native, *_remarks(rows), *table.rows(rows, has_wire=link is not None))
    _say(native, f"# wrong elements: {report.wrong}")
    return report


def _series(
    wanted: Options, dtypes: list[np.dtype[Any]], native: NativeMpi
) -> Iterator[list[Case]]:
    """Yield the cases of each collective, dtype and operator, by rising size."""
    fitting = _fitting(wanted, native)
    for name, dtype in itertools.product(wanted.collectives, dtypes):
        if name == "barrier" and dtype != dtypes[0]:
            continue  # it has no elements
        for op in wanted.ops if COLLECTIVES[name].is_reduction else [""]:
            if op and (reason := _has_no_meaning(op, dtype)):
                _say(native, f"# left out: {reason}")
                continue
            cases = [make_case(name, op, dtype, each, native.size) for each in fitting]
            yield list(dict.fromkeys(cases))


def _has_no_meaning(op: str, dtype: np.dtype[Any]) -> str | None:
    try:
        rc.Op(op).require(DTYPES[dtype.name])
    except TypeError as error:
        return str(error)
    return None


def _fitting(wanted: Options, native: NativeMpi) -> tuple[int, ...]:
    """Return the sizes that fit into memory; say so if some do not."""
    mine = _available_bytes() // native.local_size
    limit = int(-native.highest(-mine)) // runner.MEMORY_FACTOR
    fitting = sizes.cap(wanted.sizes, limit)
    if fitting != wanted.sizes:
        _say(native, f"# sizes above {sizes.show_bytes(limit)} are left out: MemAvailable")
    return fitting


def _available_bytes() -> int:
    with open("/proc/meminfo") as file:
        lines = dict(line.split(":") for line in file)
    return int(lines["MemAvailable"].split()[0]) * 1024


def _contenders(wanted: Options, send: Array, recv: Array, native: NativeMpi) -> list[Contender]:
    """Return who is measured. Private memory is shared, so that caches favour nobody."""
    if wanted.is_mpi_default:
        return [Contender(native, "private", send, recv)]
    ours = RingcommEngine(wanted.mode)
    found = []
    for each in wanted.buffers or options.BUFFERS:
        memory = send if each == "private" else engines.registered(send.nbytes)
        found.append(Contender(ours, each, memory, recv))
    others: list[Engine] = [
        native if name == "native" else engines.load_engine(name) for name in wanted.against
    ]
    return found + [Contender(other, "private", send, recv) for other in others]


def _private(nbytes: int) -> Array:
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + nbytes]


def _refusals(case: Case, contenders: Sequence[Contender]) -> list[str]:
    reasons = {
        each.engine.name: each.engine.refuses(case.collective, case.dtype, case.op)
        for each in contenders
    }
    title = " ".join(filter(None, (case.collective, case.dtype.name, case.op)))
    left_out = [f"# without {name}: {reason}" for name, reason in reasons.items() if reason]
    return ["#", f"# {title}", *left_out]


def _with_algorithm(case: Case, rows: list[Row]) -> list[Row]:
    is_ours = rc.is_initialized() and case.collective == "allreduce"
    text = engines.explain(case.nbytes, case.dtype) if is_ours else ""
    return [
        dataclasses.replace(row, algorithm=text) if row.engine == "ringcomm" else row
        for row in rows
    ]


def _remarks(rows: list[Row]) -> list[str]:
    texts = dict.fromkeys(row.algorithm for row in rows if row.algorithm)
    return [f"# {sizes.show_bytes(rows[0].nbytes)}: {text}" for text in texts]


def _say(native: NativeMpi, *lines: str) -> None:
    if native.rank == 0:
        print(*lines, sep="\n", flush=True)


def _write(wanted: Options, report: Report) -> None:
    if wanted.json is not None:
        wanted.json.write_text(to_json(report) + "\n")
    if wanted.plot is not None:
        from ringcomm.launch.bench.plot import draw

        draw(report, wanted.plot)
