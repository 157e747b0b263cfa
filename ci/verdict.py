#!/usr/bin/env python3
"""Judges a run of ci/test: tells a fault from weather, and says it in at most 60 lines.

usage: ci/verdict.py again RECORDS     print, for bash, the steps that try failures again
       ci/verdict.py report RECORDS    print the verdict, exit with 1 if the gate fails

RECORDS holds a folder for each step that ci/test ran. A step that names what failed, by a
FailureLog, is tried again by that alone; a step marked "whole" as a whole; all others never. What
passes alone is flaky, and a few flaky ones do not fail the gate.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

MAX_FLAKY_TESTS = 3
MAX_FLAKY_STEPS = 1
MAX_TRIED_AGAIN = 8  # more than may be flaky: the gate fails anyway, and the reader learns enough
MAX_LINES = 60
CPU_BUDGET_S = 1750  # of the gate; who adds more than 5 takes out as much, or says why
TAIL_LINES = 15  # of what a failed test said
WIDTH = 160
NOISE = re.compile(r"^(SKIPPED .*|.*\[ *\d+%\])\n", re.MULTILINE)
TESTS_FAILED = 1  # the exit code of pytest and of ci/safety where they came to their end


@dataclass(frozen=True)
class Failure:
    """A part of a step that failed: a test, a test file, a cell of the safety matrix."""

    name: str
    arguments: tuple[str, ...]  # they stand in the place of the step's own to run it alone
    text: str


class FailureLog:
    """Writes down what failed, one JSON object per line, where FAILURES says; else nothing.

    What runs below this process does not see the variable: it is not of this step.
    """

    def __init__(self) -> None:
        path = os.environ.pop("FAILURES", None)
        self._file: TextIO | None = open(path, "a") if path else None  # noqa: SIM115

    def add(self, failure: Failure) -> None:
        self._write(vars(failure))

    def close(self) -> None:
        """Say that the step came to its end, whatever failed on the way."""
        self._write({"complete": True})

    def _write(self, entry: dict[str, object]) -> None:
        if self._file:
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()


@dataclass(frozen=True)
class Step:
    """A step of ci/test that has ended.

    Its mode says how it may be tried again: "never", "by test" or "whole"; or, as "of ID", which
    step this one tried again.
    """

    id: str
    name: str
    mode: str
    command: tuple[str, ...]
    code: int
    seconds: int
    output: str = ""
    failures: tuple[Failure, ...] = ()
    is_complete: bool = False  # a FailureLog was closed
    costs: dict[str, tuple[float, int]] = field(default_factory=dict)  # of files; see cost_plugin

    def parts(self) -> tuple[Failure, ...]:
        """Return what may be tried again instead of the whole step."""
        is_named = self.mode == "by test" and self.code == TESTS_FAILED and self.is_complete
        return self.failures if is_named else ()

    def command_of(self, part: Failure) -> tuple[str, ...]:
        return (*self.command[:2], *part.arguments)  # run_pytest VENV, python ci/safety


@dataclass
class Verdict:
    failed: list[Failure] = field(default_factory=list)
    flaky_tests: list[Failure] = field(default_factory=list)
    flaky_steps: list[Failure] = field(default_factory=list)

    def flaky(self) -> list[Failure]:
        return [*self.flaky_tests, *self.flaky_steps]

    def reasons(self) -> list[str]:
        """Return why the gate fails; nothing if it passes."""
        many = [
            f"{len(flaky)} {what} passed only when tried again, at most {limit} may"
            for what, flaky, limit in (
                ("tests", self.flaky_tests, MAX_FLAKY_TESTS),
                ("steps", self.flaky_steps, MAX_FLAKY_STEPS),
            )
            if len(flaky) > limit
        ]
        return [*(each.name for each in self.failed), *many]


# -- decisions ------------------------------------------------------------------------------------


def to_try_again(steps: Sequence[Step]) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield (mode, name, command) of the steps that try again what failed, the first of them."""
    tests = 0
    for step in steps:
        if step.mode == "whole" and step.code:
            yield f"of {step.id}", f"again: {step.name}", step.command
        for part in step.parts():
            if tests < MAX_TRIED_AGAIN:
                yield f"of {step.id}", f"alone: {part.name}", step.command_of(part)
            tests += 1


