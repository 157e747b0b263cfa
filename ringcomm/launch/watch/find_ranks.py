"""Finds the ranks of this user on this host by their status pages, without the help of the jobs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping
from typing import Final

from ringcomm._core import StatusPage
from ringcomm.launch.watch.rank_rows import Process, RankSample
from ringcomm.launched.process_stat import ProcessStat
from ringcomm.nvidia.process_memory import ProcessMemory
from ringcomm.status.ending_text import how_it_ended
from ringcomm.status.page_enums import Ending

_NAME: Final = "/memfd:ringcomm-status-"


class Ranks:
    """The ranks on this host that were found. Their pages stay readable after they have died."""

    def __init__(self, *, sees_gpus: bool = True) -> None:
        self.problems: set[str] = set()  # pages that cannot be read, as those of other versions
        self._gpus = ProcessMemory() if sees_gpus else None
        self._pages: dict[tuple[str, int], StatusPage] = {}
        self._found_at: dict[tuple[str, int], tuple[int, int]] = {}

    def search(self, pids: Collection[int] | None = None) -> None:
        """Look for ranks that have started since the last call. Takes some milliseconds.

        pids: the processes to look at; None: all.
        """
        self.problems = set()
        for pid, fd in _descriptors(pids):
            with contextlib.suppress(OSError):  # the process has ended meanwhile
                try:
                    page = StatusPage.look(pid, fd)
                except RuntimeError as error:
                    self.problems.add(f"pid {pid}: {error}")
                    continue
                facts = page.snapshot()
                if self._pages.setdefault((facts["job"], facts["rank"]), page) is page:
                    self._found_at[facts["job"], facts["rank"]] = pid, fd

    def has(self, sample: RankSample) -> bool:
        """Return True if a rank is of this host, and not one that another host has reported."""
        return (sample.job, sample.rank) in self._found_at

    def page_to_ask(self, sample: RankSample) -> StatusPage:
        """Return the page of a rank for writing. Raises OSError if it has ended."""
        return StatusPage.look_to_ask(*self._found_at[sample.job, sample.rank])

    def sample(self, now_ns: int) -> list[RankSample]:
        gpu_nbytes = self._gpus.by_pid() if self._gpus is not None else {}
        return [_sample(page, now_ns, gpu_nbytes) for _, page in sorted(self._pages.items())]


def _descriptors(pids: Collection[int] | None) -> Iterator[tuple[int, int]]:
    """Yield (pid, descriptor) of each status page that a process of this user has open."""
    me = os.geteuid()
    for pid in filter(str.isdigit, os.listdir("/proc")) if pids is None else map(str, pids):
        folder = f"/proc/{pid}"  # texts: paths would take more time than what they are for
        try:
            if os.stat(folder).st_uid != me:
                continue
            names = os.listdir(f"{folder}/fd")
        except OSError:  # it has ended, or lets nobody look
            continue
        for name in names:
            with contextlib.suppress(OSError):
                if os.readlink(f"{folder}/fd/{name}").startswith(_NAME):
                    yield int(pid), int(name)


def _sample(page: StatusPage, now_ns: int, gpu_nbytes: Mapping[int, int]) -> RankSample:
    facts = page.snapshot()
    return RankSample(
        now_ns,
        facts,
        [(name, step, value) for name, step, value, _ in page.scalars()],
        page.events(),
        _process(facts["pid"], gpu_nbytes.get(facts["pid"], 0)),
        how_it_ended(facts) if facts["end_kind"] != Ending.NONE else "",
        page.steps(),
    )


def _process(pid: int, gpu_nbytes: int) -> Process | None:
    """Return CPU time and memory of a process; None if it is dead."""
    try:
        process = ProcessStat.of(pid)
    except OSError:
        return None
    if process.is_dead:
        return None
    return Process(
        cpu_s=process.cpu_ticks / os.sysconf("SC_CLK_TCK"),
        nbytes=process.n_pages * os.sysconf("SC_PAGE_SIZE"),
        gpu_nbytes=gpu_nbytes,
    )
