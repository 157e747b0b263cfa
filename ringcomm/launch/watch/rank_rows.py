"""Rows of `ringcomm top`, from two samples of a rank. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ringcomm.foreign_text import printable
from ringcomm.status.json_numbers import json_number
from ringcomm.status.page_enums import RESERVE, SPARE, Ending, OpState, PageState

AS_RANK: Final = "as rank"  # the column of the rank that a process has now
COLUMNS: Final = (
    "rank", AS_RANK, "pid", "state", "step", "operation", "for", "wait", "MB/s", "CPU", "memory",
    "GPU", "scalars",
)  # fmt: skip
_LATE_NS: Final = 2_000_000_000  # the heart beats four times per second
_SHOWN_SCALARS: Final = 4
_TEXT: Final = 40
_NUMBER: Final = re.compile("[0-9]{1,9}")


@dataclass(frozen=True)
class Process:
    """The CPU time that a process has used, its resident memory, and that on GPUs."""

    cpu_s: float
    nbytes: int
    gpu_nbytes: int = 0


@dataclass(frozen=True)
class RankSample:
    """The state of a rank at one moment.

    Attributes:
        time_ns: the moment, by the clock of the page.
        page: StatusPage.snapshot().
        scalars: name, step (-1: none) and latest value.
        events: time_ns and text.
        process: None if it is dead.
        ending: how it has failed, in words; "": it has not said so.
        steps: StatusPage.steps().
    """

    time_ns: int
    page: Mapping[str, Any]
    scalars: Sequence[tuple[str, int, float]]
    events: Sequence[tuple[int, str]]
    process: Process | None
    ending: str = ""
    steps: Sequence[tuple[int, Sequence[int], Sequence[int]]] = ()

    @property
    def job(self) -> str:
        return str(self.page["job"])

    @property
    def rank(self) -> int:
        return int(self.page["rank"])

    @property
    def is_over(self) -> bool:
        return self.process is None or self.page["state"] == PageState.LEFT

    @property
    def as_rank(self) -> int | None:
        """The rank that the process has now; None: it has no place, or none any more."""
        role = str(self.page["role"])
        if self.is_over or role in (SPARE, RESERVE):
            return None
        return place_of(self.rank, role)

    @property
    def is_paused(self) -> bool:
        return bool(self.page["is_paused"]) and not self.is_over

    @property
    def is_in_operation(self) -> bool:
        return self.page["op_state"] == OpState.RUNNING and not self.is_over

    @property
    def busy_ns(self) -> int:
        current = self.time_ns - int(self.page["op_start_ns"]) if self.is_in_operation else 0
        return int(self.page["busy_ns"]) + current


@dataclass(frozen=True)
class RankRow:
    """A rank's row; the texts are in the order of COLUMNS."""

    texts: tuple[str, ...]
    is_bad: bool  # the rank has failed, is dead or is stopped

    @property
    def has_moved(self) -> bool:
        return self.texts[1] not in ("", self.texts[0])


def place_of(number: int, role: str) -> int:
    """Return the rank of a process, by its number and its role: "rank 1" if that is another."""
    kind, _, place = role.partition(" ")
    return int(place) if kind == "rank" and _NUMBER.fullmatch(place) else number


def row_of(now: RankSample, before: RankSample | None) -> RankRow:
    """Return the row of a rank; rates are since `before`, and empty without one."""
    page = now.page
    state, is_bad = _state(now)
    is_running = now.is_in_operation
    seconds = max(now.time_ns - page["op_start_ns"], 0) / 1e9  # it may have begun since the look
    texts = (
        str(now.rank),
        "" if now.as_rank is None else str(now.as_rank),
        str(page["pid"]),
        printable(state),
        str(step_of(now)),
        printable(_shortened(page["op_name"])) if is_running else "",
        f"{seconds:.1f} s" if is_running else "",
        *_rates(now, before),
        *_memory(now.process),
        " ".join(
            f"{printable(name)}={value:.4g}" for name, _, value in now.scalars[:_SHOWN_SCALARS]
        ),
    )
    return RankRow(texts, is_bad)


def title_of(samples: Sequence[RankSample], place: str = "") -> str:
    """Return a line about a job, with the folder of its run if it has one."""
    first = samples[0].page
    hosts = list(dict.fromkeys(str(each.page["host"]) for each in samples))
    live = sum(not each.is_over for each in samples)
    job = ", ".join(filter(None, (f"job {first['job']}", place)))
    title = f"{job}: {live} of {first['size']} ranks live on {', '.join(hosts)}"
    n_unseen = first["size"] - len(samples)
    if n_unseen > 0:
        title += f"; {n_unseen} on other hosts are not seen from here"
    return printable(title)


