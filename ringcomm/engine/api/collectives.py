"""The collectives, each with its contract. Every rank of the group must call the same ones.

Common to all: `x` is a numpy array, a torch tensor on the CPU or a CUDA device, or a cupy array, of
any dtype among float16, bfloat16, float32, float64, int8 to int64, uint8 to uint64, bool, complex64
and complex128, and what comes back is of the same kind. On a GPU a call returns once its work is on
a stream: behind what the caller's stream was given before, and before what it is given after. What
is passed in is left alone, except by the functions whose name ends in `_`. A strided array is
copied. `group` is a rc.Group, None for all ranks; `root` is a rank within it. The operators of
reductions are those of rc.Op, which see.

Operations without a name are matched by their order in each group. A `name` matches those of the
same name, in whatever order each rank starts them (in async_ops.py are the forms that do not
block); it is agreed on at its first use and may be used again once the operation is over.

Raises, all of them: MismatchError (the same on every rank, the engine works on; the text says if
anything was sent, which only happens under a name that had been agreed on), PeerFailedError,
CommTimeoutError (after both, the engine is unusable), NotInitializedError; and
TypeError or ValueError for an argument that is wrong in the same way on every rank. A ValueError or
TypeError on this rank alone: an operation of that name is pending here, or the name is no text, or
this rank is not in the group.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from ringcomm.collectives.op import SUM, Op
from ringcomm.engine.api.world import engine
from ringcomm.engine.core.execution import Plan
from ringcomm.engine.core.group import Group
from ringcomm.engine.executors.device import note_current_gpu
from ringcomm.engine.executors.node import Quick
from ringcomm.engine.operations import plans
from ringcomm.engine.operations.stand_in import plan_stand_in

A = TypeVar("A", bound=Any)
R = TypeVar("R")


def allreduce(
    x: A,
    op: Op = SUM,
    *,
    name: str | None = None,
    group: Group | None = None,
    deterministic: bool = False,
) -> A:
    """Return the reduction of x over all ranks; the same bits on every rank.

    Args:
        x: any shape, also empty and 0-d; same shape and dtype on every rank.
        op: rc.SUM, AVERAGE, MIN, MAX, PRODUCT, BAND, BOR or BXOR.
        name: matches the operations of this name on the other ranks; None: matched by order.
        group: the ranks that take part; None: all.
        deterministic: reduce each element as ((0 + 1) + 2) + ... in rank order: the same bits in
            every run, for any size of buffer.

    Returns:
        A new array of x's shape and dtype.

    Cost: 2 (size - 1) / size of x's bytes sent per rank, after one agreement round.
    """
    return _run(
        "allreduce",
        name,
        group,
        plans.allreduce,
        x,
        op,
        is_borrowed=True,
        deterministic=deterministic,
    )


def allreduce_(
    x: A,
    op: Op = SUM,
    *,
    name: str | None = None,
    group: Group | None = None,
    deterministic: bool = False,
) -> A:
    """Replace x by its reduction over all ranks and return it; see allreduce().

    After PeerFailedError, CommTimeoutError or a MismatchError that says so, x is undefined.
    """
    if name is None and deterministic is False:
        which = engine().groups.default if group is None else group
        if isinstance(which, Group) and which.team is not None:
            if which.quick is None:
                which.quick = Quick(engine(), which, which.team)
            if which.quick.allreduce_(x, op):
                return x
    return _run(
        "allreduce_",
        name,
        group,
        plans.allreduce,
        x,
        op,
        in_place=True,
        deterministic=deterministic,
    )


def reduce(
    x: A,
    op: Op = SUM,
    root: int = 0,
    *,
    name: str | None = None,
    group: Group | None = None,
    deterministic: bool = False,
) -> A | None:
    """Return the reduction of x over all ranks on root, None on the others; see allreduce().

    Cost: (size - 1) / size of x's bytes sent by each rank, then 1 / size of them to root.
    """
    return _run("reduce", name, group, plans.reduce, x, op, root, deterministic=deterministic)


def reduce_(
    x: A,
    op: Op = SUM,
    root: int = 0,
    *,
    name: str | None = None,
    group: Group | None = None,
    deterministic: bool = False,
) -> A:
    """Replace root's x by its reduction over all ranks and return x; the others' is left alone."""
    result: A | None = _run(
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
    return cast(A, result)


def reduce_scatter(
    x: A,
    op: Op = SUM,
    *,
    name: str | None = None,
    group: Group | None = None,
    deterministic: bool = False,
) -> A:
    """Return this rank's rows of the reduction of x over all ranks.

    Args:
        x: at least one dimension; same shape and dtype on every rank.
        op: rc.SUM, AVERAGE, MIN, MAX, PRODUCT, BAND, BOR or BXOR.
        name: matches the operations of this name on the other ranks; None: matched by order.
        group: the ranks that take part; None: all.
        deterministic: as in allreduce().

    Returns:
        A new array: the first dimension n is split, the first n % size ranks get one row more.
    """
    return _run(
        "reduce_scatter",
        name,
        group,
        plans.reduce_scatter,
        x,
        op,
        is_borrowed=True,
        deterministic=deterministic,
    )


def reduce_scatter_(
    x: A,
    op: Op = SUM,
    *,
    name: str | None = None,
    group: Group | None = None,
    deterministic: bool = False,
) -> A:
    """Return this rank's rows of the reduction as a view of x, which must be contiguous.

    The other rows of x are undefined afterwards. Else as reduce_scatter().
    """
    return _run(
        "reduce_scatter_",
        name,
        group,
        plans.reduce_scatter,
        x,
        op,
        in_place=True,
        deterministic=deterministic,
    )


def allgather(x: A, *, name: str | None = None, group: Group | None = None) -> A:
    """Return the arrays of all ranks, one after another along the first dimension.

    Args:
        x: at least one dimension; same dtype on every rank, and same shape but for the first
            dimension, which may differ and may be 0.
        name: matches the operations of this name on the other ranks; None: matched by order.
        group: the ranks that take part; None: all.

    Returns:
        A new array, shape (sum of first dimensions, *x.shape[1:]), in rank order.
    """
    return _run("allgather", name, group, plans.allgather, x)


def gather(x: A, root: int = 0, *, name: str | None = None, group: Group | None = None) -> A | None:
    """Return what allgather() returns on root, None on the others."""
    return _run("gather", name, group, plans.gather, x, root)


def scatter(
    x: A | None = None, root: int = 0, *, name: str | None = None, group: Group | None = None
) -> A:
    """Return this rank's rows of root's x.

    Args:
        x: at least one dimension; looked at on root only, None will do elsewhere.
        root: the rank whose rows all get.
        name: matches the operations of this name on the other ranks; None: matched by order.
        group: the ranks that take part; None: all.

    Returns:
        A new array of root's kind and dtype: the first dimension n is split, the first n % size
        ranks get one row more.
    """
    return _run("scatter", name, group, plans.scatter, x, root)


def alltoall(
    x: A,
    splits: Sequence[int] | None = None,
    return_splits: bool = False,
    *,
    name: str | None = None,
    group: Group | None = None,
) -> Any:
    """Return the rows that every rank has for this one, one after another in rank order.

    Args:
        x: at least one dimension; same dtype on every rank, and same shape but for the first
            dimension.
        splits: how many rows of x go to each rank; None: as many to each, which must be possible.
            May differ between ranks.
        return_splits: return (rows, splits), too: how many came from each rank, a list of ints.
        name: matches the operations of this name on the other ranks; None: matched by order.
        group: the ranks that take part; None: all.

    Returns:
        A new array, shape (rows received, *x.shape[1:]).
    """
    return _run("alltoall", name, group, plans.alltoall, x, splits, return_splits=return_splits)


def broadcast(x: A, root: int = 0, *, name: str | None = None, group: Group | None = None) -> A:
    """Return root's x on every rank.

    Args:
        x: same shape and dtype on every rank; its values matter on root only.
        root: the rank whose values all get.
        name: matches the operations of this name on the other ranks; None: matched by order.
        group: the ranks that take part; None: all.

    Returns:
        A new array of x's shape and dtype.
    """
    return _run("broadcast", name, group, plans.broadcast, x, root)


def broadcast_(x: A, root: int = 0, *, name: str | None = None, group: Group | None = None) -> A:
    """Replace x by root's x and return it; see broadcast(). On root x is not touched."""
    return _run("broadcast_", name, group, plans.broadcast, x, root, in_place=True)


