"""The rendezvous mpi://, and env:// under mpirun, which get rank, size and store from MPI.

They serve every backend of torch.distributed, gloo and nccl too.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

from ringcomm.engine.api.collectives import barrier, broadcast_object
from ringcomm.engine.api.init_rank_size import begin_anew, engine, init, local_size, rank, size
from ringcomm.engine.core.group import Group
from ringcomm.errors import CommTimeoutError, ConfigError
from ringcomm.launched.child_marks import parent_rank_pid
from ringcomm.launched.launcher import (
    command_for,
    foreign_launcher,
    is_launched_by_mpi,
    launched_rank,
    launched_size,
    missing_of_torch,
    require_mpi_launcher,
    torch_ranks,
)
from ringcomm.torch.distributed.compat import DEFAULT_TIMEOUT, Rendezvous, c10d

_PROBE_S = 2.0

Found = Iterator[tuple[Any, int, int]]


def by_mpi(url: str, timeout: timedelta = DEFAULT_TIMEOUT, **_: Any) -> Found:
    """Yield a TCPStore that rank 0 serves on a free port, this rank, and the number of ranks."""
    wanted = {key: int(values[0]) for key, values in parse_qs(urlparse(url).query).items()}
    given = torch_ranks() | wanted
    start_as_rank(given.get("rank"), given.get("world_size"))
    yield make_store(timeout), rank(), size()
    raise RuntimeError("mpi:// cannot bring ranks together again: start the job anew")


def wrap_env(torchs_own: Rendezvous) -> Rendezvous:
    """Return a handler of env://, which acts as mpi:// under mpirun without torch's variables."""

    def handle(url: str, timeout: timedelta = DEFAULT_TIMEOUT, **more: Any) -> Found:
        given = parse_qs(urlparse(url).query)
        _refuse_ranks_of_others({name: int(values[0]) for name, values in given.items()})
        missing = missing_of_torch(given)
        if missing and is_launched_by_mpi():
            return by_mpi(url, timeout)
        if {"RANK", "WORLD_SIZE"} <= {*missing}:
            raise ConfigError(
                "torch.distributed: nothing has started this process as a rank, and RANK and "
                f"WORLD_SIZE are not set. Start the ranks: {command_for('N')}"
            )
        return torchs_own(url, timeout=timeout, **more)

    return handle


def _refuse_ranks_of_others(given: dict[str, int]) -> None:
    """Raise ConfigError if all of MPI's ranks are numbered by something else, as by SLURM_PROCID.

    Two of them may have one number, of which torch would tell by EADDRINUSE, or not at all. Groups
    of other sizes, of processes that ranks start, and of torchrun have numbers of their own.
    """
    found = torch_ranks() | given
    launched = launched_size()
    if launched is None or not found.keys() >= {"rank", "world_size"}:
        return
    if foreign_launcher() or parent_rank_pid() is not None:
        return
    _, n_ranks = launched
    if found["world_size"] == n_ranks and found["rank"] != launched_rank():
        raise _numbered_differently(found["rank"], n_ranks, launched_rank(), n_ranks)


def _numbered_differently(said: int, said_size: int, rank: int, size: int) -> ConfigError:
    return ConfigError(
        f"torch.distributed says rank {said} of {said_size} (RANK and WORLD_SIZE, or arguments "
        f"of init_process_group), MPI says rank {rank} of {size}. Unset RANK and "
        'WORLD_SIZE, and pass neither rank nor world_size: init_method="mpi://" takes both '
        "from MPI"
    )


def start_as_rank(given_rank: int | None, given_size: int | None) -> None:
    """Make this process a rank of its job; start the job anew after a timeout. Collective.

    After a timeout torch's programs destroy their process groups and make new ones. A rank that
    does not know of the timeout learns of it here: other ranks start anew, so its barrier fails.

    Raises:
        ConfigError: no MPI launcher started the ranks, or torch.distributed and MPI number them
            differently.
        CommTimeoutError: a rank did not come.
        PeerFailedError: a rank died or failed.
    """
    instead = '; or use init_process_group("gloo") with this launcher'
    require_mpi_launcher(given_size or 1, "torch.distributed", or_else=instead)
    init()
    current = engine()
    was_broken = current.state.is_broken
    try:
        barrier()
    except CommTimeoutError:
        gave_up_here = not was_broken and current.job_rank in current.watch.peers.gave_up
        if gave_up_here or not current.state.has_waited_in_vain:
            raise
        begin_anew()
    if given_rank not in (None, rank()) or given_size not in (None, size()):
        said = rank() if given_rank is None else given_rank
        said_size = size() if given_size is None else given_size
        raise _numbered_differently(said, said_size, rank(), size())


def make_store(timeout: timedelta, group: Group | None = None) -> Any:
    """Return a TCPStore that rank 0 of a group serves on a free port. Collective."""
    index, n_ranks = (rank(), size()) if group is None else (group.index, group.size)
    own = _serve_store(n_ranks, timeout) if index == 0 else None
    mine = None if own is None else (_addresses(), own.port)
    hosts, port = broadcast_object(mine, group=group)
    return own or c10d.TCPStore(_reachable(hosts, port), port, n_ranks, False, timeout)


def _serve_store(n_ranks: int, timeout: timedelta) -> Any:
    if local_size() < size():
        return c10d.TCPStore(_addresses()[0], 0, n_ranks, True, timeout, False)
    # By itself torch listens on all addresses, and no other host need reach this store.
    with socket.create_server(("127.0.0.1", 0), backlog=socket.SOMAXCONN) as listener:
        host, port = listener.getsockname()
        return c10d.TCPStore(
            host, port, n_ranks, True, timeout, False, master_listen_fd=listener.detach()
        )


def _addresses() -> list[str]:
    """Return names and addresses of this host for other ranks, the likeliest to work first."""
    if local_size() == size():
        return ["127.0.0.1"]
    name = socket.gethostname()
    found = [name]
    with contextlib.suppress(OSError):
        found += socket.gethostbyname_ex(name)[2]
    with contextlib.suppress(OSError):
        found += [socket.getfqdn(name)]
    return list(dict.fromkeys(each for each in found if not each.startswith("127.")))


def _reachable(hosts: list[str], port: int) -> str:
    for host in hosts:
        with contextlib.suppress(OSError), socket.create_connection((host, port), _PROBE_S):
            return host
    raise ConfigError(
        f"mpi://: rank {rank()} cannot connect to rank 0 at {', '.join(hosts)} (port {port}). "
        "Make the hosts find each other by name, and make firewalls pass TCP between them"
    )