def latest_events(samples: Sequence[RankSample], count: int) -> list[str]:
    """Return the latest events of a job's ranks, the newest last."""
    events = sorted(
        (time_ns - each.time_ns, each.rank, text)  # clocks of hosts differ
        for each in samples
        for time_ns, text in each.events
    )[-count:]
    return [
        f"{-since / 1e9:6.0f} s ago  rank {rank}: {printable(text)}" for since, rank, text in events
    ]


def as_json(now: RankSample) -> dict[str, Any]:
    state, is_bad = _state(now)
    is_running = now.is_in_operation
    return {
        "job": now.job,
        "rank": now.rank,
        "as_rank": now.as_rank,
        "size": now.page["size"],
        "host": now.page["host"],
        "pid": now.page["pid"],
        "state": state,
        "is_bad": is_bad,
        "role": now.page["role"],
        "step": step_of(now),
        "operation": now.page["op_name"] if is_running else None,
        "operation_s": max(now.time_ns - now.page["op_start_ns"], 0) / 1e9 if is_running else None,
        "ended_operations": now.page["n_ended_ops"],
        "ended_nbytes": now.page["ended_nbytes"],
        "busy_s": now.page["busy_ns"] / 1e9,
        "cpu_s": None if now.process is None else now.process.cpu_s,
        "memory_nbytes": None if now.process is None else now.process.nbytes,
        "gpu_nbytes": None if now.process is None else now.process.gpu_nbytes,
        "scalars": {name: json_number(value) for name, _, value in now.scalars},
        "events": [text for _, text in now.events],
    }


def use_between(before: RankSample, now: RankSample) -> tuple[float, float, int, int]:
    """Return how a rank has used its host between two samples.

    Returns:
        The share of time in operations (-1: it has failed, -2: it has ended), cores, bytes of
        memory, and bytes of payload per second.
    """
    if now.is_over or before.process is None or now.process is None:
        return -1.0 if _state(now)[1] else -2.0, 0.0, 0, 0
    seconds = max(now.time_ns - before.time_ns, 1) / 1e9
    wait = min(max((now.busy_ns - before.busy_ns) / 1e9 / seconds, 0.0), 1.0)
    cores = max(now.process.cpu_s - before.process.cpu_s, 0.0) / seconds
    nbytes = max(now.page["ended_nbytes"] - before.page["ended_nbytes"], 0) / seconds
    return round(wait, 3), round(cores, 3), now.process.nbytes, round(nbytes)


def _state(now: RankSample) -> tuple[str, bool]:
    """Return the state in words, and True if it is a bad one."""
    page = now.page
    if page["state"] == PageState.LEFT:
        return "left", False
    if now.ending:
        return _shortened(now.ending), page["end_kind"] != Ending.PEER_FAILED
    if now.process is None:
        return "dead", True
    if page["heartbeat_ns"] and now.time_ns - page["heartbeat_ns"] > _LATE_NS:
        return f"stopped for {(now.time_ns - page['heartbeat_ns']) / 1e9:.0f} s", True
    return _good_state(page), False


def _good_state(page: Mapping[str, Any]) -> str:
    role = str(page["role"])
    if role in (SPARE, RESERVE):
        return role
    if page["state"] != PageState.RUNNING:
        return PageState(page["state"]).name.lower()
    doing = "waits" if page["op_state"] == OpState.RUNNING else "computes"
    shown = f"{role}: " if role.partition(" ")[0] not in ("", "worker", "rank") else ""
    return shown + ("paused" if page["is_paused"] else doing)


def step_of(now: RankSample) -> int:
    """Return the last step that a rank has told of, by its optimizer or by rc.log()."""
    return max([int(now.page["step"]), *(step for _, step, _ in now.scalars)])


def _rates(now: RankSample, before: RankSample | None) -> tuple[str, str, str]:
    """Return the share of time in operations, payload per second, and CPU load."""
    if before is None or now.time_ns <= before.time_ns:
        return "", "", ""
    seconds = (now.time_ns - before.time_ns) / 1e9
    busy_s = (now.busy_ns - before.busy_ns) / 1e9
    nbytes = now.page["ended_nbytes"] - before.page["ended_nbytes"]
    wait = f"{min(max(busy_s / seconds, 0.0), 1.0):.0%}"
    if now.process is None or before.process is None:
        return wait, f"{nbytes / seconds / 1e6:.1f}", ""
    load = (now.process.cpu_s - before.process.cpu_s) / seconds
    return wait, f"{nbytes / seconds / 1e6:.1f}", f"{load:.0%}"


def _memory(process: Process | None) -> tuple[str, str]:
    if process is None:
        return "", ""
    return _amount(process.nbytes), _amount(process.gpu_nbytes) if process.gpu_nbytes else ""


def _amount(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"


def _shortened(text: str) -> str:
    return text if len(text) <= _TEXT else f"{text[: _TEXT - 3]}..."
