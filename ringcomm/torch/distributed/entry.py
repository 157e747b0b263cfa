"""Registers the backend with torch.distributed, and makes its process groups."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from ringcomm import discovery
from ringcomm.engine.api.world import init, rank, size
from ringcomm.engine.core.group import Group
from ringcomm.errors import ConfigError
from ringcomm.torch.distributed import compat, rendezvous
from ringcomm.torch.distributed.compat import c10d
from ringcomm.torch.distributed.group.process_group import ProcessGroup
from ringcomm.torch.distributed.launch import begin, require_launcher, require_same_rank

BACKEND = "ringcomm"


class _Here(threading.local):
    parent: Any = None  # of the subgroups that this thread makes


_here = _Here()


def register() -> None:
    """Make the backend "ringcomm" and the init_methods known to torch.distributed; starts no MPI.

    `import ringcomm.torch` does it; entry points do it where torch looks them up.
    """
    discovery.register()
    compat.wrap_rendezvous("env", rendezvous.wrap_env)


def init_process_group(backend: str = BACKEND, **options: Any) -> None:
    """Make torch.distributed's default process group of this job's ranks. Collective.

    Does nothing if there is one already, so that frameworks that make their own can come before or
    after: Accelerate, the Trainer of transformers and Lightning take a group that is there.

    Args:
        backend: "ringcomm", or any that torch has: ranks and store come from MPI for all of them.
        options: of torch.distributed.init_process_group().

    Raises:
        ConfigError: no MPI launcher, or ranks that are not MPI's.
        ValueError: there is a default group of another backend.
    """
    register()
    if not c10d.is_initialized():
        if options.keys().isdisjoint({"init_method", "store"}):
            options["init_method"] = "mpi://"
        c10d.init_process_group(backend, **options)
    elif backend not in c10d.get_backend():
        raise ValueError(
            f"torch.distributed has a default group of {c10d.get_backend()}, and {backend} is "
            "wanted: destroy it first, or call this one before what made it"
        )


def make(options: Any, own_options: Any = None) -> ProcessGroup:
    """Return a process group; called by torch on each of its members."""
    del own_options
    members = list(options.global_ranks_in_group)
    if not members:
        require_launcher(options.group_size)
        begin()
        require_same_rank(options.group_rank, options.group_size, rank(), size())
        members = list(range(size()))
    init()
    if members[options.group_rank] != rank():
        raise ConfigError(
            f"the default process group calls this rank {members[options.group_rank]}, MPI calls "
            f'it {rank()}. Make the default group by init_method="mpi://", too'
        )
    compat.reach_from_operators()
    compat.before_new_group(_require_alike)
    compat.within_new_subgroups(_within)
    compat.on_destroy(_close)
    is_default = options.timeout == compat.DEFAULT_TIMEOUT
    timeout_s = None if is_default else options.timeout.total_seconds()
    return ProcessGroup(options.store, Group(members), timeout_s)


def _close(group: Any) -> None:
    if isinstance(group, ProcessGroup):
        group.shutdown()


@contextlib.contextmanager
def _within(parent: Any) -> Iterator[None]:
    """Return a context in which only this group's ranks compare arguments of dist.new_group()."""
    before, _here.parent = _here.parent, parent
    try:
        yield
    finally:
        _here.parent = before


def _require_alike(ranks: list[int]) -> None:
    """Compare the ranks passed by all ranks of the default group, or of the enclosing one."""
    default = c10d.group.WORLD
    if isinstance(default, ProcessGroup):
        parent = _here.parent
        (parent if isinstance(parent, ProcessGroup) else default).compare_members(ranks)
