#!/usr/bin/env python3
"""Kills or stops ranks of elastic jobs at random moments; the others go on, with exact results.

usage: .venv/bin/python ci/storms.py [--storms 200] [--launcher ulfm|continuous|both] [--seed 1]
       .venv/bin/python ci/storms.py --latency 20   # from the kill to the next step of all others
       .venv/bin/python ci/storms.py --latency 20 --spares 1   # and of the spare
       .venv/bin/python ci/storms.py --cost 10      # a step of elastic jobs, and of others, in turn

Ends with 1 if a job hangs, or if its final state is not exact on all ranks that live.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

JOB = Path(__file__).with_name("storm_job.py")
LAUNCHERS = {"ulfm": ("--with-ft", "ulfm"), "continuous": ("--runtime-options", "continuous")}
STEPS = 50
MOMENTS = ("before", "inside", "inside", "applying", "after")
LIMIT_S = 120
HANG_S = 5  # a rank that is late by less is not killed


@dataclass
class Outcome:
    verdict: str  # "right", "wrong" or "hangs"
    results: list
    killed: dict  # rank -> time of its kill
    output: str
    code: int
    seconds: float

    @property
    def recovery_ms(self):
        """From the last kill to the moment at which all others have done the next step."""
        done = max(result["times"][-1][1] for result in self.results)
        return (done - max(self.killed.values())) / 1e6


@dataclass
class Storm:
    """A job whose ranks are killed. n: without spares; kills: RANK@STEP:WHEN; see storm_job.py."""

    n: int
    kills: list
    launcher: str
    n_spares: int = 0
    is_rich: bool = False
    is_shut_down: bool = False
    pause_s: float = 1e-3

    def __str__(self):
        extra = " rich" * self.is_rich + " shutdown" * self.is_shut_down
        return f"{self.launcher}, np {self.n}+{self.n_spares}, {' '.join(self.kills)}{extra}"

    def run(self):
        """Run the job; return its Outcome."""
        with tempfile.TemporaryDirectory() as folder:
            return self._run_in(folder)

    def _run_in(self, out):
        bin_folder = Path(sys.executable).parent
        options = [f"--kill={kill}" for kill in self.kills] + [f"--pause={self.pause_s}"]
        options += ["--rich"] * self.is_rich + ["--shutdown"] * self.is_shut_down
        command = [
            bin_folder / "mpirun", "--oversubscribe", *LAUNCHERS[self.launcher],
            "-np", str(self.n + self.n_spares),
            sys.executable, JOB, "--out", out, "--steps", str(STEPS), *options,
        ]  # fmt: skip
        root = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
        mine = {"RINGCOMM_ELASTIC": "1", "RINGCOMM_TIMEOUT_S": "30", "OMP_NUM_THREADS": "1"}
        mine |= {"RINGCOMM_SPARES": str(self.n_spares), "TMPDIR": out}
        if any(kill.endswith(":hanging") for kill in self.kills):
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
            output, _ = job.communicate()
            verdict = "hangs"
        killed = {int(p.suffix[1:]): int(p.read_text()) for p in Path(out).glob("kill.*")}
        results = [json.loads(p.read_text()) for p in sorted(Path(out).glob("result.?"))]
        verdict = verdict or self._verdict(results, killed)
        return Outcome(verdict, results, killed, output, job.returncode, time.monotonic() - began)

    def _verdict(self, results, killed):
        """Say whether all that live have the same exact state, which all of them have made.

        A spare reports only if it had a place. Those that were waiting have come by the end.
        """
        live = set(range(self.n + self.n_spares)) - set(killed)
        reported = [result for result in results if result["member"] in live]
        members = {result["member"] for result in reported}
        is_right = (
            live & set(range(self.n)) <= members
            and len(members) >= min(self.n, len(live)) - (len(killed) > 1) * self.n_spares
            and all(result["is_exact"] for result in results)
            and len({tuple(result["history"]) for result in results}) == 1
            and all(members == set(result["members"]) & live for result in reported)
        )
        return "right" if is_right else "wrong"


def random_storm(chance, launcher):
    """Return a storm: 4 to 6 ranks, of which 1 to 3 die, in every third storm rank 0 among them.

    Up to two of the ranks are spares. In every eighth storm a rank hangs.
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
    return Storm(n - n_spares, kills, launcher, n_spares, rich, shut_down)


def run_storms(n, launchers, seed):
    """Run n storms; print each; return the number of those that are not right."""
    chance, bad, codes = random.Random(seed), 0, {}
    for number in range(n):
        storm = random_storm(chance, launchers[number % len(launchers)])
        outcome = storm.run()
        print(
            f"{number}: {storm}: killed {sorted(outcome.killed)}, {outcome.verdict}, exit code "
            f"{outcome.code}, {outcome.seconds:.1f} s",
            flush=True,
        )
        codes[outcome.code] = codes.get(outcome.code, 0) + 1
        if outcome.verdict != "right":
            bad += 1
            print(outcome.output[-8000:], outcome.results, flush=True)
    print(f"{n} storms, {bad} of them not right; exit codes of mpirun: {codes}")
    return bad


def measure(n, launchers, size, victim, n_spares):
    """Print how long the others need from a kill to their next step."""
    for launcher in launchers:
        times = []
        for _ in range(n):
            outcome = Storm(size, [f"{victim}@20:before"], launcher, n_spares).run()
            if outcome.verdict != "right":
                print(outcome.output[-8000:])
                return 1
            times.append(outcome.recovery_ms)
        times.sort()
        print(
            f"{launcher}, np {size}+{n_spares}, rank {victim} killed: {n} jobs, ms to the next "
            f"step: median {statistics.median(times):.1f}, p95 {times[int(0.95 * (n - 1))]:.1f}, "
            f"max {times[-1]:.1f}",
            flush=True,
        )
    return 0


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
        without, with_it = (min(each[what] for each in times[key]) for key in "01")
        change = 100 * (with_it / without - 1)
        print(f"{what}: {without:.1f} us, elastic {with_it:.1f} us ({change:+.1f} %)")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--storms", type=int, default=200)
    parser.add_argument("--latency", type=int, default=0, help="measure in this many jobs")
    parser.add_argument("--cost", type=int, default=0, help="compare this many pairs of jobs")
    parser.add_argument("--launcher", default="both", choices=(*LAUNCHERS, "both"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--size", type=int, default=4, help="ranks, for --latency, --cost")
    parser.add_argument("--spares", type=int, default=0, help="more ranks, for --latency")
    parser.add_argument("--victim", type=int, default=2, help="rank, for --latency")
    args = parser.parse_args()
    if args.cost:
        measure_cost(args.cost, args.size)
        return 0
    launchers = tuple(LAUNCHERS) if args.launcher == "both" else (args.launcher,)
    if args.latency:
        return measure(args.latency, launchers, args.size, args.victim, args.spares)
    return 1 if run_storms(args.storms, launchers, args.seed) else 0


if __name__ == "__main__":
    sys.exit(main())
