"""What the page says of a job at its head: from the first second, and after its end."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, Final

from ringcomm.foreign_text import printable
from ringcomm.launch.dashboard.job_state import (
    JobState,
    LoggedStep,
    Pace,
    job_state,
    pace_of,
    parameters,
    parse_logged,
    percent,
    samples_of,
    seconds_left,
)
from ringcomm.launch.job.records import RunConfig, RunEnd
from ringcomm.launch.job.run_folder import RunFolder
from ringcomm.launch.job.run_words import Stages
from ringcomm.launch.watch.find_runs import facts_of, live_jobs
from ringcomm.launch.watch.rank_rows import RankSample
from ringcomm.launch.watch.run_rows import RunFacts, program_words, shown_time
from ringcomm.launch.watch.which_run import KnownRun

_LOOK_S: Final = 2.0
_STARTING_S: Final = 0.4  # between looks until all ranks are through init()
_LINES: Final = 8  # of rc.log(), of which the pace is
_TAIL: Final = 1 << 14


class JobHead:
    """The head of the page for one run or job. Reads files once per second at most."""

    def __init__(self) -> None:
        self._looked = float("-inf")
        self._facts: RunFacts | None = None
        self._logged: list[LoggedStep] = []
        self._stages: Stages | None = None
        self._pace = Pace()

    def now(
        self,
        folder: RunFolder | None,
        samples: Sequence[RankSample],
        rows: Sequence[Mapping[str, Any]],
        end: RunEnd | None = None,
    ) -> dict[str, Any]:
        """Return what is shown of a job.

        Args:
            folder: of its run; None: it has none, or there is no job yet.
            samples: its ranks as they are seen now.
            rows: of the table of ranks.
            end: of the run.
        """
        has_begun = self._stages is not None and self._stages.through == self._stages.size
        is_due = time.monotonic() - self._looked >= (_LOOK_S if has_begun else _STARTING_S)
        if is_due or (end is not None and self._facts is not None and self._facts.end is None):
            self._looked = time.monotonic()
            self._look(folder, samples)
        facts = self._facts
        if facts is None:
            return {"state": "waiting", "text": "no job yet: it is shown once there is one"}
        began_s = self._began_s(folder, samples)
        over_s = facts.end.seconds if facts.end is not None else None
        elapsed_s = over_s if over_s is not None else max(time.time() - began_s, 0.0)
        words = program_words(facts.config.program)
        states = [str(each["state"]) for each in rows]
        state = job_state(
            facts.state, self._stages, states, how=facts.how, seconds=elapsed_s
        ) if rows or folder is not None else JobState("waiting")  # fmt: skip
        is_live = state.word not in _OVER
        step = max((int(each.get("step") or 0) for each in rows), default=0)
        step = max([step, *(each.step for each in self._logged[-1:])])
        if is_live:
            self._pace.add(time.monotonic(), step)
        return {
            "state": state.word,
            "text": printable(state.text),
            "is_live": is_live,
            "name": facts.name,
            "folder": str(folder.path) if folder is not None else "",
            "command": printable(shlex.join(words)),
            "host": facts.config.host or ", ".join(_hosts(samples)),
            "started": shown_time(facts.config.started),
            "elapsed_s": round(elapsed_s, 1) if is_live or over_s is not None else None,
            "step": step,
            "of": percent(self._logged),
            "steps_per_s": self._steps_per_s(is_live),
            "samples_per_s": self._samples_per_s(samples),
            "left_s": seconds_left(self._logged, time.time()) if is_live else None,
            "parameters": [*facts.config.parameters, *parameters(words[1:])],
            "commit": printable(facts.config.commit),
            "versions": [*map(list, facts.config.versions)],
        }

    def _look(self, folder: RunFolder | None, samples: Sequence[RankSample]) -> None:
        if folder is None:
            self._facts = _facts_of_job(samples)
            return
        if self._facts is None or self._facts.end is None:
            self._facts = facts_of(KnownRun(str(folder.path), str(folder.path), True))
        with contextlib.suppress(OSError):  # the folder was removed, or is not this user's to read
            size = self._facts.config.ranks
            if size and (self._stages is None or self._stages.through < size):
                self._stages = folder.stages(size)
        with contextlib.suppress(OSError), folder.open_metrics() or contextlib.nullcontext() as f:
            if f is not None:
                self._logged = logged_lines(f, _LINES)

    def _began_s(self, folder: RunFolder | None, samples: Sequence[RankSample]) -> float:
        if folder is not None:
            with contextlib.suppress(OSError):  # it was removed
                return folder.began_s()
        return min((each.began_s for each in live_jobs(samples)), default=time.time())

    def _steps_per_s(self, is_live: bool) -> float | None:
        return self._pace.per_s if is_live else pace_of(self._logged)

    def _samples_per_s(self, samples: Sequence[RankSample]) -> float | None:
        live = (samples_of({name: v for name, _, v in each.scalars}) for each in samples)
        found = next((each for each in live if each is not None), None)
        if found is None and self._logged:
            return self._logged[-1].samples_per_s
        return found


_OVER: Final = ("completed", "failed", "stopped", "lost", "not seen", "waiting")


def _hosts(samples: Sequence[RankSample]) -> list[str]:
    return list(dict.fromkeys(printable(str(each.page["host"])) for each in samples))


def _facts_of_job(samples: Sequence[RankSample]) -> RunFacts | None:
    """Return what is known of a job under mpirun; None if nothing is."""
    jobs = live_jobs(samples)
    if not jobs:
        return None
    job = jobs[0]
    size = int(job.members[0].page["size"])
    place = job.working[0] if job.working else "?"
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.began_s))
    return RunFacts(job.name, place, False, RunConfig(job.program, size, began), None, True)


def logged_lines(file: IO[bytes], most: int) -> list[LoggedStep]:
    """Return about so many of the latest lines that have a step, evenly."""
    size = os.fstat(file.fileno()).st_size
    file.seek(max(0, size - _TAIL))
    tail = file.read(_TAIL)
    whole = tail[: tail.rfind(b"\n") + 1].splitlines()[1 if size > _TAIL else 0 :]
    stride = max(1, len(whole) // most)
    lines = [*whole[:1], *whole[1:-1:stride], *whole[-1:]] if len(whole) > 1 else whole
    return [each for each in map(parse_logged, lines) if each is not None]
