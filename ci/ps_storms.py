#!/usr/bin/env python3
"""Kills ranks of parameter-server jobs, servers too; the state of the rest is exact.

usage: .venv/bin/python ci/ps_storms.py [--storms 200] [--launcher ulfm|continuous|both] [--seed 1]
                                        [--of servers|others] [--replication 2] [--spares 1]
                                        [--collectives] [--worker-spares 2]
       .venv/bin/python ci/ps_storms.py --hosts 3 --storms 30   # on fake hosts, under ulfm; root

Ends with 1 if a job hangs, if its exit code is not that of a good job, if an acknowledged push is
lost or one counts twice, or if a checkpoint that is complete cannot be read. After the death of a
server all go back to a checkpoint, and their state is that of it, and what was pushed since. With
--replication 2 nobody goes back, and a second server dies once lost copies are made again; then the
last line has how long it took: from a death to the end of the first step, on the slowest worker,
that began after it. Each step needs all servers. With --spares N there are two servers, and spares
take the places of those that die; with copies, a worker adds and removes servers in some storms.
With --collectives workers also reduce together, and go on in a group of those that live.
With --worker-spares N (some of the others have it, too) ranks that stand by take the places of
workers, the chief and evaluators, while servers die in the same job; they may die as they come in.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import ps_storm_base
import ps_worker_spares_verdict
from fakecluster import Cluster, running
from ps_storm_base import SHARE
from storms import LAUNCHERS, end_on, place

JOB = Path(__file__).with_name("ps_lost_client_job.py")
MODES = tuple(ps_storm_base.MODES)
MOMENTS = ("before", "sent", "acked", "soon", "soon", "moving", "snapshot")
# Requests of these kinds, counted: those of the first checkpoint come before.
OF_SERVERS = {
    "push": (1, 60), "moving": (1, 12), "snapshot": (8, 30), "saving": (2, 7), "recovering": (1, 6)
}  # fmt: skip
# Without copies, a server that dies before the first checkpoint takes the job with it.
OF_COPIES = {kind: at for kind, at in OF_SERVERS.items() if kind != "recovering"}
OF_COPIES["opening"] = (1, 3)
OF_CHIEFS = (*MOMENTS, "opening", "saving", "stopping")
OF_WORKERS = (*MOMENTS, "between", "standing")
OF_SPARES = ("asking", "taking", "taking", "telling", "telling")
STEPS, N_SERVERS, LIMIT_S = 20, 2, 300
TAKEN = "a spare, takes the place of"
GOOD = "--runtime-options", "continuous,error-nonzero-status=0"  # else mpirun's code is not 0


@dataclass
class Outcome:
    problems: list
    output: str
    seconds: float


@dataclass
class Storm:
    """A job whose ranks are killed. kills: RANK@STEP:WHEN, see ps_lost_client_job.py.

    cluster: fake hosts, on which the ranks are spread; None: this machine.
    collectives: in how many steps workers also reduce together; none dies long after.
    """

    mode: str
    n_workers: int
    kills: list
    launcher: str
    cluster: Cluster | None = None
    collectives: int = 0

    def __str__(self):
        also = ", collectives" if self.collectives else ""
        kills = " ".join(self.kills)
        return f"{self.launcher}, {self.mode}, {self.n_workers} workers, {kills}{also}"

    job, n_servers, steps, replication = JOB, N_SERVERS, STEPS, 1
    spares, changes_places, worker_spares = 0, False, 0

    @property
    def _kill_options(self):
        return [f"--kill={kill}" for kill in self.kills]

    @property
    def options(self):
        return GOOD if self.launcher == "continuous" else LAUNCHERS[self.launcher]

    def run(self):
        """Run the job; return its Outcome."""
        with tempfile.TemporaryDirectory() as folder:
            return self._run_in(Path(folder))

    def _run_in(self, out):
        size = self.n_workers + self.worker_spares + 1 + self.n_servers + self.spares
        n_hosts = 1 if self.cluster is None else len(self.cluster.hosts)
        inside, layout = place(self.cluster, -(-size // n_hosts))
        command = [
            *inside, Path(sys.executable).parent / "mpirun", *layout, *self.options,
            "-np", str(size), sys.executable, self.job, "--out", out,
            "--mode", self.mode, "--servers", str(self.n_servers), "--steps", str(self.steps),
            *self._kill_options,
            *(["--collectives", str(self.collectives)] if self.collectives else []),
            *(["--replication", str(self.replication)] if self.replication > 1 else []),
            *(["--spares", str(self.spares)] if self.spares else []),
            *(["--changes-places"] if self.changes_places else []),
        ]  # fmt: skip
        root = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
        mine = {"RINGCOMM_ELASTIC": "1", "RINGCOMM_TIMEOUT_S": "60", "OMP_NUM_THREADS": "1"}
        environment = os.environ | dict.fromkeys(root, "1") | mine | {"TMPDIR": str(out)}
        began = time.monotonic()
        job = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", start_new_session=True,
        )  # fmt: skip
        problems = []
        try:
            output, _ = job.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            self._end(job)
            output, _ = job.communicate()
            problems.append("hangs")
        except BaseException:  # Ctrl-C, or SIGTERM
            self._end(job)
            raise
        problems += list(self._problems(out, job.returncode))
        if "has come to differ" in output:  # two copies of a server, and memory is not short
            problems.append("copies differed")
        return Outcome(problems, output, time.monotonic() - began)

    def _end(self, job):
        os.killpg(job.pid, signal.SIGKILL)
        end_on(self.cluster)

    def _problems(self, out, code):
        """Yield what is wrong with the end of the job."""
        killed = {int(path.suffix[1:]) for path in out.glob("kill.*")}
        acked = {int(path.suffix[1:]): path.stat().st_size for path in out.glob("acked.*")}
        results = [json.loads(path.read_text()) for path in sorted(out.glob("result.*"))]
        live = set(range(self.n_workers)) - killed
        if code != 0:
            yield f"the exit code is {code}"
        if {each["index"] for each in results} != live:
            yield f"{sorted(live)} live, and {[each['index'] for each in results]} have ended"
            return
        chiefs = [each["index"] for each in results if each["is_chief"]]
        is_too_late = any("stopping" in kill for kill in self.kills)  # to hear of the death
        if chiefs != [min(live)] and not is_too_late:
            yield "the chief is not the lowest worker that lives"
        for each in results:
            yield from self._wrong_values(each, killed, acked)
            if each["reduced"] != self.collectives:
                yield f"worker {each['index']} has reduced {each['reduced']} times"

    def _wrong_values(self, result, killed, acked):
        me, steps, applied = result["index"], result["steps"], result["applied"]
        for block, row in enumerate(result["values"]):
            where = f"worker {me} has {row} in block {block} after {steps} steps"
            if self.mode == "sync":
                live = {x for worker, x in enumerate(row) if worker not in killed}
                if sum(row) != SHARE * steps or live != {max(row)} or applied != steps:
                    yield where
            elif self.mode == "first_of":
                if sum(row) % SHARE or not applied * SHARE / 2 <= row[me] <= applied * SHARE:
                    yield f"{where}, {applied} applied"
            elif row[me] != applied or applied != steps:
                yield where
            for worker in killed & set(range(self.n_workers)):
                n = acked.get(worker, 0)
                least, most = n, n + 1
                if self.mode in ("sync", "first_of"):
                    least, most = n * SHARE / self.n_workers, (n + 1) * SHARE
                if not least <= row[worker] <= most:
                    yield f"{where}; {n} of worker {worker}, which died, were acknowledged"


@dataclass
class ServerStorm(Storm):
    """A job whose servers are killed. kills: SERVER@REQUEST:WHEN, see ps_lost_server_job.py.

    Attributes:
        worker: WORKER@STEP, one that dies before the servers; "": none does.
    """

    n_servers: int = 3
    steps: int = 30
    worker: str = ""
    spares: int = 0
    job = JOB.with_name("ps_lost_server_job.py")

    @property
    def _kill_options(self):
        of_worker = [f"--kill-worker={self.worker}"] if self.worker else []
        return [*super()._kill_options, *of_worker]

    def _problems(self, out, code):
        killed, workers = list(out.glob("kill.*")), list(out.glob("kill-worker.*"))
        n_killed, n_live = len(killed), self.n_workers - len(workers)
        n_places = min(self.n_servers, self.n_servers + self.spares - n_killed)
        results = [json.loads(path.read_text()) for path in sorted(out.glob("result.*"))]
        if code != 0:
            yield f"the exit code is {code}"
        if len(results) != n_live or len(workers) != bool(self.worker):
            yield f"{len(results)} of {self.n_workers} workers have ended, {len(workers)} killed"
            return
        for path in workers:  # else the mean of a round is not known
            if any(path.stat().st_mtime > server.stat().st_mtime for server in killed):
                yield "a server was killed before the worker"
        for each in results:
            me, step = each["index"], each["step"]
            if each["own"] != each["wanted"]:
                yield f"worker {me} has {each['own']}, and has pushed {each['wanted']}"
            if each["n_recovered"] > n_killed:
                yield f"worker {me} has recovered {each['n_recovered']} times, {n_killed} killed"
            if self.replication == 1 and each["n_servers"] < n_places:
                yield f"worker {me} has {each['n_servers']} servers, and not {n_places}"
            if self.mode == "sync" and step is not None:
                before = self._sums_after(step)
                if not before & {*each["before"]}:
                    yield f"worker {me} went back to {each['before']}, and not to {before}"

    def _sums_after(self, step):
        """Return what an element may be after so many rounds; the worker dies within one."""
        n, at = self.n_workers, int(self.worker.partition("@")[2] or step)
        with_all = {min(step, at), min(step, at + bool(self.worker))}
        return {k * SHARE / n + (step - k) * SHARE / (n - 1) for k in with_all}


@dataclass
class CopiedServerStorm(ServerStorm):
    """A job of which a server is killed, and another one goes on in its place.

    Attributes:
        later: as kills: who dies once there are two copies again.
        n_killed: servers that died in run().
        latencies: seconds that each death has cost.
    """

    later: str = ""
    n_killed: int = 0
    latencies: list = field(default_factory=list)
    replication = 2

    @property
    def _kill_options(self):
        later = [f"--kill-later={self.later}"] if self.later else []
        return [*super()._kill_options, *later]

    def __str__(self):
        seconds = " ".join(f"{each:.2f}" for each in self.latencies)
        return f"{super().__str__()}, then {self.later}: {self.n_killed} killed ({seconds} s)"

    def _problems(self, out, code):
        killed_at = sorted(float(path.read_text()) for path in out.glob("kill.*"))
        self.n_killed = len(killed_at)
        yield from super()._problems(out, code)
        results = [json.loads(path.read_text()) for path in sorted(out.glob("result.*"))]
        for each in results:
            if each["n_recovered"]:
                yield f"worker {each['index']} went back to a checkpoint"
            if each["n_stale"]:
                yield f"{each['n_stale']} pulls of worker {each['index']} missed what was there"
        for at in killed_at:
            ends = [next((end for began, end in x["times"] if began > at), None) for x in results]
            if ends and None not in ends:  # else it died behind the last step
                self.latencies.append(max(ends) - at)


@dataclass
class WorkerSpareStorm(Storm):
    """A job in which ranks that stand by take the places of the dead; servers are killed, too.

    Attributes:
        of_servers: as kills of a ServerStorm.
        later: as in a CopiedServerStorm.
        queue: parts of a WorkQueue, of which workers take one in each step, and what is left
            behind the last; the first server lives. 0: there is none.
        rounds_of: the table that has rounds of ps.FirstOf; the other is "async" there.
        n_joined: newcomers, in run().
    """

    worker_spares: int = 2
    replication: int = 1
    n_servers: int = 3
    steps: int = 24
    of_servers: list = field(default_factory=list)
    later: str = ""
    queue: int = 0
    rounds_of: str = "w"
    n_joined: int = 0
    job = JOB.with_name("ps_worker_spares_job.py")

    @property
    def _kill_options(self):
        later = [f"--kill-later={self.later}"] if self.later else []
        clients = [f"--kill-client={kill}" for kill in self.kills]
        size = [f"--workers={self.n_workers}", f"--worker-spares={self.worker_spares}"]
        queue = [f"--queue={self.queue}"] if self.queue else []
        servers = [*(f"--kill={kill}" for kill in self.of_servers), *later]
        return [*size, f"--rounds-of={self.rounds_of}", *clients, *servers, *queue]

    def __str__(self):
        servers = f"servers x{self.replication}: {' '.join(self.of_servers)} {self.later}".strip()
        queue = ", queue" if self.queue else ""
        return (
            f"{super().__str__()}, {self.worker_spares} stand by, {servers}{queue}: "
            f"{self.n_joined} joined"
        )

    def _problems(self, out, code):
        results = [json.loads(path.read_text()) for path in out.glob("result.*")]
        self.n_joined = len({rank for each in results for rank, *_ in each["filled"]})
        if code != 0:
            yield f"the exit code is {code}"
        yield from ps_worker_spares_verdict.problems_of(
            self, out, {each["rank"]: each for each in results}
        )
        if self.replication > 1 and any(each["n_recovered"] for each in results):
            yield "somebody went back to a checkpoint"


def random_worker_spare_storm(rng, launcher, n_spares, replication):
    """Return a storm; of the workers, the evaluator and those that stand by one or more die.

    In half of them a server dies, too; with copies a second one once copies are made again.
    """
    n = rng.randint(2, 4)
    storm = WorkerSpareStorm(rng.choice(MODES), n, [], launcher, worker_spares=n_spares)
    storm.replication = replication
    for rank in rng.sample(range(n), rng.randint(1, min(n, n_spares))):
        step = rng.randint(1, storm.steps - 12)
        storm.kills.append(f"{rank}@{step}:{rng.choice(OF_WORKERS)}")
    if n_spares > 1 and rng.random() < 0.5:  # the lowest comes first
        when = rng.choice((*OF_WORKERS, *OF_SPARES))
        storm.kills.append(f"{n}@{rng.randint(0, 2)}:{when}")
    if rng.random() < 0.3:
        storm.kills.append(f"{n + n_spares}@{rng.randint(2, 20)}:evaluating")
    kinds = [kind for kind in OF_SERVERS if replication == 1 or kind != "recovering"]
    first, second = rng.sample(range(3), 2)
    if rng.random() < 0.5:
        kinds, moment = rng.choice(kinds), rng.choice(("before", "after", "soon"))
        storm.of_servers = [f"{first}@{rng.randint(*OF_SERVERS[kinds])}:{kinds}-{moment}"]
        if replication > 1 and rng.random() < 0.5:
            moment = rng.choice(("before", "after", "soon"))
            storm.later = f"{second}@{rng.randint(1, 20)}:push-{moment}"
    is_kept = not any(kill[0] == "0" for kill in [*storm.of_servers, storm.later] if kill)
    if is_kept and rng.random() < 0.7:
        storm.queue = int(1.5 * storm.steps * n)  # who goes back to a checkpoint takes more
    storm.rounds_of = rng.choice(("w", "rows"))
    return storm


def random_copied_server_storm(rng, launcher, spares):
    """Return a storm; of three servers one dies: by a request to it, or to one it has a copy of.

    Then another one dies, if it still gets so many pushes once there are two copies of it.
    """
    kinds = rng.choice([*OF_COPIES])
    moment = rng.choice(("before", "after", "soon"))
    first, second = rng.sample(range(2 + spares if spares else 3), 2)
    kill = f"{first}@{rng.randint(*OF_COPIES[kinds])}:{kinds}-{moment}"
    later = f"{second}@{rng.randint(1, 20)}:push-{rng.choice(('before', 'after', 'soon'))}"
    mode = rng.choice(MODES)
    n_workers = 2 if mode == "first_of" else rng.randint(2, 3)  # see random_server_storm()
    storm = CopiedServerStorm(mode, n_workers, [kill], launcher, later=later)
    storm.changes_places = bool(spares) and rng.random() < 0.5
    return with_spares(storm, spares)


def with_spares(storm, spares):
    """Return the storm, in which so many servers are spares."""
    if spares:
        storm.n_servers, storm.spares = 2, spares
    return storm


def random_server_storm(rng, launcher, spares):
    """Return a storm; of three servers one or two die."""
    kills = []
    for server in rng.sample(range(2 + spares if spares else 3), rng.choice((1, 1, 2))):
        kinds = rng.choice([*OF_SERVERS])
        moment = rng.choice(("before", "after", "soon"))
        kills.append(f"{server}@{rng.randint(*OF_SERVERS[kinds])}:{kinds}-{moment}")
    mode, n_workers = rng.choice(MODES), rng.randint(2, 3)
    n_workers = 2 if mode == "first_of" else n_workers  # who has made all steps helps no other
    return with_spares(ServerStorm(mode, n_workers, kills, launcher), spares)


def random_storm(rng, launcher, _spares, *, collectives=0):
    """Return a storm; of the workers at least one lives.

    With collectives, none dies while or after others make the last: they would not wait for who
    makes a new group.
    """
    mode, n = rng.choice(MODES), rng.randint(2, 4)
    kind = rng.choice(("worker", "chief", "evaluator", "two"))
    workers = {"worker": [rng.randrange(n)], "chief": [0], "evaluator": []}.get(kind)
    if workers is None:
        workers = rng.sample(range(n), min(2, n - 1))
    kills = []
    for rank in workers:
        when = rng.choice(MOMENTS if rank else OF_CHIEFS)
        step = rng.randint(1, STEPS - 2)
        if collectives:
            when, step = rng.choice((*MOMENTS, *["reducing"] * 4)), rng.randint(1, STEPS // 2 - 2)
        step = {"opening": 0, "saving": 4 * rng.randint(1, 4), "stopping": STEPS}.get(when, step)
        kills.append(f"{rank}@{step}:{when}")
    if kind == "evaluator" or (kind == "two" and rng.random() < 0.5):
        kills.append(f"{n}@{rng.randint(2, STEPS)}:evaluating")
    return Storm(mode, n, kills, launcher, collectives=collectives)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--storms", type=int, default=200)
    parser.add_argument("--launcher", choices=(*LAUNCHERS, "both"), default="both")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--of", choices=("all", "servers", "others"), default="all")
    parser.add_argument("--hosts", type=int, default=0, help="that many fake hosts, under ulfm")
    parser.add_argument(
        "--collectives", action="store_true", help="of workers, in storms of others"
    )
    parser.add_argument("--replication", type=int, choices=(1, 2), default=1)
    parser.add_argument("--spares", type=int, default=0, help="for servers that die")
    parser.add_argument("--worker-spares", type=int, default=0, help="for workers; in all storms")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and end the job that runs
    if not args.hosts:
        sys.exit(run(args, None))
    with running(f"ps-storms-{os.getpid()}", args.hosts, "200mbit") as cluster:
        sys.exit(run(args, cluster))


def run(args, cluster):
    """Run the storms; return True if one went wrong."""
    launchers = [*LAUNCHERS] if args.launcher == "both" else [args.launcher]
    launchers = launchers if cluster is None else ["ulfm"]
    counts, seconds, latencies, n_taken, n_joined = Counter(), [], [], 0, 0
    for number in range(args.storms):
        seed = args.seed + number
        rng, launcher = random.Random(seed), launchers[number % len(launchers)]
        is_of_servers = args.of == "servers" or (args.of == "all" and number // 2 % 3 == 0)
        of_servers = random_copied_server_storm if args.replication > 1 else random_server_storm
        collectives = {"collectives": STEPS - 2} if args.collectives and not is_of_servers else {}
        worker_spares = args.worker_spares
        if args.of == "all" and not (args.spares or collectives) and number % 6 == 5:
            worker_spares = worker_spares or rng.randint(1, 3)
        if worker_spares:
            storm = random_worker_spare_storm(rng, launcher, worker_spares, args.replication)
        else:
            storm = (of_servers if is_of_servers else random_storm)(
                rng, launcher, args.spares, **collectives
            )
        storm.cluster = cluster
        outcome = storm.run()
        counts["wrong" if outcome.problems else "right"] += 1
        seconds.append(outcome.seconds)
        latencies += getattr(storm, "latencies", [])
        n_joined += getattr(storm, "n_joined", 0)
        n_taken += len({line for line in outcome.output.splitlines() if TAKEN in line})
        print(
            f"{seed}: {storm}: {outcome.problems or 'right'}, {outcome.seconds:.1f} s", flush=True
        )
        if outcome.problems:
            print(outcome.output, flush=True)
    print(f"{dict(counts)}, {sum(seconds) / max(1, len(seconds)):.1f} s each")
    if n_joined:
        print(f"{n_joined} ranks that stood by took the place of another")
    if args.spares and args.replication > 1:
        print(f"{n_taken} times a spare has taken the place of a server that shared a process")
    if latencies:
        latencies.sort()
        p50, p95 = (latencies[int(share * (len(latencies) - 1))] for share in (0.5, 0.95))
        print(f"fail-over: p50 {p50:.3f} s, p95 {p95:.3f} s, of {len(latencies)} deaths")
    return bool(counts["wrong"])


if __name__ == "__main__":
    main()
