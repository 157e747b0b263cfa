"""The folder of a run: its configuration, the log of each rank, and the record of its end."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import stat
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, TypeVar

from ringcomm.atomic_files import paths_in, replacing
from ringcomm.errors import ConfigError
from ringcomm.foreign_text import is_int64, parsed_json
from ringcomm.launch.job.records import (
    GuardianFile,
    RankEnd,
    RunConfig,
    RunEnd,
    parse_guardian_file,
    parse_rank_end,
    parse_run_config,
    parse_run_end,
)
from ringcomm.launch.job.run_words import Stages
from ringcomm.launched.child_marks import LOST_BEFORE_INIT
from ringcomm.launched.rank_process import RankProcess
from ringcomm.regular_files import BrokenFileError, open_regular, rest_of
from ringcomm.system_text import text_of
from ringcomm.trusted_files import is_own, user_name

CONFIG: Final = "run.json"
END: Final = "end.json"
METRICS: Final = "metrics.jsonl"
LAUNCHER_LOG: Final = "launcher.log"
_ABORT: Final = re.compile(rb"^Abort\(-?\d+\) on node \d+ \(rank \d+ in comm \d+\): ", re.MULTILINE)
_END_NBYTES: Final = 4096
_LOG: Final = re.compile(r"rank-(0|[1-9][0-9]{0,8})\.log")
_OF_METRICS: Final = re.compile(r"metrics(?:-([1-9][0-9]{0,8}))?\.jsonl")
_EVENTS: Final = re.compile(r"events-(0|[1-9][0-9]{0,8})\.jsonl")
_USE: Final = re.compile(r"use(?:-.*)?\.jsonl")
_OF_HOST: Final = re.compile(r"host-.*\.json")
# Whatever the umask lets others do: what is recorded there is believed.
_MODE: Final = 0o755
_FILE_MODE: Final = 0o644
_LACKS: Final = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
T = TypeVar("T")


def metrics_of(rank: int) -> str:
    """Return the name of the file of rc.log() of a rank."""
    return METRICS if rank == 0 else f"metrics-{rank}.jsonl"


class RunFolder:
    """A folder of a run. `path` is absolute.

    It is opened once, and its files are reached from there: whoever can rename it, such as the
    owner of the folder that it lies in, cannot put another in its place. A record counts if its
    owner is this user, root, or the owner of the folder, and if it is a file and no link.

    Attributes:
        path: where it was when it was opened.
        problems: why files in it do not count, by their names.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: dict[str, str] = {}
        self._descriptor: int | None = None
        self._size: float | None = None

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
        return RunFolder(self.path.with_name(f"{self.path.name}-restart-{number}"))

    def claim(self) -> bool:
        """Make the folder, for one run alone; return False if it is that of another run.

        Raises ConfigError if it cannot be made, or others could forge what is recorded in it.
        """
        with _saying_what_to_do():
            self.path.mkdir(_MODE, parents=True, exist_ok=True)
            self.fileno()
        if text := self.distrust:
            raise ConfigError(
                f"the folder of the run, {self.path}, {text}. Name another by --run-folder"
            )
        with _saying_what_to_do():
            if self._exists(CONFIG):
                return False
            try:
                os.close(self._create(LAUNCHER_LOG, os.O_EXCL))
            except FileExistsError:  # another run has claimed it in this moment
                return False
            return True

    @property
    def distrust(self) -> str:
        """Say why others could forge what is recorded in the folder; "" if they cannot.

        Raises OSError if there is no folder.
        """
        facts = os.fstat(self.fileno())
        if not is_own(facts.st_uid):
            return f"belongs to {user_name(facts.st_uid)}, who could forge what ranks record there"
        if facts.st_mode & stat.S_IWOTH:
            return (
                f"can be written by every user (mode {stat.S_IMODE(facts.st_mode):04o}), who could "
                "forge what ranks record there. Take that right away (chmod o-w)"
            )
        return ""

    def create(
        self, config: Mapping[str, Any], files: Mapping[str, str], *, is_secret: bool = False
    ) -> None:
        """Write the configuration, which a secret closes to other users, and the launcher's files.

        Raises ConfigError if they cannot be written.
        """
        with _saying_what_to_do():
            self.path.mkdir(_MODE, parents=True, exist_ok=True)
            for name, text in files.items():
                self.put(name, text.encode())
            # By its name, ranks know the folder; see rank_program.py.
            whole = {"folder": text_of(os.fsencode(self.path)), **config}
            self._write(CONFIG, whole, 0o600 if is_secret else _FILE_MODE)

    def launch_config(self) -> dict[str, Any] | None:
        """Return the configuration that create() has written; None if it does not count."""
        config: Any = self._parsed(CONFIG, parsed_json)
        return config if isinstance(config, dict) else None

    def record_end(self, end: Mapping[str, Any]) -> None:
        self._write(END, end)

    def log_of(self, rank: int) -> Path:
        return self.path / f"rank-{rank}.log"

    def open_log_of(self, rank: int) -> IO[bytes] | None:
        return self._open_record(self.log_of(rank).name)

    def ranks_with_log(self) -> list[int]:
        """Return the ranks that have one. Raises OSError."""
        names = map(_LOG.fullmatch, os.listdir(self.fileno()))
        return sorted(int(found[1]) for found in names if found)

    def open_launcher_log(self) -> IO[bytes]:
        return open(self._create(LAUNCHER_LOG, os.O_TRUNC), "wb", 0)

    def metric_files(self) -> list[tuple[str, int]]:
        """Return the names of the files of rc.log(), and their ranks."""
        try:
            matches = map(_OF_METRICS.fullmatch, sorted(os.listdir(self.fileno())))
        except OSError:  # it is gone, or is not this user's to read
            return []
        return [(each[0], int(each[1] or 0)) for each in matches if each]

    def open_metrics(self, name: str = METRICS) -> FileIO | None:
        """Return a file of rc.log() for reading without a buffer; None if it does not count.

        name: by default that of what rank 0 has passed to rc.log().
        """
        return self._open_record(name)

    def is_log(self, rank: int, facts: os.stat_result) -> bool:
        with contextlib.suppress(OSError):  # there is none
            name = self.log_of(rank).name
            return os.path.samestat(os.stat(name, dir_fd=self.fileno()), facts)
        return False

    def _end_of_log(self, rank: int) -> bytes:
        with self.open_log_of(rank) or contextlib.nullcontext() as file:
            if file is None:
                return b""
            file.seek(max(0, os.fstat(file.fileno()).st_size - _END_NBYTES))
            return file.read()

    def ranks(self) -> dict[int, RankProcess]:
        """Return the process of each rank that has started on a host that sees the folder."""
        return dict(self._records("rank-", ".at", _process_of))

    def stages(self, size: int) -> Stages:
        """Return how far the ranks have come, by the names of their records. Raises OSError."""
        found = Counter(name.rpartition(".")[2] for name in os.listdir(self.fileno())
                        if name.startswith("rank-"))  # fmt: skip
        through = min(found["end"], size)
        return Stages(size, min(found["at"], size), min(found["starts"] + through, size), through)

    def in_init(self) -> set[int]:
        """Return the ranks that wait in init(), and those that have ended there."""
        return {rank for rank, _ in self._files("rank-", ".starts")}

    def end_those_in_init(self, text: str) -> None:
        """Let the ranks that wait in init() end with this text, those of all hosts."""
        with contextlib.suppress(OSError):
            self.put(LOST_BEFORE_INIT, text.encode())

    def ends(self) -> dict[int, RankEnd]:
        """Return how far each rank came that is through init()."""
        return dict(self._records("rank-", ".end", parse_rank_end))

    def aborted(self) -> list[int]:
        """Return the ranks whose logs end with what MPICH and Intel MPI say in MPI_Abort."""
        return [rank for rank in self.ranks() if _ABORT.search(self._end_of_log(rank))]

    def guardians(self) -> list[GuardianFile]:
        found = []
        for number, each in self._records("guardian-", "", parse_guardian_file):
            if each.is_damaged:
                self.problems[f"guardian-{number}"] = "has a record that is none"
            found.append(each)
        return found

    def end(self) -> RunEnd | None:
        """Return how the run has ended; None if it has not, or its record does not count."""
        with contextlib.suppress(FileNotFoundError):  # somebody has removed the folder
            return self._parsed(END, parse_run_end)
        return None

    def config(self) -> RunConfig:
        """Return what is known of the run; nothing if its record does not count."""
        with contextlib.suppress(FileNotFoundError):  # somebody has removed the folder
            return self._parsed(CONFIG, parse_run_config) or RunConfig()
        return RunConfig()

    def began_s(self) -> float:
        """Return when its configuration was written, in seconds since 1970. Raises OSError."""
        return os.stat(CONFIG, dir_fd=self.fileno(), follow_symlinks=False).st_mtime

    def ended_s(self) -> float:
        """Return when the record of its end was written, since 1970. Raises OSError."""
        return os.stat(END, dir_fd=self.fileno(), follow_symlinks=False).st_mtime

    def ranks_with_events(self) -> list[int]:
        """Return the numbers of the processes that have recorded events. Raises OSError."""
        names = map(_EVENTS.fullmatch, os.listdir(self.fileno()))
        return sorted(int(found[1]) for found in names if found)

    def open_events_of(self, number: int) -> IO[bytes] | None:
        return self._open_record(f"events-{number}.jsonl")

    def reports_of_hosts(self) -> Iterator[tuple[str, bytes]]:
        """Yield name and content of what hosts have written for watchers of other hosts."""
        try:
            names = sorted(os.listdir(self.fileno()))
        except OSError:  # it is gone, or is not this user's to read
            return
        for name in names:
            if _OF_HOST.fullmatch(name) and (data := self._read(name)) is not None:
                yield name, data

    @property
    def is_stopped(self) -> bool:
        """True if the job has taken the command `stop`; see engine/control/perform.py."""
        return self._read("stopped") is not None

    def put(self, name: str, data: bytes) -> None:
        """Write a file as a whole; it may be gone after a crash of the host. Raises OSError."""
        new = f".{name}.new"
        with open(self._create(new, os.O_TRUNC), "wb", 0) as file:
            file.write(data)
        folder = self.fileno()
        os.rename(new, name, src_dir_fd=folder, dst_dir_fd=folder)

    def fileno(self) -> int:
        if self._descriptor is None:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags)
            weakref.finalize(self, os.close, self._descriptor)
        return self._descriptor

    def appending(self, name: str) -> IO[bytes]:
        """Open a file to add to its end, without a buffer. Raises OSError."""
        return open(self._create(name, os.O_APPEND), "ab", 0)

    def use_files(self) -> Iterator[IO[bytes]]:
        """Yield the files in which hosts have written how ranks used them, while each is open."""
        with contextlib.suppress(OSError):  # it is gone, or is not this user's to read
            for name in sorted(filter(_USE.fullmatch, os.listdir(self.fileno()))):
                with self._open_record(name) or contextlib.nullcontext() as file:
                    if file is not None:
                        yield file

    def _create(self, name: str, flags: int) -> int:
        flags |= os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, _FILE_MODE, dir_fd=self.fileno())

    def _exists(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self.fileno(), follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def _records(
        self, prefix: str, suffix: str, parse: Callable[[bytes], T]
    ) -> Iterator[tuple[int, T]]:
        """Yield what the records of ranks say; one that is empty is about to be written."""
        for rank, data in self._files(prefix, suffix):
            if data:
                with self._noting_problem(f"{prefix}{rank}{suffix}"):
                    yield rank, parse(data)

    def _parsed(self, name: str, parse: Callable[[bytes], T]) -> T | None:
        if data := self._read(name):
            with self._noting_problem(name):
                return parse(data)
        return None

    @contextlib.contextmanager
    def _noting_problem(self, name: str) -> Iterator[None]:
        """Note that a file does not count, if the block raises a ValueError."""
        try:
            yield
        except ValueError as error:
            self.problems[name] = str(error)

    def _files(self, prefix: str, suffix: str) -> Iterator[tuple[int, bytes]]:
        """Yield the records of the ranks of the run, with the rank that the name has."""
        pattern = re.compile(re.escape(prefix) + r"(0|[1-9][0-9]*)" + re.escape(suffix))
        try:
            names = sorted(os.listdir(self.fileno()))
        except FileNotFoundError:  # somebody has removed the folder
            return
        for name in names:
            match = pattern.fullmatch(name)
            if not match:
                continue
            if int(match[1]) >= self._n_ranks():
                self.problems[name] = f"is of no rank: there are {self._n_ranks()}"
            elif (data := self._read(name)) is not None:
                yield int(match[1]), data

    def _n_ranks(self) -> float:
        """Return how many ranks the run has; inf if its configuration does not say."""
        if self._size is None:
            self._size = math.inf
            config: Any = self._parsed(CONFIG, parsed_json)
            size: Any = config.get("ranks") if isinstance(config, dict) else None
            if is_int64(size):
                self._size = size
            elif config is not None and config != {}:
                self.problems[CONFIG] = "does not say how many ranks there are"
        return self._size

    def _read(self, name: str) -> bytes | None:
        with self._open_record(name) or contextlib.nullcontext() as file:
            if file is None:
                return None
            try:
                return rest_of(file)
            except BrokenFileError as error:
                self.problems[name] = str(error)
                return None

    def _open_record(self, name: str) -> FileIO | None:
        """Return a file that is there and counts, for reading without a buffer; else None."""
        try:
            file = open_regular(name, flags=os.O_NOFOLLOW, folder=self.fileno())
        except FileNotFoundError:
            return None
        except BrokenFileError as error:
            self.problems[name] = str(error)
            return None
        except OSError as error:
            if error.errno in _LACKS:
                raise
            self.problems[name] = "is a link" if error.errno == errno.ELOOP else str(error.strerror)
            return None
        owner = os.fstat(file.fileno()).st_uid
        if is_own(owner) or owner == os.fstat(self.fileno()).st_uid:
            self.problems.pop(name, None)
            return file
        file.close()
        self.problems[name] = f"belongs to {user_name(owner)}"
        return None

    def _write(self, name: str, content: Mapping[str, Any], mode: int = _FILE_MODE) -> None:
        try:
            with replacing(Path(f"/proc/self/fd/{self.fileno()}", name), mode=mode) as file:
                file.write(json.dumps(content, indent=2).encode() + b"\n")
        except OSError as error:
            raise OSError(error.errno, error.strerror, os.fspath(self.path / name)) from error


@contextlib.contextmanager
def _saying_what_to_do() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the folder of the run cannot be made: {error}. Name another by --run-folder"
        ) from error


