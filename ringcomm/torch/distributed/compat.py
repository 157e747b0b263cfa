"""Uses of torch's internals, and differences between versions of torch."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist

from ringcomm.arrays import arrived
from ringcomm.arrays.torch import advice_for
from ringcomm.errors import ConfigError
from ringcomm.torch.untraced import untraced

# Typed as Any: the stubs of torch lack names, and differ between versions.
c10d: Any = dist
_internal: Any = torch
F = TypeVar("F", bound=Callable[..., Any])
Rendezvous = Callable[..., Iterator[tuple[Any, int, int]]]

_OLDEST: Final = (2, 6)


def checked_version(version: str, *, has_distributed: bool) -> tuple[int, ...]:
    """Return (2, 13) for "2.13.0+cpu". Raises ConfigError if ringcomm cannot use this torch."""
    parts = tuple(int(part) for part in version.split("+", maxsplit=1)[0].split(".")[:2])
    if parts < _OLDEST:
        raise ConfigError(
            f"ringcomm.torch needs torch {'.'.join(map(str, _OLDEST))} or newer, and this is "
            f"{version}: pip install --upgrade torch"
        )
    if not has_distributed:
        raise ConfigError(
            f"ringcomm.torch needs torch.distributed, but this torch ({version}) was built without "
            "it: install another build, such as pip's"
        )
    return parts


# Checked first: the lines below use names that an unsuitable torch may lack.
VERSION: Final = checked_version(torch.__version__, has_distributed=c10d.is_available())

# The C++ class of backends, if a Python class can derive from it.
CppBackend: Final[Any] = _internal._C._distributed_c10d.Backend if VERSION >= (2, 14) else None
# True if C++ keeps only the C++ part of a Work made in Python, whose wait() never returns.
LOSES_WORKS: Final = VERSION < (2, 7)
DEFAULT_TIMEOUT: Final = c10d.distributed_c10d.default_pg_timeout


# --- operations that profilers show, and torch.compile does not trace ----------------------------
def traced(method: F) -> F:
    """Return `method` in a form that profilers show as "ringcomm:<name>" and torch.compile skips.

    The result waits until other collectives have filled its arguments, and passes plain tensors on.
    record_function costs 13 us, so it runs only while a profiler is on.
    """
    label = f"ringcomm:{method.__name__}"

    @untraced
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        args = tuple(map(arrived, args))
        kwargs = {name: arrived(value) for name, value in kwargs.items()} if kwargs else kwargs
        if not _is_profiling():
            return method(*args, **kwargs)
        with torch.profiler.record_function(label):
            return method(*args, **kwargs)

    return call  # type: ignore[return-value] # it has the signature of `method`


_is_profiling = _internal.autograd._profiler_enabled


def _once(patch: F) -> F:
    calls = itertools.count()

    @functools.wraps(patch)
    def call(*args: Any) -> None:
        if next(calls) == 0:
            patch(*args)

    return call  # type: ignore[return-value] # it has the signature of `patch`


# --- rendezvous -----------------------------------------------------------------------------------
@_once
def wrap_rendezvous(scheme: str, wrap: Callable[[Rendezvous], Rendezvous]) -> None:
    from torch.distributed.rendezvous import _rendezvous_handlers as handlers

    handlers[scheme] = wrap(handlers[scheme])


# --- groups ---------------------------------------------------------------------------------------
def _wrap(name: str, wrapper: Callable[..., Any]) -> None:
    """Make torch.distributed call wrapper(f, *arguments) in place of its function f called `name`.

    Does nothing if this version of torch has no function of that name.
    """
    plain = getattr(c10d.distributed_c10d, name, None)
    if plain is not None:
        wrapped = functools.wraps(plain)(functools.partial(wrapper, plain))
        for home in (c10d.distributed_c10d, c10d):
            if hasattr(home, name):
                setattr(home, name, wrapped)


@_once
def before_new_group(look: Callable[[list[int]], None]) -> None:
    """Call look(ranks) in new_group(), on members and other ranks, before torch makes the group.

    A backend is called on members alone. But torch names a group on all ranks, so look() is called
    on all, unless use_hashed_name says that only the members make the group.
    """

    def name_group(plain: Any, ranks: Any, use_hashed_name: bool, *more: Any, **others: Any) -> Any:
        if not use_hashed_name and c10d.is_initialized():
            look(list(ranks))
        return plain(ranks, use_hashed_name, *more, **others)

    _wrap("_process_group_name", name_group)


@_once
def within_new_subgroups(within: Callable[[Any], AbstractContextManager[object]]) -> None:
    """Make new_subgroups(group=group), which only that group's ranks call, run in within(group)."""

    def new_subgroups(
        plain: Any, group_size: Any = None, group: Any = None, *more: Any, **named: Any
    ) -> Any:
        with within(group):
            return plain(group_size, group, *more, **named)

    _wrap("new_subgroups", new_subgroups)


