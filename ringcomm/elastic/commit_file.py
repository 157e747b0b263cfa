"""The file that keeps commits of a state, for a job that is started again."""

from __future__ import annotations

import logging
import os
import pickle
from pathlib import Path
from typing import Any, Final, NamedTuple

from ringcomm.atomic_files import replacing
from ringcomm.errors import RingcommError

_log = logging.getLogger("ringcomm")
_FORMAT: Final = 1


class Kept(NamedTuple):
    """The content of a file."""

    n_commits: int
    copies: dict[str, Any]  # by attribute of the state
    n_made: int  # commits that were made, as far as that is known; n_made - n_commits are lost


class KeptFile:
    """Keeps every `every`-th commit in `path`, and in `path`.count how many there were.

    Only the rank 0 of the moment writes. The count takes a microsecond, and is right after the
    death of any process; after that of a host, the newest ones may be missing.
    """

    def __init__(self, path: str | os.PathLike[str], every: int) -> None:
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"keep_in: every must be a number of commits >= 1, not {every!r}")
        self.path = Path(path).absolute()
        self._every = every
        self._count = -1  # descriptor, once this rank writes
        self._has_failed = False  # in the last attempt

    def keep(self, n_commits: int, copies: dict[str, Any]) -> None:
        """Keep a commit, or count it. If that is not possible, log it: training goes on.

        An error would end rank 0, and then whoever is rank 0 next, until nobody is left.
        """
        try:
            self._write(n_commits, copies)
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                _log.warning(
                    "elastic: commit %d cannot be kept in %s: %s. Training goes on; a job that is "
                    "started again begins with an earlier commit",
                    n_commits,
                    self.path,
                    error,
                )
            self._has_failed = True

    def _write(self, n_commits: int, copies: dict[str, Any]) -> None:
        try:
            if n_commits % self._every == 0:
                content = {"format": _FORMAT, "n_commits": n_commits, "copies": copies}
                with replacing(self.path) as file:
                    pickle.dump(content, file, pickle.HIGHEST_PROTOCOL)
        finally:  # one that is not kept was made all the same
            self._count_to(n_commits)

    def _count_to(self, n_commits: int) -> None:
        if self._count < 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._count = os.open(self._path_of_count, os.O_WRONLY | os.O_CREAT, 0o666)
        os.pwrite(self._count, b"%20d\n" % n_commits, 0)

    def load(self) -> Kept | None:
        """Return what is kept, None if there is no file.

        Raises RingcommError if the file is no such file.
        """
        try:
            content = pickle.loads(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except (pickle.UnpicklingError, EOFError, AttributeError, ImportError) as error:
            raise RingcommError(
                f"elastic: {self.path} holds no commit ({error}). Remove it to begin anew"
            ) from error
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise RingcommError(
                f"elastic: {self.path} holds no commit of this version. Remove it to begin anew"
            )
        n_commits: int = content["n_commits"]
        return Kept(n_commits, content["copies"], max(n_commits, self._n_counted()))

    @property
    def _path_of_count(self) -> Path:
        return self.path.with_name(f"{self.path.name}.count")

    def _n_counted(self) -> int:
        try:
            text = self._path_of_count.read_text().strip()
        except FileNotFoundError:
            return 0
        return int(text) if text.isdigit() else 0

    def say_what_is_lost(self, kept: Kept) -> None:
        """Log from which commit the job goes on."""
        n_lost = kept.n_made - kept.n_commits
        _log.warning(
            "elastic: the job goes on from commit %d, which %s keeps; %d commit%s after it %s lost",
            kept.n_commits,
            self.path,
            n_lost,
            "" if n_lost == 1 else "s",
            "is" if n_lost == 1 else "are",
        )
