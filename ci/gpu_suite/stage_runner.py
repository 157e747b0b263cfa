"""Runs a stage of the suite: a command with a time limit, all of whose processes are ended."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from gpu_suite.outcome_lines import SKIP

GRACE_S = 5.0  # in which mpirun can end its ranks
TRACE_S = 1.5  # in which a process writes where its threads are
_LAUNCHERS = ("mpirun", "prterun", "prted", "orterun", "timeout")  # they write no trace
SHORTEST_S = 5.0

Verdict = Literal["ok", "FAIL", "cut", "skip", "not shown"]


@dataclass(frozen=True)
class Stage:
    """A command of the suite."""

    name: str  # "ipc N=4"
    command: Sequence[str]  # program and arguments
    limit_s: float  # after that it is ended
    environment: Mapping[str, str] = field(default_factory=dict)  # in addition to the suite's
    needs_gpu: bool = True  # it is skipped if there is no GPU
    needs_build: bool = True  # of ringcomm; it is skipped if there is none
    n_gpus: int = 1  # with fewer, what it is about is not shown


@dataclass(frozen=True)
class Row:
    """The outcome of a stage."""

    name: str  # of the stage
    verdict: Verdict  # "cut": it exceeded its limit, or the suite had no time left for it
    # "not shown": this machine has too few GPUs, or hosts, to show it
    seconds: float  # of its run
    text: str  # "ok": its figure, or else its last line; other verdicts: why
    details: tuple[str, ...] = ()  # lines that are printed below the table

    def __str__(self) -> str:
        return f"{self.name:<26} {self.verdict:<9} {self.seconds:6.1f} s  {self.text}".rstrip()


def run_stage(stage: Stage, log: Path, environment: Mapping[str, str], deadline: float) -> Row:
    """Run a stage to its end or its limit, and return the outcome.

    Args:
        stage: the stage.
        log: file for its output.
        environment: of all stages.
        deadline: of the suite, by time.monotonic().
    """
    start = time.monotonic()
    limit_s = min(stage.limit_s, deadline - start)
    if limit_s < SHORTEST_S:
        return Row(stage.name, "cut", 0.0, "no time was left for it")
    with log.open("w") as output:
        process = subprocess.Popen(
            stage.command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environment, **stage.environment},
            start_new_session=True,
        )
        code = _wait(process, limit_s)
    left = end_session(process.pid, GRACE_S if code is not None else 0)
    lines = log.read_text(errors="replace").splitlines()
    seconds = time.monotonic() - start
    return _judge(stage.name, code, seconds, lines, limit_s, left)


def end_session(leader: int, grace_s: float) -> list[str]:
    """Kill the processes of a session that are left after `grace_s`; return their names.

    mpirun gives each rank its own process group, but no rank leaves the session.
    """
    deadline = time.monotonic() + grace_s
    while (members := _members(leader)) and time.monotonic() < deadline:
        time.sleep(0.05)  # only a parent can wait for the end of a process
    if members:
        abort_session(leader)
    for pid, _ in members:
        _kill(pid, signal.SIGKILL)
    return [name for _, name in members]


def abort_session(leader: int) -> None:
    """Let the processes of a session write where their threads are, which ends them.

    PYTHONFAULTHANDLER is set, so that SIGABRT does that.
    """
    asked = [pid for pid, name in _members(leader) if name not in _LAUNCHERS]
    for pid in asked:
        _kill(pid, signal.SIGABRT)
    deadline = time.monotonic() + TRACE_S
    while time.monotonic() < deadline and any(pid in asked for pid, _ in _members(leader)):
        time.sleep(0.05)  # only a parent can wait for the end of a process


def _kill(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """Return the exit code; None: the process was ended at its limit."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        abort_session(process.pid)
        process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    process.kill()
    process.wait()
    return None


def _members(session: int) -> list[tuple[int, str]]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process may have ended
            head, _, rest = path.read_text().rpartition(")")
            state, _, _, its_session, *_ = rest.split()
            if its_session == str(session) and state not in "ZX":
                found.append((int(path.parent.name), head.partition("(")[2]))
    return found


def _judge(
    name: str,
    code: int | None,
    seconds: float,
    lines: Sequence[str],
    limit_s: float,
    left: Sequence[str],
) -> Row:
    details = tuple(line[2:] for line in lines if line.startswith("| "))
    if code is None:
        return Row(name, "cut", seconds, f"still ran after {limit_s:.0f} s", details)
    if code == SKIP:
        return Row(name, "skip", seconds, _last(lines, "skip") or "it does not say why")
    if code != 0:
        how = f"signal {-code}" if code < 0 else f"exit {code}"
        return Row(name, "FAIL", seconds, f"{how}: {_reason(lines)}", details)
    if left:
        return Row(name, "FAIL", seconds, f"left running: {', '.join(left)}", details)
    return Row(name, "ok", seconds, _last(lines, "figure") or _end(lines), details)


def _last(lines: Sequence[str], key: str) -> str:
    """Return the text of the last line "KEY: TEXT"."""
    found = [line.removeprefix(f"{key}: ") for line in lines if line.startswith(f"{key}: ")]
    return found[-1] if found else ""


def _reason(lines: Sequence[str]) -> str:
    """Return the line that most likely names the cause of a failure."""
    errors = [line for line in lines if re.match(r"E? *[\w.]*(Error|Exception)\b", line)]
    first_hand = [line for line in errors if "PeerFailedError" not in line]
    return _end(first_hand or errors or lines)


def _end(lines: Sequence[str]) -> str:
    """Return the last line that is not empty."""
    return next((line.strip()[:160] for line in reversed(lines) if line.strip()), "no output")