def judge(steps: Sequence[Step]) -> Verdict:
    passed_again = {(step.mode, step.name) for step in steps if not step.code}
    failed_again = {(step.mode, step.name) for step in steps if step.code}
    verdict = Verdict()
    for step in steps:
        again = f"of {step.id}"
        if not step.code or step.mode.startswith("of "):
            continue
        for part in step.parts():
            name = f"alone: {part.name}"
            if (again, name) in passed_again:
                verdict.flaky_tests.append(part)
            else:
                note = "" if (again, name) in failed_again else ", not tried again"
                verdict.failed.append(
                    Failure(f"{part.name} ({step.name}{note})", part.arguments, part.text)
                )
        if not step.parts():
            is_flaky = (again, f"again: {step.name}") in passed_again
            name = f"{step.name} (exit {step.code})"
            failure = Failure(name, (), step.output)
            (verdict.flaky_steps if is_flaky else verdict.failed).append(failure)
    return verdict


# -- what is said ---------------------------------------------------------------------------------


def report(steps: Sequence[Step], verdict: Verdict, facts: str, path: str) -> list[str]:
    """Return at most MAX_LINES lines that say all that somebody needs who sees nothing else."""
    reasons = verdict.reasons()
    end = [*durations(steps), facts]
    if verdict.failed or verdict.flaky():
        end.append(f"every failure, as it was first: {path}")
    if reasons:
        end += textwrap.wrap(f"FAILED: {', '.join(reasons)}", WIDTH, max_lines=3)
    else:
        end.append(f"all {len(steps)} steps passed" if not verdict.flaky() else "passed, see FLAKY")
    flaky = [line for each in verdict.flaky() for line in shown(each, "FLAKY", 2)]
    room = MAX_LINES - len(end)
    flaky = cut(flaky, 12)
    room -= len(flaky)
    failed: list[str] = []
    for number, each in enumerate(verdict.failed):
        left = len(verdict.failed) - number
        lines = min(TAIL_LINES + 2, (room - len(failed)) // left)
        failed += shown(each, "FAILED", max(1, lines))
    return [*cut(failed, room), *flaky, *end]


def shown(failure: Failure, word: str, lines: int) -> list[str]:
    """Return its name, what it asserted, and the end of what it said, in so many lines."""
    said = [line.rstrip() for line in failure.text.splitlines() if line.strip()]
    asserted = next((line for line in said if line.startswith("E  ")), None)
    tail = said[-max(0, lines - 2) :] if lines > 2 else []
    if asserted is None:
        tail = said[-(lines - 1) :] if lines > 1 else []
    elif asserted not in tail:
        tail = [asserted, *tail]
    tail = [f"    {narrow(line)}" for line in tail[: lines - 1]]
    return [f"{word} {failure.name}"[:WIDTH], *tail]


def narrow(line: str) -> str:
    """Leave out the middle of a long line."""
    if len(line) <= WIDTH:
        return line
    return f"{line[: WIDTH // 2]} [...] {line[-WIDTH // 2 :]}"


def cut(lines: list[str], limit: int) -> list[str]:
    if len(lines) <= limit:
        return lines
    return [*lines[: limit - 1], f"... {len(lines) - limit + 1} lines more"]


def durations(steps: Sequence[Step]) -> list[str]:
    tries = [step for step in steps if step.mode.startswith("of ")]
    each = [
        f"{step.seconds} s {step.name}{cost_of(step)}" + " (failed)" * bool(step.code)
        for step in steps
        if step not in tries
    ]
    if tries:
        each.append(f"{sum(step.seconds for step in tries)} s {len(tries)} tried again")
    return textwrap.wrap("steps: " + ", ".join(each), WIDTH, max_lines=12)


def cost_of(step: Step) -> str:
    if not step.costs:
        return ""
    seconds, jobs = (sum(each) for each in zip(*step.costs.values(), strict=True))
    return f" ({seconds:.0f} s of a core, {jobs} jobs)"


def cost_table(steps: Sequence[Step]) -> list[str]:
    """Return a line per step and test file, the dearest first."""
    rows = [(*cost, name, step.name) for step in steps for name, cost in step.costs.items()]
    rows.sort(reverse=True)
    return ["CPU s  jobs  file", *(f"{s:5.1f}  {n:4}  {name} ({of})" for s, n, name, of in rows)]


# -- files ----------------------------------------------------------------------------------------


def steps_in(folder: Path) -> list[Step]:
    """Return the steps that have ended, in the order in which they began."""
    ended = [each for each in folder.iterdir() if (each / "code").exists()]
    return [step_in(each) for each in sorted(ended, key=lambda e: int((e / "start").read_text()))]


def step_in(folder: Path) -> Step:
    log = folder / "failures"
    entries = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    failures: dict[str, Failure] = {}
    for each in entries:
        if "name" in each:
            before = failures[each["name"]].text + "\n" if each["name"] in failures else ""
            text = before + each["text"]
            failures[each["name"]] = Failure(each["name"], tuple(each["arguments"]), text)
    _pid, _, output = (folder / "output").read_text(errors="replace").partition("\n")
    return Step(
        id=folder.name,
        name=(folder / "name").read_text(),
        mode=(folder / "mode").read_text(),
        command=tuple((folder / "command").read_text().split("\0")[:-1]),
        code=int((folder / "code").read_text()),
        seconds=int((folder / "seconds").read_text()),
        output=NOISE.sub("", output),
        failures=tuple(failures.values()),
        is_complete={"complete": True} in entries,
        costs=json.loads(costs.read_text()) if (costs := folder / "costs").exists() else {},
    )


def kept(verdict: Verdict) -> str:
    """Write all that failed to a file, and return its path."""
    number, path = tempfile.mkstemp(prefix="ringcomm-failures-", suffix=".txt")
    with open(number, "w") as file:
        for word, failures in (("FAILED", verdict.failed), ("FLAKY", verdict.flaky())):
            file.writelines(f"== {word} {each.name}\n{each.text}\n\n" for each in failures)
    return path


def facts() -> str:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    commit = git("rev-parse", "--short", "HEAD") or "unknown"
    changed = " with changes" if git("status", "--porcelain") else ""
    cores = len(os.sched_getaffinity(0))
    start, seconds = os.environ["LOAD_AT_START"], os.environ["SECONDS_IN_ALL"]
    load = f"load {start} at the start, {os.getloadavg()[0]:.2f} at the end"
    used = f"{cpu_seconds(os.environ['TIMES_OF_CORES']):.0f} s of a core (budget {CPU_BUDGET_S})"
    speed = f"a fixed loop takes {loop_ms():.0f} ms"
    return f"commit {commit}{changed}, {cores} cores, {load}, {seconds} s in all, {used}, {speed}"


def loop_ms() -> float:
    """Return how long a fixed loop of Python takes, the best of 5: the speed of this machine."""
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        sum(i * i for i in range(1_000_000))
        best = min(best, time.perf_counter() - start)
    return 1000 * best


def cpu_seconds(times: str) -> float:
    """Return the sum of what the shell's `times` printed: 1m2.345s for a minute and 2.345 s."""
    parts = (part.removesuffix("s").split("m") for part in times.split())
    return sum(60 * int(minutes) + float(seconds) for minutes, seconds in parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS)
    parser.add_argument("what", choices=["again", "report"])
    parser.add_argument("records", type=Path)
    args = parser.parse_args()
    steps = steps_in(args.records)
    if args.what == "again":
        for mode, name, command in to_try_again(steps):
            print(shlex.join(["step", "--again", mode, name, *command]))
        return 0
    verdict = judge(steps)
    if os.environ.get("SHOW_COSTS"):
        print(*cost_table(steps), sep="\n")
    path = kept(verdict) if verdict.failed or verdict.flaky() else ""
    print(*report(steps, verdict, facts(), path), sep="\n")
    return 1 if verdict.reasons() else 0


if __name__ == "__main__":
    sys.exit(main())
