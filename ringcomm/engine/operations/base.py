"""The base of all operations, and the checks that several of them share."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from ringcomm.arrays import AnyAdapter, Array, Flat
from ringcomm.arrays.host_mirror import MIRROR
from ringcomm.collectives.message_patterns import chunks
from ringcomm.collectives.operators import ReductionOptions
from ringcomm.engine.core.call import Call
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.plan import Plan
from ringcomm.integers import is_integer
from ringcomm.transport.channel import Channel

A = TypeVar("A", bound=Any)


@dataclass(slots=True, eq=False)
class Operation:
    """A collective whose arguments are checked; its arrays are in host memory or on a GPU."""

    group: Group
    call: Call  # on which all ranks must agree
    adapter: Any  # of its arrays: an ArrayAdapter in host memory, a DeviceAdapter on a GPU
    x: Any  # the array, or a list of the arrays
    mirrored: ClassVar[dict[str, Any]] = {}  # fields that on_mirrors() changes

    def on_host(self) -> Plan[Any]:
        """Return the plan for host memory; arrays that may change before it runs are copied now."""
        raise NotImplementedError

    def on_mirrors(self, mirrors: list[Any]) -> Plan[Any]:
        return replace(self, adapter=MIRROR, x=mirrors[0], **self.mirrored).on_host()


@dataclass(slots=True, eq=False)
class GroupedOperation(Operation):
    """A reduction of several arrays; `adapter` is a list with one for each."""

    options: ReductionOptions
    in_place: bool  # the arrays are overwritten by the results

    def on_mirrors(self, mirrors: list[Any]) -> Plan[Any]:
        adapters = [MIRROR] * len(mirrors)
        return replace(self, adapter=adapters, x=mirrors, in_place=True).on_host()


def rank_of(what: str, rank: int, group: Group) -> int:
    index = int_of(what, rank, "a rank, an int")
    if not 0 <= index < group.size:
        raise ValueError(f"{what} is {index}; ranks are 0 to {group.size - 1}")
    return index


def int_of(what: str, number: int, due: str = "an int") -> int:
    if not is_integer(number):
        raise TypeError(f"{what} must be {due}, not {number!r}")
    return operator.index(number)


def require_rows(shape: tuple[int, ...], kind: str) -> None:
    if not shape:
        raise ValueError(f"{kind} needs at least one dimension; use x.reshape(1) for a number")


def rows_call(
    kind: str, name: str | None, x: Array, adapter: AnyAdapter, root: int | None = None
) -> Call:
    shape = adapter.shape(x)
    require_rows(shape, kind)
    dtype = adapter.dtype(x).name
    return Call(kind, name, None, dtype, (None, *shape[1:]), root, place=adapter.place)


def rows_by_rank(shape: tuple[int, ...], group: Group) -> tuple[list[slice], slice]:
    """Return each rank's slice of elements, and this rank's slice of rows."""
    rows = chunks(shape[0], group.size)
    return chunks(shape[0], group.size, math.prod(shape[1:])), rows[group.index]


def contiguous(x: A, adapter: AnyAdapter) -> A:
    copied: A = x if adapter.is_contiguous(x) else adapter.copy(x)
    return copied


def written(x: A, work: A, adapter: AnyAdapter, t: Channel | None = None) -> A:
    """Copy the result from `work` to x unless they are the same array; return x."""
    if work is x:
        adapter.written(x)
    else:
        with contextlib.nullcontext() if t is None else t.phase("copy"):
            adapter.assign(x, work)
    return x


def listed(kind: str, xs: Sequence[A]) -> Sequence[A]:
    if not isinstance(xs, list | tuple):
        raise TypeError(f"{kind} takes a list or tuple of arrays, not {type(xs).__qualname__}")
    return xs


def require_one_kind(kind: str, adapters: Sequence[AnyAdapter]) -> None:
    """Raise TypeError unless all arrays are in host memory, or all of one library on a GPU."""
    for i, each in enumerate(adapters):
        if each is not adapters[0] and (adapters[0].place or each.place):
            here, there = ("on a GPU" if a.place else "in host memory" for a in (adapters[0], each))
            where = "of another library" if here == there else there
            raise TypeError(
                f"{kind}: array 0 is {here}, array {i} is {where}. Pass arrays of one kind."
            )


def memory_of(x: Array, adapter: Any) -> Any:
    return adapter.flat(x) if adapter.place is None else adapter.span(x)


def extent_of(x: Array, adapter: Any) -> tuple[int, int]:
    memory = memory_of(x, adapter)
    if isinstance(memory, Flat):
        return memory.bytes.ctypes.data, memory.bytes.nbytes
    return memory.address, memory.nbytes
