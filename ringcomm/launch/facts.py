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
    """The MPI library that mpi4py loads.

    Attributes:
        kind: None if none could be loaded.
        path: the file, empty if it is not known.
        error: why none could be loaded.
    """

    kind: Kind | None
    path: str = ""
    error: str = ""


@dataclass(frozen=True)
class Launcher:
    """The mpirun beside Python, else the one on PATH.

    Attributes:
        path: the file.
        kind: None if it does not run.
        error: why it does not run.
    """

    path: str
    kind: Kind | None
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """An installation, as check judges it.

    Attributes:
        python: version and path of this interpreter.
        versions: distribution name -> version, of those that are installed.
        floors: distribution name -> lowest version that ringcomm asks for.
        mpi: the MPI library.
        launcher: None if there is no mpirun.
        core: path of the compiled part, None if it cannot be loaded.
        core_error: why it cannot be loaded.
        sources: the folder of ringcomm's sources, if it is imported from there; else empty.
        origin: the argument with which pip installs it again: "-e /home/me/ringcomm".
        guardian: path of the guardian program, None if it is not there.
        is_guardian_executable: this user may run it.
        cores: number of processor cores that this process may use.
        is_root: this process runs as root.
        allows_root: ROOT_VARIABLES are set.
        settings_error: what is wrong with a RINGCOMM_ variable, empty if nothing is.
        lacks_nccl4py: RINGCOMM_NCCL asks for nccl4py, which is not installed.
        gpu: NVIDIA's driver, cupy and NCCL, None if the child that looks for them failed.
        gpu_error: how it failed.
    """

    python: tuple[str, str]
    versions: Mapping[str, str]
    floors: Mapping[str, str]
    mpi: Library
    launcher: Launcher | None
    core: str | None
    core_error: str = ""
    sources: str = ""
    origin: str = "ringcomm"
    guardian: str | None
    is_guardian_executable: bool
    cores: int
    is_root: bool
    allows_root: bool
    settings_error: str = ""
    lacks_nccl4py: bool = False
    gpu: Stack | None = field(default_factory=Stack)
    gpu_error: str = ""
