"""The facts about an installation: gather_facts.py finds them, judge_facts.py judges them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ringcomm.launch.mpi_kind import Family, MpiKind
from ringcomm.nvidia.judge_software import Stack

# If both are set to 1, Open MPI's mpirun runs as root.
ROOT_VARIABLES: Final = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")


@dataclass(frozen=True)
class Library:
    """The MPI library that mpi4py loads."""

    kind: MpiKind | None  # None: none could be loaded
    path: str = ""  # "" if it is not known
    error: str = ""


@dataclass(frozen=True)
class Launcher:
    """The mpirun beside Python, else the one on PATH."""

    path: str
    kind: MpiKind | None  # None: it does not run
    error: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)  # without which it does not run


@dataclass(frozen=True)
class Reading:
    """Whether a process could read the private memory of another one, as ranks of a host do."""

    refused_by: str | None = ""  # the name of an errno; "": it could; None: not known
    error: str = ""  # why it is not known
    ptrace_scope: int | None = None  # what Yama restricts; None: there is no Yama
    is_off: bool = False  # RINGCOMM_READ_MEMORY=0


@dataclass(frozen=True, kw_only=True)
class Facts:
    python: tuple[str, str]  # version and path of this interpreter
    versions: Mapping[str, str]  # installed distribution -> its version
    floors: Mapping[str, str]  # distribution -> the lowest version that ringcomm requires
    mpi: Library
    launcher: Launcher | None  # None: there is no mpirun
    core: str | None  # path of the compiled part; None: it cannot be loaded
    core_error: str = ""
    sources: str = ""  # the source tree from which ringcomm is imported; "": it is installed
    origin: str = "ringcomm"  # pip's argument to install it again: "-e /home/me/ringcomm"
    guardian: str | None  # path of the guardian program; None: it is missing
    is_guardian_executable: bool
    cores: int  # number of cores that this process can use
    is_root: bool
    has_home: bool = True  # HOME is set
    allows_root: bool  # ROOT_VARIABLES are set
    settings_error: str = ""  # what is wrong with a RINGCOMM_ variable; "": nothing
    gpu: Stack | None = field(default_factory=Stack)  # None: the search for GPUs failed
    gpu_error: str = ""
    reading: Reading = field(default_factory=Reading)

    @property
    def launcher_family(self) -> Family | None:
        return self.launcher.kind.family if self.launcher and self.launcher.kind else None

    @property
    def mpirun_variables(self) -> dict[str, str]:
        """The variables without which this mpirun does not run here."""
        is_refused = self.launcher_family == "openmpi" and self.is_root and not self.allows_root
        root = dict.fromkeys(ROOT_VARIABLES, "1") if is_refused else {}
        return {**(self.launcher.variables if self.launcher else {}), **root}
