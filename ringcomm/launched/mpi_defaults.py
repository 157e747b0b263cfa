"""MPI's settings that ringcomm puts into the environment before MPI starts."""

from __future__ import annotations

import os
from collections.abc import Iterable, MutableMapping

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
    "OMPI_MCA_btl": "self,sm,tcp",
}
# Without a launcher, no process removes the segment of btl/sm in /dev/shm (Open MPI 5.0.11).
_ALONE = _ON_ONE_HOST | {"OMPI_MCA_btl": "self,tcp"}


# The rest matters while MPI starts, or, as `coll`, where MPI's collectives meet a death.
_BETWEEN_HOSTS = ("OMPI_MCA_coll=", "OMPI_MCA_btl_tcp_links=")


def missed_settings(settings: Iterable[str], *, is_open_mpi: bool, n_hosts: int) -> list[str]:
    """Return those of set_mpi_defaults() that the job lacks, if MPI had started before them."""
    if not is_open_mpi or n_hosts == 1:
        return []
    return [each for each in settings if each.startswith(_BETWEEN_HOSTS)]


def set_mpi_defaults(environ: MutableMapping[str, str] = os.environ) -> list[str]:
    """Set MPI's start-up settings that the user has not set; return them as NAME=VALUE."""
    wanted = dict(_ALWAYS)
    n_local = environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    if n_local is not None and n_local == environ.get("OMPI_COMM_WORLD_SIZE"):
        wanted |= _ON_ONE_HOST
    elif not any(name in environ for name in ("PMIX_RANK", "PMI_RANK")):
        wanted |= _ALONE
    added = {name: value for name, value in wanted.items() if name not in environ}
    environ.update(added)
    return [f"{name}={value}" for name, value in added.items()]
