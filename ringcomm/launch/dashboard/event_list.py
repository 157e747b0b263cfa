"""Decides what the list of events shows: one line for what several ranks say of one event. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ringcomm.foreign_text import is_int64, is_number, parsed_json, printable
from ringcomm.launch.job.records import GuardianFile, RunEnd

# A job has few of these, and none is ever left out.
MAIN_KINDS: Final = (
    "death", "recovery", "spare", "failover", "view", "checkpoint", "stall", "slow", "command",
    "end",
)  # fmt: skip
OTHERS: Final = 500  # notes and warnings, the latest
_ONE_S: Final = 5.0  # within it, several ranks tell of the same event
_TEXT: Final = 2000
_KIND: Final = 20
_AFTER: Final = re.compile(r" after step ([0-9]{1,18})\b")


@dataclass(frozen=True)
class Event:
    """What has happened.

    Attributes:
        time: in seconds since 1970, by the clock of its host.
        kind: "death", "note" and so on.
        text: in words.
        ranks: who tells of it, or whom it is about.
        step: of the job; None: that is not known.
    """

    time: float
    kind: str
    text: str
    ranks: tuple[int, ...] = ()
    step: int | None = None


def parse_event(line: bytes, rank: int) -> Event | None:
    """Return what a line of a rank's file says; None if it is no event."""
    try:
        said = parsed_json(line)
        time, kind, text, step = (said.get(name) for name in ("time", "kind", "text", "step"))
    except (ValueError, AttributeError):
        return None
    if not (is_number(time) and isinstance(kind, str) and isinstance(text, str)):
        return None
    shown = printable(text)[:_TEXT]
    known = step if is_int64(step) and step >= 0 else None
    return Event(float(time), printable(kind)[:_KIND], shown, (rank,), known)


def deaths(
    guardians: Iterable[GuardianFile], step_of: Callable[[int, float], int | None]
) -> list[Event]:
    """Return the failures of ranks that guardians have recorded.

    step_of: the last step of a rank until a time; None: that is not known. That of the event is
        the one in the guardian's text, if it is later: rc.log() may not have told of each.
    """
    found = []
    for failure in (each for guardian in guardians for each in guardian.failures):
        if failure.rank is not None and failure.text:
            first = failure.text.strip().splitlines()[0].removeprefix("x ")
            text = printable(first)[:_TEXT]
            rank, at_s = failure.rank, failure.time_ns / 1e9
            told = _AFTER.search(first)
            steps = [step_of(rank, at_s), int(told[1]) if told else None]
            step = max((each for each in steps if each is not None), default=None)
            found.append(Event(at_s, "death", text, (rank,), step))
    return found


def end_event(end: RunEnd | None, ended_s: float | None) -> list[Event]:
    """Return the end of a run, if it has come, and when."""
    if end is None or ended_s is None:
        return []
    ranks = () if end.rank is None else (end.rank,)
    return [Event(ended_s, "end", printable(f"{end.what} - exit {end.code}"), ranks)]


def listed(events: Iterable[Event]) -> list[Event]:
    """Return the events in the order of time; those that several ranks tell of are one."""
    found: list[Event] = []
    latest: dict[tuple[str, str], int] = {}  # where the last one of its kind and text stands
    for event in sorted(events, key=lambda each: each.time):
        key = event.kind, event.text
        at = latest.get(key)
        if at is not None and event.time - found[at].time < _ONE_S:
            ranks = tuple(sorted({*found[at].ranks, *event.ranks}))
            found[at] = replace(found[at], ranks=ranks)
        else:
            latest[key] = len(found)
            found.append(event)
    return _without_old_notes(_with_steps(found))


def as_json(events: Sequence[Event]) -> list[dict[str, Any]]:
    return [
        {"time": e.time, "kind": e.kind, "text": e.text, "ranks": e.ranks, "step": e.step}
        for e in events
    ]


def _with_steps(events: list[Event]) -> list[Event]:
    """Give an event without a step that of the one before it, or after it: charts show it there.

    A process that has just taken a place has step 0, which tells nothing.
    """
    known = [each.step for each in events if each.step]
    step = known[0] if known else None
    found: list[Event] = []
    for event in events:
        step = event.step or step
        found.append(replace(event, step=None if event.kind == "end" else step))
    return found


def _without_old_notes(events: list[Event]) -> list[Event]:
    n_others = sum(each.kind not in MAIN_KINDS for each in events)
    found = []
    for event in events:
        if event.kind not in MAIN_KINDS:
            n_others -= 1
            if n_others >= OTHERS:
                continue
        found.append(event)
    return found
