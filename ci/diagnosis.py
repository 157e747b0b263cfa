#!/usr/bin/env python3
"""Who is slow: how often `ringcomm top` names it, and how often it names somebody in balanced jobs.

usage: ci/diagnosis.py [--times 20] [--jobs 2] [--load N] [CASE...]

A job has 4 ranks (for `server` and `served`, 3 workers and a server). One of them sleeps 50 ms per
step; the server does so whenever it looks for requests. Who is slow is asked after each 50 steps,
`--times` times in all `--jobs`. Prints a line per case, and exits with 1 unless the slow one, and
no other, was named in 95 % of them, and nobody in balanced jobs. Needs .venv of ./ci/test.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "ci")]

from harness import finish_job, start_job, wait_until  # noqa: E402

from ringcomm._core import monotonic_ns  # noqa: E402
from ringcomm.launch.watch.diagnosis import Verdicts  # noqa: E402
from ringcomm.launch.watch.find_ranks import Ranks  # noqa: E402

STEPS = 50
_STEPS_S = 600.0  # on a machine with 20 processes per core, too
JOB = """
import os, sys, time, torch
case, is_served = sys.argv[1], sys.argv[1].startswith("server") or sys.argv[1] == "served"
torch.set_num_threads(1)
if is_served:
    import ringcomm.torch.ps as hvd
    from ringcomm.ps.server.server import Server
    if case == "server":
        look = Server.look
        def look_late(self):
            time.sleep(0.05)
            look(self)
        Server.look = look_late
    hvd.init(servers=1)
else:
    import ringcomm.torch as hvd
    hvd.init()
import ringcomm as rc
me = rc.rank()
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
if case == "backward" and me == 2:
    model[2].weight.register_hook(lambda grad: time.sleep(0.05))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
if case == "optimizer" and me == 3:
    optimizer.register_step_pre_hook(lambda *_: time.sleep(0.05))
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
while not rc.broadcast_object(os.path.exists("enough")) if not is_served else True:
    if case == "loader" and me == 1:
        time.sleep(0.05)
    x = torch.randn(64, 256)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    if is_served and os.path.exists("enough"):
        hvd.stop()
    if is_served and hvd.should_stop():
        break
"""
EXPECTED = {
    "backward": "rank 2 is slow in backward",
    "loader": "rank 1 is slow before backward",
    "optimizer": "rank 3 is slow in the optimizer",
    "server": "server 0 (rank 3) is slow",
    "balanced": "",
    "served": "",
}


def verdicts_of(case, times):
    """Yield what is said of a job of this case, each time after 50 more steps."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder).resolve()
        (path / "train.py").write_text(JOB)
        job = start_job(4, path / "train.py", case, cwd=path, env={"OMP_NUM_THREADS": "1"})
        try:
            for number in range(1, times + 1):
                yield look(path, number * STEPS)
        finally:
            (path / "enough").touch()
            finish_job(job)


def look(folder, step):
    """Return what is said of the job when all workers have come to a step."""
    ranks, verdicts = Ranks(), Verdicts()

    def have_stepped():
        ranks.search()
        live = members(ranks, folder)
        if len(live) == 4:
            verdicts.look(live)
        steps = [each.page["step"] for each in live if each.page["role"] in ("", "worker")]
        return len(live) == 4 and min(steps) >= step

    wait_until(have_stepped, "the job makes no steps", _STEPS_S)
    slow = verdicts.look(members(ranks, folder))
    return [text for texts in slow.values() for text in texts]


def members(ranks, folder):
    def is_here(pid):
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/cwd").resolve() == folder
        return False

    samples = ranks.sample(monotonic_ns())
    return [each for each in samples if not each.is_over and is_here(each.page["pid"])]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", default=list(EXPECTED), metavar="CASE")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=2, help="over which these are spread")
    parser.add_argument("--load", type=int, default=0, help="busy processes beside the jobs")
    args = parser.parse_args()
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(args.load)]
    is_good = True
    try:
        for case in args.cases:
            start, said = time.monotonic(), Counter()
            for _ in range(args.jobs):
                for texts in verdicts_of(case, args.times // args.jobs):
                    said["; ".join(text.partition(":")[0] for text in texts) or "nobody"] += 1
            wanted = EXPECTED[case]
            right = sum(
                n
                for text, n in said.items()
                if (text.startswith(wanted) and ";" not in text if wanted else text == "nobody")
            )
            is_good &= right >= args.times * (0.95 if wanted else 1)
            seconds = time.monotonic() - start
            print(
                f"{case}: {right} of {args.times} right, load {os.getloadavg()[0]:.0f}, "
                f"{seconds:.0f} s: {dict(said)}",
                flush=True,
            )
    finally:
        for process in busy:
            process.kill()
            process.wait()
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