@_once
def on_destroy(close: Callable[[Any], None]) -> None:
    """Call close(group) for each group that is destroyed.

    It is for torch 2.6, which shuts down only groups of NCCL. Later versions call shutdown() of
    each group.
    """

    def shutdown_backend(plain: Any, group: Any) -> None:
        plain(group)
        close(group)

    _wrap("_shutdown_backend", shutdown_backend)


@_once
def serve_groups(kind: type[Any]) -> None:
    """Make dist.monitored_barrier and dist.split_group call groups of a Python class.

    By itself torch lets only gloo have the first before 2.14, and groups on GPUs the second before
    2.15. Up to 2.12 it has no function that tells it of a group; there split_group stays as it is.
    """
    internals = c10d.distributed_c10d

    def monitored_barrier(plain: Any, group: Any = None, *more: Any, **named: Any) -> Any:
        own = group or c10d.group.WORLD
        if not isinstance(own, kind):
            return plain(group, *more, **named)
        return own.monitored_barrier(*more, **named)

    def split_group(
        plain: Any, parent_pg: Any = None, split_ranks: Any = None, *more: Any, **named: Any
    ) -> Any:
        parent = parent_pg or c10d.group.WORLD
        if not isinstance(parent, kind):
            return plain(parent_pg, split_ranks, *more, **named)
        return _split(parent, split_ranks, *more, **named)

    if VERSION < (2, 14):
        _wrap("monitored_barrier", monitored_barrier)
    if VERSION < (2, 15) and hasattr(internals, "_register_pg_in_world"):
        _wrap("split_group", split_group)


