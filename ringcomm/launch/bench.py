"""`ringcomm bench`: measures every call on this job's ranks, and prints one table.

docs/benchmarks.md explains it. `ci/bench calls` measures more ways to make a call, and other
libraries.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import sys
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import ringcomm as rc
from ringcomm.arrays import adapter_of_kind
from ringcomm.arrays.dtypes import DTYPES
from ringcomm.engine.api.explain import bytes_text
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.errors import ConfigError
from ringcomm.launch.command_line import CommandParser
from ringcomm.launch.option_types import new_file, seconds, sizes
from ringcomm.launch.own_ranks import add_np, run_own_ranks
from ringcomm.launch.usable_cores import usable_cores
from ringcomm.progress_bar import ProgressBar, progress_bar
from ringcomm.system_text import read_text

Array = NDArray[Any]
Call = Callable[[], Any]

POINT_TO_POINT: Final = ("sendrecv", "isend", "pingpong")
REDUCTIONS: Final = (
    "allreduce_", "allreduce", "reduce_", "reduce", "reduce_scatter_", "reduce_scatter", "scan",
    "exscan",
)  # fmt: skip
COPIES: Final = ("broadcast_", "broadcast", "allgather", "gather", "scatter", "alltoall")
CALLS: Final = ("barrier", *POINT_TO_POINT, *REDUCTIONS, *COPIES, "memcpy")
ROOT: Final = 0

_SIZES: Final = "8,1K,64K,1M,16M"
_COLUMNS = 8  # of sizes beside each other
_PERIOD = 8191  # a prime, so that no two parts or ranks look alike
_ALIGNMENT = 64  # bytes: an array begins at a cache line
_MEMORY_FACTOR = 10  # bytes of a rank's memory per byte of the largest array
_BATCH_S = 1e-3  # 1000 times the cost of the clock and the loop
_MOST_CALLS = 1000
_FEWEST_BATCHES, _MOST_BATCHES = 5, 200
_QUIET_LOAD = 0.5


class Arrays:
    """What a call of one size works on. x: shape (n,), a whole part for each rank; y: the same."""

    def __init__(self, nbytes: int, dtype: np.dtype[Any]) -> None:
        self.rank, self.size, self.nbytes, self.dtype = rc.rank(), rc.size(), nbytes, dtype
        n = max(nbytes // dtype.itemsize, 1)
        self.n = -(-n // self.size) * self.size
        self.x, self.y = self._private(), self._private()
        self.after, self.before = (self.rank + 1) % self.size, (self.rank - 1) % self.size

    def _private(self) -> Array:
        memory = np.zeros(self.n * self.dtype.itemsize + _ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        return memory[start : start + self.n * self.dtype.itemsize].view(self.dtype)

    @cached_property
    def shared(self) -> Array:
        """As x, in memory that all ranks of the host map."""
        x: Array = rc.empty((self.n,), self.dtype)
        return x

    @property
    def part(self) -> Array:
        """This rank's part of x, shape (n / size,)."""
        return self.x[: self.n // self.size]

    def fill(self) -> None:
        """Fill x with small integers that depend on rank and position, y with others."""
        self.x[:] = _spread(_of_rank(self.rank).astype(self.dtype), 0, self.n)
        self.y[:] = 9
        if "shared" in self.__dict__:
            self.shared[:] = self.x

    def clear(self) -> None:
        """Fill all with zeros, so that repeated sums in place stay finite."""
        for each in (self.x, self.y, *([self.shared] if "shared" in self.__dict__ else [])):
            each[:] = 0


Way = Callable[[str, Arrays], Call | None]
"""Returns what makes a call once; None if the way has no such call.

What is made returns the result, but point to point, whose result is y. An attribute `result` turns
what is returned into an array, outside the time that is measured.
"""


@dataclass
class Row:
    """A figure of the table."""

    call: str  # one of CALLS
    way: str  # "ringcomm", or another way to make that call
    nbytes: int
    us: float | None = None  # median over batches of the mean call, on the slowest rank
    least_us: float | None = None  # that of the fastest batch
    wrong: int = 0  # number of wrong elements on all ranks


def main(argv: Sequence[str]) -> int:
    """Measure what `argv` asks for; return 0, 1 after a wrong result, or 2 if it cannot measure.

    Collective, except for --help.
    """
    options = parser()
    options.add_argument("--mpi4py", action="store_true", help="also mpi4py's calls, in turns")
    add_np(options)
    args = options.parse_args(argv)
    if args.np:
        return run_own_ranks("bench", args.np, argv)
    ways: dict[str, Way] = {"ringcomm": ringcomm_way, "rc.zeros": _sum_of_shared_arrays}
    if args.mpi4py:
        ways["mpi4py"] = mpi4py_way
    try:
        return finish(args, measure_all(args, ways))
    except ConfigError as error:
        if not rc.is_initialized() or rc.rank() == 0:
            print(f"ringcomm bench: {error}", file=sys.stderr, flush=True)
        rc.shutdown()
        return 2


def parser() -> argparse.ArgumentParser:
    """Return the options that `ringcomm bench` and `ci/bench calls` share."""
    options = CommandParser(
        prog="ringcomm bench",
        usage="ringcomm bench -np N [CALL ...] [options]",
        description="Measure every call on N ranks of its own, or on those of a job (`mpirun "
        "ringcomm bench`): one table of microseconds. Results are checked; the exit code is 1 if "
        "any was wrong. docs/benchmarks.md explains the table.",
    )
    add = options.add_argument
    add("calls", nargs="*", type=_call, metavar="CALL", help=f"{', '.join(CALLS)}; default all")
    add("--sizes", type=sizes, default=sizes(_SIZES), metavar="SIZE,...",
        help=f"bytes, as in 4K,1M; ranges by powers of 2: 8:64M; default {_SIZES}")  # fmt: skip
    add("--dtype", choices=[each for each in DTYPES if each != "bool"], default="float32",
        metavar="DTYPE", help="of the arrays; default float32")  # fmt: skip
    add("--seconds", type=seconds, default=0.15, help="for each figure, about; default 0.15")
    add("--json", type=new_file, metavar="FILE", help="write all figures to this file, too")
    return options


def _call(text: str) -> str:
    if text not in CALLS:
        raise ArgumentTypeError(f"{text!r} is not one of {', '.join(CALLS)}")
    return text


def measure_all(args: Namespace, ways: Mapping[str, Way]) -> dict[str, Any]:
    """Return the facts about this run and its "rows", the same on all ranks; rank 0 prints both.

    Args:
        args: the command line, parsed by parser().
        ways: to make each call, by name; those of one call and size take turns.

    Raises:
        ConfigError: there is one rank, or the dtype needs a package that is missing.
    """
    try:
        made: Array = adapter_of_kind("numpy").make(DTYPES[args.dtype], (0,))
    except TypeError as error:
        raise ConfigError(str(error)) from error
    load = os.getloadavg()[0]
    rc.init()
    if rc.size() == 1:
        raise ConfigError("1 rank, and a call needs two: ringcomm bench -np 2")
    report: dict[str, Any] = {"ringcomm_bench": 3, "load": load, **_facts(args), "rows": []}
    say(*preamble(report))
    calls = tuple(dict.fromkeys(args.calls)) or CALLS
    fitting = _fitting(args.sizes)
    with progress_bar("bench", len(calls) * len(fitting), shows=rc.rank() == 0) as bar:
        for start in range(0, len(fitting), _COLUMNS):
            columns = fitting[start : start + _COLUMNS]
            arrays = [Arrays(nbytes, made.dtype) for nbytes in columns]
            say("", *map(bar.over, heading(columns)))
            for call in calls:
                if call == "barrier" and start:
                    continue  # it has no size
                rows = list(_rows(call, arrays, ways, args.seconds, bar))
                say(*map(bar.over, lines(rows, columns)))
                report["rows"] += [asdict(row) for row in rows]
    return report


def finish(args: Namespace, report: Mapping[str, Any]) -> int:
    """Write the JSON and shut down; return 1 if a result was wrong, else 0."""
    wrong = sum(row["wrong"] for row in report["rows"])
    if wrong:
        say("", f"WRONG: {wrong} elements of the results above")
    if rc.rank() == 0 and args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    rc.shutdown()
    return 1 if wrong else 0


def say(*text: str) -> None:
    """Print lines on rank 0."""
    if rc.rank() == 0:
        print(*text, sep="\n", flush=True)


def _facts(args: Namespace) -> dict[str, Any]:
    """Return the facts about this run for the JSON. Collective."""
    cpus = rc.allgather_object(os.sched_getaffinity(0))  # mpirun may bind each rank to one
    return {
        "version": rc.__version__,
        "size": rc.size(),
        "hosts": sum(local == 0 for local in rc.allgather_object(rc.local_rank())),
        "cores": usable_cores(cpus[: rc.local_size()]),
        "mpi": engine().transport.implementation,
        "dtype": args.dtype,
    }


def _fitting(wanted: Sequence[int]) -> list[int]:
    """Return the sizes that fit in the memory of every host, or the smallest if none fits."""
    facts = dict(line.split(":") for line in read_text("/proc/meminfo").splitlines())
    available = int(facts["MemAvailable"].split()[0]) * 1024
    limit = min(rc.allgather_object(available // rc.local_size())) // _MEMORY_FACTOR
    fitting = [size for size in wanted if size <= limit] or [min(wanted)]
    if len(fitting) < len(wanted):
        say(f"# sizes above {bytes_text(limit)} are left out: MemAvailable")
    return fitting


# --- the table ------------------------------------------------------------------------------------
def preamble(report: Mapping[str, Any]) -> Iterator[str]:
    size, hosts, cores, load = (report[name] for name in ("size", "hosts", "cores", "load"))
    where = "1 host" if hosts == 1 else f"{hosts} hosts"
    yield f"ringcomm {report['version']}, {size} ranks on {where}, {cores} cores; {report['mpi']}"
    yield (
        f"Microseconds of a call, on the slowest rank. {report['dtype']}, rc.SUM, root {ROOT}. "
        "pingpong: there and back."
    )
    if size > cores * hosts:
        yield "More ranks than cores: a rank that waits takes the core of one that works."
    if load > _QUIET_LOAD:
        yield f"Load average {load:.1f}: other programs run. Compare figures of one run only."


def heading(columns: Sequence[int]) -> list[str]:
    return [f"{'':<16}" + "".join(f"{bytes_text(nbytes):>10}" for nbytes in columns)]


def lines(rows: Sequence[Row], columns: Sequence[int]) -> list[str]:
    """Return a line of each way of one call; the first bears the call's name."""
    found = {(row.way, row.nbytes): row for row in rows}
    ways = list(dict.fromkeys(row.way for row in rows))
    label = {way: f"  {way}" if number else rows[0].call for number, way in enumerate(ways)}
    sized = columns if rows and rows[0].call != "barrier" else [0]
    return [
        f"{label[way]:<16}" + "".join(f"{_figure(found.get((way, n))):>10}" for n in sized)
        for way in ways
    ]


def _figure(row: Row | None) -> str:
    if row is None:
        return "-"
    if row.us is None:
        return "WRONG"
    return f"{row.us:.1f}" if row.us < 100 else f"{row.us:,.0f}"


# --- a call of ringcomm, of mpi4py ----------------------------------------------------------------
def ringcomm_way(call: str, a: Arrays, **options: Any) -> Call | None:
    """Return a call of ringcomm on private arrays; `options` go to it."""
    if call == "memcpy":
        return partial(np.copyto, a.y, a.x)
    if call == "barrier":
        return partial(rc.barrier, **options)
    if call in POINT_TO_POINT:
        if options:
            return None
        if call == "sendrecv":
            return partial(rc.sendrecv, a.x, a.after, a.y, a.before)
        if call == "isend":
            return lambda: rc.wait_all([rc.irecv(a.y, a.before), rc.isend(a.x, a.after)])
        return pingpong(a.rank, a.x, a.y, rc.send, rc.recv)
    return partial(getattr(rc, call), a.part if call in ("allgather", "gather") else a.x, **options)


def shared_way(call: str, a: Arrays) -> Call | None:
    """Return a reduction of an array that all ranks of the host map."""
    return partial(getattr(rc, call), a.shared) if call in REDUCTIONS else None


def _sum_of_shared_arrays(call: str, a: Arrays) -> Call | None:
    return shared_way(call, a) if call == "allreduce_" else None


def pingpong(
    rank: int,
    x: Any,
    y: Any,
    send: Callable[[Any, int], object],
    recv: Callable[[Any, int], object],
) -> Call:
    """Return a message from rank 0 to rank 1 and back; other ranks do nothing."""

    def first() -> None:
        send(x, 1)
        recv(y, 1)

    def second() -> None:
        recv(y, 0)
        send(y, 0)

    return (first, second, lambda: None)[min(rank, 2)]


def mpi4py_way(call: str, a: Arrays) -> Call | None:
    """Return a call of mpi4py. Results are new arrays where ringcomm's are."""
    from mpi4py import MPI

    if call == "memcpy" or (call in REDUCTIONS and a.dtype.name in ("float16", "bfloat16")):
        return None  # MPI reduces none of these
    c, at_root, part_n = MPI.COMM_WORLD, a.rank == ROOT, a.n // a.size
    x, y, part = (
        each.view(np.uint16) if each.dtype.name in ("float16", "bfloat16") else each
        for each in (a.x, a.y, a.part)
    )

    def new(n: int, start: Callable[[Array], object]) -> Call:
        def made() -> Array:
            out = np.empty(n, x.dtype)
            start(out)
            return out

        return made

    def own(start: Call) -> Call:
        def made() -> Array:
            start()
            return x

        return made

    def broadcast() -> Array:
        out = x.copy()
        c.Bcast(out)
        return out

    def exscan() -> Array:
        out = np.zeros(a.n, x.dtype)
        c.Exscan(x, out)
        return out

    def swap() -> None:
        MPI.Request.Waitall([c.Irecv(y, a.before), c.Isend(x, a.after)])

    reduce = partial(c.Reduce, x, None)
    calls: dict[str, Call] = {
        "barrier": c.Barrier,
        "sendrecv": lambda: c.Sendrecv(x, a.after, 0, y, a.before),
        "isend": swap,
        "pingpong": pingpong(a.rank, x, y, c.Send, c.Recv),
        "allreduce_": own(partial(c.Allreduce, MPI.IN_PLACE, x)),
        "allreduce": new(a.n, partial(c.Allreduce, x)),
        "reduce_": own(partial(c.Reduce, MPI.IN_PLACE, x)) if at_root else reduce,
        "reduce": new(a.n, partial(c.Reduce, x)) if at_root else reduce,
        "reduce_scatter_": own(partial(c.Reduce_scatter_block, MPI.IN_PLACE, x)),
        "reduce_scatter": new(part_n, partial(c.Reduce_scatter_block, x)),
        "scan": new(a.n, partial(c.Scan, x)),
        "exscan": exscan,
        "broadcast_": own(partial(c.Bcast, x)),
        "broadcast": broadcast,
        "allgather": new(a.n, partial(c.Allgather, part)),
        "gather": new(a.n, partial(c.Gather, part)) if at_root else partial(c.Gather, part, None),
        "scatter": new(part_n, partial(c.Scatter, x if at_root else None)),
        "alltoall": new(a.n, partial(c.Alltoall, x)),
    }
    return calls[call]


# --- right results --------------------------------------------------------------------------------
def expected(call: str, a: Arrays) -> Array | None:
    """Return this rank's result, computed by numpy, shape (m,); None if it gets none."""
    ranks, p = range(a.size), a.n // a.size
    kind = call.rstrip("_")
    if kind in ("reduce", "gather") and a.rank != ROOT:
        return None
    if call == "pingpong" and a.rank > 1:
        return None
    if kind in ("allgather", "gather"):
        parts = [_spread(_of_rank(r), 0, p) for r in ranks]
        return np.concatenate(parts).astype(a.dtype)
    if kind == "alltoall":
        parts = [_spread(_of_rank(r), a.rank * p, p) for r in ranks]
        return np.concatenate(parts).astype(a.dtype)
    if call in REDUCTIONS:
        last = {"scan": a.rank + 1, "exscan": a.rank}.get(kind, a.size)
        period = sum((_of_rank(r) for r in range(last)), np.zeros(_PERIOD, np.int64))
    else:
        source = {"sendrecv": a.before, "isend": a.before, "memcpy": a.rank}.get(kind, ROOT)
        period = _of_rank(source)
    start, n = (a.rank * p, p) if kind in ("reduce_scatter", "scatter") else (0, a.n)
    return _spread(period.astype(a.dtype), start, n)


def _of_rank(rank: int) -> Array:
    """Return the values of a rank's x, which repeat themselves. Sums fit in every dtype."""
    return np.random.RandomState(rank).randint(0, 7, _PERIOD)  # the same in every numpy


def _spread(period: Array, start: int, n: int) -> Array:
    return np.resize(np.roll(period, -(start % _PERIOD)), n)


def _n_wrong(name: str, a: Arrays, call: Call) -> int:
    """Return how many elements of the result are wrong, over all ranks. Collective."""
    a.fill()
    rc.barrier()
    result = getattr(call, "result", np.asarray)(call())
    right = None if name == "barrier" else expected(name, a)
    wrong = 0
    if right is not None:
        found = a.y if name in (*POINT_TO_POINT, "memcpy") else result
        wrong = right.size
        if name.endswith("_"):  # in place, reduce_scatter leaves its result in the first part
            found = found[: right.size]
        if found.nbytes == right.nbytes:
            bits = f"u{right.dtype.itemsize}" if right.dtype.itemsize <= 8 else "V16"
            wrong = int(np.count_nonzero(found.reshape(-1).view(bits) != right.view(bits)))
    return sum(rc.allgather_object(wrong))


# --- time -----------------------------------------------------------------------------------------
def _rows(
    call: str, arrays: Sequence[Arrays], ways: Mapping[str, Way], seconds: float, bar: ProgressBar
) -> Iterator[Row]:
    for a in arrays[:1] if call == "barrier" else arrays:
        yield from measure(call, a, ways, seconds)
        bar.advance(1)


def measure(call: str, a: Arrays, ways: Mapping[str, Way], seconds: float) -> list[Row]:
    """Return the rows of one call and size, the same on every rank. Collective.

    A way whose result is wrong is not timed.

    Args:
        ways: which take turns.
        seconds: about how long to measure each.
    """
    a.fill()
    bound = {name: way(call, a) for name, way in ways.items()}
    calls = {name: each for name, each in bound.items() if each is not None}
    rows = {name: Row(call, name, 0 if call == "barrier" else a.nbytes) for name in calls}
    for name, each in calls.items():
        rows[name].wrong += _n_wrong(call, a, each)
    sound = [name for name in calls if not rows[name].wrong]
    a.clear()
    times_s = take_turns([calls[name] for name in sound], seconds * len(sound))
    for name, each_s in zip(sound, times_s, strict=True):
        rows[name].us = 1e6 * float(np.median(each_s))
        rows[name].least_us = 1e6 * float(each_s.min())
        rows[name].wrong += _n_wrong(call, a, calls[name])
    return list(rows.values())


def take_turns(
    calls: Sequence[Call], seconds: float, batches: int | None = None, *, batch_s: float = _BATCH_S
) -> list[Array]:
    """Return the seconds of each of `calls`, shape (batches,): the slowest rank's. Collective.

    A batch is one call that is not timed, and then timed calls in a row. The first call is slower:
    ranks leave the barrier at different times, caches have the data of the previous call, and
    threads sleep. After the first call, each collective keeps its ranks together.
    """
    with quiet():
        call_s = [max(rc.allgather_object(_pilot_s(call))) for call in calls]
        counts = [min(max(math.ceil(batch_s / s), 1), _MOST_CALLS) for s in call_s]
        round_s = sum(s * (n + 1) for s, n in zip(call_s, counts, strict=True))
        affordable = int(seconds / max(round_s, 1e-9))
        batches = batches or min(max(affordable, _FEWEST_BATCHES), _MOST_BATCHES)
        found = np.empty((len(calls), batches))
        for number in range(batches):
            # The order alternates: else each would always follow the same other one.
            order = range(len(calls))
            for each in order if number % 2 == 0 else reversed(order):
                rc.barrier()
                found[each, number] = _batch_s(calls[each], counts[each])
    return list(np.max(rc.allgather_object(found), axis=0))


def _pilot_s(call: Call) -> float:
    """Return about how long a call takes, after some slower first calls."""
    rc.barrier()
    _batch_s(call, 2)
    return max(_batch_s(call, 3), 1e-9)


def _batch_s(call: Call, n: int) -> float:
    call()
    begun = time.perf_counter()
    for _ in range(n):
        call()
    return (time.perf_counter() - begun) / n


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Disable Python's garbage collector in a block."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
