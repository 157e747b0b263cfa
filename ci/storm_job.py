"""One job of ci/storms.py: an exact trainer, some of whose processes are killed, hang or are slow.

Each step is a hash of all steps before it and of the ranks that took part, in integers. So the
final state shows whether any step was lost, done twice, or done on some ranks only.

What happens to a process is written PROCESS@STEP:WHEN. +STEP counts the steps of the process
itself, for spares and newcomers. With :before, :inside, :sent, :applying and :after it dies at that
moment of the step, with :healing in the next failure, with :idle, :joining and :receiving on its
way to a place. With :hanging it stops, with :waiting it does so before it has a place. With :slow
it sleeps, with :late it does so on its way to a place. With :leaving it leaves in order, with
:also-N it kills process N and itself, and with :alone-N only that one.
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
SLOW_S = 1.0  # less than HANG_S of storms.py
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
        (Path(args.out) / f"pid.{self.me}").write_text(str(os.getpid()))
        kills = dict(text.split("@") for text in args.kill)
        self.at, _, self.when = kills.get(str(self.me), "-1").partition(":")
        self.n_steps = 0  # that this process has begun
        self.resizes = dict(text.split(":") for text in args.resize)
        if self.when == "idle":
            self.die_within(0.5)
        elif self.when == "waiting":  # and stops
            threading.Timer(0.05, self.hang).start()
        elif self.when == "joining":  # on the way to its place
            self.die_within(30e-3)
        elif self.when == "late":
            self.be_slow()
        self.registered = rc.zeros(1 << 14, np.int64)  # made before a death, and used after it
        self.large = np.zeros(1 << 18, np.int64)  # in private memory: reduced through lanes
        self.group = None
        self.times = []  # (view, when its first step was done, size)
        rc.elastic.on_new_view(self.forget_group)
        self.state = self.state_class()(
            step=0, x=np.arange(WIDTH, dtype=np.uint64), history=np.zeros(args.steps, np.uint64)
        )

    def state_class(self):
        trainer = self

        class DyingState(self.rc.elastic.ArrayState):
            def receive(self, root, *, is_new):
                if trainer.when == "receiving" and is_new:
                    trainer.die_within(1e-3)
                super().receive(root, is_new=is_new)

        return DyingState

    def forget_group(self):
        self.group = None

    def note(self, what="kill", process=None):
        process = self.me if process is None else process
        Path(f"{self.args.out}/{what}.{process}").write_text(str(time.monotonic_ns()))

    def die(self):
        self.note()
        os.kill(os.getpid(), signal.SIGKILL)

    def kill(self, process):
        self.note(process=process)
        os.kill(int(Path(f"{self.args.out}/pid.{process}").read_text()), signal.SIGKILL)

    def hang(self):
        self.note()
        self.when = ""
        os.kill(os.getpid(), signal.SIGSTOP)

    def be_slow(self):
        self.note("slow")
        self.when = ""
        time.sleep(SLOW_S)

    def die_within(self, seconds):
        threading.Timer(random.random() * seconds, self.die).start()
        self.when = ""

    def is_time(self, state):
        """Say whether something is to happen to this process in this step."""
        here = f"+{self.n_steps}" if self.at.startswith("+") else str(state.step)
        return here == self.at

    def before_step(self):
        """Do what is to happen before this process takes part in a step."""
        when, _, other = self.when.partition("-")
        if when in ("also", "alone"):
            self.when = ""
            self.kill(other)
        if when in ("before", "also"):
            self.die()
        elif when == "hanging":
            self.hang()
        elif when == "slow":
            self.be_slow()
        elif when == "inside":
            self.die_within(2e-3)

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
        rc, is_time = self.rc, self.is_time(state)
        self.n_steps += 1
        if is_time:
            self.before_step()
        if rc.rank() == 0 and (size := self.resizes.pop(str(state.step), None)) is not None:
            rc.elastic.request_scale(int(size))
        view = rc.elastic.view()
        handle = self.begin_more() if self.args.rich else None
        total = rc.allreduce(contribution(state.x, state.step, self.me))
        if handle is not None:
            n = rc.size()
            assert (handle.wait() == n * (n + 1) // 2).all()
        self.registered[:] = rc.rank() + 1
        rc.allreduce_(self.registered)
        assert (self.registered == rc.size() * (rc.size() + 1) // 2).all()
        if is_time and self.when == "sent":
            self.die()
        time.sleep(self.args.pause)
        state.x[:] = applied(state.x, total)
        if is_time and self.when == "applying":
            self.die()
        state.history[state.step] = sum(1 << member for member in view.members)
        state.step += 1
        state.commit()
        if not self.times or self.times[-1][0] != view.number:
            self.times.append((view.number, time.monotonic_ns(), view.size))
        if is_time and self.when == "after":
            self.die()
        if is_time and self.when == "leaving":
            self.note()
            rc.elastic.leave()

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
    parser.add_argument("--kill", action="append", default=[], help="PROCESS@STEP:WHEN")
    parser.add_argument("--resize", action="append", default=[], help="STEP:SIZE")
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