def barrier(*, name: str | None = None, group: Group | None = None) -> None:
    """Return when every rank has called it."""
    _run("barrier", name, group, plans.barrier)


def join() -> int:
    """Take part in what the other ranks do until all have called this; blocks.

    For ranks that have fewer batches than others: this one goes on to contribute what changes no
    result (0 to a SUM, 1 to a PRODUCT, no rows to an allgather ...), to operations with a name and
    without, and of any group. An AVERAGE is still divided by the number of all ranks.

    Returns:
        The last rank that called it, the same on all.

    Raises:
        PeerFailedError: a rank left without joining.
        CommTimeoutError: nothing has happened for RINGCOMM_TIMEOUT_S, and not all have joined.

    A broadcast or scatter from a rank that has joined is a MismatchError on the others.
    """
    current = engine()
    note_current_gpu(current)  # what it stands in for may be on a GPU
    return current.join(plan_stand_in)


def grouped_allreduce(
    xs: Sequence[A],
    op: Op = SUM,
    *,
    name: str | None = None,
    group: Group | None = None,
    deterministic: bool = False,
) -> list[A]:
    """Return the reductions of several arrays, agreed on at once and fused where dtypes are alike.

    Args:
        xs: list or tuple; as many, of the same shapes and dtypes, on every rank. May be empty.
        op: rc.SUM, AVERAGE, MIN, MAX, PRODUCT, BAND, BOR or BXOR.
        name: of the whole call.
        group: the ranks that take part; None: all.
        deterministic: as in allreduce(): the bits do not depend on what is fused.

    Returns:
        A new array for each.
    """
    return _run(
        "grouped_allreduce",
        name,
        group,
        plans.grouped_allreduce,
        xs,
        op,
        deterministic=deterministic,
    )


