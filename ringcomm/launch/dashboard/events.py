"""Reads the events of a run from its folder, each line once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Final

from ringcomm.foreign_text import printable
from ringcomm.launch.dashboard.event_list import Event, deaths, end_event, listed, parse_event
from ringcomm.launch.dashboard.job_head import logged_lines
from ringcomm.launch.job.records import RunEnd
from ringcomm.launch.job.run_folder import RunFolder, metrics_of
from ringcomm.launch.watch.rank_rows import RankSample, step_of

_PIECE: Final = 1 << 20
_LOOK_S: Final = 0.8
_GONE_S: Final = 60.0  # a rank that was not slow for so long begins to be slow again
_LINES: Final = 1000  # at the end of a file, in which the step of a death is sought
_MOST: Final = 20_000  # that are kept


class EventReader:
    """The events of a run, or of live jobs without a folder.

    Attributes:
        version: grows when events() has another answer.
    """

    def __init__(self) -> None:
        self.version = 0
        self._events: list[Event] = []
        self._kept: list[Event] = []  # of files
        self._slow: dict[str, tuple[Event, float]] = {}  # culprit -> event, when it was seen last
        self._was_slow: list[Event] = []
        self._at: dict[int, int] = {}  # how far files are read
        self._steps: dict[tuple[int, float], int | None] = {}  # (rank, time of its death) -> step
        self._looked = float("-inf")

    def events(
        self,
        folder: RunFolder | None,
        samples: Sequence[RankSample],
        slow: Iterable[str],
        end: RunEnd | None,
    ) -> list[Event]:
        """Return all events, the oldest first.

        Args:
            folder: of the run; None: what the pages of ranks have is shown.
            samples: the ranks that are seen.
            slow: who is slow now, in words.
            end: of the run.
        """
        now = time.monotonic()
        self._note_slow(slow, samples, now)
        if now - self._looked >= _LOOK_S or (end is not None and self._looked != float("inf")):
            self._looked = now if end is None else float("inf")
            self._look(folder, samples, end)
        return self._events

    def _look(
        self, folder: RunFolder | None, samples: Sequence[RankSample], end: RunEnd | None
    ) -> None:
        found = [*self._was_slow, *(event for event, _ in self._slow.values())]
        if folder is None:
            found += _of_pages(samples)
        else:
            with contextlib.suppress(OSError):  # somebody has removed the folder
                for number in folder.ranks_with_events():
                    self._read(folder, number)
                ended_s = folder.ended_s() if end is not None else None
                steps = {each.rank: step_of(each) for each in samples if each.is_over}
                dead = deaths(folder.guardians(), partial(self._step_at, folder, steps))
                found += [*dead, *end_event(end, ended_s)]
            found += self._kept
        shown = listed(found)
        if shown != self._events:
            self._events = shown
            self.version += 1

    def _step_at(
        self, folder: RunFolder, steps: Mapping[int, int], rank: int, at_s: float
    ) -> int | None:
        """Return the step at which a rank has died: by its page, or by what it had logged."""
        if rank in steps:
            return steps[rank]
        if (rank, at_s) not in self._steps:
            with folder.open_metrics(metrics_of(rank)) or contextlib.nullcontext() as file:
                lines = [] if file is None else logged_lines(file, _LINES)
                known = [each.step for each in lines if each.time <= at_s]
                self._steps[rank, at_s] = known[-1] if known else None
        return self._steps[rank, at_s]

    def _read(self, folder: RunFolder, number: int) -> None:
        with folder.open_events_of(number) or contextlib.nullcontext() as file:
            if file is None:
                return
            file.seek(self._at.get(number, 0))
            data = file.read(_PIECE)
            whole = data[: data.rfind(b"\n") + 1] or (data if len(data) == _PIECE else b"")
            self._at[number] = self._at.get(number, 0) + len(whole)
            events = (parse_event(line, number) for line in whole.splitlines())
            self._kept += [each for each in events if each is not None]
        if len(self._kept) > _MOST:
            self._kept = listed(self._kept)[-_MOST:]

    def _note_slow(self, slow: Iterable[str], samples: Sequence[RankSample], now: float) -> None:
        step = max(map(step_of, samples), default=0)
        for text in slow:
            culprit = text.partition(":")[0]
            if culprit not in self._slow:
                event = Event(time.time(), "slow", printable(text), (), step)
                self._slow[culprit] = event, now
            self._slow[culprit] = self._slow[culprit][0], now
        for culprit, (event, seen) in [*self._slow.items()]:
            if now - seen > _GONE_S:
                self._was_slow.append(event)
                del self._slow[culprit]


def _of_pages(samples: Sequence[RankSample]) -> list[Event]:
    now_s = time.time()
    found = []
    for sample in samples:
        for time_ns, text in sample.events:
            at_s = round(now_s - (sample.time_ns - time_ns) / 1e9, 1)
            kind = "command" if text.startswith("ctl ") else "note"
            found.append(Event(at_s, kind, printable(text), (sample.rank,)))
        if sample.ending:
            at_s = round(now_s - (sample.time_ns - int(sample.page["end_time_ns"])) / 1e9, 1)
            text = f"rank {sample.rank} {printable(sample.ending)}"
            found.append(Event(at_s, "death", text, (sample.rank,)))
    return found
