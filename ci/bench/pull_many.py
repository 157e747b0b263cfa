"""Pulls of rows of many hash tables: one by one, issued together, and by ps.pull_many(), in turns.

The last ranks are servers, all others workers. All rows are checked; the exit code is 1 if any was
wrong.
"""

import argparse
import json
import os
import time

import numpy as np
from bench.figure_and_goal import Figure, verdict
from bench.option_types import above_zero

import ringcomm as rc
from ringcomm import ps
from ringcomm.launch.bench import quiet
from ringcomm.launch.option_types import new_file

UNIVERSE = 1_000_000
OF_ONE_BY_ONE = 1 / 3


def one_by_one(pulls):
    return [table.pull(keys).wait() for table, keys in pulls]


def together(pulls):
    futures = [table.pull(keys) for table, keys in pulls]
    return [future.wait() for future in futures]


def pull_many(pulls):
    return ps.pull_many(pulls).wait()


WAYS = {"one by one": one_by_one, "issued together": together, "pull_many": pull_many}


def main(argv):
    args = parsed(argv)
    load = os.getloadavg()[0]
    ps.init(args.servers)  # servers end here, when the workers do
    pulls = tables_of(args)
    right = [b.tobytes() for b in one_by_one(pulls)]
    times_s, n_wrong = {name: [] for name in WAYS}, 0
    with quiet():
        for number in range(args.rounds + 1):  # the first is not recorded
            for name, way in WAYS.items() if number % 2 == 0 else reversed(WAYS.items()):
                rc.barrier()
                start = time.perf_counter()
                rows = way(pulls)
                times_s[name] += [time.perf_counter() - start] if number else []
                n_wrong += sum(a.tobytes() != b for a, b in zip(rows, right, strict=True))
    everyone = rc.allgather_object((times_s, n_wrong))
    n_wrong = sum(each for _, each in everyone)
    median_ms = {
        name: 1e3 * float(np.median([times[name] for times, _ in everyone])) for name in WAYS
    }
    if ps.is_chief():
        report(args, load, median_ms, n_wrong)
    return 1 if n_wrong else 0


def tables_of(args):
    """Open the tables; return pairs of a table and this worker's keys, whose rows are there."""
    rng = np.random.default_rng(rc.rank())
    init = ps.initializers.normal(std=0.1)
    pulls = []
    for k in range(args.tables):
        table = ps.hashtable(f"bench {k}", args.dim, init=init)
        keys = np.sort(rng.choice(UNIVERSE, args.keys, replace=False))  # as an embedding asks
        table.push(keys, np.zeros((len(keys), args.dim), np.float32)).wait()
        pulls.append((table, keys))
    return pulls


def report(args, load, median_ms, n_wrong):
    print(
        f"# ci/bench pull_many {rc.__version__}: {args.tables} tables, {args.keys} keys x "
        f"{args.dim} float32, {rc.size()} worker(s), {args.servers} server(s), load average "
        f"{load:.1f}",
        *(f" {name:<16} {x:8.2f} ms" for name, x in median_ms.items()),
        f"# {n_wrong} arrays of rows were wrong",
        sep="\n",
    )
    ratio = median_ms["pull_many"] / median_ms["one by one"]
    judged = [Figure("pull_many: time / one by one", ratio, at_most=OF_ONE_BY_ONE)]
    print("#", *map(str, judged), verdict(judged), sep="\n", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps({"median_ms": median_ms, "wrong": n_wrong}) + "\n")


def parsed(argv):
    parser = argparse.ArgumentParser(prog="ci/bench pull_many", description=__doc__)
    add = parser.add_argument
    add("--tables", type=above_zero(int), default=26, help="default 26")
    add("--keys", type=above_zero(int), default=2000, help="of each table; default 2000")
    add("--dim", type=above_zero(int), default=16, help="columns of a row; default 16")
    add("--servers", type=above_zero(int), default=2, help="default 2")
    add("--rounds", type=above_zero(int), default=60, help="default 60")
    add("--json", type=new_file, metavar="FILE", help="write what was found, too")
    return parser.parse_args(argv)
