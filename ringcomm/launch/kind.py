"""The MPI that a library or an mpirun is of, by the text that gives its version. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

Family = Literal["openmpi", "mpich"]
FAMILIES: Final[tuple[Family, ...]] = ("openmpi", "mpich")


@dataclass(frozen=True)
class Kind:
    """An MPI implementation; a family understands its launchers, and has one wheel."""

    name: str  # "Open MPI", or all that it said about itself
    version: str = ""  # "5.0.11"; "" if it is not known
    family: Family | None = None

    def __str__(self) -> str:
        return f"{self.name} {self.version}".rstrip()


def kind_of_library(version_text: str) -> Kind:
    """Return the kind of the library whose MPI_Get_library_version() is `version_text`."""
    return _first_match(_LIBRARIES, version_text)


def kind_of_launcher(version_text: str) -> Kind:
    """Return the kind of the mpirun whose `--version` prints `version_text`."""
    return _first_match(_LAUNCHERS, version_text)


Fit = Literal["fits", "clashes", "unsure"]


def fit(library: Kind, launcher: Kind) -> Fit:
    """Say whether `launcher` can start ranks that use `library`.

    If they clash, each process is "rank 0 of 1" and nobody says a word about it.
    """
    if library.family is None or launcher.family is None:
        return "unsure"
    if library.family != launcher.family:
        return "clashes"
    if library.family == "openmpi" and _major(library) != _major(launcher):
        return "unsure"  # the wire between them (PMIx) is another one
    return "fits"


_LIBRARIES: Final[tuple[tuple[str, str, Family], ...]] = (
    (r"Open MPI v([^\s,]+)", "Open MPI", "openmpi"),
    (r"Intel\(R\) MPI Library (\S+)", "Intel MPI", "mpich"),
    (r"MVAPICH2? Version\s*:\s*(\S+)", "MVAPICH", "mpich"),
    (r"\AMPICH Version:\s*(\S+)", "MPICH", "mpich"),
)
_LAUNCHERS: Final[tuple[tuple[str, str, Family], ...]] = (
    (r"\((?:Open MPI|OpenRTE)\) (\S+)", "Open MPI", "openmpi"),
    (r"Intel\(R\) MPI Library .*Version (\S+)", "Intel MPI", "mpich"),
    (r"HYDRA build details:\s*Version:\s*(\S+)", "MPICH", "mpich"),
)


def _first_match(table: tuple[tuple[str, str, Family], ...], text: str) -> Kind:
    for pattern, name, family in table:
        match = re.search(pattern, text)
        if match:
            return Kind(name, match[1], family)
    first_line = text.strip(" \t\r\n\0").partition("\n")[0]
    return Kind(" ".join(first_line.split()) or "an MPI that does not say which")


def _major(kind: Kind) -> str:
    return kind.version.partition(".")[0]