def grouped_allreduce_(
    xs: Sequence[A],
    op: Op = SUM,
    *,
    name: str | None = None,
    group: Group | None = None,
    deterministic: bool = False,
) -> list[A]:
    """Replace each of xs by its reduction over all ranks; see grouped_allreduce()."""
    return _run(
        "grouped_allreduce_",
        name,
        group,
        plans.grouped_allreduce,
        xs,
        op,
        in_place=True,
        deterministic=deterministic,
    )


def grouped_allgather(
    xs: Sequence[A], *, name: str | None = None, group: Group | None = None
) -> list[A]:
    """Return allgather() of each of xs, agreed on at once."""
    return _run("grouped_allgather", name, group, plans.grouped_allgather, xs)


def grouped_reduce_scatter(
    xs: Sequence[A],
    op: Op = SUM,
    *,
    name: str | None = None,
    group: Group | None = None,
    deterministic: bool = False,
) -> list[A]:
    """Return reduce_scatter() of each of xs, agreed on at once."""
    return _run(
        "grouped_reduce_scatter",
        name,
        group,
        plans.grouped_reduce_scatter,
        xs,
        op,
        deterministic=deterministic,
    )


def broadcast_object(
    obj: Any = None, root: int = 0, *, name: str | None = None, group: Group | None = None
) -> Any:
    """Return root's object on every rank, pickled on the way; on root it is `obj` itself.

    Args:
        obj: anything that can be pickled; looked at on root only.
        root: the rank whose object all get.
        name: matches the operations of this name on the other ranks; None: matched by order.
        group: the ranks that take part; None: all.

    Unpickling runs code that root chose: the ranks of a job must trust each other.
    """
    data = _run("broadcast_object", name, group, plans.broadcast_object, obj, root)
    return obj if _rank_in(group) == root else pickle.loads(data)


def allgather_object(obj: Any, *, name: str | None = None, group: Group | None = None) -> list[Any]:
    """Return every rank's object, in rank order, pickled on the way; this rank's is `obj` itself.

    Unpickling runs code that the others chose: the ranks of a job must trust each other.
    """
    packed = _run("allgather_object", name, group, plans.allgather_object, obj)
    mine = _rank_in(group)
    return [obj if r == mine else pickle.loads(each) for r, each in enumerate(packed)]


def _run(
    kind: str,
    name: str | None,
    group: Group | None,
    plan: Callable[..., Plan[R]],
    *args: Any,
    **options: Any,
) -> R:
    return engine().execute(kind, name, lambda g: plan(g, name, *args, **options), group)


def _rank_in(group: Group | None) -> int | None:
    return engine().rank if group is None else group.rank
