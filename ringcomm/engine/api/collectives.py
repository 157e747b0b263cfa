"""The collectives, each with its contract. All ranks of a group call the same ones.

Arrays: `x` is a numpy array, a torch tensor on the CPU or a GPU, or a cupy array. Its dtype is
float16, bfloat16, float32, float64, int8 to int64, uint8 to uint64, bool, complex64 or complex128.
The result is an array of the same library. Only functions whose name ends in `_` change their
arguments. Strided arrays are copied.

Numbers: allreduce, reduce, scan, exscan, broadcast and gather also take a bool, int, float or
complex of Python, or a number of numpy. It counts as an array of no dimension, of bool, int64,
float64 or complex128, or of numpy's dtype; for gather, as one row. The others return a number of
the same kind. An int that int64 does not have is a ValueError.

GPUs: a call returns once its work is on a stream. The work runs after the earlier work of the
caller's stream, and before its later work.

Groups: `group` is a rc.Group, or None for all ranks; `root` is an index in the group.

Matching: unnamed operations are matched by their order in each group. Named ones are matched by
their name, so each rank may start them in an order of its own: functions whose name ends in
`_async` do not block. Ranks agree on a name at its first use, and may use it again once the
operation is over.

Errors of all functions:
    MismatchError: the ranks' calls differ. Each rank gets the same error, and the engine stays
        usable. "Nothing was sent" stands in the text, unless ranks had agreed on this name before.
    TypeError, ValueError: an argument is wrong in the same way on all ranks, and all raise this
        error. Or this rank alone raises it: an operation of that name is pending here, the name is
        no str, or this rank is not in the group.
    PeerFailedError, CommTimeoutError: a rank is lost. The engine is unusable.
    NotInitializedError: rc.init() was not called.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, overload

from ringcomm.collectives.operators import SUM, Op, ReductionOptions
from ringcomm.engine.api.blocking_async_in_place import (
    PlannedCall,
    blocking,
    in_place,
    started,
    with_shortcut,
)
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.core.group import BlockingCalls, Group
from ringcomm.engine.core.handle import Handle  # noqa: F401 - used by annotations of the forms
from ringcomm.engine.executors.joined_rank import plan_stand_in
from ringcomm.engine.executors.short_calls import short_calls_of
from ringcomm.engine.operations.allgather_and_gather import (
    members_of,
    plan_allgather,
    plan_gather,
    plan_split,
)
from ringcomm.engine.operations.allreduce import plan_allreduce
from ringcomm.engine.operations.alltoall import plan_alltoall
from ringcomm.engine.operations.barrier import plan_barrier
from ringcomm.engine.operations.base import note_current_gpu
from ringcomm.engine.operations.broadcast import plan_broadcast
from ringcomm.engine.operations.grouped import (
    plan_grouped_allgather,
    plan_grouped_allreduce,
    plan_grouped_reduce_scatter,
)
from ringcomm.engine.operations.objects import (
    plan_allgather_object,
    plan_broadcast_object,
    plan_gather_object,
    plan_scatter_object,
)
from ringcomm.engine.operations.reduce import plan_reduce
from ringcomm.engine.operations.reduce_scatter import plan_reduce_scatter
from ringcomm.engine.operations.scan import plan_exscan, plan_scan
from ringcomm.engine.operations.scatter import plan_scatter

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Number: TypeAlias = bool | int | float | complex | np.generic

A = TypeVar("A", bound=Any)
F = TypeVar("F", bound=Callable[..., Any])


def _short(group: Any) -> BlockingCalls | None:
    if group is None:
        group = engine().groups.default
    elif not isinstance(group, Group):
        return None  # the plan refuses it
    return group.short_calls or short_calls_of(group)


def _shortened_reduction(form: F) -> F:
    """Return a blocking reduction without a root that makes short calls where it can."""
    kind = form.__name__

    @with_shortcut(form)
    def call(
        x: Any,
        op: Op = SUM,
        *,
        name: str | None = None,
        group: Group | None = None,
        **options: Any,
    ) -> Any:
        if not options or _are_default(options):
            calls = _short(group)
            if calls is not None:
                return calls.run(kind, x, op, 0, name)
        return form(x, op, name=name, group=group, **options)

    return call


def _shortened_allreduce_(form: F) -> F:
    """Return what _shortened_reduction() does, which asks for the shortest of all calls first."""

    @with_shortcut(form)
    def call(
        x: Any,
        op: Op = SUM,
        *,
        name: str | None = None,
        group: Group | None = None,
        **options: Any,
    ) -> Any:
        if not options or _are_default(options):
            calls = _short(group)
            if calls is not None:
                if name is None and calls.allreduce_(x, op):
                    return x
                return calls.run("allreduce_", x, op, 0, name)
        return form(x, op, name=name, group=group, **options)

    return call


def _shortened_scan(form: F) -> F:
    kind = form.__name__

    @with_shortcut(form)
    def call(x: Any, op: Op = SUM, *, name: str | None = None, group: Group | None = None) -> Any:
        calls = _short(group)
        if calls is not None:
            return calls.run(kind, x, op, 0, name)
        return form(x, op, name=name, group=group)

    return call


def _shortened_reduction_at_root(form: F) -> F:
    kind = form.__name__

    @with_shortcut(form)
    def call(
        x: Any,
        op: Op = SUM,
        root: int = 0,
        *,
        name: str | None = None,
        group: Group | None = None,
        **options: Any,
    ) -> Any:
        if not options or _are_default(options):
            calls = _short(group)
            if calls is not None:
                return calls.run(kind, x, op, root, name)
        return form(x, op, root, name=name, group=group, **options)

    return call


def _shortened(form: F) -> F:
    kind = form.__name__

    @with_shortcut(form)
    def call(x: Any, *, name: str | None = None, group: Group | None = None) -> Any:
        calls = _short(group)
        if calls is not None:
            return calls.run(kind, x, None, 0, name)
        return form(x, name=name, group=group)

    return call


def _shortened_at_root(form: F) -> F:
    kind = form.__name__

    @with_shortcut(form)
    def call(x: Any, root: int = 0, *, name: str | None = None, group: Group | None = None) -> Any:
        calls = _short(group)
        if calls is not None:
            return calls.run(kind, x, None, root, name)
        return form(x, root, name=name, group=group)

    return call


def _shortened_scatter(form: F) -> F:
    @with_shortcut(form)
    def call(
        x: Any = None, root: int = 0, *, name: str | None = None, group: Group | None = None
    ) -> Any:
        calls = _short(group)
        if calls is not None:
            is_root = calls.is_root(root)
            return calls.run("scatter", x if is_root else None, None, root, name)
        return form(x, root, name=name, group=group)

    return call


def _shortened_alltoall(form: F) -> F:
    @with_shortcut(form)
    def call(
        x: Any,
        splits: Sequence[int] | None = None,
        return_splits: bool = False,
        *,
        name: str | None = None,
        group: Group | None = None,
    ) -> Any:
        if splits is None and return_splits is False:
            calls = _short(group)
            if calls is not None:
                return calls.run("alltoall", x, None, 0, name)
        return form(x, splits, return_splits, name=name, group=group)

    return call


def _shortened_barrier(form: F) -> F:
    @with_shortcut(form)
    def call(*, name: str | None = None, group: Group | None = None) -> Any:
        calls = _short(group)
        if calls is not None:
            return calls.run("barrier", None, None, 0, name)
        return form(name=name, group=group)

    return call


@_shortened_reduction
@blocking
def allreduce(
    x: A,
    op: Op = SUM,
    *,
    name: str | None = None,
    group: Group | None = None,
    deterministic: bool = False,
) -> PlannedCall[A]:
    """Return the reduction of x over all ranks. All ranks get the same bits.

    Args:
        x: array of any shape, also empty and 0-d, or a number; same shape and dtype on every rank.
        deterministic: reduce each element in rank order, ((x0 + x1) + x2) + ..., which gives the
            same bits in every run, for any size of buffer.

    Returns:
        A new array of x's shape and dtype; for a number, a number.

    Cost: 2 (size - 1) / size of x's bytes sent per rank, after one agreement round.
    """
    options = ReductionOptions(op, deterministic)
    return PlannedCall("allreduce", name, group, plan_allreduce, (x, options), borrows=True)


allreduce_ = _shortened_allreduce_(
    in_place(
        allreduce,
        "Replace x by its reduction over all ranks and return it.",
        "x, undefined after PeerFailedError, CommTimeoutError, or a MismatchError whose text says "
        "so.",
    )
)


@_shortened_reduction_at_root
@blocking
def reduce(
    x: A,
    op: Op = SUM,
    root: int = 0,
    *,
    name: str | None = None,
    group: Group | None = None,
    deterministic: bool = False,
) -> PlannedCall[A | None]:
    """Return the reduction of x over all ranks; None on every rank but root.

    Args:
        x: array of any shape, also empty and 0-d, or a number; same shape and dtype on every rank.

    Returns:
        On root a new array of x's shape and dtype; for a number, a number.

    Cost: (size - 1) / size of x's bytes sent by each rank, then 1 / size of them to root.
    """
    options = ReductionOptions(op, deterministic)
    return PlannedCall("reduce", name, group, plan_reduce, (x, options, root))


@_shortened_reduction_at_root
@blocking
def reduce_(
    x: A,
    op: Op = SUM,
    root: int = 0,
    *,
    name: str | None = None,
    group: Group | None = None,
    deterministic: bool = False,
) -> PlannedCall[A]:
    """Replace root's x by its reduction over all ranks and return x. Other ranks keep their x.

    Args:
        x: array of any shape, also empty and 0-d; same shape and dtype on every rank.
        root: the rank whose x gets the result.
    """
    args = (x, ReductionOptions(op, deterministic), root)
    return PlannedCall("reduce_", name, group, partial(plan_reduce, in_place=True), args)


@_shortened_scan
@blocking
def scan(
    x: A, op: Op = SUM, *, name: str | None = None, group: Group | None = None
) -> PlannedCall[A]:
    """Return the reduction of x over the ranks up to this one, this one included.

    The ranks are combined in their order, ((x0 + x1) + x2) + ..., so the bits are the same in every
    run. On the last rank they are those of allreduce() of integers, bool, MIN and MAX, and those of
    allreduce(deterministic=True) of all dtypes.

    Args:
        x: array of any shape, also empty and 0-d, or a number; same shape and dtype on every rank.
        op: rc.SUM, MIN, MAX, PRODUCT, BAND, BOR or BXOR. Sums and products of 16-bit floats are
            computed in float32, and each rank's result is rounded once.

    Returns:
        A new array of x's shape and dtype; for a number, a number.

    Raises:
        ValueError: op is rc.AVERAGE. Divide a sum by the number of ranks instead.

    Cost: in a node the last rank reads the x of all; else each rank sends x's bytes to the next
    one, and the last rank waits for size - 1 messages in a row. Arrays on GPUs go through host
    memory.
    """
    options = ReductionOptions(op)
    return PlannedCall("scan", name, group, plan_scan, (x, options), borrows=True)


@_shortened_scan
@blocking
def exscan(
    x: A, op: Op = SUM, *, name: str | None = None, group: Group | None = None
) -> PlannedCall[A]:
    """Return the reduction of x over the ranks before this one; see scan().

    Args:
        x: array of any shape, also empty and 0-d, or a number; same shape and dtype on every rank.
        op: rc.SUM, MIN, MAX, PRODUCT, BAND, BOR or BXOR.

    Returns:
        A new array of x's shape and dtype; for a number, a number. The first rank has none before
        it, and gets what changes no other value: 0 for SUM, BOR and BXOR, 1 for PRODUCT, all bits
        for BAND, the dtype's largest value for MIN, its smallest for MAX. Of floats these are
        infinity and -infinity, of bool True and False.
    """
    options = ReductionOptions(op)
    return PlannedCall("exscan", name, group, plan_exscan, (x, options), borrows=True)


@_shortened_reduction
@blocking
def reduce_scatter(
    x: A,
    op: Op = SUM,
    *,
    name: str | None = None,
    group: Group | None = None,
    deterministic: bool = False,
) -> PlannedCall[A]:
    """Return this rank's rows of the reduction of x over all ranks.

    Args:
        x: array with at least one dimension; same shape and dtype on every rank.

    Returns:
        A new array. The n rows are split evenly; the first n % size ranks get one row more.
    """
    options = ReductionOptions(op, deterministic)
    return PlannedCall(
        "reduce_scatter", name, group, plan_reduce_scatter, (x, options), borrows=True
    )


reduce_scatter_ = _shortened_reduction(
    in_place(
        reduce_scatter,
        "Return this rank's rows of the reduction as a view of x, which must be contiguous.",
        "A view of x, whose other rows are undefined. The n rows are split evenly; the first\n"
        "    n % size ranks get one row more.",
    )
)


@_shortened
@blocking
def allgather(x: A, *, name: str | None = None, group: Group | None = None) -> PlannedCall[A]:
    """Return the arrays of all ranks, one after another along the first dimension.

    Args:
        x: array with at least one dimension; same dtype on every rank, and same shape except for
            the first dimension, which may differ and may be 0.

    Returns:
        A new array, shape (sum of first dimensions, *x.shape[1:]), in rank order.
    """
    return PlannedCall("allgather", name, group, plan_allgather, (x,))


@overload
def gather(
    x: Number, root: int = 0, *, name: str | None = None, group: Group | None = None
) -> NDArray[Any] | None: ...
@overload
def gather(
    x: A, root: int = 0, *, name: str | None = None, group: Group | None = None
) -> A | None: ...
@_shortened_at_root
@blocking
def gather(
    x: A, root: int = 0, *, name: str | None = None, group: Group | None = None
) -> PlannedCall[A | None]:
    """Return the result of allgather(); None on every rank but root."""
    return PlannedCall("gather", name, group, plan_gather, (x, root))


@_shortened_scatter
@blocking
def scatter(
    x: A | None = None, root: int = 0, *, name: str | None = None, group: Group | None = None
) -> PlannedCall[A]:
    """Return this rank's rows of root's x.

    Args:
        x: array with at least one dimension; used on root only, may be None on other ranks.
        root: the rank whose rows are distributed.

    Returns:
        A new array of root's library and dtype. The n rows are split evenly; the first n % size
        ranks get one row more.
    """
    return PlannedCall("scatter", name, group, plan_scatter, (x, root))


@_shortened_alltoall
@blocking
def alltoall(
    x: A,
    splits: Sequence[int] | None = None,
    return_splits: bool = False,
    *,
    name: str | None = None,
    group: Group | None = None,
) -> PlannedCall[Any]:
    """Return the rows that all ranks send to this rank, one after another in rank order.

    Args:
        splits: number of rows of x for each rank; may differ between ranks. None: x is split
            evenly, and its number of rows must be a multiple of size.
        return_splits: return (rows, number of rows from each rank as a list of ints).

    Returns:
        A new array, shape (rows received, *x.shape[1:]).
    """
    return PlannedCall("alltoall", name, group, plan_alltoall, (x, splits, return_splits))


@_shortened_at_root
@blocking
def broadcast(
    x: A, root: int = 0, *, name: str | None = None, group: Group | None = None
) -> PlannedCall[A]:
    """Return root's x on every rank.

    Args:
        x: array of the same shape and dtype on every rank, or a number of one dtype; its values
            matter on root only.
        root: the rank whose values all ranks get.

    Returns:
        A new array of x's shape and dtype; for a number, a number.
    """
    return PlannedCall("broadcast", name, group, plan_broadcast, (x, root))


broadcast_ = _shortened_at_root(
    in_place(broadcast, "Replace x by root's x and return x. On root x stays as it is.")
)


@_shortened_barrier
@blocking
def barrier(*, name: str | None = None, group: Group | None = None) -> PlannedCall[None]:
    """Return when every rank has called this function."""
    return PlannedCall("barrier", name, group, plan_barrier)


def join() -> int:
    """Take part in the operations of other ranks until all ranks have called join(); blocks.

    For ranks that have fewer batches than others: this rank contributes data that changes no result
    (0 to a SUM, 1 to a PRODUCT, no rows to an allgather ...), to named and unnamed operations of
    all its groups. An AVERAGE is still divided by the number of all ranks.

    Returns:
        The last rank that called join(), the same on all ranks.

    Raises:
        PeerFailedError: a rank left without joining.
        CommTimeoutError: not all ranks have joined, and none did anything for RINGCOMM_TIMEOUT_S.
        RingcommError: the job has parameter servers, which do not join.

    A broadcast or scatter from a rank that has joined raises MismatchError on the others.
    """
    current = engine()
    current.extensions.require_join()
    note_current_gpu(current)  # arrays of the others may be on a GPU
    return current.join(plan_stand_in)


def split(color: int | None, key: int | None = None, *, group: Group | None = None) -> Group | None:
    """Return a new group of the ranks that pass this rank's color; None if that is None.

    Collective over all ranks of `group`; then the ranks of each color make their group as rc.Group
    does, so all of them create their groups in the same order.

    Args:
        color: an int >= 0, or None to be in no group.
        key: an int; the new group numbers its ranks by key, and where keys are equal, as `group`
            does. None: 0.
        group: the ranks that are divided; None: all.

    Raises:
        MismatchError: a rank passed no such color or key, or has called join().
        TypeError, ValueError: all ranks did, for a reason of this kind.
        RingcommError: the ranks of this color can have no more groups; see rc.Group.
    """
    pairs = engine().execute("split", None, lambda g: plan_split(g, None, color, key), group)
    whole = engine().groups.or_default(group)
    mine = int(pairs[whole.index, 0])
    if color is None:
        return None
    return Group.of_job(whole.ranks[member] for member in members_of(mine, pairs))


@blocking
def grouped_allreduce(
    xs: Sequence[A],
    op: Op = SUM,
    *,
    name: str | None = None,
    group: Group | None = None,
    deterministic: bool = False,
) -> PlannedCall[list[A]]:
    """Return several reductions, with one agreement; arrays of one dtype are fused.

    Args:
        name: name of the whole call; None: matched by order.
        deterministic: reduce in rank order; see allreduce(). Fusion does not change the bits.

    Returns:
        A list with a new array for each of xs.
    """
    options = ReductionOptions(op, deterministic)
    return PlannedCall("grouped_allreduce", name, group, plan_grouped_allreduce, (xs, options))


grouped_allreduce_ = in_place(
    grouped_allreduce, "Replace each of xs by its reduction over all ranks.", "xs, as a list."
)


@blocking
def grouped_allgather(
    xs: Sequence[A], *, name: str | None = None, group: Group | None = None
) -> PlannedCall[list[A]]:
    """Return allgather() of each of xs, with one agreement.

    Args:
        xs: list or tuple of equally many arrays on every rank; may be empty. See allgather().
    """
    return PlannedCall("grouped_allgather", name, group, plan_grouped_allgather, (xs,))


@blocking
def grouped_reduce_scatter(
    xs: Sequence[A],
    op: Op = SUM,
    *,
    name: str | None = None,
    group: Group | None = None,
    deterministic: bool = False,
) -> PlannedCall[list[A]]:
    """Return reduce_scatter() of each of xs, with one agreement."""
    plan, args = plan_grouped_reduce_scatter, (xs, ReductionOptions(op, deterministic))
    return PlannedCall("grouped_reduce_scatter", name, group, plan, args)


def broadcast_object(
    obj: Any = None, root: int = 0, *, name: str | None = None, group: Group | None = None
) -> Any:
    """Return root's object on every rank, pickled on the way; on root it is `obj` itself.

    Args:
        obj: anything that can be pickled; used on root only.
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