def time_text(now: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(now))


def is_run_folder(path: Path) -> bool:
    """Return True if a folder is that of a run, and this user may look into it."""
    return os.path.isfile(path / CONFIG) and os.access(path, os.R_OK)


def near(path: Path) -> Path:
    """Return a path as a user writes it who stands in the working folder."""
    with contextlib.suppress(FileNotFoundError):  # that was removed
        here = Path.cwd()
        return path.relative_to(here) if path.is_relative_to(here) else path
    return path


class FoundRun(NamedTuple):
    """A run in a folder of runs. began_s: since 1970; is_own: of this user, or root."""

    path: Path
    began_s: float
    is_own: bool


def runs_in(parent: Path) -> list[FoundRun]:
    """Return the runs in a folder that this user may look into; links are none."""
    found = []
    for path in paths_in(parent):
        with contextlib.suppress(OSError):  # it is none, or removed, or closed to this user
            if not path.is_symlink() and os.access(path, os.R_OK):
                began_s = (path / CONFIG).stat().st_mtime
                found.append(FoundRun(path.absolute(), began_s, is_own(os.stat(path).st_uid)))
    return found


def _process_of(record: bytes) -> RankProcess:
    process = RankProcess.parse(text_of(record))
    if process is None:
        raise ValueError("is no record of a process")
    return process
