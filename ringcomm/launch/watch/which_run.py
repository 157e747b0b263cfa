"""Decides which run, or which live job, a word on the command line means. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

LATEST: Final = "latest"
_MOST_NAMED: Final = 5


class NoSuchRunError(LookupError):
    """A word means no run and no live job; the text says which there are."""


@dataclass(frozen=True)
class KnownRun:
    """A run, or a live job without a folder, as one under plain mpirun.

    Attributes:
        folder: path of the run's folder; "": it has none.
        place: that path, or where the ranks work; for the user, who may stand near it.
        is_here: it is of the folder in which the command is given.
        jobs: names of its live jobs that have a rank on this host.
        is_own: nobody else than this user and root owns the folder.
        began_s: when it began, in seconds since 1970.
    """

    folder: str
    place: str
    is_here: bool
    jobs: tuple[str, ...] = ()
    is_own: bool = True
    began_s: float = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        """What the user may call it. The name of a folder counts where that folder is."""
        name = self.folder.rpartition("/")[2] if self.is_here else ""
        return (name, *self.jobs) if name else self.jobs

    @property
    def title(self) -> str:
        """The job and its place, in a few words."""
        jobs = f"job {', '.join(self.jobs)}" if self.jobs else ""
        place = self.place if self.folder else f"in {self.place}"
        return ", ".join(filter(None, (jobs, place)))


def choose(word: str, known: Sequence[KnownRun]) -> KnownRun:
    """Return the run that a word means.

    Args:
        word: a name, the only beginning of one, "latest" of this folder, or "" for the only live
            job of this folder. A job of another folder is meant by its own name alone.
        known: the runs of this folder, and all live jobs of this user on this host.

    Raises:
        NoSuchRunError: none fits.
        LookupError: several fit.
    """
    here = [each for each in known if each.is_here]
    if word == LATEST:
        own = [each for each in here if each.is_own] or here
        if not own:
            raise NoSuchRunError(f"there is no run in this folder yet{_elsewhere(known)}")
        return max(own, key=lambda each: each.began_s)
    if not word:
        fitting = [each for each in here if each.jobs]
        if not fitting:
            live = any(each.jobs for each in known)
            where = "in this folder" if live else "of this user on this host"
            raise NoSuchRunError(f"there is no live job {where}{_elsewhere(known)}")
    else:
        fitting = [each for each in known if word in each.names] or [
            each for each in known if any(name.startswith(word) for name in each.names)
        ]
        if not fitting:
            raise NoSuchRunError(f"no run and no live job is called {word!r}; {_named(known)}")
    if len(fitting) > 1:
        what = f"begin with {word!r}" if word else "live jobs are in this folder"
        raise LookupError(f"several {what}: {_listed(fitting)}. Name one")
    return fitting[0]


def _elsewhere(known: Sequence[KnownRun]) -> str:
    found = [each for each in known if each.jobs and not each.is_here]
    if not found:
        return ""
    return f"; elsewhere there is {_listed(found)}: name it to mean it"


def _named(known: Sequence[KnownRun]) -> str:
    return f"there is {_listed(known)}" if known else "there is none"


def _listed(runs: Sequence[KnownRun]) -> str:
    """Return the names of runs, the newest first."""
    newest = sorted(runs, key=lambda each: -each.began_s)
    texts = [each.names[0] + _aside(each) for each in newest if each.names][:_MOST_NAMED]
    left = len(runs) - len(texts)
    return ", ".join(texts) + (f" and {left} more (`ringcomm runs` lists them)" if left else "")


def _aside(run: KnownRun) -> str:
    if run.names[0] not in run.jobs:
        return ""
    return f" ({run.place})"
