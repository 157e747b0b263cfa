"""A stage of the suite: a command with a limit, of which nothing is left when it ends."""

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

SKIP = 77  # the exit code of a stage that says "skip: REASON"
GRACE_S = 5.0  # for mpirun, to end its ranks in order
SHORTEST_S = 5.0

Verdict = Literal["ok", "FAIL", "cut", "skip"]


@dataclass(frozen=True)
class Stage:
    """A command of the suite, and its limit.

    Attributes:
        name: "ipc, 4 ranks".
        command: program and arguments.
        limit_s: seconds after which it is cut.
        environment: beside that of the suite.
        needs_gpu: where there is none it is skipped.
    """

    name: str
    command: Sequence[str]
    limit_s: float
    environment: Mapping[str, str] = field(default_factory=dict)
    needs_gpu: bool = True


@dataclass(frozen=True)
class Row:
    """The outcome of a stage.

    Attributes:
        name: of the stage.
        verdict: cut: it was still running at its limit, or nothing of the suite's was left.
        seconds: it ran.
        text: of a good one its figure, or else its last line; of others why.
        details: lines for a table of their own.
    """

    name: str
    verdict: Verdict
    seconds: float
    text: str
    details: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name:<22} {self.verdict:<4} {self.seconds:6.1f} s  {self.text}".rstrip()


def run_stage(stage: Stage, log: Path, environment: Mapping[str, str], deadline: float) -> Row:
    """Run a stage to its end, or to its limit; return what came of it.

    Args:
        stage: which.
        log: file that gets its output.
        environment: of all stages.
        deadline: of the suite, as time.monotonic() counts.
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
    """Kill what a session still consists of after `grace_s`; return the names of those processes.

    mpirun gives each rank a process group of its own, but none leaves the session.
    """
    deadline = time.monotonic() + grace_s
    while (members := _members(leader)) and time.monotonic() < deadline:
        time.sleep(0.05)  # nobody tells of the end of a process that is not a child
    for pid, _ in members:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return [name for _, name in members]


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """Return the exit code, None if the process had to be ended."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    process.kill()
    process.wait()
    return None


def _members(session: int) -> list[tuple[int, str]]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
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
    """Return what the last line "KEY: TEXT" says."""
    found = [line.removeprefix(f"{key}: ") for line in lines if line.startswith(f"{key}: ")]
    return found[-1] if found else ""


def _reason(lines: Sequence[str]) -> str:
    """Return the line that most likely says what went wrong."""
    errors = [line for line in lines if re.match(r"E? *[\w.]*(Error|Exception)\b", line)]
    first_hand = [line for line in errors if "PeerFailedError" not in line]
    return _end(first_hand or errors or lines)


def _end(lines: Sequence[str]) -> str:
    """Return the last line that is not empty."""
    return next((line.strip()[:160] for line in reversed(lines) if line.strip()), "no output")
