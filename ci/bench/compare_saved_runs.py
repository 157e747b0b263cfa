"""Runs of ci/bench collectives --json side by side, against the goals of docs/benchmarks.md.

Two MPIs cannot share a process, so every time is first divided by the simultaneous memcpy of its
own run. "The fastest MPI" is the least of these quotients over all runs given; ours is divided by
its own run's memcpy, too.
"""

import argparse
import itertools
import json
from pathlib import Path

from bench.figure_and_goal import Figure, verdict

from ringcomm.errors import ConfigError
from ringcomm.launch.bench.table import BenchRow

K, M = 1 << 10, 1 << 20
# Allreduce in place, float32, sum: times faster than the fastest MPI, (registered, private).
NODE = {
    2: {64 * K: (5, 1.2), M: (5, 1.4), 4 * M: (3, 1.3), 16 * M: (3, 1.4), 64 * M: (4.5, 2.2)},
    4: {64 * K: (5, 1.5), M: (5, 1.8), 4 * M: (5, 2), 16 * M: (5, 2), 64 * M: (5, 2.5)},
}
MEMORY_LIMIT_FROM = {2: 4 * M, 4: 16 * M}
OVERSUBSCRIBED = (8, 16)
AS_FLOAT32 = {"/float32": 1.5}
AT_MOST = ("/memcpy", "us over MPI", "p99/p50", "/float32")


def goals(nbytes, *, size, hosts, is_registered):
    """Return the goals of an allreduce in place of float32 by SUM, by the names of figures()."""
    if hosts == 3 and size == 3 and nbytes == 8 * M:
        return {"x MPI": 2, "of link": 0.8}
    if hosts == 3 and size == 6 and 4 * M <= nbytes <= 16 * M:
        return {"x MPI": 2, "x gloo": 1.3}
    if hosts == 1 and size in OVERSUBSCRIBED and is_registered and 64 * K <= nbytes <= 16 * M:
        return {"x MPI": 1, "x gloo": 1, "p99/p50": 5}
    if hosts != 1 or size not in NODE or nbytes > 64 * M:
        return {}
    if nbytes == K:
        return {"us over MPI": 2}
    found = {}
    if nbytes >= 64 * K:  # never slower, also between the sizes above
        found["x MPI"] = NODE[size].get(nbytes, (1, 1))[not is_registered]
    if is_registered and nbytes >= MEMORY_LIMIT_FROM[size]:
        found["/memcpy"] = 0.65
    return found


def main(argv):
    parser = argparse.ArgumentParser(prog="ci/bench compare_saved_runs", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    runs = [read(path) for path in parser.parse_args(argv).files]
    compared = compare(runs)
    found = [figure for *_, figures, _ in compared for figure in figures]
    print(*lines(compared), "", verdict(found), sep="\n")
    return 0


def read(path):
    """Return the run in a file: what the JSON has, its rows as Row."""
    try:
        run = json.loads(path.read_text())
        rows = [BenchRow(**row) for row in run["rows"]]
        if run["ringcomm_bench"] == 2:
            return run | {"rows": rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no result of ci/bench collectives: {error}") from error
    raise ConfigError(f"{path} was written by another version of ci/bench collectives")


def compare(runs):
    """Return (title, row, figures, the fastest MPI) of each correct row of ringcomm."""
    timed = [(run, row) for run in runs for row in run["rows"] if quotient(run, row) is not None]
    fastest = {}
    for run, row in sorted(timed, key=lambda each: quotient(*each)):
        fastest.setdefault((row.engine, key(run, row)), (run, row))
    compared = []
    for run, row in timed:
        if row.engine == "ringcomm":
            mpi, gloo = (fastest.get((name, key(run, row))) for name in ("native", "gloo"))
            compared.append((title(run, row), row, figures(run, row, mpi, gloo), who(mpi)))
    return compared


def memcpy_us(run, row):
    """Return the time of the memcpy beside a row, None if there is none."""
    wanted = ("memcpy", row.collective, row.dtype, row.op, row.nbytes)
    found = (r for r in run["rows"] if (r.engine, r.collective, r.dtype, r.op, r.nbytes) == wanted)
    return next((row.time_us for row in found), None)


def quotient(run, row):
    """Return the time of a row in units of its memcpy; None for that one, and without a time."""
    base = memcpy_us(run, row)
    return row.time_us / base if base and row.time_us and row.engine != "memcpy" else None


def key(run, row):
    """Return what two rows must have in common to be compared."""
    what = (row.collective, row.dtype, row.op, row.in_place, row.nbytes)
    return (run["size"], run["hosts"], *what)


def figures(run, row, mpi, gloo):
    """Return all figures of one row of ringcomm; mpi, gloo: (run, row) of the fastest, or None."""
    ours = quotient(run, row)
    found = {"/memcpy": ours}
    if mpi is not None:
        found["x MPI"] = quotient(*mpi) / ours
        found["us over MPI"] = row.time_us - quotient(*mpi) * memcpy_us(run, row)
    if gloo is not None:
        found["x gloo"] = quotient(*gloo) / ours
    found["p99/p50"] = row.p99_us / row.call_p50_us
    if row.wire_share is not None:
        found["of link"] = row.wire_share
    asked = {}
    if row.dtype in ("float16", "bfloat16"):
        as_float32 = [r for r in run["rows"] if is_float32_of(r, row)]
        found |= {"/float32": row.time_us / as_float32[0].time_us} if as_float32 else {}
        asked = AS_FLOAT32
    elif (row.collective, row.dtype, row.op, row.in_place) == ("allreduce", "float32", "sum", True):
        is_registered = row.buffers == "registered"
        place = {"size": run["size"], "hosts": run["hosts"]}
        asked = goals(row.nbytes, **place, is_registered=is_registered)
    if "us over MPI" not in asked:
        found.pop("us over MPI", None)
    return [
        Figure(name, value, **{"at_most" if name in AT_MOST else "at_least": asked.get(name)})
        for name, value in found.items()
    ]


def is_float32_of(other, row):
    def but_for_time(each):
        return (each.label, each.collective, each.op, each.in_place, each.nbytes)

    is_timed = other.dtype == "float32" and other.time_us is not None
    return is_timed and but_for_time(other) == but_for_time(row)


def who(mpi):
    if mpi is None:
        return ""
    run = mpi[0]
    return f"[{run['mpi']}, {'defaults' if run['is_mpi_default'] else 'our settings'}]"


def title(run, row):
    form = "in place" if row.in_place else "out of place"
    what = " ".join(filter(None, (row.collective, row.dtype, row.op, form)))
    return f"{what}, {run['size']} ranks on {run['hosts']} host{'s' * (run['hosts'] > 1)}"


def lines(compared):
    """Return the table, "!" behind each figure that misses its goal."""
    text = []
    width = max((len(str(each)) for *_, found, _ in compared for each in found), default=0)
    compared = sorted(compared, key=lambda each: (each[0], each[1].label, each[1].nbytes))
    for heading, group in itertools.groupby(compared, lambda each: each[0]):
        text += ["", f"# {heading}"]
        for _, row, found, mpi in group:
            columns = "".join(f"{each!s:<{width}}  " for each in found)
            text.append(f"{row.nbytes:>10}  {row.label:<12}  {columns}{mpi}".rstrip())
    return text[1:] or ["no line of ringcomm with a memcpy beside it"]
