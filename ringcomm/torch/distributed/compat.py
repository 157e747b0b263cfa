"""All uses of torch's internals, and all differences between versions of torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist

from ringcomm.arrays import arrived
from ringcomm.errors import ConfigError

# Its stubs leave names out, and what they say differs between versions.
c10d: Any = dist
_internal: Any = torch
F = TypeVar("F", bound=Callable[..., Any])
Rendezvous = Callable[..., Iterator[tuple[Any, int, int]]]

_OLDEST: Final = (2, 6)


def checked_version(version: str, *, has_distributed: bool) -> tuple[int, ...]:
    """Return (2, 13) for "2.13.0+cpu"; ConfigError: one that cannot be served."""
    parts = tuple(int(part) for part in version.split("+", maxsplit=1)[0].split(".")[:2])
    if parts < _OLDEST:
        raise ConfigError(
            f"ringcomm.torch needs torch {'.'.join(map(str, _OLDEST))} or newer, and this is "
            f"{version}: pip install --upgrade torch"
        )
    if not has_distributed:
        raise ConfigError(
            f"ringcomm.torch needs torch.distributed, without which this torch ({version}) was "
            "built: install another build, as pip's are"
        )
    return parts


# First of all: what comes below looks at what others may not have.
VERSION: Final = checked_version(torch.__version__, has_distributed=c10d.is_available())

# The class of backends in C++, where one in Python can derive from it.
CppBackend: Final[Any] = _internal._C._distributed_c10d.Backend if VERSION >= (2, 14) else None
# C++ that is given a Work made in Python keeps the C++ part alone, whose wait() waits for ever.
LOSES_WORKS: Final = VERSION < (2, 7)
DEFAULT_TIMEOUT: Final = c10d.distributed_c10d.default_pg_timeout


# --- frames that torch.compile must not trace -----------------------------------------------------
def untraced(method: F, *, with_callees: bool = True) -> F:
    """Return `method` such that torch.compile runs it, and all that it calls, as they are.

    C++ calls some from within a compiled step: what the reducer of DDP calls would be traced there.
    torch._disable_dynamo() would do, but imports all of torch._dynamo at the first call, 1 to 2 s.
    """
    frames = _internal._C._dynamo.eval_frame
    if not hasattr(frames, "set_code_exec_strategy"):  # before torch 2.7
        return _internal._disable_dynamo(method, with_callees)  # type: ignore[no-any-return]
    action = frames._FrameAction
    skip = frames._FrameExecStrategy(action.SKIP, action.SKIP if with_callees else action.DEFAULT)
    frames.set_code_exec_strategy(method.__code__, skip)
    return method


def traced(method: F) -> F:
    """Return `method` such that profilers see it as "ringcomm:<name>", and torch.compile does not.

    It gets plain tensors: those that a collective is still filling are waited for before.
    record_function costs 13 us, so it is entered while a profiler is on, and only then.
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

    return call  # type: ignore[return-value] # it has the signature of what it wraps


_is_profiling = _internal.autograd._profiler_enabled


# --- finding the backend, and each other ----------------------------------------------------------
def wrap_rendezvous(scheme: str, wrap: Callable[[Rendezvous], Rendezvous]) -> None:
    """Wrap a rendezvous handler of torch; once."""
    from torch.distributed.rendezvous import _rendezvous_handlers as handlers

    if not hasattr(handlers[scheme], "is_wrapped_by_ringcomm"):
        wrapped: Any = wrap(handlers[scheme])
        wrapped.is_wrapped_by_ringcomm = True
        handlers[scheme] = wrapped


# --- groups ---------------------------------------------------------------------------------------
def _wrap(name: str, wrapper: Callable[..., Any]) -> None:
    """Make torch.distributed call wrapper(function, *its arguments) in place of a function.

    Once; nothing is done where this version of torch has none of that name.
    """
    module = c10d.distributed_c10d
    plain = getattr(module, name, None)
    if plain is None or hasattr(plain, "is_wrapped_by_ringcomm"):
        return

    @functools.wraps(plain)
    def wrapped(*args: Any, **named: Any) -> Any:
        return wrapper(plain, *args, **named)

    wrapped.is_wrapped_by_ringcomm = True  # type: ignore[attr-defined]
    for home in (module, c10d):
        if getattr(home, name, None) is plain:
            setattr(home, name, wrapped)


