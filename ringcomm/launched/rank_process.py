"""The process of a rank, as `ringcomm run` finds it again: by a record in the folder of the run."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from ringcomm.launched.ancestors import ancestors
from ringcomm.launched.child_marks import RUN_FOLDER, create_run_file, open_run_folder, run_file
from ringcomm.launched.launcher import launched_rank
from ringcomm.launched.process_stat import ProcessStat
from ringcomm.system_text import bytes_of, host_name

_MOST_PID: Final = (1 << 31) - 1
_RECORD: Final = re.compile(r"([1-9][0-9]{0,9}) (\S+) ([0-9]{1,18})\n", re.ASCII)


class RankProcess(NamedTuple):
    """A process that nothing mistakes for another: not a new title, program or environment.

    Attributes:
        pid: its pid, which may be that of another process after its end.
        host: the name of its host.
        start: when it was started, in ticks since its host was.
    """

    pid: int
    host: str
    start: int

    @classmethod
    def parse(cls, text: str) -> RankProcess | None:
        """Return the process of a record; None if it is none."""
        match = _RECORD.fullmatch(text)
        if match is None or int(match[1]) > _MOST_PID:
            return None
        return cls(int(match[1]), match[2], int(match[3]))

    @property
    def lives(self) -> bool:
        """True if it has not ended; of this host's processes."""
        with contextlib.suppress(OSError):  # it has ended
            process = ProcessStat.of(self.pid)
            return not process.is_dead and process.start == self.start
        return False


def note_rank_process(environ: Mapping[str, str] = os.environ) -> None:
    """Record that this process is the rank, and not the shell script that has started it.

    rank_program.py has recorded the script. It stays the one on record if this process does
    not see it, as in a container, because then `ringcomm run` does not know this process's pid. A
    script that execs the rank may have started another one before.
    """
    starter = environ.get(RUN_FOLDER, "").partition(" ")[0]
    path = run_file(f"rank-{launched_rank(environ)}.at", environ)
    seen = (os.getpid(), *(each.pid for each in ancestors()))
    if not path or starter not in map(str, seen):
        return
    start = ProcessStat.of(os.getpid()).start
    with contextlib.suppress(OSError):  # the disk is full
        folder, name = os.path.split(path)
        with open(create_run_file(f"{path}.new"), "wb") as file:
            file.write(bytes_of(f"{os.getpid()} {host_name()} {start}\n"))
        opened = open_run_folder(folder)
        try:
            os.replace(f"{name}.new", name, src_dir_fd=opened, dst_dir_fd=opened)
        finally:
            os.close(opened)
