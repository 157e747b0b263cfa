"""One job of ci/ps_storms.py in which servers are killed: all go back to a checkpoint, and go on.

With --replication 2 another server goes on in the place of a dead one, and nobody goes back.

Each worker pushes to an element of its own in each block, and to a row of its own. So it knows what
these must be at the end: what they were after the last ps.recover(), and what it has pushed since.
"""

import contextlib
import json
import os
import signal
import time

import numpy as np
import ps_storm_base
from ps_storm_base import BLOCKS, SHARE, K, ask_for_move, open_tables, plan_deaths_of_servers

import ringcomm as rc
from ringcomm import ps
from ringcomm.ps.session import session


def parse():
    parser = ps_storm_base.parser(servers=3, steps=30)
    parser.add_argument("--replication", type=int, default=1)
    parser.add_argument("--spares", type=int, default=0)
    parser.add_argument("--changes-places", action="store_true", help="add and remove servers")
    parser.add_argument("--kill", action="append", default=[], help="SERVER@REQUEST:WHEN")
    parser.add_argument(
        "--kill-later",
        action="append",
        default=[],
        help="likewise; counts once another has died and there are two copies",
    )
    parser.add_argument("--kill-worker", default="-1@0", help="WORKER@STEP, after its push")
    return parser.parse_args()


class Job:
    def __init__(self, args):
        self.args = args
        self.dies_at = [int(n) for n in args.kill_worker.split("@")]
        self.times = []  # when steps began and ended

    def open(self):
        n = len(session().layout.workers)
        self.table, self.rows, self.done = open_tables(n, self.args.mode)
        return n

    def evaluate(self, step):
        self.open()
        ps.report(step, {"sum": float(self.table.pull().wait().sum())})

    def begin(self):
        """Note what this worker has in the tables now."""
        self.before = self.own()
        self.n_live = len(self.live)
        self.n_dense = self.n_rows = 0
        self.shown, self.n_stale = np.zeros((BLOCKS, self.n)), 0

    @property
    def live(self):
        """The indices of the workers that live."""
        gone = session().engine.watch.peers.gone
        return [i for i, rank in enumerate(session().layout.workers) if rank not in gone]

    def own(self):
        table = self.table.pull().wait()[:, self.me]
        return [*table.tolist(), *self.rows.pull([self.me]).wait()[0].tolist()]

    def step(self):
        pushed = self.table.push(self.gradient)
        if [self.me, ps.step_number()] == self.dies_at:
            (self.args.out / f"kill-worker.{self.me}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        of_rows = self.rows.push([self.me], np.full((1, 2), float(self.weight)))
        self.n_rows += of_rows.wait().applied
        self.n_dense += pushed.wait().applied
        self.look()
        ps.complete_step()
        step = ps.step_number()
        if step % 5 == 0 and self.me == self.n - 1:
            ask_for_move(self.table, step)
        if step % 4 == 0 and self.me == 0 and self.args.changes_places:
            self.change_places()
        if step % 7 == 0 and self.me == 0:
            with ps.snapshot():
                self.rows.pull([0]).wait()

    def look(self):
        """Pull, and count what misses own pushes, or what an earlier pull has shown."""
        values, has_rounds = self.table.pull().wait(), self.table.mode.has_rounds
        if self.args.replication > 1:  # else all go back to a checkpoint
            own = values[:, self.me] - self.before[:BLOCKS]
            is_stale = (values < self.shown - 1e-6).any()
            is_stale |= not has_rounds and (own != self.n_dense).any()
            self.n_stale += bool(is_stale)
            self.shown = values

    def change_places(self):
        """Add a server or remove one, and wait for nothing; it may be none, or the last."""
        if np.random.default_rng().integers(2):
            ps.remove_server(int(np.random.default_rng().integers(len(session().client.servers))))
        else:
            with contextlib.suppress(rc.RingcommError):  # no spare stands by
                ps.add_servers()

    def await_others(self):
        """Return once all workers have made all steps; in a table, which goes back, too."""
        mine = np.zeros(self.n, np.float32)
        mine[self.me] = 1
        if not self.done.pull().wait()[self.me]:
            self.done.push(mine).wait()
        while not self.done.pull().wait()[self.live].all():
            pass

    def train(self):
        self.n, self.me = self.open(), rc.rank()
        has_rounds = self.table.mode.has_rounds
        self.weight = SHARE if has_rounds else 1
        self.gradient = np.zeros((BLOCKS, self.n))
        self.gradient[:, self.me] = self.weight
        saves, manifest, n_recovered = self.args.out / "saves", None, 0
        if ps.is_chief():
            ps.save(saves, background=False)
        rc.barrier()  # servers are killed by what follows
        ps.save(saves, every_steps=3)
        has_begun = False
        while True:
            try:
                if not has_begun:
                    self.begin()
                    has_begun = True
                while ps.step_number() < self.args.steps:
                    began = time.monotonic()
                    self.step()
                    self.times.append((began, time.monotonic()))
                self.await_others()
                own = self.own()
                break
            except rc.ServerLostError:
                manifest = ps.recover(saves).manifest
                n_recovered, has_begun = n_recovered + 1, False
        in_round = {"sync": self.n_live, "first_of": K}.get(self.args.mode, 1)
        wanted = [x + self.n_dense * self.weight / in_round for x in self.before[:BLOCKS]]
        wanted += [x + self.n_rows * self.weight / in_round for x in self.before[BLOCKS:]]
        step = None if manifest is None else manifest["clock"]
        result = {
            "index": self.me, "own": own, "wanted": wanted, "n_recovered": n_recovered,
            "step": step, "before": self.before, "n_stale": self.n_stale, "n": self.n,
            "times": self.times, "n_servers": len(session().client.servers),
        }  # fmt: skip
        (self.args.out / f"result.{self.me}").write_text(json.dumps(result))


def main():
    job = Job(parse())
    plan_deaths_of_servers(job.args)
    ps.evaluator(every=4)(job.evaluate)
    ps.init(
        job.args.servers, evaluators=1, replication=job.args.replication, spares=job.args.spares
    )
    job.train()


if __name__ == "__main__":
    main()
