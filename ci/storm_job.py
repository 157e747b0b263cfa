"""One job of ci/storms.py: an exact trainer, some of whose ranks are killed.

Each step is a hash of all steps before it and of the ranks that took part, in integers. So the
final state shows whether any step was lost, done twice, or done on some ranks only.
"""

import argparse
import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import numpy as np

WIDTH = 512
A, B = np.uint64(6364136223846793005), np.uint64(1442695040888963407)


def contribution(state, step, member):
    x = state * A + np.uint64((member + 1) * 2654435761 + step)
    return x ^ (x >> np.uint64(29))


def applied(state, total):
    x = (state ^ total) * A + B
    return x ^ (x >> np.uint64(31))


def expected(history):
    """Return the final state; history[step]: the members that took part, as bits."""
    state = np.arange(WIDTH, dtype=np.uint64)
    for step, bits in enumerate(history):
        members = [m for m in range(64) if bits >> m & 1]
        parts = (contribution(state, step, m) for m in members)
        state = applied(state, sum(parts, np.zeros(WIDTH, np.uint64)))
    return state


class Trainer:
    def __init__(self, args):
        import ringcomm as rc

        self.rc, self.args = rc, args
        rc.init()
        self.me = rc.rank()
        kills = dict(text.split("@") for text in args.kill)
        at, _, self.when = kills.get(str(self.me), "-1").partition(":")
        self.kill_at = int(at)
        if self.when == "idle":
            self.die_within(0.5)
        self.registered = rc.zeros(1 << 14, np.int64)  # made before a death, and used after it
        self.large = np.zeros(1 << 18, np.int64)  # in private memory: reduced through lanes
        self.group = None
        self.times = []  # (view, when its first step was done)
        rc.elastic.on_new_view(self.forget_group)
        self.state = rc.elastic.ArrayState(
            step=0, x=np.arange(WIDTH, dtype=np.uint64), history=np.zeros(args.steps, np.uint64)
        )

    def forget_group(self):
        self.group = None

    def die(self):
        Path(f"{self.args.out}/kill.{self.me}").write_text(str(time.monotonic_ns()))
        os.kill(os.getpid(), signal.SIGKILL)

    def hang(self):
        Path(f"{self.args.out}/kill.{self.me}").write_text(str(time.monotonic_ns()))
        self.when = ""
        os.kill(os.getpid(), signal.SIGSTOP)

    def die_within(self, seconds):
        threading.Timer(random.random() * seconds, self.die).start()
        self.when = ""

    def train(self, state):
        try:
            while state.step < self.args.steps:
                self.step(state)
        except self.rc.PeerFailedError:
            if self.when == "healing":
                self.die_within(20e-3)
            raise
        return state.step

    def step(self, state):
        rc, is_time = self.rc, state.step == self.kill_at
        if is_time and self.when == "before":
            self.die()
        if is_time and self.when == "hanging":
            self.hang()
        if is_time and self.when == "inside":
            self.die_within(2e-3)
        view = rc.elastic.view()
        handle = self.begin_more() if self.args.rich else None
        total = rc.allreduce(contribution(state.x, state.step, self.me))
        if handle is not None:
            n = rc.size()
            assert (handle.wait() == n * (n + 1) // 2).all()
        self.registered[:] = rc.rank() + 1
        rc.allreduce_(self.registered)
        assert (self.registered == rc.size() * (rc.size() + 1) // 2).all()
        time.sleep(self.args.pause)
        state.x[:] = applied(state.x, total)
        if is_time and self.when == "applying":
            self.die()
        state.history[state.step] = sum(1 << member for member in view.members)
        state.step += 1
        state.commit()
        if not self.times or self.times[-1][0] != view.number:
            self.times.append((view.number, time.monotonic_ns()))
        if is_time and self.when == "after":
            self.die()

    def begin_more(self):
        rc, n, rank = self.rc, self.rc.size(), self.rc.rank()
        if self.group is None:
            self.group = rc.Group([each for each in range(n) if each % 2 == rank % 2])
        self.large[:] = rank + 1
        handle = rc.allreduce_async(self.large, name="large")
        part = rc.allreduce(np.full(3000, rank + 1, np.int64), group=self.group)
        assert (part == sum(each + 1 for each in range(rank % 2, n, 2))).all()
        return handle

    def report(self):
        state, view = self.state, self.rc.elastic.view()
        history = [int(bits) for bits in state.history]
        result = {
            "member": self.me,
            "members": view.members,
            "view": view.number,
            "is_exact": bool((state.x == expected(history)).all()),
            "history": history,
            "times": self.times,
        }
        part = Path(f"{self.args.out}/part.{self.me}")
        part.write_text(json.dumps(result))
        part.rename(f"{self.args.out}/result.{self.me}")


def print_times():
    """Print the medians in microseconds of three kinds of steps, on rank 0."""
    import ringcomm as rc

    rc.init()
    small, large = rc.zeros(1024, np.float64), rc.zeros(1 << 18, np.float64)
    private = np.zeros(1 << 18)
    results = {}
    for name, x, n in (("8 KB", small, 3000), ("2 MB", large, 300), ("2 MB private", private, 300)):
        times = []
        for _ in range(n):
            began = time.perf_counter()
            rc.allreduce_(x)
            times.append(time.perf_counter() - began)
        results[f"allreduce_, {name}"] = 1e6 * sorted(times)[n // 2]
    if rc.rank() == 0:
        print(json.dumps(results), flush=True)
    rc.shutdown()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--kill", action="append", default=[], help="RANK@STEP:WHEN")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--pause", type=float, default=1e-3)
    parser.add_argument("--rich", action="store_true")
    parser.add_argument("--shutdown", action="store_true")
    parser.add_argument("--time", action="store_true", help="print how long steps take, and end")
    args = parser.parse_args()
    if args.time:
        print_times()
        return
    trainer = Trainer(args)
    done = trainer.rc.elastic.run(trainer.train)(trainer.state)
    assert done == args.steps
    trainer.report()
    if args.shutdown:
        trainer.rc.shutdown()


if __name__ == "__main__":
    main()
