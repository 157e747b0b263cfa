"""One job of ci/ps_storms.py: workers push integers, some ranks are killed, and who lives checks.

Each block has an element for each worker, to which it pushes; what, ps_storm_base.py says. So, if
there are rounds, the elements of a block add up to 840 for each, whoever was in it, and those of
who lives are equal in "sync".

With --collectives N workers also reduce together in each of the first N steps, after a death in a
group of those that live.
"""

import json
import os

import numpy as np
import ps_storm_base
from ps_storm_base import BLOCKS, MODES, SHARE, Death, ask_for_move

import ringcomm as rc
from ringcomm import ps
from ringcomm.ps.session import session


def numbers_of(rank, step):
    """Return what a worker brings to the collectives of a step: of a size of its own."""
    rng = np.random.default_rng(step)
    size = int(rng.choice((11, 5_003, 400_009)))
    return np.random.default_rng((rank, step)).integers(-99, 99, size).astype(np.float32)


def parse():
    parser = ps_storm_base.parser(servers=2, steps=20)
    parser.add_argument("--collectives", type=int, default=0, help="in so many steps")
    parser.add_argument("--kill", action="append", default=[], help="RANK@STEP:WHEN")
    return parser.parse_args()


class Job:
    def __init__(self, args):
        self.args = args
        self.death = Death(args.kill, args.out / "kill")
        self.group, self.has_agreed, self.n_reduced = None, True, 0

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
            handle = rc.allreduce_async(numbers_of(self.death.me, step), group=self.group, **kinds)
            self.death.if_due(step, "reducing")
            sums = handle.wait()
            assert np.array_equal(sums, wanted), (step, [*ranks])
        x = rc.empty(wanted.size, np.float32)
        x[:] = numbers_of(self.death.me, step)
        rc.allreduce_(x, group=self.group)
        assert np.array_equal(x, wanted), (step, [*ranks])

    def evaluate(self, step):
        self.death.plan(session().engine.job_rank)
        if step >= self.death.at >= 0:
            self.death.now()
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
        self.death.plan(session().engine.job_rank)
        self.death.if_due(0, "opening")
        table = self.open()
        gradient = np.zeros((BLOCKS, n))
        gradient[:, index] = SHARE if table.mode.has_rounds else 1
        step = n_applied = 0
        acked = os.open(args.out / f"acked.{index}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        save = None
        while not ps.should_stop():
            self.death.soon(step)
            self.death.if_due(step, "before")
            self.reduce(step)
            pushed = table.push(gradient)
            self.death.if_due(step, "sent")
            if pushed.wait().applied:
                n_applied += 1
                os.write(acked, b".")  # a kill finds the byte written, or not
            self.death.if_due(step, "acked")
            ps.complete_step()
            table.pull().wait()
            step += 1
            if (step, "snapshot") == (self.death.at, self.death.when):
                with ps.snapshot():
                    self.death.now()
            if step % 5 == 0 and index == n - 1:
                ask_for_move(table, step)
            self.death.if_due(step, "moving")
            if ps.is_chief() and step % 4 == 0:
                save = ps.save(args.out / "saves", step=step)
                self.death.if_due(step, "saving")
            if ps.is_chief() and step >= args.steps:
                ps.stop()
                self.death.if_due(step, "stopping")
        if save is not None:
            save.wait()
        values = table.pull().wait()
        (args.out / f"result.{index}").write_text(
            json.dumps(
                {"index": index, "steps": step, "applied": n_applied, "values": values.tolist(),
                 "is_chief": ps.is_chief(), "reduced": self.n_reduced}
            )
        )  # fmt: skip


def main():
    job = Job(parse())
    ps.evaluator(every=2)(job.evaluate)
    ps.init(job.args.servers, evaluators=1)
    job.train()


if __name__ == "__main__":
    main()
