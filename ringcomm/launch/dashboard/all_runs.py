"""The runs and live jobs that the page can show: a list, and a source for each that is opened."""

from __future__ import annotations

import os
import shlex
import threading
import time
from pathlib import Path
from typing import Any, Final

from ringcomm.foreign_text import printable
from ringcomm.launch.dashboard.source import LiveRanks, Source
from ringcomm.launch.job.records import RunConfig
from ringcomm.launch.job.run_folder import RunFolder
from ringcomm.launch.watch.find_runs import facts_of, facts_of_job, known_runs
from ringcomm.launch.watch.rank_rows import RankSample
from ringcomm.launch.watch.run_rows import (
    RunFacts,
    program_words,
    shown_time,
)
from ringcomm.launch.watch.which_run import KnownRun

_FRESH_S: Final = 1.0
_SHOWN: Final = 200  # runs in the list, the newest
_OPEN: Final = 16  # sources that are kept


class AllRuns:
    """The runs of a folder, and all live jobs of this user on this host.

    Args:
        runs: the folder of runs.
        given: what was named on the command line, which is shown first; None: nothing was.
        live: the ranks of this host.
    """

    def __init__(self, runs: Path, given: Source | None, live: LiveRanks) -> None:
        self._runs, self._live = runs, live
        self.default = given or Source(None, "", runs, live)
        self._given = given
        self._lock = threading.Lock()
        self._known: dict[str, KnownRun] = {}
        self._over: dict[str, RunFacts] = {}  # what no longer changes
        self._sources: dict[str, Source] = {}
        self._looked = float("-inf")

    def listing(self) -> dict[str, Any]:
        """Return the runs, the newest first, and the key of the one that is shown first.

        That is the one of the command line, or the only live job of this folder; "": the list
        is.
        """
        with self._lock:
            samples = self._look()
            known = sorted(self._known.items(), key=lambda each: -each[1].began_s)[:_SHOWN]
            rows = [self._row(key, run, samples) for key, run in known]
            here = {key for key, run in known if run.is_here}
        live = [row["key"] for row in rows if row["is_live"] and row["key"] in here]
        shown = live[0] if len(live) == 1 else ""
        if self._given is not None:
            shown = "given"
        return {"shown": shown, "folder": str(self._runs), "runs": rows}

    def source(self, key: str) -> Source:
        """Return what is shown of a run; "" and "given" are that of the command line.

        Raises LookupError if there is none of this name.
        """
        if key in ("", "given"):
            return self.default
        with self._lock:
            if key not in self._sources:
                if key not in self._known:
                    self._looked = float("-inf")
                    self._look()
                run = self._known[key]
                folder = RunFolder(Path(run.folder)) if run.folder else None
                new = Source(folder, "" if folder else run.jobs[0], None, self._live)
                self._sources[key] = new
            source = self._sources.pop(key)
            self._sources[key] = source  # the one that was used last stands last
            while len(self._sources) > _OPEN:
                del self._sources[next(iter(self._sources))]
            return source

    def _look(self) -> list[RankSample]:
        samples = self._live.sample()
        if time.monotonic() - self._looked > _FRESH_S:
            self._looked = time.monotonic()
            found = known_runs(self._runs, samples)
            self._known = {_key_of(each): each for each in found}
        return samples

    def _row(self, key: str, run: KnownRun, samples: list[RankSample]) -> dict[str, Any]:
        facts = self._over.get(key)
        if facts is None:
            facts = facts_of(run, samples=samples) if run.folder else _facts_of_job(run, samples)
            if facts.end is not None:
                self._over[key] = facts
        config, end = facts.config, facts.end
        return {
            "key": key,
            "name": facts.name,
            "where": facts.place if not facts.has_folder else "",
            "command": printable(shlex.join(program_words(config.program))),
            "state": facts.state,
            "is_live": facts.is_live is True,
            "how": printable(facts.lost if facts.state == "completed" else facts.how),
            "ranks": facts.ranks,
            "host": config.host,
            "started": shown_time(config.started),
            "seconds": end.seconds if end is not None else max(0.0, time.time() - run.began_s),
        }


def _key_of(run: KnownRun) -> str:
    return os.path.realpath(run.folder) if run.folder else f"job {run.jobs[0]}"


def _facts_of_job(run: KnownRun, samples: list[RankSample]) -> RunFacts:
    try:
        return facts_of_job(run, samples)
    except StopIteration:  # it has ended since it was listed
        return RunFacts(run.jobs[0], run.place, False, RunConfig())
