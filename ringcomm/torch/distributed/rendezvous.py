"""mpi:// and env:// under mpirun: rank, size and store come from MPI.

They serve every backend of torch.distributed, gloo and nccl too.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

from ringcomm import launched
from ringcomm.engine.api.collectives import broadcast_object
from ringcomm.engine.api.world import local_size, rank, size
from ringcomm.errors import ConfigError
from ringcomm.torch.distributed import compat
from ringcomm.torch.distributed.compat import c10d
from ringcomm.torch.distributed.launch import begin, require_launcher, require_same_rank

_PROBE_S = 2.0

Found = Iterator[tuple[Any, int, int]]


def by_mpi(url: str, timeout: timedelta = compat.DEFAULT_TIMEOUT, **_: Any) -> Found:
    """Yield a TCPStore that rank 0 serves on a free port; MPI tells the others where."""
    _start(url)
    yield _tcp_store(timeout), rank(), size()
    raise RuntimeError("mpi:// cannot bring ranks together again: start the job anew")


def wrap_env(torchs_own: compat.Rendezvous) -> compat.Rendezvous:
    """Return a handler of env:// that asks MPI where mpirun set none of torch's variables."""

    def handle(url: str, timeout: timedelta = compat.DEFAULT_TIMEOUT, **more: Any) -> Found:
        missing = launched.missing_of_torch(parse_qs(urlparse(url).query))
        if not missing or not launched.is_launched_by_mpi():
            return torchs_own(url, timeout=timeout, **more)
        return by_mpi(url, timeout)

    return handle


def _start(url: str) -> None:
    """Start MPI if nobody has, or begin anew; refuse ranks that are not MPI's."""
    wanted = {key: int(values[0]) for key, values in parse_qs(urlparse(url).query).items()}
    given = launched.torch_ranks()
    require_launcher(wanted.get("world_size", given.get("world_size", 1)))
    begin()
    mine = {"rank": rank(), "world_size": size()}
    said = mine | given | wanted
    require_same_rank(said["rank"], said["world_size"], rank(), size())


def _tcp_store(timeout: timedelta) -> Any:
    make: Any = c10d.TCPStore
    own = None
    if rank() == 0:
        own = make(
            "127.0.0.1" if _is_one_host() else socket.gethostname(), 0, size(), True, timeout, False
        )
    hosts, port = broadcast_object(None if own is None else (_addresses(), own.port))
    return own or make(_reachable(hosts, port), port, size(), False, timeout)


def _is_one_host() -> bool:
    return local_size() == size()


def _addresses() -> list[str]:
    """Return names by which other ranks may reach this host, the likeliest first."""
    if _is_one_host():
        return ["127.0.0.1"]
    name = socket.gethostname()
    found = [name]
    with contextlib.suppress(OSError):
        found += socket.gethostbyname_ex(name)[2]
    with contextlib.suppress(OSError):
        found += [socket.getfqdn(name)]
    return list(dict.fromkeys(each for each in found if not each.startswith("127.")))


def _reachable(hosts: list[str], port: int) -> str:
    """Return the first of rank 0's addresses that answers from here."""
    for host in hosts:
        with contextlib.suppress(OSError), socket.create_connection((host, port), _PROBE_S):
            return host
    raise ConfigError(
        f"mpi://: rank {rank()} reaches rank 0 by none of {', '.join(hosts)} (port {port}). Let "
        "the hosts find each other by name, and let a firewall pass TCP between them"
    )