def before_new_group(look: Callable[[list[int]], None]) -> None:
    """Call look(ranks) on all ranks that call new_group(), members or not, before it does a thing.

    torch asks none but those who are members for a group, by what they have passed. But it gives
    the group a name on all ranks, unless members alone make it. Once.
    """

    def named(plain: Any, ranks: Any, use_hashed_name: bool, *more: Any, **others: Any) -> Any:
        if not use_hashed_name and c10d.is_initialized():
            look(list(ranks))
        return plain(ranks, use_hashed_name, *more, **others)

    _wrap("_process_group_name", named)


def within_new_subgroups(within: Callable[[Any], AbstractContextManager[object]]) -> None:
    """Run new_subgroups(group=group), which only its ranks call, in the context within(group)."""

    def made(
        plain: Any, group_size: Any = None, group: Any = None, *more: Any, **named: Any
    ) -> Any:
        with within(group):
            return plain(group_size, group, *more, **named)

    _wrap("new_subgroups", made)


def on_destroy(close: Callable[[Any], None]) -> None:
    """Call close(group) for each group that is destroyed, where torch tells NCCL's alone.

    Torch 2.6 does so; later ones call the group's own shutdown().
    """

    def shut(plain: Any, group: Any) -> None:
        plain(group)
        close(group)

    _wrap("_shutdown_backend", shut)


# --- callbacks of Futures -------------------------------------------------------------------------
Seen = Callable[[Any], None]
_has_wrapped_callbacks = False


def wrap_callbacks(wrap: Callable[[Any, Any], tuple[Any, Seen | None]]) -> None:
    """Give Futures wrap(future, callback) instead of each callback; once.

    What wrap() returns second is shown the Future that then() returns, if it is a function. This
    replaces two methods of torch._C.Future, for all Futures of this process: then() returns objects
    of that very class, so a subclass would not see the second then() of a chain; and
    torch gives them no dictionary, and no way to end in an error but a callback that raises.
    """
    global _has_wrapped_callbacks  # noqa: PLW0603 - for the life of the process
    if _has_wrapped_callbacks:
        return
    _has_wrapped_callbacks = True
    future: Any = _internal._C.Future
    plain_then, plain_add = future.then, future.add_done_callback

    def then(self: Any, callback: Any) -> Any:
        instead, see = wrap(self, callback)
        result = plain_then(self, instead)
        if see is not None:
            see(result)
        return result

    def add_done_callback(self: Any, callback: Any) -> None:
        plain_add(self, wrap(self, callback)[0])

    future.then = untraced(then, with_callees=False)
    future.add_done_callback = untraced(add_done_callback, with_callees=False)


# --- other devices --------------------------------------------------------------------------------
def make_device_backend(
    kind: str, store: Any, rank: int, size: int, timeout: timedelta | None
) -> Any:
    """Return torch's own backend for a type of device, for the same ranks.

    Raises:
        RuntimeError: it has none.
    """
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
            f"ringcomm: a tensor is on {kind}, and this torch has no backend for it "
            f"({name or 'none'} is not there). Use .cpu(), or install a torch that has it."
        )
    timeout = timeout or DEFAULT_TIMEOUT
    if not plugin.extended_api:
        return plugin.creator_fn(own, rank, size, timeout)
    options = c10d.distributed_c10d._DistributedBackendOptions()
    options.store, options.group_rank, options.group_size = own, rank, size
    options.timeout = timeout
    return plugin.creator_fn(options, None)


# --- an operator that cannot reach Python ---------------------------------------------------------
_library: Any = None


def reach_from_operators() -> None:
    """Make _c10d_functional.all_gather_into_tensor_out reach process groups in Python; once.

    Up to torch 2.13 it calls a method in C++ that no subclass in Python can replace, and inductor
    makes it of functional collectives. This does the same, through Python.
    """
    global _library  # noqa: PLW0603 - registered for the life of the process
    if _library is not None or VERSION >= (2, 14):
        return
    _library = torch.library.Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call]

    def all_gather_into_tensor_out(
        input: torch.Tensor, group_size: int, group_name: str, *, out: torch.Tensor
    ) -> torch.Tensor:
        del group_size
        group = c10d.distributed_c10d._resolve_process_group(group_name)
        gather = getattr(group, "all_gather_single", None) or group._allgather_base
        work = gather(out, input.contiguous())
        _internal._C._distributed_c10d._register_work(out, work)
        return out

    _library.impl("all_gather_into_tensor_out", all_gather_into_tensor_out, "CPU")
