#!/usr/bin/env python3
"""Kills all ranks of jobs that save checkpoints; the newest complete one is whole, each time.

usage: .venv/bin/python ci/ps_killed_saves.py [--times 100] [--seed 1]

Each job saves one checkpoint after the other, and is killed at a random moment once the first is
complete. Ends with 1 if what is read then is not a state that the job had.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from ringcomm import ps
from ringcomm.ps.checkpoint import files

JOB = """
import sys
import numpy as np
from ringcomm import ps
ps.init(servers=2)
w = ps.table("w", 50_000, updater=ps.optim.Add(), block_nbytes=40_000)
rows = ps.hashtable("rows", 2, updater=ps.optim.Add())
for step in range(10**6):
    pushed = [w.push(np.ones(50_000, np.float32)), rows.push(range(100), np.ones((100, 2), "f"))]
    [each.wait() for each in pushed]
    ps.save(sys.argv[1], step=step + 1).wait()
"""
LIMIT_S = 60


def is_whole(root, rng):
    """Kill a job that saves there; return True if what is found then is whole."""
    command = [
        Path(sys.executable).parent / "mpirun", "--oversubscribe", "-np", "3",
        sys.executable, "-c", JOB, root,
    ]  # fmt: skip
    allowed = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    environment = os.environ | dict.fromkeys(allowed, "1") | {"TMPDIR": str(root.parent)}
    quiet = subprocess.DEVNULL
    job = subprocess.Popen(
        command, env=environment, stdout=quiet, stderr=quiet, start_new_session=True
    )
    deadline = time.monotonic() + LIMIT_S
    while not files.complete(root):
        if time.monotonic() > deadline or job.poll() is not None:
            raise RuntimeError("the job has saved nothing")
        time.sleep(0.01)  # other processes write it
    time.sleep(rng.uniform(0, 0.3))  # the random moment
    for pid in _session(job.pid):
        os.kill(pid, signal.SIGKILL)
    job.wait()
    before = files.complete(root)
    step = files.read_manifest(before[0])["step"] if before else None
    found = ps.load_state_dict(root)
    return (
        step is not None
        and (found["w"] == step).all()
        and len(found["rows"]["keys"]) == 100
        and np.all(found["rows"]["values"] == step)
    )


def _session(leader):
    """Return the pids of all processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[3]) == leader:
            found.append(int(path.parent.name))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rng, n_whole = random.Random(args.seed), 0
    for _ in range(args.times):
        with tempfile.TemporaryDirectory() as folder:
            n_whole += bool(is_whole(Path(folder) / "saves", rng))
    print(f"{n_whole} of {args.times} were whole")
    sys.exit(n_whole != args.times)


if __name__ == "__main__":
    main()