def gather_object(
    obj: Any, root: int = 0, *, name: str | None = None, group: Group | None = None
) -> list[Any] | None:
    """Return every rank's object, in rank order, on root; None on every other rank.

    Args:
        obj: anything that can be pickled; root's own is returned as it is.
        root: the rank that gets the objects.
        name: matches the operations of this name on the other ranks; None: matched by order.
        group: the ranks that take part; None: all.

    Unpickling runs code that the others chose: the ranks of a job must trust each other.
    """
    plan = lambda g: plan_gather_object(g, name, obj, root)  # noqa: E731
    packed = engine().execute("gather_object", name, plan, group)
    mine = _rank_in(group)
    if mine != root:
        return None
    return [obj if r == mine else pickle.loads(each) for r, each in enumerate(packed)]


def scatter_object(
    objs: Sequence[Any] | None = None,
    root: int = 0,
    *,
    name: str | None = None,
    group: Group | None = None,
) -> Any:
    """Return this rank's object of root's objs, pickled on the way; on root it is objs[root].

    Args:
        objs: a list or tuple of one object per rank, each of which can be pickled; used on root
            only.
        root: the rank whose objects are distributed.
        name: matches the operations of this name on the other ranks; None: matched by order.
        group: the ranks that take part; None: all.

    Unpickling runs code that root chose: the ranks of a job must trust each other.
    """
    plan = lambda g: plan_scatter_object(g, name, objs, root)  # noqa: E731
    data = engine().execute("scatter_object", name, plan, group)
    if _rank_in(group) != root:
        return pickle.loads(data)
    assert objs is not None
    return objs[root]


# The asynchronous forms. handle.wait() returns or raises the same as the blocking form; it also
# raises errors of arguments, because the other ranks must learn of them. Until the operation is
# over, arguments must not be changed, and those that it overwrites must not be read; reductions and
# broadcasts that are not in place copy x at once. A rank may have 16,384 operations pending; the
# next one raises RingcommError.
allreduce_async = started(allreduce)
allreduce_async_ = started(allreduce_)
reduce_async = started(reduce)
reduce_async_ = started(reduce_)
scan_async = started(scan)
exscan_async = started(exscan)
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


_DEFAULTS = ReductionOptions()._asdict()


def _are_default(options: dict[str, Any]) -> bool:
    """Return True if each option has its default value; the type is checked, too, as 0 == False."""
    return all(value is _DEFAULTS.get(name, options) for name, value in options.items())


def _rank_in(group: Group | None) -> int | None:
    return engine().rank if group is None else group.rank
