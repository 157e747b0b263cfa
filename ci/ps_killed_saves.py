#!/usr/bin/env python3
"""Kills jobs at each operation on the files of a checkpoint; what is left is whole, each time.

usage: .venv/bin/python ci/ps_killed_saves.py [--times 100]

A job saves four checkpoints, one after the other; its ranks are threads of one process. A moment is
before or after an operation of any rank on files: a flush, a rename and so on; of writes that
follow each other the first counts, and one in 200. One job that is not killed tells how many
moments there are; then each job is killed at one of them, --times of them, evenly spread. Ends with
1 if what is found then is neither the checkpoint that was complete last nor the one that was being
written, as a whole.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "tests")]

from file_operations import watched  # noqa: E402
from ps_ranks_as_threads import run_workers  # noqa: E402

from ringcomm import ps  # noqa: E402
from ringcomm.ps.checkpoint import files  # noqa: E402

N_SAVES, COUNT, KEYS, LIMIT_S = 4, 50_000, 100, 60
WRITES = 200  # of so many that follow each other one counts


def train(folder):
    w = ps.table("w", COUNT, updater=ps.optim.Add(), block_nbytes=40_000)
    rows = ps.hashtable("rows", 2, updater=ps.optim.Add())
    saved = os.open(folder / "saved", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for step in range(1, N_SAVES + 1):
        w.push(np.ones(COUNT, np.float32)).wait()
        rows.push(range(KEYS), np.ones((KEYS, 2), np.float32)).wait()
        ps.save(folder / "saves", step=step).wait()
        os.write(saved, b".")


def run(folder, moment):
    """Run a job in this process, and kill it at a moment; note how many there were."""
    n, n_writes, root = 0, 0, folder / "saves"

    def at(name):
        nonlocal n, n_writes
        n_writes = n_writes + 1 if name == "write" else 0
        if n_writes % WRITES > 1 or not root.is_dir():
            return
        if n == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        n += 1

    with watched(at):
        run_workers(1, lambda _: train(folder), 2)
    (folder / "moments").write_text(str(n))


def ended(folder, moment):
    """Run a job in another process; return by which signal it ended, or 0."""
    pid = os.fork()
    if pid == 0:
        try:
            run(folder, moment)
        finally:
            os._exit(0)
    deadline = time.monotonic() + LIMIT_S
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise RuntimeError(f"the job that is killed at moment {moment} hangs")
        time.sleep(0.005)  # another process works


def n_moments():
    """Return how many moments a job has."""
    with tempfile.TemporaryDirectory() as folder:
        ended(Path(folder), -1)
        return int((Path(folder) / "moments").read_text())


def problem_after(moment):
    """Kill a job there; return what is wrong with what is found then, or ""."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if ended(folder, moment) != signal.SIGKILL:
            return "it has not come to this moment"
        root, n_saved = folder / "saves", (folder / "saved").stat().st_size
        complete = files.complete(root)
        if not complete:
            return f"nothing is there, and {n_saved} were saved" if n_saved else ""
        step = files.read_manifest(complete[0])["step"]
        if step not in (n_saved, n_saved + 1):
            return f"{n_saved} were saved, and {step} is found"
        found = ps.load_state_dict(root)
        values, rows = found["w"], found["rows"]
        if (values != step).any() or len(rows["keys"]) != KEYS or np.any(rows["values"] != step):
            return f"checkpoint {step} has other values"
        return ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--times", type=int, default=100)
    args = parser.parse_args()
    n, n_whole = n_moments(), 0
    times = min(args.times, n)
    for k in range(times):
        moment = k * n // times
        problem = problem_after(moment)
        n_whole += not problem
        if problem:
            print(f"moment {moment}: {problem}", flush=True)
    print(f"{n_whole} of {times} were whole; there are {n} moments")
    sys.exit(n_whole != times)


if __name__ == "__main__":
    main()
