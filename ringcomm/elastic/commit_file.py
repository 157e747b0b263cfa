"""The file that keeps commits of a state, for a job that is started again.

A file is a pickle, then _TRAILER: a mark, the length of the pickle, and its CRC-32. A pickle can
run any code, so it is read if nobody else can have written it; see ringcomm.trusted_files.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import shutil
import struct
import zlib
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from ringcomm.atomic_files import crc_of, remove_unfinished, replacing
from ringcomm.errors import RingcommError
from ringcomm.integers import is_integer
from ringcomm.regular_files import BrokenFileError, checksum, open_regular, read_regular
from ringcomm.trusted_files import read_trusted, why_untrusted

_log = logging.getLogger("ringcomm")
_FORMAT: Final = 2
_WITHOUT_TRAILER: Final = 1  # format of version 0.1.0 before it had a trailer
_TRAILER: Final = struct.Struct("<16sQI")
_MARK: Final = b"ringcomm commit\n"

_MOST: Final = (1 << 63) - 1  # commits, as ranks tell each other of them

UNREAD: Final = -1
ABSENT: Final = -2


class Origin(NamedTuple):
    """What a job has found in the file, before it writes there."""

    crc: int = UNREAD  # of the file; ABSENT: there was none
    n_made: int = 0  # commits that were made, as far as is known; those after the kept one are lost


class Kept(NamedTuple):
    n_commits: int
    n_steps: int  # that the job had completed
    copies: dict[str, dict[str, Any]]  # by attribute of the state
    origin: Origin


class KeptFile:
    """Keeps every `every`-th commit in `path`, and in `path`.count how many there were.

    Only the rank 0 of the moment writes. The count takes a microsecond, and is right after the
    death of any process; after that of a host, the newest ones may be missing. The commit with
    which the job began is kept in `path`.previous; nothing here reads that.

    Attributes:
        given: the path as the program gave it.
        origin: what the job has found at `path`; the same on all ranks that may write.
    """

    def __init__(self, path: str | os.PathLike[str], every: int) -> None:
        if not (isinstance(every, bool) or is_integer(every)) or every < 1:
            raise ValueError(f"keep_in: every must be a number of commits >= 1, not {every!r}")
        self.given = os.fspath(path)
        self.path = Path(path).absolute()
        self.origin = Origin()
        self._every = int(every)
        self._count = -1  # descriptor, once this rank writes
        self._written: int | None = None  # CRC-32 of the last commit that this rank has written
        self._has_warned = False  # of commits of others
        self._has_failed = False  # since a commit was kept last

    @property
    def previous(self) -> Path:
        return _with_suffix(self.path, "previous")

    def keep(self, n_commits: int, n_steps: int, copies: dict[str, Any]) -> None:
        """Keep a commit, or count it. If that is not possible, log it: training goes on.

        An error would end rank 0, and then whoever is rank 0 next, until nobody is left.
        """
        assert self.origin.crc != UNREAD, "what nobody has read is never overwritten"
        try:
            self._write(n_commits, n_steps, copies)
            self._has_failed &= not self._is_due(n_commits)
        except Exception as error:  # noqa: BLE001 - pickling a value may raise anything
            if not self._has_failed:
                _log.warning(
                    "elastic: commit %d cannot be kept in %s: %s. Training goes on; a job that is "
                    "started again begins with an earlier commit",
                    n_commits,
                    self.path,
                    error if isinstance(error, OSError) else f"{type(error).__name__}: {error}",
                )
            self._has_failed = True

    def _write(self, n_commits: int, n_steps: int, copies: dict[str, Any]) -> None:
        try:
            if self._is_due(n_commits):
                if self._written is None:
                    self._remove_unfinished()
                    self._keep_origin()
                else:
                    self._warn_of_others(n_commits)
                counts = {"n_commits": n_commits, "n_steps": n_steps}
                content = {"format": _FORMAT, **counts, "copies": copies}
                with replacing(self.path, mode=0o600) as file:
                    summed = _Summed(file)
                    pickle.dump(content, summed, pickle.HIGHEST_PROTOCOL)
                    file.write(_TRAILER.pack(_MARK, summed.length, summed.crc))
                is_first, self._written = self._written is None, summed.crc
                if is_first:
                    self._warn_if_untrusted()
        finally:  # one that is not kept was made all the same
            self._count_to(n_commits)

    def _is_due(self, n_commits: int) -> bool:
        return n_commits % self._every == 0

    def _keep_origin(self) -> None:
        """Keep what the job began with, unless an earlier rank 0 of the job has done so."""
        if self.origin.crc == ABSENT or self.origin.crc != _crc_of_file(self.path):
            return
        self.previous.unlink(missing_ok=True)
        try:
            os.link(self.path, self.previous)
        except OSError:  # a file system without links
            with open_regular(self.path) as old, replacing(self.previous, mode=0o600) as new:
                shutil.copyfileobj(old, new)
        with replacing(_with_suffix(self.previous, "count"), mode=0o600) as file:
            file.write(_COUNT % self.origin.n_made)

    def _remove_unfinished(self) -> None:
        """Remove what ranks have left that were killed while they wrote: each a whole commit."""
        with contextlib.suppress(OSError):  # they only take room
            for path in (self.path, self.previous, _with_suffix(self.previous, "count")):
                remove_unfinished(path)

    def _warn_of_others(self, n_commits: int) -> None:
        """Say once that the file is not what this rank has left there: each takes the other's away.

        Only a rank that has written here can tell: a new rank 0 finds what the one before it wrote.
        """
        with contextlib.suppress(OSError, BrokenFileError):
            if not self._has_warned and _crc_of_file(self.path) not in (self._written, ABSENT):
                self._has_warned = True
                _log.warning(
                    "elastic: before commit %d of this job, somebody else has written %s: another "
                    "job, or another state of this program, keeps its commits there, too. A job "
                    "that is started again begins with whichever was the last. Give each a path of "
                    "its own",
                    n_commits,
                    self.path,
                )

    def _warn_if_untrusted(self) -> None:
        if text := why_untrusted(self.path):
            _log.warning(
                "elastic: a job that is started again will not begin with %s, which %s",
                self.path,
                text,
            )

    def _count_to(self, n_commits: int) -> None:
        if self._count < 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            path = _with_suffix(self.path, "count")
            flags = os.O_WRONLY | os.O_CREAT | _OTHERS_MAY_HAVE_MADE_IT
            self._count = os.open(path, flags, 0o600)
        os.pwrite(self._count, _COUNT % n_commits, 0)

    def load(self) -> Kept | None:
        """Return what is kept, None if there is no file.

        Raises:
            RingcommError: the file cannot be read, or is damaged, or holds something else, or
                others can have written it.
        """
        try:
            data = memoryview(read_trusted(self.path, mends_mode=True))
        except FileNotFoundError:
            return None
        except BrokenFileError as error:
            raise self.refusal(str(error)) from error
        except (OSError, MemoryError, ValueError) as error:  # ValueError: of no path
            raise self.refusal(f"cannot be read ({error or type(error).__name__})") from error
        content, has_trailer = self._checked(data)
        try:
            kept = pickle.loads(content)
        except Exception as error:  # damaged pickles, and changed programs, raise many kinds
            what = f"cannot be unpickled ({type(error).__name__}: {error})"
            raise self.refusal(what) from error
        expected = _FORMAT if has_trailer else _WITHOUT_TRAILER
        if not _is_commit(kept, expected):
            end = "" if has_trailer else ", or is cut off"
            raise self.refusal(f"holds no commit of this version of ringcomm{end}")
        n_commits: int = kept["n_commits"]
        n_steps: int = kept.get("n_steps", 0)  # files of 0.1.0 lack it
        origin = Origin(crc_of(content), max(n_commits, self._n_counted()))
        return Kept(n_commits, n_steps, kept["copies"], origin)

    def _checked(self, data: memoryview) -> tuple[memoryview, bool]:
        """Return the pickle of a file, and whether a trailer has vouched for it."""
        mark, length, crc = _trailer_of(data[-_TRAILER.size :])
        if mark != _MARK:
            return data, False
        content = data[: -_TRAILER.size]
        if len(content) != length:
            raise self.refusal(f"has {len(content)} bytes of a commit, and {length} were written")
        if crc != (found := crc_of(content)):
            raise self.refusal(f"is damaged: its checksum is {found:08x}, and was {crc:08x}")
        return content, True

    def refusal(self, what: str) -> RingcommError:
        text = (
            f"elastic: {self.path} {what}. No rank has begun, and the file stays as it is. Put a "
            "good copy in its place, or move it away to begin anew"
        )
        if os.path.exists(self.previous):  # False also if that cannot be found out
            text += (
                f". {self.previous} is an older commit, with which a job that wrote here had "
                "begun; to go on from that, move it there"
            )
        return RingcommError(text)

    def _n_counted(self) -> int:
        try:
            path = _with_suffix(self.path, "count")
            text = read_regular(path, len(_COUNT % 0), flags=os.O_NOFOLLOW).strip()
        except (OSError, BrokenFileError):  # it only tells how many commits are lost
            return 0
        return min(int(text), _MOST) if text.isdigit() else 0

    def say_what_is_lost(self, n_commits: int) -> None:
        n_lost = self.origin.n_made - n_commits
        _log.warning(
            "elastic: the job goes on from commit %d, which %s keeps; %d commit%s after it %s lost",
            n_commits,
            self.path,
            n_lost,
            "" if n_lost == 1 else "s",
            "is" if n_lost == 1 else "are",
        )


_COUNT: Final = b"%20d\n"
# The file of the count is neither a link nor a pipe, and does not wait for the other end of one.
_OTHERS_MAY_HAVE_MADE_IT: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class _Summed:
    """Writes to a file, and takes the length and the CRC-32 of what it has written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.length = self.crc = 0

    def write(self, data: Any) -> int:
        self.crc = zlib.crc32(data, self.crc)
        n = self._file.write(data)
        self.length += n
        return n


def _with_suffix(path: Path, suffix: str) -> Path:
    return path.with_name(f"{path.name}.{suffix}")


def _trailer_of(end: bytes | memoryview) -> tuple[bytes, int, int]:
    if len(end) < _TRAILER.size:
        return b"", 0, 0
    mark, length, crc = _TRAILER.unpack(end)
    return mark, length, crc


def _crc_of_file(path: Path) -> int:
    """Return the CRC-32 of the pickle in a file, as its trailer has it; ABSENT if there is none."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TRAILER.size))
            mark, _, crc = _trailer_of(file.read())
        return crc if mark == _MARK else checksum(path)[1]
    except FileNotFoundError:
        return ABSENT


def _is_commit(content: Any, of_format: int) -> bool:
    if not isinstance(content, dict) or content.get("format") != of_format:
        return False
    n_commits, copies = content.get("n_commits"), content.get("copies")
    return (
        isinstance(n_commits, int)
        and 0 <= n_commits <= _MOST
        and isinstance(content.get("n_steps", 0), int)
        and isinstance(copies, dict)
        and all(isinstance(each, dict) for each in copies.values())
    )
