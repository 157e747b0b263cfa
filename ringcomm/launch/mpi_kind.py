"""Recognises an MPI implementation by the version text of its library or its mpirun. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

Family = Literal["openmpi", "mpich"]
FAMILIES: Final[tuple[Family, ...]] = ("openmpi", "mpich")


@dataclass(frozen=True)
class MpiKind:
    """An MPI implementation. Implementations of one family can use each other's launchers."""

    name: str  # "Open MPI"; if it is not recognised, the first line of its version text
    version: str = ""  # "5.0.11"; "" if it is not known
    family: Family | None = None  # None: it is not recognised

    def __str__(self) -> str:
        return f"{self.name} {self.version}".rstrip()


def kind_of(version_text: str) -> MpiKind:
    """Return the kind of a library or of an mpirun.

    Args:
        version_text: output of MPI_Get_library_version() or of `mpirun --version`.
    """
    for pattern, name, family in _KINDS:
        match = re.search(pattern, version_text)
        if match:
            return MpiKind(name, match[1], family)
    first_line = version_text.strip(" \t\r\n\0").partition("\n")[0]
    return MpiKind(" ".join(first_line.split()) or "an MPI without a version text")


_KINDS: Final[tuple[tuple[str, str, Family], ...]] = (
    (r"Open MPI v([^\s,]+)", "Open MPI", "openmpi"),
    (r"\((?:Open MPI|OpenRTE)\) (\S+)", "Open MPI", "openmpi"),
    (r"Intel\(R\) MPI Library .*Version (\S+)", "Intel MPI", "mpich"),
    (r"Intel\(R\) MPI Library (\S+)", "Intel MPI", "mpich"),
    (r"MVAPICH2? Version\s*:\s*(\S+)", "MVAPICH", "mpich"),
    (r"\AMPICH Version:\s*(\S+)", "MPICH", "mpich"),
    (r"HYDRA build details:\s*Version:\s*(\S+)", "MPICH", "mpich"),
)

Fit = Literal["fits", "clashes", "unsure"]


def fit(library: MpiKind, launcher: MpiKind) -> Fit:
    """Return whether `launcher` can start ranks that use `library`.

    If they clash, each process is "rank 0 of 1", without any message.
    """
    if library.family is None or launcher.family is None:
        return "unsure"
    if library.family != launcher.family:
        return "clashes"
    if library.family == "openmpi" and _major(library) != _major(launcher):
        return "unsure"  # they use different versions of PMIx
    return "fits"


def _major(kind: MpiKind) -> str:
    return kind.version.partition(".")[0]
