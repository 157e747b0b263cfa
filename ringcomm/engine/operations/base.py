"""The base of all operations, and the checks that several of them share."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from ringcomm.arrays import AnyAdapter, Array, Flat
from ringcomm.arrays.mirror import MIRROR
from ringcomm.collectives.op import ReductionOptions
from ringcomm.collectives.schedule import chunks
from ringcomm.engine.core.call import Call
from ringcomm.engine.core.execution import Plan
from ringcomm.engine.core.group import Group
from ringcomm.transport.channel import Channel

A = TypeVar("A", bound=Any)


@dataclass(slots=True, eq=False)
class Operation:
    """A collective whose arguments are checked, in host memory and on a GPU alike."""

    group: Group  # who takes part
    call: Call  # what all ranks must agree on
    adapter: Any  # of its arrays: an ArrayAdapter in on_host(), a DeviceAdapter on a GPU
    x: Any  # its array; a list, if it takes several
    mirrored: ClassVar[dict[str, Any]] = {}  # what is set besides in on_mirrors()

    def on_host(self) -> Plan[Any]:
        """Return how it is carried out in host memory. What it may not read later is copied now."""
        raise NotImplementedError

    def on_mirrors(self, mirrors: list[Any]) -> Plan[Any]:
        """Return how it is carried out on Mirrors of its sources, which are on a GPU."""
        return replace(self, adapter=MIRROR, x=mirrors[0], **self.mirrored).on_host()


@dataclass(slots=True, eq=False)
class GroupedOperation(Operation):
    """A reduction of several arrays; `adapter` is a list, with that of each."""

    options: ReductionOptions  # how they are reduced
    in_place: bool  # they get the results

    def on_mirrors(self, mirrors: list[Any]) -> Plan[Any]:
        """Return how mirrors of the arrays are reduced."""
        adapters = [MIRROR] * len(mirrors)
        return replace(self, adapter=adapters, x=mirrors, in_place=True).on_host()


def root_of(root: int, group: Group) -> int:
    """Return a rank of the group as an int. Raises TypeError or ValueError if it is none."""
    index = int_of("root", root, "a rank, an int")
    if not 0 <= index < group.size:
        raise ValueError(f"root is {index}; ranks are 0 to {group.size - 1}")
    return index


def int_of(what: str, number: int, due: str = "an int") -> int:
    """Return a number as an int. Raises TypeError if it is none."""
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        raise TypeError(f"{what} must be {due}, not {number!r}")
    return operator.index(number)


def require_rows(shape: tuple[int, ...], kind: str) -> None:
    """Raise ValueError for an array without dimensions."""
    if not shape:
        raise ValueError(f"{kind} needs at least one dimension; use x.reshape(1) for a number")


def rows_call(
    kind: str, name: str | None, x: Array, adapter: AnyAdapter, root: int | None = None
) -> Call:
    """Return what ranks must agree on that may have different numbers of rows."""
    shape = adapter.shape(x)
    require_rows(shape, kind)
    dtype = adapter.dtype(x).name
    return Call(kind, name, None, dtype, (None, *shape[1:]), root, place=adapter.place)


def rows_by_rank(shape: tuple[int, ...], group: Group) -> tuple[list[slice], slice]:
    """Return whose which elements are where rows are shared out, and which rows are this rank's."""
    rows = chunks(shape[0], group.size)
    return chunks(shape[0], group.size, math.prod(shape[1:])), rows[group.index]


def contiguous(x: A, adapter: AnyAdapter) -> A:
    """Return x, or a contiguous copy."""
    copied: A = x if adapter.is_contiguous(x) else adapter.copy(x)
    return copied


def written(x: A, work: A, adapter: AnyAdapter, t: Channel | None = None) -> A:
    """Return x once it has the result, which is in `work`; they may be the same."""
    if work is x:
        adapter.written(x)
    else:
        with contextlib.nullcontext() if t is None else t.phase("copy"):
            adapter.assign(x, work)
    return x


def listed(kind: str, xs: Sequence[A]) -> Sequence[A]:
    """Return xs. Raises TypeError unless it is a list or tuple."""
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
    """Return the memory of a contiguous array: a Flat, or a Span of a GPU's."""
    return adapter.flat(x) if adapter.place is None else adapter.span(x)


def extent_of(x: Array, adapter: Any) -> tuple[int, int]:
    """Return (address, nbytes) of a contiguous array."""
    memory = memory_of(x, adapter)
    if isinstance(memory, Flat):
        return memory.bytes.ctypes.data, memory.bytes.nbytes
    return memory.address, memory.nbytes
