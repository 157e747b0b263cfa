"""One job of ci/ps_storms.py --worker-spares: ranks that stand by go on in the places of the dead.

Workers, the chief, evaluators, those that stand by and servers are killed. Each rank has a column
of its own in each block, and a row, whatever its place is: so it knows what these must be. It notes
what it reads, for ps_worker_spares_verdict.py. Without copies of servers all go back to a
checkpoint, and count from there.
"""

import json
import os
import threading
import time

import numpy as np
import ps_storm_base
from ps_storm_base import BLOCKS, SHARE, ask_for_move, open_tables, plan_deaths_of_servers

import ringcomm as rc
from ringcomm import ps
from ringcomm.ps.members import let_in, stand_by
from ringcomm.ps.session import session

LATE_S = 120  # all meet within that time
PAUSE_S = 0.01
MEET_BEFORE_END = 8  # steps: there all workers meet, and newcomers are waited for


def parse():
    parser = ps_storm_base.parser(servers=3, steps=30)
    parser.add_argument("--replication", type=int, default=1)
    parser.add_argument("--workers", type=int, required=True, help="at first")
    parser.add_argument("--worker-spares", type=int, default=1)
    parser.add_argument("--kill", action="append", default=[], help="SERVER@REQUEST:WHEN")
    parser.add_argument("--kill-later", action="append", default=[], help="likewise")
    parser.add_argument("--kill-client", action="append", default=[], help="RANK@STEP:WHEN")
    parser.add_argument("--rounds-of", choices=("w", "rows"), default="w", help="of ps.FirstOf")
    parser.add_argument("--queue", type=int, help="parts; the server that keeps them lives")
    return parser.parse_args()


class Death(ps_storm_base.Death):
    """When this rank is to be killed: in which step of its own, and where."""

    def plant(self):
        """Let those that stand by die as they come in, and the chief beside them."""
        await_place, begin, here = stand_by._await_place, stand_by._begin, let_in._here

        def await_or_die(current, **options):
            self.plan(current.engine.job_rank)
            if self.when == "asking":
                if self.at == 0:
                    self.now()
                threading.Timer(0.01 * self.at, self.now).start()
            result = await_place(current, **options)
            if self.when == "telling":
                self.now()
            return result

        def begin_or_die(current, told):
            if self.when == "taking" and self.at == 0:
                self.now()
            begin(current, told)
            if self.when == "taking":
                self.now()

        def here_or_die(current, newcomer):
            if self.when != "standing":
                return here(current, newcomer)
            if self.at:  # else nobody hears from it
                here(current, newcomer)
                current.client.wait_until_sent("step")
            return self.now()

        stand_by._await_place, stand_by._begin = await_or_die, begin_or_die
        let_in._here = here_or_die


