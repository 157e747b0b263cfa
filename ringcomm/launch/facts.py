"""Facts about an installation, which gather.py finds and findings.py judges. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ringcomm.launch.kind import Kind
from ringcomm.nvidia.presence import Stack

# With both set to 1, Open MPI's mpirun runs as root.
ROOT_VARIABLES: Final = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")


@dataclass(frozen=True)
class Library:
    """The MPI library that mpi4py loads."""

    kind: Kind | None  # None: none could be loaded
    path: str = ""  # "" if it is not known
    error: str = ""


@dataclass(frozen=True)
class Launcher:
    """The mpirun beside Python, else the one on PATH."""

    path: str
    kind: Kind | None  # None: it does not run
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """An installation, as check judges it."""

    python: tuple[str, str]  # version and path of this interpreter
    versions: Mapping[str, str]  # by distribution, of those that are installed
    floors: Mapping[str, str]  # by distribution: the lowest version that ringcomm asks for
    mpi: Library
    launcher: Launcher | None  # None: there is no mpirun
    core: str | None  # path of the compiled part; None: it cannot be loaded
    core_error: str = ""
    sources: str = ""  # the folder of ringcomm's sources, if it is imported from there
    origin: str = "ringcomm"  # with which pip installs it again: "-e /home/me/ringcomm"
    guardian: str | None  # path of the guardian program; None: it is not there
    is_guardian_executable: bool
    cores: int  # that this process may use
    is_root: bool
    allows_root: bool  # ROOT_VARIABLES are set
    settings_error: str = ""  # of a RINGCOMM_ variable
    lacks_nccl4py: bool = False  # RINGCOMM_NCCL asks for it
    gpu: Stack | None = field(default_factory=Stack)  # None: the child that looks for it failed
    gpu_error: str = ""
