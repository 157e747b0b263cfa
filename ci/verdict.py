#!/usr/bin/env python3
"""Judges a run of ci/test: tells a fault from weather, and says it in at most 60 lines.

usage: ci/verdict.py again RECORDS     print, for bash, the steps that try failures again
       ci/verdict.py report RECORDS    print the verdict, exit with 1 if the gate fails

RECORDS holds a folder for each step that ci/test ran. A step that names what failed, by a
FailureLog, is tried again by that alone; a step marked "whole" as a whole; all others never. What
passes alone is flaky, and a few flaky ones do not fail the gate: but a test does whose own file, or
the code that it tests (as ci/mutations knows it), was changed by one of the newest commits.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO

MAX_FLAKY_TESTS = 3
MAX_FLAKY_STEPS = 1
MAX_TRIED_AGAIN = 8  # more than may be flaky: the gate fails anyway, and the reader learns enough
MAX_LINES = 60
CPU_BUDGET_S = 1000  # of the gate; who adds more than 5 takes out as much, or says why
TAIL_LINES = 15  # of what a failed test said
NEW_COMMITS = 20  # as many as land together
WIDTH = 160
NOISE = re.compile(r"^(SKIPPED .*|.*\[ *\d+%\])\n", re.MULTILINE)
BARE = re.compile(r"E\s+([\w.]*(Error|Exception|Exit|Failed|Interrupt))?:?$")  # says nothing
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
    not_tried: list[Failure] = field(default_factory=list)  # failed once; so many others did
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
        if self.not_tried:
            many.append(f"{len(self.not_tried)} that failed were not tried again")
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


def judge(
    steps: Sequence[Step], is_of_the_change: Callable[[str], bool] = lambda name: False
) -> Verdict:
    """Return what failed, and what is flaky: no test may be of which is_of_the_change(name)."""
    passed_again = {(step.mode, step.name) for step in steps if not step.code}
    failed_again = {(step.mode, step.name) for step in steps if step.code}
    verdict = Verdict()
    for step in steps:
        again = f"of {step.id}"
        if not step.code or step.mode.startswith("of "):
            continue
        for part in step.parts():
            name = f"alone: {part.name}"
            passed = (again, name) in passed_again
            if passed and not is_of_the_change(part.name):
                verdict.flaky_tests.append(part)
                continue
            note = ", passed alone, but what it tests was changed" if passed else ""
            failure = replace(part, name=f"{part.name} ({step.name}{note})")
            was_tried = passed or (again, name) in failed_again
            (verdict.failed if was_tried else verdict.not_tried).append(failure)
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
    if path:
        end.append(f"every failure, as it was first: {path}")
    if reasons:
        end += textwrap.wrap(f"FAILED: {', '.join(reasons)}", WIDTH, max_lines=3)
    else:
        end.append(f"all {len(steps)} steps passed" if not verdict.flaky() else "passed, see FLAKY")
    flaky = cut([line for each in verdict.flaky() for line in shown(each, "FLAKY", 2)], 12)
    others = cut([line for each in verdict.not_tried for line in shown(each, "NOT TRIED", 2)], 12)
    room = MAX_LINES - len(end) - len(flaky) - len(others)
    failed: list[str] = []
    for number, each in enumerate(verdict.failed):
        left = len(verdict.failed) - number
        lines = min(TAIL_LINES + 2, (room - len(failed)) // left)
        failed += shown(each, "FAILED", max(2, lines))
    return [*cut(failed, room), *others, *flaky, *end]


def shown(failure: Failure, word: str, lines: int) -> list[str]:
    """Return its name, why it failed, and the end of what it said, in so many lines."""
    said = [line.rstrip() for line in failure.text.splitlines() if line.strip()]
    why = reason_in(said)
    tail = said[-(lines - 2) :] if lines > 2 else []
    return [f"{word} {failure.name}"[:WIDTH], *(f"    {narrow(s)}" for s in [*why, *tail])]


def reason_in(said: Sequence[str]) -> list[str]:
    """Return a line that says why: of an assertion its text and what it compared; else the last."""
    errors = [line for line in said if line.startswith("E  ") and not BARE.match(line)]
    if not errors:
        return list(said[-1:])
    first, *others = errors
    compared = next((line[1:].strip() for line in others if re.match(r"E\s+assert ", line)), "")
    return [f"{first} | {compared}" if compared else first]


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
        of_word = {
            "FAILED": verdict.failed, "NOT TRIED": verdict.not_tried, "FLAKY": verdict.flaky()
        }  # fmt: skip
        for word, failures in of_word.items():
            file.writelines(f"== {word} {each.name}\n{each.text}\n\n" for each in failures)
    return path


def git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent.parent), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def tests_of_the_change() -> Callable[[str], bool]:
    """Return what says whether the newest commits changed a test's file, or code that it tests."""
    base = git("rev-list", f"--max-count={NEW_COMMITS + 1}", "HEAD").split("\n")[-1]
    changed = set(git("diff", "--name-only", base).split("\n")) if base else set()
    tests = {path for path in changed if path.startswith("tests/")}
    if changed:
        from mutations import CPP_MUTATIONS, MUTATIONS

        folders = {f"csrc/{path.split('/')[1]}" for path in changed if path.startswith("csrc/")}
        for each in MUTATIONS:
            if f"ringcomm/{each.file}" in changed:
                tests.update(f"tests/{target}" for target in each.targets)
        for each in CPP_MUTATIONS:
            if f"csrc/{each.file}" in folders:
                tests.update(f"tests/{target}" for target in each.targets)
    files = {target.split("::")[0] for target in tests}
    return lambda name: name.split("::")[0] in files


def facts() -> str:
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
    verdict = judge(steps, tests_of_the_change())
    if os.environ.get("SHOW_COSTS"):
        print(*cost_table(steps), sep="\n")
    path = kept(verdict) if verdict.failed or verdict.not_tried or verdict.flaky() else ""
    print(*report(steps, verdict, facts(), path), sep="\n")
    return 1 if verdict.reasons() else 0


if __name__ == "__main__":
    sys.exit(main())
