"""Finds the processes of a job on this host and MPI's files of them; sends signals to its ranks."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

from ringcomm.launch.job.run_folder import RunFolder
from ringcomm.launched.ancestors import ancestors
from ringcomm.launched.child_marks import RUN_FOLDER
from ringcomm.launched.process_stat import ProcessStat, all_processes
from ringcomm.launched.rank_process import RankProcess
from ringcomm.system_text import bytes_of, host_name, read_text

_LOOK_S: Final = 1.0  # between two looks at the ranks in init()
_LONGEST_S: Final = 64.0  # between two at the others
_MPI_FILE: Final = (
    r" (/dev/shm/(?:[^/\s]+/)?(?:mpich_shm_|sm_segment\.|vader_segment\.|Intel_MPI_)\S+)$"
)


def send_signal(
    number: int,
    ranks: Mapping[int, RankProcess],
    folder: RunFolder,
    launcher: int | None = None,
) -> dict[int, RankProcess]:
    """Send a signal to those of these processes that live, and are of the run; all of this host.

    Args:
        number: the signal.
        ranks: processes of ranks, by their records in the folder, which may be wrong.
        folder: the folder of the run.
        launcher: the pid of the run's launcher, None if that is not known.

    Returns:
        Those that live, and show no sign that they are of the run.
    """
    passed_over = {}
    for rank, process in ranks.items():
        with contextlib.suppress(OSError), _held(process.pid) as descriptor:
            if not process.lives:
                continue
            if not is_of_run(process, rank, folder, launcher):
                passed_over[rank] = process
            elif descriptor is None:
                os.kill(process.pid, number)
            else:
                signal.pidfd_send_signal(descriptor, number)
    return passed_over


def is_of_run(
    process: RankProcess, rank: int, folder: RunFolder, launcher: int | None = None
) -> bool:
    """Return True if a process shows that it is of the run, as no other process of its user does.

    One sign is enough: a rank may become a program with another environment, or write elsewhere
    than to its log. Raises OSError if it has ended.
    """
    found = ProcessStat.of(process.pid)
    if launcher is not None and found.session == launcher:
        return True
    if launcher is not None and any(each.pid == launcher for each in ancestors(process.pid)):
        return True
    return _is_marked(process.pid, folder) or _writes_to_log(process.pid, rank, folder)


def _is_marked(pid: int, folder: RunFolder) -> bool:
    """Return True if the environment with which a process has begun names the run."""
    mark = re.compile(RUN_FOLDER.encode() + rb"=[0-9]+ " + re.escape(os.fsencode(folder.path)))
    with contextlib.suppress(OSError):  # it lets nobody look
        environ = bytes_of(read_text(f"/proc/{pid}/environ"))
        return any(mark.fullmatch(each) for each in environ.split(b"\0"))
    return False


def _writes_to_log(pid: int, rank: int, folder: RunFolder) -> bool:
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # it is closed, or nobody may look
            if folder.is_log(rank, os.stat(f"/proc/{pid}/fd/{descriptor}")):
                return True
    return False


@contextlib.contextmanager
def _held(pid: int) -> Iterator[int | None]:
    """Yield a descriptor of a process, whose pid may become that of another; None: there are none.

    Raises ProcessLookupError if there is no such process.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (OSError, AttributeError):  # before Linux 5.3, or in a sandbox
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def ranks_here(folder: RunFolder) -> dict[int, RankProcess]:
    here = host_name()
    return {rank: process for rank, process in folder.ranks().items() if process.host == here}


def live_ranks_here(folder: RunFolder, launcher: int | None = None) -> dict[int, RankProcess]:
    found = {}
    for rank, process in ranks_here(folder).items():
        with contextlib.suppress(OSError):  # it has ended in this moment
            if process.lives and is_of_run(process, rank, folder, launcher):
                found[rank] = process
    return found


def session_members(session: int) -> list[int]:
    processes = all_processes()
    return [each.pid for each in processes if each.session == session and not each.is_dead]


def company(launcher: int) -> list[ProcessStat]:
    return [
        each
        for each in all_processes()
        if not each.is_dead and each.pid != launcher and launcher in (each.parent, each.session)
    ]


class MpiFiles:
    """MPI's files in /dev/shm of the ranks that no guardian watches yet, or ever.

    Ranks that are killed leave them there: of Intel MPI, those that are killed in init().
    """

    def __init__(self, folder: RunFolder, size: int) -> None:
        self._folder, self._is_alone = folder, size == 1  # without a guardian
        self._paths: set[str] = set()
        self._look_at, self._look_at_all = 0.0, 0.0
        self._pause_s = _LOOK_S

    def look(self) -> None:
        """Note the files of the ranks in init() once a second; of others after 1, 2, 4 ... s."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_S
        if now < self._look_at_all:
            self._note(self._folder.in_init())
            return
        self.note()
        self._look_at_all = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_S)

    def note(self) -> None:
        self._note(ranks_here(self._folder))

    def _note(self, ranks: Collection[int]) -> None:
        here = live_ranks_here(self._folder) if ranks else {}
        ends = () if self._is_alone else self._folder.ends()
        live = [here[rank] for rank in ranks if rank in here and rank not in ends]
        for pid in _with_descendants([rank.pid for rank in live]):
            self._paths |= _mpi_files(pid)

    def remove(self) -> None:
        """Remove them; to be called when the ranks have ended."""
        for path in self._paths:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _with_descendants(pids: Iterable[int]) -> list[int]:
    found = [*pids]
    if not found:
        return found
    children: dict[int, list[int]] = {}
    for process in all_processes():
        children.setdefault(process.parent, []).append(process.pid)
    for pid in found:
        found += children.get(pid, [])
    return found


def _mpi_files(pid: int) -> set[str]:
    try:
        maps = read_text(f"/proc/{pid}/maps")
    except OSError:  # it has ended
        return set()
    return {*re.findall(_MPI_FILE, maps, re.MULTILINE)}
