"""Decides what the head of the page says of a job: its state, its pace, and when it ends. Pure."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ringcomm.foreign_text import is_int64, is_number, parsed_json, printable
from ringcomm.launch.job.run_words import Stages, start_text
from ringcomm.launch.watch.run_rows import FINISHING, PAUSED, RUNNING

_WINDOW_S: Final = 20.0  # of which the pace is
_LEAST_S: Final = 1.0
_PER_SECOND: Final = re.compile(
    r"(?:.*[/_.])?(?:samples|images|examples|tokens|items)(?:/s|_per_s|_per_sec|_per_second)"
)


@dataclass(frozen=True)
class JobState:
    """A word for a badge, and what a reader would ask next."""

    word: str
    text: str = ""


def job_state(
    recorded: str,
    stages: Stages | None,
    states: Sequence[str],
    *,
    how: str = "",
    seconds: float = 0.0,
) -> JobState:
    """Return the state of a job.

    Args:
        recorded: that of its folder, see RunFacts.state; a job under mpirun is "running".
        stages: how far its ranks have come to init(), if it has a folder.
        states: of the ranks that are seen, as in the table.
        how: how it ended, in words.
        seconds: since it began.
    """
    here = [each for each in states if each not in ("left", "dead", "spare", "reserve")]
    if recorded not in (RUNNING, FINISHING, PAUSED) and not (recorded == "not seen" and here):
        return JobState(recorded, how)
    if stages is not None and stages.size and stages.through < stages.size:
        text = start_text(stages, seconds, seconds)
        if stages.arrived:
            return JobState("init", text)
        return JobState("importing" if stages.started else "starting", text)
    if any(each.endswith("paused") for each in here):
        return JobState(PAUSED, "the ranks wait for the command `resume`")
    has_left = states and all(each in ("left", "leaving", "dead") for each in states)
    if has_left or recorded == FINISHING:
        return JobState(FINISHING, "the ranks have left the job, and their processes end")
    if here and all(each == "starting" for each in here):
        return JobState("init", "")
    return JobState("training" if states else "starting", "")


@dataclass(frozen=True)
class LoggedStep:
    """What a line of rc.log() says of progress.

    Attributes:
        time: in seconds since 1970.
        step: the step of the line.
        of: how many steps there will be; None: it does not say.
        samples_per_s: as the program measures it; None: it does not.
    """

    time: float
    step: int
    of: int | None = None
    samples_per_s: float | None = None


def parse_logged(line: bytes) -> LoggedStep | None:
    """Return what a line of metrics.jsonl says; None if it has no step."""
    try:
        record = parsed_json(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not is_int64(record.get("step")):
        return None
    if not is_number(record.get("time")):
        return None
    of: Any = record.get("of")
    whole = of if is_int64(of) and of > 0 else None
    return LoggedStep(float(record["time"]), record["step"], whole, samples_of(record))


def samples_of(values: Mapping[str, Any]) -> float | None:
    """Return the samples per second among values of rc.log(), by their names; None without any."""
    found = (value for name, value in values.items() if _PER_SECOND.fullmatch(name))
    return next((float(each) for each in found if is_number(each)), None)


class Pace:
    """Steps per second of the last 20 s, from looks at the number of the step."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, int]] = deque()

    def add(self, time: float, step: int) -> None:
        looks = self._looks
        if looks and (step < looks[-1][1] or time <= looks[-1][0]):
            if step >= looks[-1][1]:
                return
            looks.clear()  # a job goes back to a checkpoint
        if looks and time - looks[-1][0] < _LEAST_S / 2:
            return
        looks.append((time, step))
        while len(looks) > 2 and time - looks[0][0] > _WINDOW_S:
            looks.popleft()

    @property
    def per_s(self) -> float | None:
        if len(self._looks) < 2:
            return None
        (start, first), (end, last) = self._looks[0], self._looks[-1]
        return (last - first) / (end - start) if end - start >= _LEAST_S else None


def pace_of(logged: Sequence[LoggedStep]) -> float | None:
    """Return the steps per second between the first and the last of these lines."""
    if len(logged) < 2:
        return None
    seconds, steps = logged[-1].time - logged[0].time, logged[-1].step - logged[0].step
    return steps / seconds if seconds > 0 and steps > 0 else None


def seconds_left(logged: Sequence[LoggedStep], now: float) -> float | None:
    """Return the seconds until the last step, by the latest lines; None if that is not known."""
    of = next((each.of for each in reversed(logged) if each.of is not None), None)
    pace = pace_of(logged)
    if of is None or pace is None:
        return None
    done = logged[-1].step + pace * min(now - logged[-1].time, 1 / pace)
    return max(of - done, 0) / pace


def percent(logged: Sequence[LoggedStep]) -> tuple[int, int] | None:
    """Return the last step, and of how many it is; None if that is not known."""
    of = next((each.of for each in reversed(logged) if each.of is not None), None)
    return None if of is None or not logged else (logged[-1].step, of)


def role_of(role: str, *, is_chief: bool) -> str:
    """Return the kind of a role of a status page: worker, chief, server, evaluator or spare."""
    kind = role.partition(" ")[0]
    if kind in ("spare", "reserve"):
        return "spare"
    if kind in ("server", "evaluator"):
        return kind
    return "chief" if is_chief else "worker"


def chief_among(roles: Iterable[tuple[int, str, bool]]) -> int | None:
    """Return the chief of a job with servers: its first worker that lives; None without servers.

    Where none lives, the job has ended: it is the first worker.

    Args:
        roles: number, role and whether it lives, of each rank.
    """
    known = sorted(roles)
    if not any(role.startswith("server") for _, role, _ in known):
        return None
    workers = [
        (not lives, n) for n, role, lives in known if role_of(role, is_chief=False) == "worker"
    ]
    return min(workers)[1] if workers else None


def parameters(words: Sequence[str]) -> list[tuple[str, str]]:
    """Return the options of a program's command line as names and values: its hyper-parameters."""
    found: list[tuple[str, str]] = []
    rest = [printable(each) for each in words]
    while rest:
        word = rest.pop(0)
        if not re.match(r"--?[A-Za-z]", word):
            continue
        name, has_value, value = word.lstrip("-").partition("=")
        if not has_value and rest and not re.match(r"--?[A-Za-z]", rest[0]):
            value = rest.pop(0)
        found.append((name, value if has_value or value else "yes"))
    return found
