"""Registers the backend with torch.distributed, and makes process groups."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from ringcomm import discovery
from ringcomm.engine.api.init_rank_size import init, rank, size
from ringcomm.engine.core.group import Group
from ringcomm.errors import ConfigError
from ringcomm.torch.distributed.compat import (
    DEFAULT_TIMEOUT,
    before_new_group,
    c10d,
    on_destroy,
    reach_from_operators,
    serve_groups,
    within_new_subgroups,
    wrap_rendezvous,
)
from ringcomm.torch.distributed.group.process_group import ProcessGroup
from ringcomm.torch.distributed.rendezvous import start_as_rank, wrap_env

BACKEND = "ringcomm"


class _EntryThread(threading.local):
    parent: Any = None  # group whose subgroups this thread makes


_this_thread = _EntryThread()


def register() -> None:
    """Register the backend "ringcomm" and its init_methods with torch.distributed; start no MPI.

    `import ringcomm.torch` calls it. Without that import, torch finds the backend by entry points.
    """
    discovery.register()
    wrap_rendezvous("env", wrap_env)


def init_process_group(backend: str = BACKEND, **options: Any) -> None:
    """Make torch.distributed's default process group from the ranks of this job. Collective.

    Does nothing if there is a default group. So you can call it before or after Accelerate, the
    Trainer of transformers or Lightning, which also keep an existing default group.

    Args:
        backend: "ringcomm", or any backend of torch: each gets its ranks and its store from MPI.
        options: other arguments of torch.distributed.init_process_group().

    Raises:
        ConfigError: no MPI launcher started the ranks, or torch and MPI number them differently.
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
            "wanted: destroy that group first, or call this function before the group is made"
        )


def make(options: Any, own_options: Any = None) -> ProcessGroup:
    """Return a process group; torch calls this on each member."""
    del own_options
    members = list(options.global_ranks_in_group)
    if not members:
        start_as_rank(options.group_rank, options.group_size)
    init()
    group = _group_of(members, options.group_rank)
    reach_from_operators()
    before_new_group(_require_alike)
    within_new_subgroups(_within)
    on_destroy(_close)
    serve_groups(ProcessGroup)
    is_default = options.timeout == DEFAULT_TIMEOUT
    timeout_s = None if is_default else options.timeout.total_seconds()
    return ProcessGroup(options.store, group, timeout_s)


def _group_of(members: list[int], index: int) -> Group:
    """Return the group of ranks of the default process group; of all ranks if there are none."""
    default = c10d.group.WORLD
    if members and isinstance(default, ProcessGroup):  # reconfigure() may have numbered it anew
        return Group.of_job([default.group.ranks[rank] for rank in members])
    if members and members[index] != rank():
        raise ConfigError(
            f"this rank is rank {members[index]} in the default process group, and "
            f'rank {rank()} in MPI. Make the default group with init_method="mpi://"'
        )
    return Group(members or range(size()))


def _close(group: Any) -> None:
    if isinstance(group, ProcessGroup):
        group.shutdown()


@contextlib.contextmanager
def _within(parent: Any) -> Iterator[None]:
    """Return a context in which dist.new_group() compares arguments among ranks of `parent`."""
    before, _this_thread.parent = _this_thread.parent, parent
    try:
        yield
    finally:
        _this_thread.parent = before


def _require_alike(ranks: list[int]) -> None:
    default = c10d.group.WORLD
    if isinstance(default, ProcessGroup):
        parent = _this_thread.parent
        (parent if isinstance(parent, ProcessGroup) else default).compare_members(ranks)
