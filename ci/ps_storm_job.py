"""One job of ci/ps_storms.py: workers push integers, some ranks are killed, and who lives checks.

Each block has an element for each worker. With mode "sync" or "first_of" a worker pushes 840 to
its own, and the mean over n divides that by n: 840 has all divisors up to 8. So the elements of a
block add up to 840 for each round, whoever was in it, and those of who lives are equal in "sync".
In other modes a push adds 1 to its worker's element.

With --collectives N workers also reduce together in each of the first N steps, after a death in a
group of those that live.
"""

import argparse
import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np

import ringcomm as rc
from ringcomm import ps
from ringcomm.ps.client.json_requests import ignore
from ringcomm.ps.client.request import Request
from ringcomm.ps.protocol.frames import Kind, Step
from ringcomm.ps.server.replies import as_body
from ringcomm.ps.session import session

SHARE, BLOCKS = 840, 6
MODES = {"sync": "sync", "async": "async", "ssp": ps.SSP(2), "first_of": ps.FirstOf(2)}


def numbers_of(rank, step):
    """Return what a worker brings to the collectives of a step: of a size of its own."""
    rng = np.random.default_rng(step)
    size = int(rng.choice((11, 5_003, 400_009)))
    return np.random.default_rng((rank, step)).integers(-99, 99, size).astype(np.float32)


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--collectives", type=int, default=0, help="in so many steps")
    parser.add_argument("--kill", action="append", default=[], help="RANK@STEP:WHEN")
    return parser.parse_args()


class Job:
    def __init__(self, args):
        self.args = args
        self.at, self.when = -1, ""
        self.is_over = False
        self.group, self.has_agreed, self.n_reduced = None, True, 0

    def plan(self, rank):
        """Learn when this rank is to be killed."""
        self.me = rank
        for kill in self.args.kill:
            who, at, when = kill.replace("@", ":").split(":")
            if int(who) == rank:
                self.at, self.when = int(at), when

    def die(self):
        (self.args.out / f"kill.{self.me}").write_text(str(time.monotonic_ns()))
        os.kill(os.getpid(), signal.SIGKILL)

    def die_if(self, step, when):
        if step == self.at and when == self.when:
            self.die()

    def die_soon(self, step):
        """Be killed within the next step, wherever this rank is then."""
        if step == self.at and self.when == "soon":
            threading.Timer(np.random.default_rng().uniform(0, 0.01), self.die).start()

    def reduce(self, step):
        """Reduce with the other workers that live, once per step.

        Who had not the result of the step in which a worker died, while others had, goes without.
        """
        while self.n_reduced <= step < self.args.collectives:
            try:
                if not self.has_agreed:
                    each = rc.allgather_object(self.n_reduced, group=self.group)
                    assert max(each) - min(each) <= 1, each
                    self.n_reduced, self.has_agreed = max(each), True
                    continue
                self._reduce(step)
                self.n_reduced += 1
            except rc.PeerFailedError:
                self.group, self.has_agreed = ps.live_workers(), False

    def _reduce(self, step):
        ranks = range(rc.size()) if self.group is None else self.group.ranks
        wanted = sum(numbers_of(rank, step) for rank in ranks)
        for kinds in ({}, {"name": "sum"}):
            handle = rc.allreduce_async(numbers_of(self.me, step), group=self.group, **kinds)
            self.die_if(step, "reducing")
            sums = handle.wait()
            assert np.array_equal(sums, wanted), (step, [*ranks])
        x = rc.empty(wanted.size, np.float32)
        x[:] = numbers_of(self.me, step)
        rc.allreduce_(x, group=self.group)
        assert np.array_equal(x, wanted), (step, [*ranks])

    def evaluate(self, step):
        self.plan(session().engine.job_rank)
        if step >= self.at >= 0:
            self.die()
        table = self.open()
        ps.report(step, {"sum": float(table.pull().wait().sum())})

    def open(self):
        n = len(session().layout.workers)
        first = np.zeros((BLOCKS, n))
        return ps.table(
            "w", (BLOCKS, n), "float64", updater=ps.optim.Add(), mode=MODES[self.args.mode],
            init=first, block_nbytes=8 * n,
        )  # fmt: skip

    def train(self):
        args = self.args
        index, n = rc.rank(), rc.size()
        self.plan(session().engine.job_rank)
        self.die_if(0, "opening")
        table = self.open()
        gradient = np.zeros((BLOCKS, n))
        gradient[:, index] = SHARE if table.mode.has_rounds else 1
        step = n_applied = 0
        acked = os.open(args.out / f"acked.{index}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        save = None
        while not ps.should_stop():
            self.die_soon(step)
            self.die_if(step, "before")
            self.reduce(step)
            pushed = table.push(gradient)
            self.die_if(step, "sent")
            if pushed.wait().applied:
                n_applied += 1
                os.write(acked, b".")  # a kill finds the byte written, or not
            self.die_if(step, "acked")
            ps.complete_step()
            table.pull().wait()
            step += 1
            if step == self.at and self.when == "snapshot":
                with ps.snapshot():
                    self.die()
            if step % 5 == 0 and index == n - 1:
                self.move(table, step)
            self.die_if(step, "moving")
            if ps.is_chief() and step % 4 == 0:
                save = ps.save(args.out / "saves", step=step)
                self.die_if(step, "saving")
            if ps.is_chief() and step >= args.steps:
                ps.stop()
                self.die_if(step, "stopping")
        if save is not None:
            save.wait()
        values = table.pull().wait()
        (args.out / f"result.{index}").write_text(
            json.dumps(
                {"index": index, "steps": step, "applied": n_applied, "values": values.tolist(),
                 "is_chief": ps.is_chief(), "reduced": self.n_reduced}
            )
        )  # fmt: skip

    def move(self, table, step):
        """Ask for a move, and wait for nothing."""
        client = session().client
        part, dest = step % BLOCKS, step // 5 % len(client.servers)
        body = as_body([(table.number, part, 0, dest)])
        request = Request(Kind.MOVE, server=client.leader, option=Step.ASK, body=body)
        client.call_one("move", request, ignore)


def main():
    job = Job(parse())
    ps.evaluator(every=2)(job.evaluate)
    ps.init(job.args.servers, evaluators=1)
    job.train()


if __name__ == "__main__":
    main()
