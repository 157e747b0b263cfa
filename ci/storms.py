#!/usr/bin/env python3
"""Kills or stops ranks of elastic jobs at random moments; the others go on, with exact results.

usage: .venv/bin/python ci/storms.py [--storms 200] [--launcher ulfm|continuous|both] [--seed 1]
       .venv/bin/python ci/storms.py --fault sent/leader   # the storm of one cell, or of `all`
       .venv/bin/python ci/storms.py --hosts 3 --storms 50   # on fake hosts of two ranks each; root
       .venv/bin/python ci/storms.py --latency 20   # from the kill to the next step of all others
       .venv/bin/python ci/storms.py --latency 20 --spares 1   # and of the spare
       .venv/bin/python ci/storms.py --latency 20 --reserves 1   # and to all places taken again
       .venv/bin/python ci/storms.py --cost 10      # a step of elastic jobs, and of others, in turn

Ends with 1 if a job hangs, or if its final state is not exact on all ranks that live.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from fakecluster import Cluster, running

JOB = Path(__file__).with_name("storm_job.py")
LAUNCHERS = {"ulfm": ("--with-ft", "ulfm"), "continuous": ("--runtime-options", "continuous")}
STEPS = 50
MOMENTS = ("before", "inside", "inside", "sent", "applying", "after")
FAULTS = ("before", "inside", "sent", "applying", "hanging", "slow", "two")
ROLES = ("worker", "leader", "spare", "newcomer")
CELLS = (
    *(f"{fault}/{role}" for fault in FAULTS for role in ROLES),
    "joining/newcomer", "receiving/spare", "receiving/newcomer",
)  # fmt: skip
PLACES = 2  # ranks of a fake host
LIMIT_S = 120
HANG_S = 10  # a rank that is late by less is not killed
HANGING = (":hanging", ":waiting", ":slow", ":late")  # moments in which a job needs that limit


@dataclass
class Outcome:
    verdict: str  # "right", "wrong" or "hangs"
    results: list
    killed: dict  # process -> time of its kill
    slow: set  # processes that were slow
    output: str
    code: int
    seconds: float

    @property
    def recovery_ms(self):
        """From the last kill to the moment at which all ranks of the next view have done a step."""
        first = min(number for number, _, _ in self._later_views)
        return self._ms_until(at for number, at, _ in self._later_views if number == first)

    def full_size_ms(self, size):
        """From the last kill to the moment at which all of `size` ranks have done a step."""
        whole = min(number for number, _, each in self._later_views if each == size)
        return self._ms_until(at for number, at, _ in self._later_views if number == whole)

    @property
    def _later_views(self):
        return [each for result in self.results for each in result["times"] if each[0]]

    def _ms_until(self, times):
        return (max(times) - max(self.killed.values())) / 1e6


@dataclass
class Storm:
    """A job some of whose processes are killed, hang, are slow or leave.

    n: without spares and reserves; kills: PROCESS@STEP:WHEN, resizes: STEP:SIZE; see storm_job.py.

    cluster: fake hosts, each of which has PLACES ranks; None: this machine.
    """

    n: int
    kills: list
    launcher: str
    n_spares: int = 0
    n_reserves: int = 0
    resizes: tuple = ()
    is_rich: bool = False
    is_shut_down: bool = False
    pause_s: float = 1e-3
    cluster: Cluster | None = None

    def __str__(self):
        extra = " rich" * self.is_rich + " shutdown" * self.is_shut_down
        size = "+".join(map(str, (self.n, self.n_spares, self.n_reserves)))
        return f"{self.launcher}, np {size}, {' '.join((*self.kills, *self.resizes))}{extra}"

    def run(self):
        """Run the job; return its Outcome."""
        with tempfile.TemporaryDirectory() as folder:
            return self._run_in(folder)

    def _run_in(self, out):
        bin_folder = Path(sys.executable).parent
        options = [f"--kill={kill}" for kill in self.kills] + [f"--pause={self.pause_s}"]
        options += [f"--resize={resize}" for resize in self.resizes]
        options += ["--rich"] * self.is_rich + ["--shutdown"] * self.is_shut_down
        inside, layout = place(self.cluster, PLACES)
        command = [
            *inside, bin_folder / "mpirun", *layout, *LAUNCHERS[self.launcher],
            "-np", str(self.n + self.n_spares + self.n_reserves),
            sys.executable, JOB, "--out", out, "--steps", str(STEPS), *options,
        ]  # fmt: skip
        root = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
        mine = {"RINGCOMM_ELASTIC": "1", "RINGCOMM_TIMEOUT_S": "30", "OMP_NUM_THREADS": "1"}
        mine |= {"RINGCOMM_SPARES": str(self.n_spares), "TMPDIR": out}
        mine |= {"RINGCOMM_RESERVES": str(self.n_reserves)}
        if any(kill.endswith(HANGING) for kill in self.kills):
            mine["RINGCOMM_ELASTIC_HANG_S"] = str(HANG_S)
        environment = os.environ | dict.fromkeys(root, "1") | mine
        began = time.monotonic()
        job = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = job.communicate(timeout=LIMIT_S)
            verdict = ""
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            end_on(self.cluster)
            output, _ = job.communicate()
            verdict = "hangs"
        killed = {int(p.suffix[1:]): int(p.read_text()) for p in Path(out).glob("kill.*")}
        slow = {int(p.suffix[1:]) for p in Path(out).glob("slow.*")}
        results = [json.loads(p.read_text()) for p in sorted(Path(out).glob("result.?"))]
        verdict = verdict or self._verdict(results, killed)
        seconds = time.monotonic() - began
        return Outcome(verdict, results, killed, slow, output, job.returncode, seconds)

    def _verdict(self, results, killed):
        """Say whether all that live have the same exact state, which all of them have made.

        A spare or reserve reports only if it had a place. Those that were waiting have come by the
        end. After a request for fewer ranks, others may be without a place, too.
        """
        live = set(range(self.n + self.n_spares + self.n_reserves)) - set(killed)
        reported = [result for result in results if result["member"] in live]
        members = {result["member"] for result in reported}
        is_late = len(killed) > 1 or any(kill.endswith(":late") for kill in self.kills)
        least = min(self.n, len(live) - self.n_reserves) - is_late * self.n_spares
        stay = live & set(range(self.n))
        if self.resizes:
            least, stay = 1, set()
        is_right = (
            stay <= members
            and len(members) >= max(1, least)
            and all(result["is_exact"] for result in results)
            and len({tuple(result["history"]) for result in results}) == 1
            and all(members == set(result["members"]) & live for result in reported)
        )
        return "right" if is_right else "wrong"


def place(cluster, n):
    """Return what comes before mpirun, and its options, so that n ranks are on each host.

    cluster: fake hosts; None: this machine.
    """
    if cluster is None:
        return [], ["--oversubscribe"]
    hosts = ",".join(f"{host}:{n}" for host in cluster.hosts)
    reach = cluster.launch_options(is_mpich=False)
    return cluster.entering("h0"), [*reach, "--map-by", "slot", "--host", hosts]


def end_on(cluster):
    """Kill what is left on the hosts of a cluster."""
    for host in [] if cluster is None else cluster.hosts:
        for pid in cluster.pids(host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def storm_of(cell, launcher, chance):
    """Return a storm that has the fault of a cell, FAULT/ROLE: one of CELLS."""
    fault, _, role = cell.partition("/")
    n, step = 4, chance.randrange(5, 12)
    n_spares, n_reserves = int(role == "spare"), int(role == "newcomer")
    victim = {"worker": 2, "leader": 0}.get(role, n)
    is_outside = victim == n
    at = f"+{chance.randrange(3)}" if is_outside else step
    kills = [f"1@{step}:before"] if is_outside else []  # so there is a place
    if fault == "two" and role == "spare":  # both at once: the spare, and whose place it would get
        kills = [f"1@{step}:also-{n}"]
    elif fault == "two":
        kills.append(f"{victim}@{at}:also-3")
    elif role == "spare" and fault in ("hanging", "slow"):  # before it has a place
        kills.append(f"{victim}@{at}:{'waiting' if fault == 'hanging' else 'late'}")
    else:
        kills.append(f"{victim}@{at}:{fault}")
    pause_s = 10e-3 if is_outside else 1e-3  # there is time to come
    pause_s = 40e-3 if (fault, role) == ("slow", "spare") else pause_s
    return Storm(n, kills, launcher, n_spares, n_reserves, (), fault == "inside", pause_s=pause_s)


def reaches(cell, outcome):
    """Return True if the fault of a cell has happened."""
    fault, _, role = cell.partition("/")
    victim = {"worker": 2, "leader": 0}.get(role, 4)
    return victim in (outcome.slow if fault == "slow" else outcome.killed)


def random_storm(chance, launcher, *, has_changes=True):
    """Return a storm: 4 to 6 ranks, of which 1 to 3 die, in every third storm rank 0 among them.

    Up to two of the ranks are spares. In every eighth storm a rank hangs.

    has_changes: in every third storm there are also reserves that join, and may die on their way or
    later; in every fourth one the number of ranks is to change, or a rank leaves; in every eighth
    one a rank is slow.
    """
    n, n_deaths = chance.randint(4, 6), chance.choice([1, 1, 2, 2, 3])
    n_spares = chance.choice([0, 0, 1, 1, 2]) if n_deaths < n - 2 else 0
    victims = chance.sample(range(n), n_deaths)
    if all(victim >= n - n_spares for victim in victims):
        victims[0] = 1
    if 0 not in victims and chance.random() < 1 / 3:
        victims[0] = 0
    step = chance.choice([STEPS - 1, *[chance.randrange(2, STEPS - 6)] * 9])
    kills = []
    for rank in victims:
        is_idle = rank >= n - n_spares and chance.random() < 1 / 2
        when = "idle" if is_idle else chance.choice(MOMENTS)
        kills.append(f"{rank}@{min(step, STEPS - 1)}:{when}")
        step += chance.choice([0, 0, 1, 2, 4])
    if n_deaths > 1 and chance.random() < 1 / 3:
        kills[-1] = f"{victims[-1]}@0:healing"
    if chance.random() < 1 / 8:
        kills[0] = kills[0].rpartition(":")[0] + ":hanging"
    rich, shut_down = chance.random() < 1 / 3, chance.random() < 1 / 2
    storm = Storm(n - n_spares, kills, launcher, n_spares, 0, (), rich, shut_down)
    if has_changes:
        _add_changes(storm, chance, set(range(n)) - set(victims))
    return storm


def _add_changes(storm, chance, well):
    """Add reserves, requests for another size, and what happens to ranks that are well."""
    n = storm.n + storm.n_spares
    if chance.random() < 1 / 3:
        storm.n_reserves, storm.pause_s = chance.choice([1, 2]), 5e-3
        if chance.random() < 1 / 2:
            when = chance.choice(["joining", "receiving", "late", *MOMENTS])
            storm.kills.append(f"{n}@+{chance.randrange(5)}:{when}")
    workers = sorted(well & set(range(storm.n)))
    change = chance.randrange(8)
    if change == 0 and len(workers) > 1:
        storm.kills.append(f"{workers[-1]}@{chance.randrange(STEPS - 5)}:leaving")
    elif change in (1, 2):
        n_deaths = sum(not kill.endswith(":late") for kill in storm.kills)
        least, most = n_deaths + 1, n + storm.n_reserves - n_deaths  # one has the state
        sizes = [chance.randint(least, max(least, most)) for _ in range(change * (least <= most))]
        steps = sorted(chance.sample(range(STEPS), len(sizes)))
        storm.resizes = tuple(f"{at}:{size}" for at, size in zip(steps, sizes, strict=True))
    elif change == 3 and workers:
        storm.kills.append(f"{workers[0]}@{chance.randrange(STEPS)}:slow")


def over_hosts(storm, cluster):
    """Return the storm on the hosts of a cluster. A rank that nobody there can kill does not hang.

    Only a rank of the same host can kill one that hangs.
    """
    hosts_of_victims = [int(kill.partition("@")[0]) // PLACES for kill in storm.kills]
    last = storm.n + storm.n_spares - 1
    kills = []
    for kill, host in zip(storm.kills, hosts_of_victims, strict=True):
        is_alone = hosts_of_victims.count(host) > 1 or last == host * PLACES
        kills.append(kill.replace(":hanging", ":before") if is_alone else kill)
    return replace(storm, kills=kills, cluster=cluster)


def run_storms(n, launchers, seed, cluster=None):
    """Run n storms; print each; return the number of those that are not right."""
    chance = random.Random(seed)
    has_changes = cluster is None  # the fake hosts have no places for reserves
    storms = (
        random_storm(chance, launchers[number % len(launchers)], has_changes=has_changes)
        for number in range(n)
    )
    if cluster is not None:
        storms = (over_hosts(storm, cluster) for storm in storms)
    return _run_all((storm, "") for storm in storms)


def run_cells(cells, launchers, seed):
    """Run a storm of each cell with each launcher; return the number of those not right."""
    chance = random.Random(seed)
    return _run_all((storm_of(cell, by, chance), cell) for cell in cells for by in launchers)


def _run_all(storms):
    n, bad, codes = 0, 0, {}
    for storm, cell in storms:
        outcome = storm.run()
        if cell and outcome.verdict == "right" and not reaches(cell, outcome):
            outcome.verdict = "not reached"
        slow = f", slow {sorted(outcome.slow)}" if outcome.slow else ""
        print(
            f"{n}: {cell} {storm}: killed {sorted(outcome.killed)}{slow}, {outcome.verdict}, "
            f"exit code {outcome.code}, {outcome.seconds:.1f} s",
            flush=True,
        )
        codes[outcome.code] = codes.get(outcome.code, 0) + 1
        n += 1
        if outcome.verdict != "right":
            bad += 1
            print(outcome.output[-8000:], outcome.results, flush=True)
    print(f"{n} storms, {bad} of them not right; exit codes of mpirun: {codes}")
    return bad


def measure(n, launchers, size, victim, n_spares, n_reserves):
    """Print how long the others need from a kill to their next step.

    With reserves: also how long until all places are taken again, while the others train.
    """
    for launcher in launchers:
        times, full = [], []
        for _ in range(n):
            pause_s = 10e-3 if n_reserves else 1e-3
            kills = [f"{victim}@10:before"]
            outcome = Storm(size, kills, launcher, n_spares, n_reserves, pause_s=pause_s).run()
            if outcome.verdict != "right":
                print(outcome.output[-8000:])
                return 1
            times.append(outcome.recovery_ms)
            if n_reserves:
                full.append(outcome.full_size_ms(size))
        what = f"{launcher}, np {size}+{n_spares}+{n_reserves}, rank {victim} killed: {n} jobs"
        print(f"{what}, ms to the next step: {_spread(times)}", flush=True)
        if full:
            print(f"{what}, ms to {size} ranks again: {_spread(full)}", flush=True)
    return 0


def _spread(times):
    p95 = sorted(times)[int(0.95 * (len(times) - 1))]
    return f"median {statistics.median(times):.1f}, p95 {p95:.1f}, max {max(times):.1f}"


def measure_cost(n, size):
    """Print how long a step takes in elastic jobs and in others, in turn; nothing fails."""
    times = {"1": [], "0": []}
    for number in range(2 * n):
        is_elastic = str(number % 2)
        command = [
            Path(sys.executable).parent / "mpirun", "--oversubscribe", *LAUNCHERS["ulfm"],
            "-np", str(size), sys.executable, JOB, "--out", "/tmp", "--time",
        ]  # fmt: skip
        root = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
        mine = {"RINGCOMM_ELASTIC": is_elastic, "OMP_NUM_THREADS": "1"}
        environment = os.environ | dict.fromkeys(root, "1") | mine
        job = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, timeout=LIMIT_S
        )
        times[is_elastic].append(json.loads(job.stdout.strip().splitlines()[-1]))
    for what in times["0"][0]:
        # Now and then a job with more ranks than cores has a few fast steps: no minimum.
        without, with_it = (statistics.median(each[what] for each in times[key]) for key in "01")
        change = 100 * (with_it / without - 1)
        print(f"{what}: {without:.1f} us, elastic {with_it:.1f} us ({change:+.1f} %)")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--storms", type=int, default=200)
    parser.add_argument("--latency", type=int, default=0, help="measure in this many jobs")
    parser.add_argument("--cost", type=int, default=0, help="compare this many pairs of jobs")
    parser.add_argument("--fault", choices=(*CELLS, "all"), help="run the storm of this cell")
    parser.add_argument("--launcher", default="both", choices=(*LAUNCHERS, "both"))
    parser.add_argument("--hosts", type=int, default=0, help="that many fake hosts, under ulfm")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--size", type=int, default=4, help="ranks, for --latency, --cost")
    parser.add_argument("--spares", type=int, default=0, help="more ranks, for --latency")
    parser.add_argument("--reserves", type=int, default=0, help="that sleep, for --latency")
    parser.add_argument("--victim", type=int, default=2, help="rank, for --latency")
    args = parser.parse_args()
    if args.cost:
        measure_cost(args.cost, args.size)
        return 0
    launchers = tuple(LAUNCHERS) if args.launcher == "both" else (args.launcher,)
    if args.latency:
        more = (args.spares, args.reserves)
        return measure(args.latency, launchers, args.size, args.victim, *more)
    if args.fault:
        cells = CELLS if args.fault == "all" else (args.fault,)
        return 1 if run_cells(cells, launchers, args.seed) else 0
    if args.hosts:
        with running(f"storms-{os.getpid()}", args.hosts, "200mbit") as cluster:
            return 1 if run_storms(args.storms, ("ulfm",), args.seed, cluster) else 0
    return 1 if run_storms(args.storms, launchers, args.seed) else 0


if __name__ == "__main__":
    sys.exit(main())
