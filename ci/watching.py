#!/usr/bin/env python3
"""What watching costs a job: `ringcomm top`, the dashboard in a browser, rc.log() in each step.

usage: ci/watching.py [--phases 20] [--phase-s 2]

A job of 2 ranks trains in steps of some 10 ms. In every other phase it is watched and logs; else
both watchers are stopped and it does not. Prints the median CPU time and duration of the steps of
both kinds, and the CPU that the watchers take; exits with 1 if a step takes more than 1 % longer,
or if the watchers take more than 1.5 % of a core.
Needs .venv of ./ci/test.
"""

import argparse
import contextlib
import http.client
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests")]

from harness import BIN, job_environment, wait_until  # noqa: E402

BAR, WATCHERS_BAR = 0.01, 0.015
JOB = """
import json, os, time
import numpy as np
import ringcomm as rc
rc.init()
a, gradients = np.ones((300, 300), np.float32), np.ones(100_000, np.float32)
steps, flag = [], os.path.join(os.environ["FOLDER"], "watched")
for step in range(10**9):
    is_watched = os.path.exists(flag)
    cpu, clock = time.process_time_ns(), time.monotonic_ns()
    for _ in range(15):
        a @ a
    rc.allreduce_(gradients, name="gradients", op=rc.AVERAGE)
    if is_watched:
        rc.log(step=step, loss=1.0, lr=0.1)
    steps.append((is_watched, time.process_time_ns() - cpu, time.monotonic_ns() - clock))
    if step % 50 == 49 and rc.broadcast_object(os.path.exists("enough")):
        break
json.dump(steps, open(f"steps-{rc.rank()}.json", "w"))
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--phases", type=int, default=20)
    parser.add_argument("--phase-s", type=float, default=2.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        watcher_cpu_s = run(path, args)
        steps = [s for i in range(2) for s in json.loads((path / f"steps-{i}.json").read_text())]
    seen = [[each for each in steps if each[0] is kind] for kind in (False, True)]
    (cpu0, cpu1), (wall0, wall1) = (
        [median(s[i] for s in each) / 1e6 for each in seen] for i in (1, 2)
    )
    share = watcher_cpu_s / (args.phases / 2 * args.phase_s)
    print(f"{len(seen[0])} steps not watched, {len(seen[1])} watched and logging")
    print(f"CPU time of a step: {cpu0:.2f} ms, watched {cpu1:.2f} ms: {cpu1 / cpu0 - 1:+.1%}")
    print(f"duration of a step: {wall0:.2f} ms, watched {wall1:.2f} ms: {wall1 / wall0 - 1:+.1%}")
    print(f"top and dashboard take {share:.1%} of a core")
    sys.exit(wall1 / wall0 - 1 > BAR or share > WATCHERS_BAR)


def run(path, args):
    """Run the job; return the CPU time of the watchers while it is watched."""
    (path / "train.py").write_text(JOB)
    env = job_environment({"TMPDIR": str(path), "FOLDER": str(path), "OMP_NUM_THREADS": "1"})
    command = [BIN / "ringcomm", "run", "--run-folder", "run", "-np", "2", "train.py"]
    quiet = {"cwd": path, "env": env, "stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, **quiet)
    wait_until(lambda: len(list((path / "run").glob("rank-*.end"))) == 2, "no ranks", 300)
    watchers = [
        subprocess.Popen([BIN / "ringcomm", "top"], stdout=subprocess.DEVNULL, **quiet),
        subprocess.Popen(
            [BIN / "ringcomm", "dashboard"], stdout=subprocess.PIPE, text=True, **quiet
        ),
    ]
    address, _, token = watchers[1].stdout.readline().strip().partition("/#")
    threading.Thread(target=read_stream, args=(address, token), daemon=True).start()
    try:
        time.sleep(2 * args.phase_s)  # all have started
        before = sum(map(cpu_s, watchers))
        for phase in range(args.phases):
            is_watched = phase % 2 == 1
            if is_watched:
                (path / "watched").touch()
            else:
                (path / "watched").unlink(missing_ok=True)
            for each in watchers:
                each.send_signal(signal.SIGCONT if is_watched else signal.SIGSTOP)
            time.sleep(args.phase_s)
        return sum(map(cpu_s, watchers)) - before
    finally:
        for each in watchers:
            each.kill()
            each.wait()
        (path / "enough").touch()
        if job.wait() != 0:
            sys.exit("the job has failed")


def read_stream(address, token):
    """Read what the page gets until the dashboard ends."""
    host = address.removeprefix("http://")
    connection = http.client.HTTPConnection("127.0.0.1", int(host.split(":")[1]), timeout=600)
    headers = {"host": host, "authorization": f"Bearer {token}"}
    connection.request("GET", "/stream", headers=headers)
    answer = connection.getresponse()
    with contextlib.suppress(http.client.HTTPException, OSError):  # its end is in mid-chunk
        while answer.read1(1 << 16):
            pass


def cpu_s(process):
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


if __name__ == "__main__":
    main()
