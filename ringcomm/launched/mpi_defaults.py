"""MPI's settings that ringcomm puts into the environment before MPI starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Final

from ringcomm.launched.ancestors import launchers

# Measured with Open MPI 5.0.11: coll/han returns wrong sums across hosts after a rank is killed
# (open-mpi/ompi#11794); a single TCP connection per pair is half duplex (11 against 22 MB/s on a
# 24 MB/s link); ranks that spin starve each other if there are more ranks than cores.
_ALWAYS = {
    "OMPI_MCA_coll": "^han",
    "OMPI_MCA_btl_tcp_links": "2",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
# Start-up takes 0.2-0.5 s instead of 1.3-2.4 s. Between hosts these would exclude UCX (InfiniBand).
_ON_ONE_HOST = {
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_osc": "^ucx",
}
# btl/tcp listens on all addresses, whatever btl_tcp_if_include says, and reads what connects
# without a deadline, inside MPI's progress: one byte stops the job (Open MPI 5.0.11). So it is
# there only where ranks of one host cannot share memory.
_BTL: Final = "OMPI_MCA_btl"
_BY_MEMORY, _BY_MEMORY_OR_TCP = "self,sm", "self,sm,tcp"
# Without a launcher, no process removes the segment of btl/sm in /dev/shm (Open MPI 5.0.11).
_ALONE = "self"
# Where btl/sm has its segments, and what `ringcomm run` sets for that begins with.
MEMORY: Final = "OMPI_MCA_btl_sm_backing_directory"
MEMORY_OF_RUN: Final = "/dev/shm/ringcomm-mpi-"
_SEGMENT_NBYTES = 16 << 20  # that btl/sm asks for, for each rank (Open MPI 5.0.11)


# The rest matters while MPI starts, or, as `coll`, where MPI's collectives meet a death.
_BETWEEN_HOSTS = ("OMPI_MCA_coll=", "OMPI_MCA_btl_tcp_links=")


def missed_settings(settings: Iterable[str], *, is_open_mpi: bool, n_hosts: int) -> list[str]:
    """Return those of set_mpi_defaults() that the job lacks, if MPI had started before them."""
    if not is_open_mpi or n_hosts == 1:
        return []
    return [each for each in settings if each.startswith(_BETWEEN_HOSTS)]


def share_memory(n_ranks: int) -> bool:
    """Return True if this rank has its launcher's /dev/shm, in which n_ranks segments have room.

    Ranks in containers of their own may have another, or may not see the launcher. All ranks of a
    host get the same answer, unless only some of them are in a container.
    """
    launcher = next(launchers(), None)
    if launcher is None:
        return False
    try:
        mine, theirs = os.stat("/dev/shm"), os.stat(f"/proc/{launcher}/root/dev/shm")
        system = os.statvfs("/dev/shm")
    except OSError:
        return False
    has_room = system.f_blocks * system.f_frsize >= n_ranks * _SEGMENT_NBYTES
    return has_room and (mine.st_dev, mine.st_ino) == (theirs.st_dev, theirs.st_ino)


def set_mpi_defaults(
    environ: MutableMapping[str, str] = os.environ,
    share_memory: Callable[[int], bool] = share_memory,
) -> list[str]:
    """Set MPI's start-up settings that the user has not set; return them as NAME=VALUE.

    Args:
        environ: environment to examine and change; by default, that of this process.
        share_memory: says whether so many ranks of this host can share memory.
    """
    wanted = dict(_ALWAYS)
    n_local = environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    if n_local is not None and n_local == environ.get("OMPI_COMM_WORLD_SIZE"):
        wanted |= _ON_ONE_HOST
        if _BTL not in environ:
            shares = share_memory(int(n_local))
            wanted[_BTL] = _BY_MEMORY if shares else _BY_MEMORY_OR_TCP
            if not shares and environ.get(MEMORY, "").startswith(MEMORY_OF_RUN):
                del environ[MEMORY]  # it is not there
    elif not any(name in environ for name in ("PMIX_RANK", "PMI_RANK")):
        wanted |= _ON_ONE_HOST | {_BTL: _ALONE}
    added = {name: value for name, value in wanted.items() if name not in environ}
    environ.update(added)
    return [f"{name}={value}" for name, value in added.items()]


def rank_with_segment(added: Iterable[str], environ: Mapping[str, str] = os.environ) -> int | None:
    """Return this rank among those of its host if they have only btl/sm to reach each other.

    Each has made its file then; elsewhere, MPI may do without.

    Args:
        added: what set_mpi_defaults() has added before MPI started.
        environ: the environment with which MPI started.
    """
    by_memory = f"{_BTL}={_BY_MEMORY}" in added
    ob1 = environ.get("OMPI_MCA_pml") == _ON_ONE_HOST["OMPI_MCA_pml"]
    if not (by_memory and ob1) or environ["OMPI_COMM_WORLD_LOCAL_SIZE"] == "1":
        return None
    return int(environ["OMPI_COMM_WORLD_LOCAL_RANK"])


def lacks_home(environ: Mapping[str, str] = os.environ) -> bool:
    return "HOME" not in environ


def hide_from_children(
    added: Iterable[str], environ: MutableMapping[str, str] = os.environ
) -> None:
    """Take back what a job that this rank starts must not inherit; MPI has started.

    Its ranks would take it for the user's setting, and over hosts they need TCP.
    """
    if any(each.startswith(f"{_BTL}=") for each in added):
        environ.pop(_BTL, None)
    if environ.get(MEMORY, "").startswith(
        MEMORY_OF_RUN
    ):  # which is on this host, until this job ends
        del environ[MEMORY]
