"""The collectives, each with its contract. Every rank must call the same ones in the same order.

Common to all: `x` is a numpy array or a torch CPU tensor, and what comes back is of the same kind.
What is passed in is left alone, except by the functions whose name ends in `_`. A strided array
is copied. `name` is for error messages and for the others to compare; it may be None.

Raises, all of them: MismatchError (the same on every rank, nothing was sent, the engine works on),
PeerFailedError, CommTimeoutError (after both, the engine is unusable), NotInitializedError; and
TypeError or ValueError for an argument that is wrong in the same way on every rank.
"""

from __future__ import annotations

import math
import pickle
from typing import Any, TypeVar

import numpy as np

from ringcomm.arrays import DTYPES, Array, ArrayAdapter, Flat, adapter_for
from ringcomm.collectives import direct, ring, tree
from ringcomm.collectives.op import SUM, Op
from ringcomm.collectives.schedule import chunks, consecutive
from ringcomm.engine.agreement import gather_counts
from ringcomm.engine.call import Call
from ringcomm.engine.engine import Plan
from ringcomm.engine.world import engine
from ringcomm.transport.channel import Channel

A = TypeVar("A", bound=Any)


def allreduce(x: A, op: Op = SUM, *, name: str | None = None) -> A:
    """Return the sum or average of x over all ranks; the same bits on every rank.

    Args:
        x: any shape, also empty and 0-d; same shape and dtype on every rank. float16, bfloat16,
            float32, float64, int32, int64. 16-bit floats are summed in float32 and rounded once.
        op: rc.SUM (integers wrap) or rc.AVERAGE (the sum divided by size; integers truncate
            toward zero).
        name: see above.

    Returns:
        A new array of x's shape and dtype.

    Cost: 2 (size - 1) / size of x's bytes sent per rank, after one agreement round.
    """

    return _allreduce(x, op, name, in_place=False)


def allreduce_(x: A, op: Op = SUM, *, name: str | None = None) -> A:
    """Replace x by its sum or average over all ranks and return it; see allreduce().

    After a PeerFailedError or CommTimeoutError the contents of x are undefined.
    """
    return _allreduce(x, op, name, in_place=True)


def reduce_scatter(x: A, op: Op = SUM, *, name: str | None = None) -> A:
    """Return this rank's rows of the sum or average of x over all ranks.

    Args:
        x: at least one dimension; same shape and dtype on every rank, dtypes as in allreduce().
        op: rc.SUM or rc.AVERAGE.
        name: see above.

    Returns:
        A new array: the first dimension n is split, the first n % size ranks get one row more.
    """

    def plan() -> Plan[A]:
        adapter = adapter_for(x)
        call = _reduction("reduce_scatter", name, op, x, adapter)
        shape = adapter.shape(x)
        _require_rows(shape, "reduce_scatter")
        flat = adapter.flat(adapter.copy(x))

        def run(t: Channel) -> A:
            rows = chunks(shape[0], t.size)
            width = math.prod(shape[1:])
            parts = [slice(part.start * width, part.stop * width) for part in rows]
            algorithm = direct if flat.dtype.is_16bit_float else ring
            own = algorithm.reduce_scatter_(flat, parts, t, op)
            mine = rows[t.rank]
            out: A = adapter.empty(x, (mine.stop - mine.start, *shape[1:]))
            adapter.flat(out).bytes[:] = own.bytes
            return out

        return Plan(call, flat.bytes.nbytes, run)

    return engine().execute("reduce_scatter", name, plan)


def allgather(x: A, *, name: str | None = None) -> A:
    """Return the arrays of all ranks, one after another along the first dimension.

    Args:
        x: at least one dimension; same dtype on every rank, and same shape but for the first
            dimension, which may differ and may be 0. Any dtype.
        name: see above.

    Returns:
        A new array, shape (sum of first dimensions, *x.shape[1:]), in rank order.
    """

    def plan() -> Plan[A]:
        adapter = adapter_for(x)
        shape = adapter.shape(x)
        _require_rows(shape, "allgather")
        call = Call("allgather", name, dtype=str(adapter.dtype(x)), shape=(None, *shape[1:]))
        mine = adapter.flat(_contiguous(x, adapter))

        def run(t: Channel) -> A:
            rows = gather_counts(shape[0], t)
            out: A = adapter.empty(x, (sum(rows), *shape[1:]))
            flat = adapter.flat(out)
            parts = consecutive([n * math.prod(shape[1:]) for n in rows])
            flat[parts[t.rank]].bytes[:] = mine.bytes
            ring.allgather_(flat, parts, t)
            return out

        return Plan(call, mine.bytes.nbytes, run)

    return engine().execute("allgather", name, plan)


