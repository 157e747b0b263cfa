"""The folder of a run: its configuration, the log of each rank, and the record of its end."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from ringcomm.atomic_files import replacing
from ringcomm.errors import ConfigError
from ringcomm.launch.job.read_records import (
    GuardianFile,
    RankEnd,
    parse_guardian_file,
    parse_rank_end,
)
from ringcomm.launched.children_are_no_ranks import LOST_BEFORE_INIT
from ringcomm.launched.rank_process import RankProcess
from ringcomm.system_text import text_of

CONFIG: Final = "run.json"
END: Final = "end.json"
LAUNCHER_LOG: Final = "launcher.log"
_ABORT: Final = re.compile(rb"^Abort\(-?\d+\) on node \d+ \(rank \d+ in comm \d+\): ", re.MULTILINE)
_END_NBYTES: Final = 4096


class RunFolder:
    """A folder of a run. `path` is absolute."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def named_by_time(cls, parent: Path, now: float) -> RunFolder:
        """Return a folder that does not exist yet, such as runs/2026-11-20T22-10-03.

        Another run may take it first: see claim().
        """
        name = time.strftime("%Y-%m-%dT%H-%M-%S", time.localtime(now))
        path = parent.absolute() / name
        count = 1
        while path.exists():
            count += 1
            path = path.with_name(f"{name}-{count}")
        return cls(path)

    def after_restart(self, number: int) -> RunFolder:
        """Return the folder of the same run after it was started again that many times."""
        return RunFolder(self.path.with_name(f"{self.path.name}-restart-{number}"))

    def claim(self) -> bool:
        """Make the folder, for one run alone; return False if it is that of another run.

        Raises ConfigError if it cannot be made.
        """
        with _saying_what_to_do():
            self.path.mkdir(parents=True, exist_ok=True)
            if (self.path / CONFIG).exists():
                return False
            try:
                (self.path / LAUNCHER_LOG).touch(exist_ok=False)
            except FileExistsError:  # another run has claimed it in this moment
                return False
            return True

    def create(self, config: Mapping[str, Any], files: Mapping[str, str]) -> None:
        """Write the configuration and files for the launcher.

        Raises ConfigError if they cannot be written.
        """
        with _saying_what_to_do():
            self.path.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (self.path / name).write_text(text)
            self._write(CONFIG, config)

    def record_end(self, end: Mapping[str, Any]) -> None:
        """Write the record by which the run is judged."""
        self._write(END, end)

    def log_of(self, rank: int) -> Path:
        """Return the path of a rank's log."""
        return self.path / f"rank-{rank}.log"

    def ranks(self) -> dict[int, RankProcess]:
        """Return the process of each rank that has started on a host that sees the folder."""
        texts = self._files("rank-", ".at")
        found = {rank: RankProcess.parse(text_of(text)) for rank, text in texts}
        return {rank: process for rank, process in found.items() if process is not None}

    def in_init(self) -> set[int]:
        """Return the ranks that wait in init(), and those that have ended there."""
        return {rank for rank, _ in self._files("rank-", ".starts")}

    def end_those_in_init(self, text: str) -> None:
        """Let the ranks that wait in init() end with this text, those of all hosts."""
        with contextlib.suppress(OSError), replacing(self.path / LOST_BEFORE_INIT) as file:
            file.write(text.encode())

    def ends(self) -> dict[int, RankEnd]:
        """Return how far each rank came that is through init()."""
        return {rank: parse_rank_end(text.decode()) for rank, text in self._files("rank-", ".end")}

    def aborted(self) -> list[int]:
        """Return the ranks whose logs end with what MPICH and Intel MPI say in MPI_Abort."""
        return [rank for rank in self.ranks() if _ABORT.search(_end_of(self.log_of(rank)))]

    def guardians(self) -> list[GuardianFile]:
        """Return the files of the guardians."""
        return [parse_guardian_file(data) for _, data in self._files("guardian-", "")]

    @property
    def is_stopped(self) -> bool:
        """True if the job has taken the command `stop`; see engine/control/perform.py."""
        return (self.path / "stopped").exists()

    def _files(self, prefix: str, suffix: str) -> Iterator[tuple[int, bytes]]:
        pattern = re.compile(re.escape(prefix) + r"(\d+)" + re.escape(suffix))
        try:
            paths = sorted(self.path.iterdir())
        except FileNotFoundError:  # somebody has removed the folder
            return
        for path in paths:
            if match := pattern.fullmatch(path.name):
                with contextlib.suppress(FileNotFoundError):
                    yield int(match[1]), path.read_bytes()

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        with replacing(self.path / name) as file:
            file.write(json.dumps(content, indent=2).encode() + b"\n")


@contextlib.contextmanager
def _saying_what_to_do() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the folder of the run cannot be made: {error}. Name another by --run-folder"
        ) from error


def _end_of(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _END_NBYTES))
            return file.read()
    except OSError:  # somebody has removed it
        return b""


def is_run_folder(path: Path) -> bool:
    """Return True if this is the folder of a run."""
    return (path / CONFIG).is_file()