def _split(
    parent: Any,
    split_ranks: list[list[int]],
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> Any:
    del pg_options
    internals, here = c10d.distributed_c10d, parent.rank()
    mine = next((ranks for ranks in split_ranks if here in ranks), None)
    if mine is None:
        return None
    name = internals._process_group_name(mine, use_hashed_name=True)
    group = parent.split_group(mine, timeout, None, name, group_desc)
    of_job = {local: rank for rank, local in internals._world.pg_group_ranks[parent].items()}
    internals._register_pg_in_world(
        group,
        backend_name=internals._world.pg_map[parent][0],
        store=group.get_group_store(),
        group_name=name,
        backend_config=internals._world.pg_backend_config[parent],
        rank_mapping={of_job[local]: index for index, local in enumerate(mine)},
    )
    return group


def groups_named() -> int:
    """Return how many groups torch has numbered on this rank: their names are these numbers."""
    return int(c10d.distributed_c10d._world.group_count)


def name_groups_from(number: int) -> None:
    c10d.distributed_c10d._world.group_count = number


def renumber_default_group(group: Any, size: int, store: Any) -> None:
    """Tell torch the number of ranks in the default group, and its store, after a change."""
    world = c10d.distributed_c10d._world
    world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    name, _ = world.pg_map[group]
    world.pg_map[group] = name, store


def divide_by_present_size(group: Any) -> None:
    """Make the DistributedDataParallel of a group divide by its size of today.

    DDP's own reduction keeps the size that it has found first. The C++ hook that does the same asks
    the group each time; it refuses a DDP that has a hook already.
    """
    ddp = torch.nn.parallel.DistributedDataParallel
    for each in gc.get_objects():  # torch keeps no list of them
        if issubclass(type(each), ddp) and each.process_group is group and not each._comm_hooks:
            with contextlib.suppress(RuntimeError):
                each._register_builtin_comm_hook(c10d.BuiltinCommHookType.ALLREDUCE)


# --- callbacks of Futures -------------------------------------------------------------------------
@_once
def wrap_callbacks(wrap: Callable[[Any, Any], tuple[Any, Callable[[Any], None] | None]]) -> None:
    """Replace each callback of a Future by the first function of wrap(future, callback).

    The second function, if not None, is called with the Future that then() returns. This replaces
    two methods of torch._C.Future for all Futures of this process. A subclass would not suffice:
    then() of a subclass returns a plain Future, so callbacks of callbacks would be missed.
    """
    future: Any = _internal._C.Future
    plain_then, plain_add = future.then, future.add_done_callback

    def then(self: Any, callback: Any) -> Any:
        replacement, see = wrap(self, callback)
        result = plain_then(self, replacement)
        if see is not None:
            see(result)
        return result

    def add_done_callback(self: Any, callback: Any) -> None:
        plain_add(self, wrap(self, callback)[0])

    future.then = untraced(then, with_callees=False)
    future.add_done_callback = untraced(add_done_callback, with_callees=False)


# --- other devices --------------------------------------------------------------------------------
def backends_of(group: Any) -> dict[str, str]:
    """Return the backend that the user chose for each type of device; {}: no choice is known."""
    config = c10d.distributed_c10d._world.pg_backend_config.get(group, "")
    pairs = (each.partition(":") for each in str(config).split(","))
    return {device: name for device, _, name in pairs if name}


def error_types() -> Any:
    """Return torch's enum of what get_error() of a process group says."""
    return _internal._C._distributed_c10d.ErrorType


def make_device_backend(
    kind: str, store: Any, rank: int, size: int, timeout: timedelta | None
) -> Any:
    """Return torch's own backend for a type of device. Raises RuntimeError if torch has none."""
    name = c10d.Backend.default_device_backend_map.get(kind)
    own = c10d.PrefixStore(f"{kind}/", store)
    if name == c10d.Backend.NCCL and c10d.is_nccl_available():
        options = c10d.ProcessGroupNCCL.Options()
        if timeout is not None:
            options._timeout = timeout
        return c10d.ProcessGroupNCCL(own, rank, size, options)
    plugin = c10d.Backend._plugins.get((name or "").upper())
    if plugin is None or name == "ringcomm":
        raise RuntimeError(
            f"ringcomm: a tensor is on {kind}, and this torch has no backend for {kind} "
            f"({name or 'none'} is not there). {advice_for(kind)}; or install a torch that has one."
        )
    timeout = timeout or DEFAULT_TIMEOUT
    if not plugin.extended_api:
        return plugin.creator_fn(own, rank, size, timeout)
    options = c10d.distributed_c10d._DistributedBackendOptions()
    options.store, options.group_rank, options.group_size = own, rank, size
    options.timeout = timeout
    return plugin.creator_fn(options, None)


# --- an operator that C++ does not pass to Python -------------------------------------------------
_libraries: list[Any] = []  # torch drops the operators of a library that nobody refers to


@_once
def reach_from_operators() -> None:
    """Make _c10d_functional.all_gather_into_tensor_out call process groups in Python.

    inductor compiles functional collectives to this operator. Up to torch 2.13 it calls a C++
    method that a Python class cannot override.
    """
    if VERSION >= (2, 14):
        return
    library: Any = torch.library.Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call]

    def all_gather_into_tensor_out(
        input: torch.Tensor, group_size: int, group_name: str, *, out: torch.Tensor
    ) -> torch.Tensor:
        del group_size
        group = c10d.distributed_c10d._resolve_process_group(group_name)
        gather = getattr(group, "all_gather_single", None) or group._allgather_base
        work = gather(out, input.contiguous())
        _internal._C._distributed_c10d._register_work(out, work)
        return out

    library.impl("all_gather_into_tensor_out", all_gather_into_tensor_out, "CPU")
    _libraries.append(library)