def broadcast(x: A, root: int = 0, *, name: str | None = None) -> A:
    """Return root's x on every rank.

    Args:
        x: same shape and dtype on every rank, any dtype; its values matter on root only.
        root: the rank whose values all get.
        name: see above.

    Returns:
        A new array of x's shape and dtype.
    """

    return _broadcast(x, root, name, in_place=False)


def broadcast_(x: A, root: int = 0, *, name: str | None = None) -> A:
    """Replace x by root's x and return it; see broadcast(). On root x is not touched."""
    return _broadcast(x, root, name, in_place=True)


def barrier(*, name: str | None = None) -> None:
    """Return when every rank has called it."""
    engine().execute("barrier", name, lambda: Plan(Call("barrier", name), 0, lambda t: None))


def broadcast_object(obj: Any = None, root: int = 0, *, name: str | None = None) -> Any:
    """Return root's object on every rank, pickled on the way; on root it is `obj` itself.

    Args:
        obj: anything that can be pickled; looked at on root only.
        root: the rank whose object all get.
        name: see above.

    Unpickling runs code that root chose: the ranks of a job must trust each other.
    """

    def plan() -> Plan[Any]:
        _require_root(root)
        is_root = engine().rank == root
        packed = pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL) if is_root else b""

        def run(t: Channel) -> Any:
            nbytes = np.array([len(packed)], np.int64)
            tree.broadcast_(Flat(nbytes.view(np.uint8), DTYPES["int64"]), root, t)
            data = np.frombuffer(packed, np.uint8) if is_root else np.empty(nbytes[0], np.uint8)
            tree.broadcast_(Flat(data, DTYPES["uint8"]), root, t)
            return data

        return Plan(Call("broadcast_object", name, root=int(root)), len(packed), run)

    data = engine().execute("broadcast_object", name, plan)
    return obj if engine().rank == root else pickle.loads(data)


def _allreduce(x: A, op: Op, name: str | None, *, in_place: bool) -> A:
    kind = "allreduce_" if in_place else "allreduce"

    def plan() -> Plan[A]:
        adapter = adapter_for(x)
        call = _reduction(kind, name, op, x, adapter)
        if in_place:
            adapter.require_writable(x)
        work: A = _contiguous(x, adapter) if in_place else adapter.copy(x)
        flat = adapter.flat(work)

        def run(t: Channel) -> A:
            algorithm = direct if flat.dtype.is_16bit_float else ring
            algorithm.allreduce_(flat, t, op)
            return _written(x, work, adapter) if in_place else work

        return Plan(call, flat.bytes.nbytes, run)

    return engine().execute(kind, name, plan)


def _broadcast(x: A, root: int, name: str | None, *, in_place: bool) -> A:
    kind = "broadcast_" if in_place else "broadcast"

    def plan() -> Plan[A]:
        adapter = adapter_for(x)
        _require_root(root)
        dtype = str(adapter.dtype(x))
        call = Call(kind, name, dtype=dtype, shape=adapter.shape(x), root=int(root))
        is_overwritten = in_place and engine().rank != root
        if is_overwritten:
            adapter.require_writable(x)
        work: A = _contiguous(x, adapter) if in_place else adapter.copy(x)
        flat = adapter.flat(work)

        def run(t: Channel) -> A:
            tree.broadcast_(flat, root, t)
            if is_overwritten:
                return _written(x, work, adapter)
            return x if in_place else work

        return Plan(call, flat.bytes.nbytes, run)

    return engine().execute(kind, name, plan)


def _reduction(kind: str, name: str | None, op: Op, x: Array, adapter: ArrayAdapter) -> Call:
    if not isinstance(op, Op):
        raise TypeError(f"op must be ringcomm.SUM or ringcomm.AVERAGE, not {op!r}")
    dtype = adapter.dtype(x)
    op.require(dtype)
    return Call(kind, name, op=str(op), dtype=str(dtype), shape=adapter.shape(x))


def _require_root(root: int) -> None:
    if isinstance(root, bool) or not hasattr(root, "__index__"):
        raise TypeError(f"root must be a rank, an int, not {root!r}")
    if not 0 <= root < engine().size:
        raise ValueError(f"root is {root}; ranks are 0 to {engine().size - 1}")


def _require_rows(shape: tuple[int, ...], kind: str) -> None:
    if not shape:
        raise ValueError(f"{kind} needs at least one dimension; use x.reshape(1) for a number")


def _contiguous(x: A, adapter: ArrayAdapter) -> A:
    copied: A = x if adapter.is_contiguous(x) else adapter.copy(x)
    return copied


def _written(x: A, work: A, adapter: ArrayAdapter) -> A:
    if work is x:
        adapter.written(x)
    else:
        adapter.assign(x, work)
    return x
