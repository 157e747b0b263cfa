"""The collectives, each with its contract. Every rank of the group must call the same ones.

Common to all: `x` is a numpy array, a torch tensor on the CPU or a CUDA device, or a cupy array, of
any dtype among float16, bfloat16, float32, float64, int8 to int64, uint8 to uint64, bool, complex64
and complex128, and what comes back is of the same kind. On a GPU a call returns once its work is on
a stream: behind what the caller's stream was given before, and before what it is given after. What
is passed in is left alone, except by the functions whose name ends in `_`. A strided array is
copied. `group` is a rc.Group, None for all ranks; `root` is a rank within it. The operators of
reductions are those of rc.Op, which see.

Operations without a name are matched by their order in each group. A `name` matches those of the
same name, in whatever order each rank starts them (forms whose name ends in `_async` do not block);
it is agreed on at its first use and may be used again once the operation is over.

Raises, all of them: MismatchError (the same on every rank, the engine stays usable; the text says
if anything was sent, which only happens under a name that had been agreed on), PeerFailedError,
CommTimeoutError (after both, the engine is unusable), NotInitializedError; and
TypeError or ValueError for an argument that is wrong in the same way on every rank. A ValueError or
TypeError on this rank alone: an operation of that name is pending here, or the name is no str, or
this rank is not in the group.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

from ringcomm.collectives.op import SUM, Op, ReductionOptions
from ringcomm.engine.api.forms import Request, blocking, in_place, started, with_shortcut
from ringcomm.engine.api.world import engine
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.handle import Handle  # noqa: F401 - in annotations that forms have
from ringcomm.engine.executors.device import note_current_gpu
from ringcomm.engine.executors.node import short_calls_of
from ringcomm.engine.executors.stand_in import plan_stand_in
from ringcomm.engine.operations.allgather import plan_allgather, plan_gather
from ringcomm.engine.operations.allreduce import plan_allreduce
from ringcomm.engine.operations.alltoall import plan_alltoall
from ringcomm.engine.operations.barrier import plan_barrier
from ringcomm.engine.operations.broadcast import plan_broadcast
from ringcomm.engine.operations.grouped import (
    plan_grouped_allgather,
    plan_grouped_allreduce,
    plan_grouped_reduce_scatter,
)
from ringcomm.engine.operations.objects import plan_allgather_object, plan_broadcast_object
from ringcomm.engine.operations.reduce import plan_reduce
from ringcomm.engine.operations.reduce_scatter import plan_reduce_scatter
from ringcomm.engine.operations.scatter import plan_scatter

A = TypeVar("A", bound=Any)


@blocking
def allreduce(
    x: A,
    op: Op = SUM,
    *,
    name: str | None = None,
    group: Group | None = None,
    deterministic: bool = False,
) -> Request[A]:
    """Return the reduction of x over all ranks; the same bits on every rank.

    Args:
        x: any shape, also empty and 0-d; same shape and dtype on every rank.
        deterministic: reduce each element as ((0 + 1) + 2) + ... in rank order: the same bits in
            every run, for any size of buffer.

    Returns:
        A new array of x's shape and dtype.

    Cost: 2 (size - 1) / size of x's bytes sent per rank, after one agreement round.
    """
    options = ReductionOptions(op, deterministic)
    return Request("allreduce", name, group, plan_allreduce, (x, options), borrows=True)


_allreduce_by_plan = in_place(
    allreduce,
    "Replace x by its reduction over all ranks and return it.",
    "x itself; undefined after PeerFailedError, CommTimeoutError or a MismatchError that says so.",
)


@with_shortcut(_allreduce_by_plan)
def allreduce_(
    x: A,
    op: Op = SUM,
    *,
    name: str | None = None,
    group: Group | None = None,
    deterministic: bool = False,
) -> A:
    """Reduce in place, by the short call where that is open."""
    if name is None and deterministic is False:
        which = engine().groups.default if group is None else group
        if isinstance(which, Group):
            short = which.short_calls or short_calls_of(which)
            if short is not None and short.allreduce_(x, op):
                return x
    return _allreduce_by_plan(x, op, name=name, group=group, deterministic=deterministic)


@blocking
def reduce(
    x: A,
    op: Op = SUM,
    root: int = 0,
    *,
    name: str | None = None,
    group: Group | None = None,
    deterministic: bool = False,
) -> Request[A | None]:
    """Return the reduction of x over all ranks on root, None on the others.

    Args:
        x: any shape, also empty and 0-d; same shape and dtype on every rank.

    Returns:
        On root a new array of x's shape and dtype.

    Cost: (size - 1) / size of x's bytes sent by each rank, then 1 / size of them to root.
    """
    options = ReductionOptions(op, deterministic)
    return Request("reduce", name, group, plan_reduce, (x, options, root))


@blocking
def reduce_(
    x: A,
    op: Op = SUM,
    root: int = 0,
    *,
    name: str | None = None,
    group: Group | None = None,
    deterministic: bool = False,
) -> Request[A]:
    """Replace root's x by its reduction over all ranks and return x; the others' is left alone.

    Args:
        x: any shape, also empty and 0-d; same shape and dtype on every rank.
        root: the rank whose x gets it.
    """
    args = (x, ReductionOptions(op, deterministic), root)
    return Request("reduce_", name, group, partial(plan_reduce, in_place=True), args)


@blocking
def reduce_scatter(
    x: A,
    op: Op = SUM,
    *,
    name: str | None = None,
    group: Group | None = None,
    deterministic: bool = False,
) -> Request[A]:
    """Return this rank's rows of the reduction of x over all ranks.

    Args:
        x: at least one dimension; same shape and dtype on every rank.

    Returns:
        A new array: the first dimension n is split, the first n % size ranks get one row more.
    """
    options = ReductionOptions(op, deterministic)
    return Request("reduce_scatter", name, group, plan_reduce_scatter, (x, options), borrows=True)


reduce_scatter_ = in_place(
    reduce_scatter,
    "Return this rank's rows of the reduction as a view of x, which must be contiguous.",
    "A view of x, whose other rows are undefined: the first dimension n is split, the first\n"
    "    n % size ranks get one row more.",
)


@blocking
def allgather(x: A, *, name: str | None = None, group: Group | None = None) -> Request[A]:
    """Return the arrays of all ranks, one after another along the first dimension.

    Args:
        x: at least one dimension; same dtype on every rank, and same shape but for the first
            dimension, which may differ and may be 0.

    Returns:
        A new array, shape (sum of first dimensions, *x.shape[1:]), in rank order.
    """
    return Request("allgather", name, group, plan_allgather, (x,))


@blocking
def gather(
    x: A, root: int = 0, *, name: str | None = None, group: Group | None = None
) -> Request[A | None]:
    """Return what allgather() returns on root, None on the others."""
    return Request("gather", name, group, plan_gather, (x, root))


@blocking
def scatter(
    x: A | None = None, root: int = 0, *, name: str | None = None, group: Group | None = None
) -> Request[A]:
    """Return this rank's rows of root's x.

    Args:
        x: at least one dimension; looked at on root only, None will do elsewhere.
        root: the rank whose rows all get.

    Returns:
        A new array of root's kind and dtype: the first dimension n is split, the first n % size
        ranks get one row more.
    """
    return Request("scatter", name, group, plan_scatter, (x, root))


@blocking
def alltoall(
    x: A,
    splits: Sequence[int] | None = None,
    return_splits: bool = False,
    *,
    name: str | None = None,
    group: Group | None = None,
) -> Request[Any]:
    """Return the rows that every rank has for this one, one after another in rank order.

    Args:
        splits: how many rows of x go to each rank; None: as many to each, which must be possible.
            May differ between ranks.
        return_splits: return (rows, splits), too: how many came from each rank, a list of ints.

    Returns:
        A new array, shape (rows received, *x.shape[1:]).
    """
    return Request("alltoall", name, group, plan_alltoall, (x, splits, return_splits))


@blocking
def broadcast(
    x: A, root: int = 0, *, name: str | None = None, group: Group | None = None
) -> Request[A]:
    """Return root's x on every rank.

    Args:
        x: same shape and dtype on every rank; its values matter on root only.
        root: the rank whose values all get.

    Returns:
        A new array of x's shape and dtype.
    """
    return Request("broadcast", name, group, plan_broadcast, (x, root))


broadcast_ = in_place(broadcast, "Replace x by root's x and return it. On root x is not touched.")


@blocking
def barrier(*, name: str | None = None, group: Group | None = None) -> Request[None]:
    """Return when every rank has called it."""
    return Request("barrier", name, group, plan_barrier)


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


@blocking
def grouped_allreduce(
    xs: Sequence[A],
    op: Op = SUM,
    *,
    name: str | None = None,
    group: Group | None = None,
    deterministic: bool = False,
) -> Request[list[A]]:
    """Return the reductions of several arrays, agreed on at once and fused where dtypes are alike.

    Args:
        name: of the whole call.
        deterministic: as in allreduce(): the bits do not depend on what is fused.

    Returns:
        A new array for each.
    """
    options = ReductionOptions(op, deterministic)
    return Request("grouped_allreduce", name, group, plan_grouped_allreduce, (xs, options))


grouped_allreduce_ = in_place(
    grouped_allreduce, "Replace each of xs by its reduction over all ranks.", "xs, as a list."
)


@blocking
def grouped_allgather(
    xs: Sequence[A], *, name: str | None = None, group: Group | None = None
) -> Request[list[A]]:
    """Return allgather() of each of xs, agreed on at once.

    Args:
        xs: list or tuple; as many on every rank, each as allgather() takes it. May be empty.
    """
    return Request("grouped_allgather", name, group, plan_grouped_allgather, (xs,))


@blocking
def grouped_reduce_scatter(
    xs: Sequence[A],
    op: Op = SUM,
    *,
    name: str | None = None,
    group: Group | None = None,
    deterministic: bool = False,
) -> Request[list[A]]:
    """Return reduce_scatter() of each of xs, agreed on at once."""
    plan, args = plan_grouped_reduce_scatter, (xs, ReductionOptions(op, deterministic))
    return Request("grouped_reduce_scatter", name, group, plan, args)


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
    plan = lambda g: plan_broadcast_object(g, name, obj, root)  # noqa: E731
    data = engine().execute("broadcast_object", name, plan, group)
    return obj if _rank_in(group) == root else pickle.loads(data)


def allgather_object(obj: Any, *, name: str | None = None, group: Group | None = None) -> list[Any]:
    """Return every rank's object, in rank order, pickled on the way; this rank's is `obj` itself.

    Unpickling runs code that the others chose: the ranks of a job must trust each other.
    """
    plan = lambda g: plan_allgather_object(g, name, obj)  # noqa: E731
    packed = engine().execute("allgather_object", name, plan, group)
    mine = _rank_in(group)
    return [obj if r == mine else pickle.loads(each) for r, each in enumerate(packed)]


# The forms that do not block. handle.wait() returns what the blocking form does, or raises what it
# does; errors of arguments, too, for the other ranks must learn of them. Until an operation is
# over, an array that was passed in must not be changed, and one that is overwritten not be read;
# reductions and broadcasts that are not in place copy x at once. A rank may have 16,384 operations
# pending; the next one raises RingcommError.
allreduce_async = started(allreduce)
allreduce_async_ = started(allreduce_)
reduce_async = started(reduce)
reduce_async_ = started(reduce_)
reduce_scatter_async = started(reduce_scatter)
reduce_scatter_async_ = started(reduce_scatter_)
allgather_async = started(allgather)
gather_async = started(gather)
scatter_async = started(scatter)
alltoall_async = started(alltoall)
broadcast_async = started(broadcast)
broadcast_async_ = started(broadcast_)
barrier_async = started(barrier)
grouped_allreduce_async = started(grouped_allreduce)
grouped_allreduce_async_ = started(grouped_allreduce_)
grouped_allgather_async = started(grouped_allgather)
grouped_reduce_scatter_async = started(grouped_reduce_scatter)


def _rank_in(group: Group | None) -> int | None:
    return engine().rank if group is None else group.rank
