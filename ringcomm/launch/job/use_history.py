"""How the ranks of this host have used it over time: a file in the folder of the run.

Watchers that come later show it. A line: {"time": 1795637.25, "ranks": {"3": [0.25, 1.0, 210000000,
5000000]}} has, for each rank, the share of time in operations (-1: it has failed, -2: it has
ended), cores, bytes of memory, and bytes of payload per second, since the line before it.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Collection, Sequence
from typing import Final

from ringcomm._core import monotonic_ns
from ringcomm.launch.job.run_folder import RunFolder
from ringcomm.launch.watch.find_ranks import Ranks
from ringcomm.launch.watch.rank_rows import RankSample, use_between

_LEAST_S: Final = 1.0
_SHARE: Final = 600  # a line comes after so long a part of the job's time: there are few of them


class UseHistory:
    """Writes the file of this host.

    Args:
        folder: of the run.
        host: part of the file's name, in a job of several hosts; "": there is this one alone.
    """

    def __init__(self, folder: RunFolder, host: str = "") -> None:
        self._folder, self._name = folder, f"use-{host}.jsonl" if host else "use.jsonl"
        self._ranks = Ranks(sees_gpus=False)  # a driver that hangs is not to hang this process
        self._began = self._due = time.monotonic()
        self._searched = float("-inf")
        self._before: dict[int, RankSample] = {}
        self._has_failed = False

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._due and not self._has_failed

    def look(self, pids: Collection[int]) -> None:
        """Add a line if it is time for one.

        Args:
            pids: of the ranks that have started on this host.
        """
        now = time.monotonic()
        if not self.is_due:
            return
        self._due = now + max(_LEAST_S, (now - self._began) / _SHARE)
        if len(self._before) < len(pids) and now - self._searched > _LEAST_S:
            self._searched = now
            self._ranks.search(pids)
        self.add([each for each in self._ranks.sample(monotonic_ns()) if each.page["pid"] in pids])

    def add(self, samples: Sequence[RankSample]) -> None:
        before, self._before = self._before, {each.rank: each for each in samples}
        used = {
            str(each.rank): use_between(before[each.rank], each)
            for each in samples
            if each.rank in before
        }
        if used:
            self._append(json.dumps({"time": round(time.time(), 2), "ranks": used}))

    def _append(self, line: str) -> None:
        try:
            with contextlib.closing(self._folder.appending(self._name)) as file:
                file.write(f"{line}\n".encode())
        except OSError:  # the disk is full, or the folder was removed: watchers lack the rest
            self._has_failed = True
