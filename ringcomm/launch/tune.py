"""`ringcomm tune`: measures every algorithm on the ranks and hosts of this job."""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

import ringcomm as rc
from ringcomm._version import __version__
from ringcomm.arrays import DTYPES, Flat
from ringcomm.collectives.measured_times import TimeTable
from ringcomm.collectives.message_patterns import chunks
from ringcomm.collectives.ranks_by_host import describe
from ringcomm.collectives.recording import perform
from ringcomm.collectives.select_algorithm import Case, choose
from ringcomm.config import COLLECTIVES
from ringcomm.engine.api import tuning_files
from ringcomm.engine.api.explain import bytes_text
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.core.algorithm_choice import MODULES
from ringcomm.engine.core.call import Call
from ringcomm.engine.core.plan import Plan
from ringcomm.errors import ConfigError
from ringcomm.launch.command_line import CommandParser
from ringcomm.launch.option_types import seconds, sizes
from ringcomm.launch.own_ranks import add_np, run_own_ranks
from ringcomm.progress_bar import ProgressBar, progress_bar
from ringcomm.transport.channel import Channel

_FLOAT32 = DTYPES["float32"]
_SIZES = [1 << n for n in range(10, 27, 2)]  # 1 KiB to 64 MiB
_MIN_ROUNDS, _MAX_ROUNDS = 3, 50  # rounds of each algorithm and size
_UNUSED = (
    "no job will choose by this table: ranks of one host always use its shared memory (node). A "
    "table of ranks on several hosts is used"
)


def main(argv: Sequence[str]) -> int:
    """Measure on this job's ranks, print and write the table; return 0, or 2 for a single rank."""
    args = _parser().parse_args(argv)
    if args.np:
        return run_own_ranks("tune", args.np, argv)
    rc.init()
    if rc.size() == 1:
        refusal = "1 rank, and a collective needs two: ringcomm tune -np 2"
        print(f"ringcomm tune: {refusal}", file=sys.stderr)
        rc.shutdown()
        return 2
    current = engine()
    layout = describe(current.groups.default.ranks.nodes)
    if problem := rc.broadcast_object(_problem_of_place(layout) if rc.rank() == 0 else ""):
        if rc.rank() == 0:
            print(f"ringcomm tune: {problem}", file=sys.stderr)
        rc.shutdown()
        return 2
    if rc.rank() == 0 and current.groups.default.shares_memory:
        print(f"{_UNUSED}\n", flush=True)
    n_all = len(COLLECTIVES) * len(args.sizes)
    with progress_bar("tune", n_all, shows=rc.rank() == 0) as bar:
        seconds = {collective: dict(_measured(collective, args, bar)) for collective in COLLECTIVES}
    if rc.rank() == 0:
        table = TimeTable(layout, current.transport.implementation, __version__, seconds)
        print(_printed(table))
        print(f"written to {tuning_files.save(current.settings, table)}", flush=True)
    rc.shutdown()
    return 0


def _problem_of_place(layout: str) -> str:
    """Return why the table cannot be written, before minutes are spent on it; "" if it can."""
    current = engine()
    try:
        tuning_files.require_place(current.settings, layout, current.transport.implementation)
    except ConfigError as error:
        return str(error)
    return ""


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="ringcomm tune",
        description="Measure every algorithm on the ranks and hosts of this job and write a table, "
        "by which later jobs of the same layout choose algorithms; ranks of one host always use "
        "its shared memory. RINGCOMM_TUNING names the table's folder.",
    )
    parser.add_argument(
        "--sizes",
        type=_sizes,
        default=_SIZES,
        help="sizes to measure, as in 4K,1M,64M (default: 1K to 64M in steps of 4)",
    )
    parser.add_argument(
        "--seconds", type=seconds, default=60.0, help="about how long to measure (default: 60)"
    )
    add_np(parser)
    return parser


def _sizes(text: str) -> tuple[int, ...]:
    if min(found := sizes(text)) < _FLOAT32.itemsize:
        raise argparse.ArgumentTypeError(f"{text!r}: a size is at least {_FLOAT32.itemsize} bytes")
    return found


def _measured(
    collective: str, args: argparse.Namespace, bar: ProgressBar
) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield (nbytes, seconds by algorithm), medians of the slowest rank's times."""
    budget_s = args.seconds / len(COLLECTIVES) / len(args.sizes)
    for nbytes in args.sizes:
        if rc.rank() == 0:
            line = bar.over(f"measuring {collective}, {bytes_text(nbytes)}", 2)
            print(line, file=sys.stderr, flush=True)
        group = engine().groups.default
        nodes, shares_memory = group.ranks.nodes, group.shares_memory
        case = Case(collective, nbytes, _FLOAT32, nodes, shares_memory=shares_memory)
        names = list(choose(case).seconds)
        x = Flat(np.zeros(nbytes // 4 * 4, np.uint8), _FLOAT32)
        first = _round(collective, names, x)  # warms up, and gives the number of rounds
        n_rounds = min(max(int(budget_s / sum(first)), _MIN_ROUNDS), _MAX_ROUNDS)
        rounds = []
        for _ in range(n_rounds):
            rounds.append(_round(collective, names, x))
            bar.advance(1 / n_rounds)
        by_name = zip(*rounds, strict=True)
        medians = [statistics.median(times) for times in by_name]
        yield nbytes, dict(zip(names, medians, strict=True))


def _round(collective: str, names: list[str], x: Flat) -> list[float]:
    """Return the seconds of each algorithm on its slowest rank. All ranks get the same list."""
    times = np.array([_seconds(collective, name, x) for name in names])
    return [float(s) for s in rc.allreduce_(times, rc.MAX)]


def _seconds(collective: str, name: str, x: Flat) -> float:
    """Return the seconds of one collective. The time in which the ranks agree is not counted."""
    module = MODULES[name]
    parts = chunks(x.count, rc.size())

    async def run(t: Channel) -> float:
        start = time.perf_counter()
        if collective == "allreduce":
            await perform(module.allreduce_, t, x, op=rc.SUM)
        elif collective == "reduce_scatter":
            await perform(module.reduce_scatter_, t, x, parts, op=rc.SUM)
        else:
            await perform(module.allgather_, t, x, parts)
        return time.perf_counter() - start

    call = Call(f"tune {collective} by {name}", shape=(x.count,))
    taken: float = engine().execute("tune", None, lambda _: Plan(call, x.bytes.nbytes, run))
    return taken


def _printed(table: TimeTable) -> str:
    lines = [f"{table.layout}, {table.implementation}, ringcomm {table.version}; us, float32"]
    for collective, rows in table.seconds.items():
        names = list(dict.fromkeys(name for row in rows.values() for name in sorted(row)))
        lines.append(f"\n{collective:<16}" + "".join(f"{name:>15}" for name in names))
        lines += [f"{bytes_text(n):>16}" + _cells(row, names) for n, row in rows.items()]
    return "\n".join(lines)


def _cells(row: Mapping[str, float], names: list[str]) -> str:
    best = min(row.values(), default=math.inf)
    return "".join(
        f"{row[name] * 1e6:14.1f}{'*' if row[name] == best else ' '}" if name in row else f"{'':15}"
        for name in names
    )
