"""Speed of the reduction kernels: each dtype against float32, and float32 against memcpy and numpy.

    python ci/kernels.py [--kib 64 4096 65536] [--sources 2 4] [--op SUM]

Every source is a destination, as in an allreduce in shared memory. Speeds are bytes of one source
per second; what is compared ran in turns. "memcpy" copies as many bytes once; "numpy" is a += b for
the second and further sources, which leaves the sum in one place only.
"""

import argparse
import mmap
import sys
import time
from statistics import median

import numpy as np

from ringcomm import _core
from ringcomm.arrays.dtypes import DTYPES
from ringcomm.collectives.operators import AVERAGE, Op

SECONDS = 0.5  # for each line of the table


def shared(nbytes):
    """Return zeros that begin at a page, as the memory that ranks share does."""
    x = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
    x[:] = 0
    return x


def reduction(rows, dtype, op):
    """Return what reduces rows in place."""
    divisor = len(rows) if op is AVERAGE else 1
    return lambda: _core.reduce_many(rows, rows, dtype.kernel, op.kernel, divisor)


def numpy_sum(rows):
    total, *others = [row.view(np.float32) for row in rows]

    def add():
        for other in others:
            np.add(total, other, out=total)

    return add


def candidates(nbytes, n_sources, op):
    """Return what is timed: {name: (function, the same on nothing)}."""
    copy, *rows = [shared(nbytes) for _ in range(n_sources + 1)]
    nothing, source = [row[:0] for row in rows], rows[0]
    table = {
        "memcpy": (lambda: np.copyto(copy, source), lambda: np.copyto(copy[:0], source[:0])),
        "numpy float32": (numpy_sum(rows), numpy_sum(nothing)),
    }
    for dtype in DTYPES.values():
        try:
            op.require(dtype)
        except TypeError:
            continue
        table[dtype.name] = (reduction(rows, dtype, op), reduction(nothing, dtype, op))
    return table


def seconds(run, repeats):
    begin = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - begin) / repeats


def timed(table, nbytes):
    """Return the median seconds of each candidate, less what it costs to call it."""
    repeats = max(1, (4 << 20) // nbytes)
    rounds = []
    begin = time.monotonic()
    while len(rounds) < 5 or time.monotonic() - begin < SECONDS * len(table):
        rounds.append([seconds(f, repeats) - seconds(idle, repeats) for f, idle in table.values()])
    return dict(zip(table, map(median, zip(*rounds, strict=True)), strict=True))


def report(nbytes, n_sources, op):
    times = timed(candidates(nbytes, n_sources, op), nbytes)
    base = times["float32"]
    print(f"\n{nbytes >> 10} KiB, {n_sources} sources = destinations, {op}")
    print(f"  {'float32':14}{nbytes / base / 1e9:7.2f} GB/s")
    for name, took in times.items():
        if name != "float32":
            print(f"  {name:14}{nbytes / took / 1e9:7.2f} GB/s {base / took:6.2f} of float32")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kib", type=int, nargs="+", default=[64, 4096, 65536])
    parser.add_argument("--sources", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--op", type=Op.__getitem__, default=Op.SUM)
    given = parser.parse_args()
    for kib in given.kib:
        for n_sources in given.sources:
            report(kib << 10, n_sources, given.op)


if __name__ == "__main__":
    sys.exit(main())