class Job:
    def __init__(self, args):
        self.args, self.death = args, Death(args.kill_client, args.out / "dead")
        self.n = args.workers + args.worker_spares  # columns, by rank of the job
        self.problems, self.parts, self.n_recovered = [], None, 0
        self.rounds = {}  # "sync": who was in each round, by block; the rows are one more
        self.seen = []  # of others: the step of a read, and the least in each column

    # --- what is there
    def open(self):
        of_blocks = of_rows = self.args.mode
        if self.args.mode == "first_of":  # the rounds of two tables may end apart
            of_blocks = "first_of" if self.args.rounds_of == "w" else "async"
            of_rows = "first_of" if self.args.rounds_of == "rows" else "async"
        self.table, self.rows, self.done = open_tables(self.n, of_blocks, of_rows)

    def evaluate(self, step):
        rank = session().engine.job_rank
        self.death.plan(rank)
        if self.death.when == "evaluating" and step >= self.death.at:
            self.death.now()
        self.open()
        ps.report(step, {"sum": float(self.table.pull().wait().sum())})

    @property
    def live(self):
        """The workers that live, by rank of the job."""
        gone = session().engine.watch.peers.gone
        return [rank for rank in session().layout.workers if rank not in gone]

    @property
    def progress(self):
        """Steps; with ps.FirstOf, rounds.

        One goes by without a newcomer, which makes fewer steps, if the dead worker was in it.
        """
        if self.args.mode != "first_of":
            return ps.step_number()
        return (self.table if self.args.rounds_of == "w" else self.rows).n_rounds

    def read(self):
        """Return all values: a line for each block, and one of the rows."""
        values = self.table.pull().wait()
        rows = self.rows.pull(np.arange(self.n, dtype=np.uint64)).wait()
        if (rows[:, 0] != rows[:, 1]).any():
            self.problems.append(f"worker {self.me} has read torn rows: {rows.tolist()}")
        return np.vstack([values, rows[:, 0]])

    # --- a step
    def begin(self):
        """Note what is in the tables now."""
        self.shown = self.before = self.read()
        self.n_dense = self.n_rows = 0

    def step(self):
        step = ps.step_number()
        mine = step - self.began if self.is_newcomer else step
        self.death.soon(mine)
        self.death.if_due(mine, "before")
        pushed = self.table.push(self.gradient)
        self.death.if_due(mine, "between")
        of_rows = self.rows.push([self.me], np.full((1, 2), float(self.weight)))
        self.death.if_due(mine, "sent")
        in_rows, in_blocks = of_rows.wait().applied, pushed.wait().applied
        self.n_rows += in_rows
        self.n_dense += in_blocks
        os.write(self.acked, b"w" * in_blocks + b"r" * in_rows)  # a kill finds them, or not
        self.death.if_due(mine, "acked")
        self.look(step)
        ps.complete_step()
        step += 1
        self.take_part()
        if step % 5 == 0 and ps.rank() == self.args.workers - 1:
            ask_for_move(self.table, step)
        self.death.if_due(mine, "moving")
        if (mine, "snapshot") == (self.death.at, self.death.when):
            with ps.snapshot():
                self.death.now()
        if step % 7 == 0 and ps.is_chief():
            with ps.snapshot():
                self.rows.pull([0]).wait()

    def look(self, step):
        """Read, and note what tells whether it is what was promised."""
        values, before = self.read(), self.shown
        self.shown = values
        if (values < before - 1e-6).any():
            self.problems.append(f"worker {self.me} has read what is older in step {step}")
        own = values[:, self.me] - self.before[:, self.me]
        pushed = self.weight * np.array([*[self.n_dense] * BLOCKS, self.n_rows])
        is_mean = np.array([*[self.table.mode.has_rounds] * BLOCKS, self.rows.mode.has_rounds])
        if ((own != pushed) & ~is_mean).any():
            self.problems.append(f"worker {self.me} misses own pushes in step {step}: {own}")
        if self.args.mode == "sync":
            self.rounds[step] = self.who_was_in(values - before, step)
        self.seen.append((step, values.min(axis=0).tolist()))

    def who_was_in(self, added, step):
        """Return the ranks whose mean was added to each line, which is that of one round."""
        found = []
        for line, each in enumerate(added):
            ranks = np.flatnonzero(each)
            sizes = {len(ranks)} if line < BLOCKS else {*range(1, self.n + 1)}  # see the verdict
            if not len(ranks) or not {*each[ranks]} <= {SHARE / n for n in sizes}:
                self.problems.append(f"worker {self.me}, step {step}: {each.tolist()} was added")
            found.append(ranks.tolist())
        return found

    def take_part(self):
        """Take a part of the epoch, of which enough are left; by that the one before is done."""
        if self.parts is not None:
            os.write(self.took, next(self.parts).astype(np.int32).tobytes())

    def meet(self, level):
        """Return once all workers are there, and each place is taken that somebody can take.

        Who has come so far is in a table, which goes back to a checkpoint, too.
        """
        mine = np.zeros(self.n, np.float32)
        mine[self.me] = level - self.done.pull().wait()[self.me]
        if mine[self.me] > 0:
            self.done.push(mine).wait()
        layout, end = session().layout, time.monotonic() + LATE_S
        while True:
            ps.complete_step(ps.step_number())  # newcomers begin here
            have_come = (self.done.pull().wait()[self.live] >= level).all()
            dead = layout.dead & {*layout.workers, *layout.evaluators}
            if have_come and not (dead and layout.standing_by):
                return
            if time.monotonic() > end:
                self.problems.append(f"worker {self.me}: {sorted(dead)} are not followed")
                return
            time.sleep(PAUSE_S)

    # --- all of it
    def train(self):
        args, current = self.args, session()
        self.me = current.engine.job_rank
        self.began, self.is_newcomer = ps.step_number(), current.is_newcomer
        self.death.plan(self.me)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self.acked = os.open(args.out / f"acked.{self.me}", flags)
        self.took = os.open(args.out / f"took.{self.me}", flags)
        (args.out / f"began.{self.me}").write_text(str(self.began))
        if args.queue:
            self.parts = iter(rc.data.WorkQueue(args.queue, 1))
        self.weight = SHARE if args.mode in ("sync", "first_of") else 1
        self.gradient = np.zeros((BLOCKS, self.n))
        self.gradient[:, self.me] = self.weight
        saves, is_ready, has_met = args.out / "saves", False, False
        while True:
            try:
                if not is_ready:
                    self.open()
                    self.save_first(saves)
                    self.begin()
                    is_ready = True
                while self.progress < args.steps:
                    if not has_met and self.progress >= args.steps - MEET_BEFORE_END:
                        self.meet(1)
                        has_met = True
                    self.step()
                self.meet(2)
                values = self.read()
                break
            except rc.ServerLostError:
                ps.recover(saves)
                (args.out / "recovered").touch()
                self.n_recovered, is_ready, has_met = self.n_recovered + 1, False, False
                self.rounds, self.seen = {}, []
        self.drain()
        self.write(values)

    def save_first(self, saves):
        """Make the first checkpoint; servers are killed by what follows."""
        done = self.args.out / "saved"
        if ps.step_number() == 0 and not self.n_recovered and ps.is_chief():
            ps.save(saves, background=False)
            done.touch()
        while not done.exists():
            time.sleep(0.01)
        if not self.n_recovered:
            ps.save(saves, every_steps=3)

    def drain(self):
        """Take what is left of the epoch, with all others."""
        for part in self.parts or ():
            os.write(self.took, part.astype(np.int32).tobytes())
        if self.parts is not None:
            (self.args.out / f"drained.{self.me}").touch()

    def write(self, values):
        joined, filled = session().layout.joined, session().layout.filled
        result = {
            "rank": self.me, "place": ps.rank(), "began": self.began, "values": values.tolist(),
            "before": self.before.tolist(), "n_dense": self.n_dense, "n_rows": self.n_rows,
            "n_recovered": self.n_recovered, "problems": self.problems, "is_chief": ps.is_chief(),
            "rounds": [*self.rounds.items()], "seen": self.seen, "joined": [*joined.items()],
            "filled": [[each.rank, each.role, place] for place, each in filled.items()],
        }  # fmt: skip
        text = json.dumps(result)
        (self.args.out / f"result.{self.me}").write_text(text)


def main():
    job = Job(parse())
    plan_deaths_of_servers(job.args)
    job.death.plant()
    ps.evaluator(every=4)(job.evaluate)
    args = job.args
    ps.init(
        args.servers, evaluators=1, replication=args.replication, worker_spares=args.worker_spares
    )
    job.train()


if __name__ == "__main__":
    main()
