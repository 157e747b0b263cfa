"""Data for the dashboard: the pages of live ranks, and the folder and the logs of a run."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from ringcomm._core import monotonic_ns
from ringcomm.engine.control.commands import Command
from ringcomm.foreign_text import printable
from ringcomm.launch.dashboard.event_list import as_json as events_as_json
from ringcomm.launch.dashboard.events import EventReader
from ringcomm.launch.dashboard.job_head import JobHead
from ringcomm.launch.dashboard.job_state import chief_among, role_of
from ringcomm.launch.dashboard.metrics import MetricReader
from ringcomm.launch.dashboard.use_columns import columns_of
from ringcomm.launch.job.records import RankEnd, RunEnd, deed_in
from ringcomm.launch.job.run_folder import RunFolder, runs_in
from ringcomm.launch.job.verdict import SIGNAL_NAMES
from ringcomm.launch.watch.diagnosis import Verdicts
from ringcomm.launch.watch.find_ranks import Ranks
from ringcomm.launch.watch.find_runs import RUNS, find
from ringcomm.launch.watch.log_order import in_order, shown_line
from ringcomm.launch.watch.logs_command import Logs
from ringcomm.launch.watch.other_hosts import RunFolders, of_run
from ringcomm.launch.watch.rank_rows import RankSample, as_json, place_of
from ringcomm.launch.watch.send_command import CommandOutcome, ask, choose_job
from ringcomm.status.page_enums import RESERVE, SPARE
from ringcomm.status.stacks import stacks_of
from ringcomm.system_text import host_name

_SEARCH_S: Final = 2.0
_MEMBERS_S: Final = 1.0  # between looks which jobs are of the run
_FRESH_S: Final = 0.2  # several viewers see the same state
_LOG_BYTES: Final = 1 << 16
_LINES_ALL: Final = 1 << 18  # bytes of the lines of a first answer, of all ranks together
_LINES_RANK: Final = 1 << 16  # of one rank in an answer
_LINE: Final = 4000  # characters of a line that are shown
_CURSOR: Final = re.compile(r"(?:(0|[1-9][0-9]{0,8}):([0-9]{1,18}))")
_CURSOR_MAX: Final = 1 << 16
_COMMAND_S: Final = 20.0
_USE_MAX: Final = 1 << 25  # bytes of a file of a host


class LiveRanks:
    """The ranks of this user on this host, which all sources share."""

    def __init__(self) -> None:
        self.ranks = Ranks()
        self._searched = float("-inf")
        self._lock = threading.Lock()

    def sample(self) -> list[RankSample]:
        with self._lock:
            if time.monotonic() > self._searched + _SEARCH_S:
                self.ranks.search()
                self._searched = time.monotonic()
            return self.ranks.sample(monotonic_ns())


@dataclass
class Viewer:
    """What one viewer has been sent."""

    metrics: MetricReader = field(default_factory=MetricReader)
    events: int = -1  # their version
    has_history: bool = False


class Source:
    """A job or a run, as it is now.

    Args:
        folder: the folder of a run; None: there is none.
        job: beginning of the name of a live job, if there is no folder; "": all live jobs.
        runs: the folder of runs, of which the newest is shown once there is one; None: no run.
        live: the ranks of this host; None: they are looked for anew.
    """

    def __init__(
        self,
        folder: RunFolder | None,
        job: str = "",
        runs: Path | None = None,
        live: LiveRanks | None = None,
    ) -> None:
        self.folder = folder
        self._job, self._runs = job, runs
        self._live = live or LiveRanks()
        self._folders = RunFolders(folder.path if folder else None)
        self._lock = threading.Lock()  # each viewer asks from a thread of its own
        self._searched = self._members_at = float("-inf")
        self._jobs: set[str] = set()  # of the run
        self._member_problems: set[str] = set()
        self._deeds: dict[int, str] = {}  # of dead ranks
        self._before: dict[tuple[str, int], RankSample] = {}
        self._verdicts = Verdicts()
        self._of_metrics: dict[str, str] = {}  # what does not count in files of rc.log()
        self._head, self._events = JobHead(), EventReader()
        self._state: dict[str, Any] = {}
        self._made = float("-inf")

    def state(self) -> dict[str, Any]:
        """Return the job, its ranks, all events and the end of the run: JSON but for events."""
        with self._lock:
            if time.monotonic() - self._made > _FRESH_S:
                self._state = self._new_state()
                self._made = time.monotonic()
            return self._state

    def news(self, viewer: Viewer, seconds: float) -> dict[str, Any]:
        """Return the state and new metrics for a viewer; events are None if he has them all."""
        state = self.state()
        is_known = viewer.events == state["version"]
        viewer.events = state["version"]
        events = None if is_known else events_as_json(state["events"])
        news: dict[str, Any] = {"events": events}
        if not viewer.has_history:
            viewer.has_history = True
            news["history"] = self._history()
        return state | news | {"metrics": self.metrics(viewer.metrics, seconds)}

    def _history(self) -> list[dict[str, Any]]:
        """Return how the ranks have used their hosts until now, as the files of the run say."""
        if self.folder is None:
            return []
        return columns_of(file.read(_USE_MAX).splitlines() for file in self.folder.use_files())

    def _new_state(self) -> dict[str, Any]:
        samples = self._samples()
        rows = [self._row(each) for each in samples]
        self._before = {(each.job, each.rank): each for each in samples}
        slow = [text for texts in self._slow(samples).values() for text in texts]
        end = self.folder.end() if self.folder is not None else None
        if end is not None and end.rank is not None:  # the others ended because of this one
            rows = [row | {"is_bad": row["rank"] in (end.rank, *end.lost)} for row in rows]
        rows = [self._with_deed(row) for row in rows]
        if self.folder is not None:
            rows += self._rows_without_page({row["rank"] for row in rows}, end)
        rows = _with_roles(rows)
        events = self._events.events(self.folder, samples, slow, end)
        return {
            "title": self.folder.path.name if self.folder else "live jobs",
            "time": time.time(),
            "job": self._head.now(self.folder, samples, rows, end),
            "ranks": rows,
            "events": events,
            "version": self._events.version,
            "late": "; ".join([*slow, *self._problems()]),
            "end": None if end is None else asdict(end),
        }

    def metrics(self, reader: MetricReader, seconds: float) -> list[dict[str, Any]]:
        """Return what rc.log() has written since the last call; see MetricReader.read()."""
        if self.folder is None:
            return []
        found = reader.read(self.folder.metric_files(), self.folder.open_metrics, seconds)
        self._of_metrics |= reader.problems
        return found

    def log(self, rank: int, most: int = _LOG_BYTES) -> str:
        """Return the end of a rank's log; "" if there is none."""
        file = self.open_log(rank)
        with file or contextlib.nullcontext():
            if file is None:
                return ""
            file.seek(max(0, os.fstat(file.fileno()).st_size - most))
            return file.read(most).decode(errors="replace")

    def open_log(self, rank: int) -> IO[bytes] | None:
        """Open a rank's log; None if there is none."""
        if self.folder is None:
            return None
        try:
            return self.folder.open_log_of(rank)
        except FileNotFoundError:  # the run was removed
            return None

    def stacks(self, rank: int) -> str:
        """Return what the threads of a live rank of this host execute; else why that is unknown."""
        with self._lock:
            samples = self._samples()
        for each in samples:
            if each.rank == rank and not each.is_over and self._live.ranks.has(each):
                return stacks_of(each.page) or "it does not answer: it is stopped, perhaps"
        return f"rank {rank} does not live on this host"

    def command(self, command: Command) -> CommandOutcome:
        with self._lock:
            samples = self._samples()
        try:
            if self.folder is not None and (text := self.folder.distrust):
                return CommandOutcome(False, f"the folder of the run {text}")
            members = self._members(samples)
        except (LookupError, OSError) as error:  # OSError: somebody has removed the folder
            return CommandOutcome(False, str(error))
        return ask(self._live.ranks, members, command, _COMMAND_S)

    def _members(self, samples: list[RankSample]) -> list[RankSample]:
        """Return the live ranks of the job that a command is for.

        Where all jobs are shown it is the only one of this folder. Raises LookupError.
        """
        if self.folder is not None or self._job:
            return choose_job(samples, self._job)
        run = find("", self._runs or RUNS, self._live.sample())
        return [each for each in samples if each.job in run.jobs and not each.is_over]

    def _samples(self) -> list[RankSample]:
        if time.monotonic() > self._searched + _SEARCH_S:
            if self.folder is None and self._runs is not None:
                self.folder = newest_run(self._runs)
            self._searched = time.monotonic()
        samples = self._folders.with_other_hosts(self._live.sample())
        if self.folder is None:
            return [each for each in samples if each.job.startswith(self._job)]
        if time.monotonic() < self._members_at + _MEMBERS_S and self._jobs:
            self._folders.problems |= self._member_problems
            return [each for each in samples if each.job in self._jobs]
        self._members_at = time.monotonic()
        self._member_problems = set()
        found = of_run(samples, self.folder.path, self._member_problems)
        self._folders.problems |= self._member_problems
        self._jobs = {each.job for each in found}
        return found

    def _slow(self, samples: list[RankSample]) -> dict[str, list[str]]:
        """Return who is slow in the jobs, in words."""
        return self._verdicts.look(samples, self._folders.traffic)

    def _row(self, now: RankSample) -> dict[str, Any]:
        before = self._before.get((now.job, now.rank))
        seconds = (now.time_ns - before.time_ns) / 1e9 if before else 0.0
        busy_s = (now.busy_ns - before.busy_ns) / 1e9 if before else 0.0
        row = as_json(now)
        del row["events"]  # they are listed apart
        return row | {
            "wait": min(max(busy_s / seconds, 0.0), 1.0) if seconds else None,
            "lives": not now.is_over,
        }

    def _with_deed(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the row; of a rank that is dead, with how it died, once its guardian says so."""
        if row["state"] != "dead" or self.folder is None:
            return row
        if row["rank"] not in self._deeds:
            for each in (f for guardian in self.folder.guardians() for f in guardian.failures):
                if each.rank is not None and (deed := deed_in(each.text)):
                    self._deeds[each.rank] = deed
        return row | {"state": self._deeds.get(row["rank"], "dead")}

    def _rows_without_page(self, known: set[int], end: RunEnd | None) -> list[dict[str, Any]]:
        """Return rows of ranks of the run that are not seen: they start, or have ended."""
        assert self.folder is not None
        if end is not None:
            return _rows_of_end(end, self.folder) if not known else []
        if known:
            return []
        with contextlib.suppress(OSError):  # the folder was removed
            in_init, ends = self.folder.in_init(), self.folder.ends()
            return [
                {
                    "rank": rank,
                    "state": "in init()" if rank in in_init else "importing",
                    "is_bad": False,
                    "lives": True,
                    "pid": process.pid,
                    "host": process.host,
                }
                for rank, process in sorted(self.folder.ranks().items())
                if rank not in ends and (process.host != host_name() or process.lives)
            ]
        return []

    def _problems(self) -> list[str]:
        """Return which files of the run cannot be used, and why, in words."""
        own = self.folder.problems if self.folder is not None else {}
        texts = {f"{name} {what}: it does not count" for name, what in own.items()}
        texts |= {f"{name} {what}: they do not count" for name, what in self._of_metrics.items()}
        return sorted(texts | self._folders.problems)


def lines_after(source: Source, cursor: str) -> dict[str, Any]:
    """Return the lines of all ranks that came after a cursor, and the next cursor.

    Args:
        source: the run.
        cursor: of the last answer; "": the latest lines are asked for.

    Returns:
        {"lines": [rank, text] of each, in the order of `ringcomm logs`; "cursor"}.
    """
    places = parse_cursor(cursor)
    found: dict[int, list[str]] = {}
    folder = source.folder
    if folder is None:
        return {"lines": [], "cursor": ""}
    with contextlib.suppress(OSError):  # the run was removed
        ranks = folder.ranks_with_log()
        most = _LINES_RANK if places else min(_LINES_RANK, _LINES_ALL // max(1, len(ranks)))
        is_over = folder.end() is not None
        for rank in ranks:
            found[rank], places[rank] = _lines(source, rank, places.get(rank), most, is_over)
    lines = [[rank, shown_line(line)[:_LINE]] for rank, line in in_order(found)]
    return {"lines": lines, "cursor": ",".join(f"{r}:{at}" for r, at in sorted(places.items()))}


def parse_cursor(text: str) -> dict[int, int]:
    """Return rank -> bytes that were read; what is no cursor is none."""
    if len(text) > _CURSOR_MAX:
        return {}
    found = (_CURSOR.fullmatch(each) for each in text.split(","))
    return {int(each[1]): int(each[2]) for each in found if each is not None}


def whole_log(source: Source) -> Iterator[str]:
    """Yield all that the ranks have written, as `ringcomm logs` prints it."""
    if source.folder is None:
        return
    with contextlib.closing(Logs(source.folder, (), None)) as logs, contextlib.suppress(OSError):
        for rank, line in in_order(logs.until_now()):
            yield f"[{rank}] {shown_line(line)}\n"
        for rank, line in logs.rest():
            yield f"[{rank}] {shown_line(line)}\n"


def newest_run(runs: Path) -> RunFolder | None:
    """Return the newest run in a folder of runs, of this user if there is one; or None."""
    found = runs_in(runs)
    newest = max(found, key=lambda each: (each.is_own, each.began_s), default=None)
    return None if newest is None else RunFolder(newest.path)


def _with_roles(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with the kind of each rank's role: worker, chief, server and so on."""
    roles = [(row["rank"], row.get("role", ""), row["lives"]) for row in rows]
    chief = chief_among(roles)
    return [
        row | {"kind": role_of(row.get("role", ""), is_chief=row["rank"] == chief)} for row in rows
    ]


def _rows_of_end(end: RunEnd, folder: RunFolder) -> list[dict[str, Any]]:
    """Return rows of ranks that are gone, by the records of their run; bad: who failed first."""
    good: set[int | None] = {0}
    if end.code == os.EX_TEMPFAIL:  # it was asked to stop
        good = {0, os.EX_TEMPFAIL}
    elif end.code in [128 + number for number in SIGNAL_NAMES]:  # and its ranks died of it
        good = set(end.exit_codes.values())
    ends, processes = folder.ends(), folder.ranks()
    deeds = {} if end.rank is None else {end.rank: deed_in(end.report)}
    deeds |= end.lost
    return [
        {
            "rank": rank,
            "as_rank": _place_at_end(rank, ends, end),
            "state": _code_text(code, deeds.get(rank, ""), is_good=code in good),
            "is_bad": rank in deeds or (end.rank is None and code not in good),
            "lives": False,
            "role": ends[rank].role if rank in ends else "",
            "host": processes[rank].host if rank in processes else "",
        }
        for rank, code in end.exit_codes.items()
    ]


def _place_at_end(rank: int, ends: Mapping[int, RankEnd], end: RunEnd) -> int | None:
    """Return the rank that a process had at last; None: it was lost before, or had no place."""
    role = ends.get(rank, RankEnd()).role
    return None if rank in end.lost or role in (SPARE, RESERVE) else place_of(rank, role)


def _code_text(code: int | None, deed: str, *, is_good: bool) -> str:
    if deed and (code is None or deed.startswith("raised")):
        return printable(deed)
    if code is None:
        return "left no exit code"
    return f"exit {code}, as asked" if is_good and code else f"exit {code}"


def _lines(
    source: Source, rank: int, at: int | None, most: int, is_over: bool
) -> tuple[list[str], int]:
    with source.open_log(rank) or contextlib.nullcontext() as file:
        if file is None:
            return [], at or 0
        size = os.fstat(file.fileno()).st_size
        begin = max(0, size - most) if at is None else min(at, size)
        file.seek(begin)
        data = file.read(most)
        end = data.rfind(b"\n") + 1
        if (is_over and begin + len(data) >= size) or (not end and len(data) == most):
            end = len(data)  # the last line has no end; or it is a long one
        lines = data[:end].decode(errors="replace").removesuffix("\n").split("\n") if end else []
        if at is None and begin and len(lines) > 1:
            lines = lines[1:]  # the first one has lost its beginning
        return lines, begin + end
