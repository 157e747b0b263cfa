"""Data for the dashboard: the pages of live ranks, and the folder of a run."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from ringcomm._core import monotonic_ns
from ringcomm.engine.control.commands import Command
from ringcomm.launch.dashboard.metrics import MetricReader
from ringcomm.launch.job.records import RunEnd
from ringcomm.launch.job.run_folder import RunFolder, runs_in
from ringcomm.launch.job.verdict import SIGNAL_NAMES
from ringcomm.launch.watch.diagnosis import Verdicts
from ringcomm.launch.watch.find_ranks import Ranks
from ringcomm.launch.watch.find_runs import RUNS, find
from ringcomm.launch.watch.other_hosts import RunFolders, of_run
from ringcomm.launch.watch.rank_rows import RankSample, as_json, latest_events
from ringcomm.launch.watch.send_command import CommandOutcome, ask, choose_job

_SEARCH_S: Final = 2.0
_LOG_BYTES: Final = 1 << 16
_EVENTS: Final = 30
_COMMAND_S: Final = 20.0


class Source:
    """A job or a run, as it is now.

    Args:
        folder: the folder of a run; None: there is none.
        job: beginning of the name of a live job, if there is no folder; "": all live jobs.
        runs: the folder of runs, of which the newest is shown once there is one; None: no run.
    """

    def __init__(self, folder: RunFolder | None, job: str = "", runs: Path | None = None) -> None:
        self.folder = folder
        self._job, self._runs = job, runs
        self._ranks = Ranks()
        self._folders = RunFolders(folder.path if folder else None)
        self._lock = threading.Lock()  # each viewer asks from a thread of its own
        self._searched = float("-inf")
        self._before: dict[tuple[str, int], RankSample] = {}
        self._verdicts = Verdicts()
        self._of_metrics: dict[str, str] = {}  # what does not count in files of rc.log()

    def state(self) -> dict[str, Any]:
        """Return the ranks, their latest events and the end of the run, to be sent as JSON."""
        with self._lock:
            samples = self._samples()
            rows = [self._row(each) for each in samples]
            self._before = {(each.job, each.rank): each for each in samples}
            late = self._late(samples)
        end = self.folder.end() if self.folder is not None else None
        if end is not None and end.rank is not None:  # the others ended because of this one
            rows = [row | {"is_bad": row["rank"] == end.rank} for row in rows]
        if not rows and self.folder is not None:
            rows = _rows_of_end(end)
        return {
            "title": self.folder.path.name if self.folder else "live jobs",
            "time": time.time(),
            "ranks": rows,
            "events": latest_events(samples, _EVENTS) if samples else [],
            "late": "; ".join([*([late] if late else []), *self._problems()]),
            "end": None if end is None else asdict(end),
        }

    def metrics(self, reader: MetricReader, seconds: float) -> list[dict[str, Any]]:
        """Return what rc.log() has written since the last call; see MetricReader.read()."""
        if self.folder is None:
            return []
        found = reader.read(self.folder.metric_files(), self.folder.open_metrics, seconds)
        self._of_metrics |= reader.problems
        return found

    def log(self, rank: int) -> str:
        """Return the end of a rank's log; "" if there is none."""
        if self.folder is None:
            return ""
        try:
            file = self.folder.open_log_of(rank)
        except FileNotFoundError:  # the run was removed
            return ""
        with file or contextlib.nullcontext():
            if file is None:
                return ""
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_BYTES))
            return file.read(_LOG_BYTES).decode(errors="replace")

    def command(self, command: Command) -> CommandOutcome:
        with self._lock:
            samples = self._samples()
        try:
            if self.folder is not None and (text := self.folder.distrust):
                return CommandOutcome(False, f"the folder of the run {text}")
            members = self._members(samples)
        except (LookupError, OSError) as error:  # OSError: somebody has removed the folder
            return CommandOutcome(False, str(error))
        return ask(self._ranks, members, command, _COMMAND_S)

    def _members(self, samples: list[RankSample]) -> list[RankSample]:
        """Return the live ranks of the job that a command is for.

        Where all jobs are shown it is the only one of this folder. Raises LookupError.
        """
        if self.folder is not None or self._job:
            return choose_job(samples, self._job)
        run = find("", self._runs or RUNS, self._ranks.sample(monotonic_ns()))
        return [each for each in samples if each.job in run.jobs and not each.is_over]

    def _samples(self) -> list[RankSample]:
        if time.monotonic() > self._searched + _SEARCH_S:
            if self.folder is None and self._runs is not None:
                self.folder = newest_run(self._runs)
            self._ranks.search()
            self._searched = time.monotonic()
        samples = self._folders.with_other_hosts(self._ranks.sample(monotonic_ns()))
        if self.folder is None:
            return [each for each in samples if each.job.startswith(self._job)]
        return of_run(samples, self.folder.path, self._folders.problems)

    def _late(self, samples: list[RankSample]) -> str:
        """Return who is slow in the jobs, in words; "" for nobody."""
        slow = self._verdicts.look(samples, self._folders.traffic)
        return "; ".join(itertools.chain.from_iterable(slow.values()))

    def _row(self, now: RankSample) -> dict[str, Any]:
        before = self._before.get((now.job, now.rank))
        seconds = (now.time_ns - before.time_ns) / 1e9 if before else 0.0
        busy_s = (now.busy_ns - before.busy_ns) / 1e9 if before else 0.0
        return as_json(now) | {"wait": min(max(busy_s / seconds, 0.0), 1.0) if seconds else None}

    def _problems(self) -> list[str]:
        """Return which files of the run cannot be used, and why, in words."""
        own = self.folder.problems if self.folder is not None else {}
        texts = {f"{name} {what}: it does not count" for name, what in own.items()}
        texts |= {f"{name} {what}: they do not count" for name, what in self._of_metrics.items()}
        return sorted(texts | self._folders.problems)


def newest_run(runs: Path) -> RunFolder | None:
    """Return the newest run in a folder of runs, of this user if there is one; or None."""
    found = runs_in(runs)
    newest = max(found, key=lambda each: (each.is_own, each.began_s), default=None)
    return None if newest is None else RunFolder(newest.path)


def _rows_of_end(end: RunEnd | None) -> list[dict[str, Any]]:
    """Return rows of ranks that are gone, by the record of their run; bad: who failed first."""
    if end is None:
        return []
    good: set[int | None] = {0}
    if end.code == os.EX_TEMPFAIL:  # it was asked to stop
        good = {0, os.EX_TEMPFAIL}
    elif end.code in [128 + number for number in SIGNAL_NAMES]:  # and its ranks died of it
        good = set(end.exit_codes.values())
    return [
        {
            "rank": rank,
            "state": "left no exit code" if code is None else f"exit {code}",
            "is_bad": code not in good if end.rank is None else rank == end.rank,
        }
        for rank, code in end.exit_codes.items()
    ]
