#!/usr/bin/env python3
"""Measures what it costs to make the lost copies of servers again, while training goes on.

usage: .venv/bin/python ci/ps_copy_cost.py [--mib 256] [--servers 3] [--hash] [--frame 1]

One server of a job with replication=2 is killed. The line says how long it took until there were
two copies of all again, and of one worker's steps the longest meanwhile, and the median before. A
step pushes to one table of 4 MiB out of many, and to a small one, which has a part on each server,
and pulls that. mib: of each server, of which there are two copies.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

TABLE_NBYTES = 4 << 20
LIMIT_S = 300


def open_tables(args, n_tables):
    """Return what pushes to one of the tables, what all values sum up to, and that of a push."""
    import numpy as np

    from ringcomm import ps

    if not args.hash:
        tables = [
            ps.table(f"w{k}", TABLE_NBYTES // 4, updater=ps.optim.Add()) for k in range(n_tables)
        ]
        gradient = np.ones(TABLE_NBYTES // 4, np.float32)
        return (
            lambda k: tables[k].push(gradient),
            lambda: sum(float(each.pull().wait().sum(dtype=float)) for each in tables),
            gradient.size,
        )
    rows, n = ps.hashtable("rows", 256, updater=ps.optim.Add()), TABLE_NBYTES // 1024
    keys = [np.arange(k * n, (k + 1) * n, dtype=np.uint64) for k in range(n_tables)]
    for each in keys:
        rows.push(each, np.zeros((n, 256), np.float32)).wait()
    gradient = np.ones((64, 256), np.float32)
    return (
        lambda k: rows.push(keys[k][:64], gradient),
        lambda: sum(float(rows.pull(each).wait().sum(dtype=float)) for each in keys),
        gradient.size,
    )


def train(args):
    """Run as one rank of the job."""
    import numpy as np

    import ringcomm as rc
    from ringcomm import ps
    from ringcomm.ps.server.homes import copy_transfer

    if args.frame:
        copy_transfer.FRAME_NBYTES = copy_transfer.WINDOW_NBYTES = args.frame
    rc.init()
    pids = rc.allgather_object(os.getpid())
    ps.init(args.servers, replication=2)
    n_tables = max(1, args.servers * (args.mib << 20) // TABLE_NBYTES)
    count = 30 * args.servers
    small = ps.table("small", count, updater=ps.optim.Add(), block_nbytes=120)
    for number in range(args.many):
        ps.table(f"many{number}", 64 * args.servers, updater=ps.optim.Add(), block_nbytes=4)
    push, total, n_in_push = open_tables(args, n_tables)
    rng, steps = np.random.default_rng(1), []

    def step():
        began = time.monotonic()
        pushed = push(int(rng.integers(n_tables)))
        small.push(np.ones(count, np.float32)).wait()
        pushed.wait()
        small.pull().wait()
        steps.append(time.monotonic() - began)

    for _ in range(args.steps):
        step()
    os.kill(pids[2], signal.SIGKILL)  # server 1: rank 0 is the worker
    died_at = time.monotonic()
    step()
    while any(each["copies"] < 2 for each in ps.stats()):
        step()
    copied_s = time.monotonic() - died_at
    for _ in range(10):
        step()
    found, wanted = total(), n_in_push * len(steps)
    assert (small.pull().wait() == len(steps)).all()
    assert found == wanted, f"{found} is there, and {wanted} was pushed"
    before, after = sorted(steps[: args.steps]), sorted(steps[args.steps :])
    numbers = {
        "copied_s": copied_s, "longest_step_s": after[-1], "second_s": after[-2],
        "median_before_s": before[len(before) // 2],
    }  # fmt: skip
    told = {"mib": args.mib, "kind": "rows" if args.hash else "dense", "steps": len(after)}
    print(json.dumps(told | {k: round(v, 4) for k, v in numbers.items()}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--steps", type=int, default=60, help="before the death")
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--many", type=int, default=0, help="tables of 64 tiny blocks on a server")
    parser.add_argument("--frame", type=int, help="bytes of pieces that go together, one by one")
    parser.add_argument("--hash", action="store_true", help="rows of a hash table")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        train(args)
        return
    root = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    mine = {"RINGCOMM_ELASTIC": "1", "RINGCOMM_TIMEOUT_S": "120", "OMP_NUM_THREADS": "1"}
    command = [
        Path(sys.executable).parent / "mpirun", "--oversubscribe", "--with-ft", "ulfm",
        "--runtime-options", "error-nonzero-status=0", "-np", str(args.servers + 1),
        sys.executable, *sys.argv, "--rank",
    ]  # fmt: skip
    environment = os.environ | dict.fromkeys(root, "1") | mine
    sys.exit(subprocess.run(command, check=False, env=environment, timeout=LIMIT_S).returncode)


if __name__ == "__main__":
    main()
