"""The collectives that do not block: each returns a Handle at once.

handle.wait() returns what the blocking form in collectives.py does, or raises what it does; errors
of arguments, too, for the other ranks must learn of them. Many operations may be in flight; a
thread of ringcomm advances them while Python computes. Until an operation is over, an array that
was passed in must not be changed, and one that is overwritten not be read; reductions and
broadcasts that are not in place copy x at once.

A rank may have 16,384 operations pending; the next one raises RingcommError. Wait for handles as
you go: how many are pending at a time differs from rank to rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ringcomm.collectives.op import SUM, Op
from ringcomm.engine.api import collectives
from ringcomm.engine.api.world import engine
from ringcomm.engine.core.execution import Plan
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.handle import Handle
from ringcomm.engine.operations import plans

A = TypeVar("A", bound=Any)
R = TypeVar("R")


def allreduce_async(
    x: A,
    op: Op = SUM,
    *,
    name: str | None = None,
    group: Group | None = None,
    deterministic: bool = False,
) -> Handle[A]:
    """Start allreduce()."""
    return _start("allreduce", name, group, plans.allreduce, x, op, deterministic=deterministic)


def allreduce_async_(
    x: A,
    op: Op = SUM,
    *,
    name: str | None = None,
    group: Group | None = None,
    deterministic: bool = False,
) -> Handle[A]:
    """Start allreduce_()."""
    return _start(
        "allreduce_",
        name,
        group,
        plans.allreduce,
        x,
        op,
        in_place=True,
        deterministic=deterministic,
    )


def reduce_async(
    x: A,
    op: Op = SUM,
    root: int = 0,
    *,
    name: str | None = None,
    group: Group | None = None,
    deterministic: bool = False,
) -> Handle[A | None]:
    """Start reduce()."""
    return _start("reduce", name, group, plans.reduce, x, op, root, deterministic=deterministic)


def reduce_async_(
    x: A,
    op: Op = SUM,
    root: int = 0,
    *,
    name: str | None = None,
    group: Group | None = None,
    deterministic: bool = False,
) -> Handle[A | None]:
    """Start reduce_()."""
    return _start(
        "reduce_",
        name,
        group,
        plans.reduce,
        x,
        op,
        root,
        in_place=True,
        deterministic=deterministic,
    )


def reduce_scatter_async(
    x: A,
    op: Op = SUM,
    *,
    name: str | None = None,
    group: Group | None = None,
    deterministic: bool = False,
) -> Handle[A]:
    """Start reduce_scatter()."""
    return _start(
        "reduce_scatter", name, group, plans.reduce_scatter, x, op, deterministic=deterministic
    )


def reduce_scatter_async_(
    x: A,
    op: Op = SUM,
    *,
    name: str | None = None,
    group: Group | None = None,
    deterministic: bool = False,
) -> Handle[A]:
    """Start reduce_scatter_()."""
    return _start(
        "reduce_scatter_",
        name,
        group,
        plans.reduce_scatter,
        x,
        op,
        in_place=True,
        deterministic=deterministic,
    )


def allgather_async(x: A, *, name: str | None = None, group: Group | None = None) -> Handle[A]:
    """Start allgather()."""
    return _start("allgather", name, group, plans.allgather, x)


def gather_async(
    x: A, root: int = 0, *, name: str | None = None, group: Group | None = None
) -> Handle[A | None]:
    """Start gather()."""
    return _start("gather", name, group, plans.gather, x, root)


def scatter_async(
    x: A | None = None, root: int = 0, *, name: str | None = None, group: Group | None = None
) -> Handle[A]:
    """Start scatter()."""
    return _start("scatter", name, group, plans.scatter, x, root)


def alltoall_async(
    x: A,
    splits: Sequence[int] | None = None,
    return_splits: bool = False,
    *,
    name: str | None = None,
    group: Group | None = None,
) -> Handle[Any]:
    """Start alltoall()."""
    return _start("alltoall", name, group, plans.alltoall, x, splits, return_splits=return_splits)


def broadcast_async(
    x: A, root: int = 0, *, name: str | None = None, group: Group | None = None
) -> Handle[A]:
    """Start broadcast()."""
    return _start("broadcast", name, group, plans.broadcast, x, root)


def broadcast_async_(
    x: A, root: int = 0, *, name: str | None = None, group: Group | None = None
) -> Handle[A]:
    """Start broadcast_()."""
    return _start("broadcast_", name, group, plans.broadcast, x, root, in_place=True)


def barrier_async(*, name: str | None = None, group: Group | None = None) -> Handle[None]:
    """Start barrier()."""
    return _start("barrier", name, group, plans.barrier)


def grouped_allreduce_async(
    xs: Sequence[A],
    op: Op = SUM,
    *,
    name: str | None = None,
    group: Group | None = None,
    deterministic: bool = False,
) -> Handle[list[A]]:
    """Start grouped_allreduce()."""
    return _start(
        "grouped_allreduce",
        name,
        group,
        plans.grouped_allreduce,
        xs,
        op,
        deterministic=deterministic,
    )


def grouped_allreduce_async_(
    xs: Sequence[A],
    op: Op = SUM,
    *,
    name: str | None = None,
    group: Group | None = None,
    deterministic: bool = False,
) -> Handle[list[A]]:
    """Start grouped_allreduce_()."""
    return _start(
        "grouped_allreduce_",
        name,
        group,
        plans.grouped_allreduce,
        xs,
        op,
        in_place=True,
        deterministic=deterministic,
    )


def grouped_allgather_async(
    xs: Sequence[A], *, name: str | None = None, group: Group | None = None
) -> Handle[list[A]]:
    """Start grouped_allgather()."""
    return _start("grouped_allgather", name, group, plans.grouped_allgather, xs)


def grouped_reduce_scatter_async(
    xs: Sequence[A],
    op: Op = SUM,
    *,
    name: str | None = None,
    group: Group | None = None,
    deterministic: bool = False,
) -> Handle[list[A]]:
    """Start grouped_reduce_scatter()."""
    return _start(
        "grouped_reduce_scatter",
        name,
        group,
        plans.grouped_reduce_scatter,
        xs,
        op,
        deterministic=deterministic,
    )


def _start(
    kind: str,
    name: str | None,
    group: Group | None,
    plan: Callable[..., Plan[R]],
    *args: Any,
    **options: Any,
) -> Handle[R]:
    return engine().start(kind, name, lambda g: plan(g, name, *args, **options), group)


for _name, _function in list(globals().items()):
    if "_async" in _name and _function.__doc__:  # none under python -OO
        _function.__doc__ += " Return a Handle at once.\n\n    "
        _function.__doc__ += getattr(collectives, _name.replace("_async", "")).__doc__
