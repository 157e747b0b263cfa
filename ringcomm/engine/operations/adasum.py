"""Adasum: a sum that does not grow where gradients agree.

Two vectors a and b become (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b: their sum if they are
orthogonal, their mean if they are parallel. Pairs of ranks combine first, then pairs of pairs, ...
Source: Maleki et al. 2021, arXiv:2006.02924.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringcomm._core import DefaultFpEnvironment
from ringcomm.arrays import DTYPES, Flat, any_adapter_for, arrived
from ringcomm.collectives.message_patterns import consecutive
from ringcomm.collectives.operators import ReductionOptions
from ringcomm.collectives.scale_factors import from_bfloat16, to_bfloat16
from ringcomm.engine.core.call import Call
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.plan import Plan
from ringcomm.engine.operations.base import A, GroupedOperation, plan, require_one_kind
from ringcomm.transport.channel import Channel

_Vector = NDArray[Any]  # float32; float64 if one of the arrays has float64


def plan_adasum(
    group: Group,
    name: str | None,
    xs: Sequence[A],
    options: ReductionOptions,
    *,
    in_place: bool = False,
) -> Plan[list[A]]:
    """Plan the Adasum of each array; the results are the same bits on every rank.

    xs are of float16, bfloat16, float32 or float64, with the same shapes and dtypes on every rank.
    `options` has the op SUM; its factors apply before and after. If the number of ranks is no
    power of two, each rank beyond the largest power of two first combines with one below it.

    Raises:
        TypeError: an array does not hold floats.

    Cost: log2(size) exchanges of all of xs, in float32 or float64.
    """
    kind = "adasum_" if in_place else "adasum"
    xs = arrived(xs)
    adapters = [any_adapter_for(x) for x in xs]
    require_one_kind(kind, adapters)
    pairs = list(zip(xs, adapters, strict=True))
    members = tuple((adapter.dtype(x).name, adapter.shape(x)) for x, adapter in pairs)
    for dtype, _ in members:
        if not DTYPES[dtype].is_float:
            raise TypeError(f"Adasum of {dtype} has no meaning: it takes floats")
    if in_place:
        for x, adapter in pairs:
            adapter.require_writable(x)
    place = adapters[0].place if adapters else None
    call = Call(kind, name, options, members=members, place=place)
    return plan(Adasum(group, call, adapters, xs, options, in_place))


class Adasum(GroupedOperation):
    __slots__ = ()

    def on_host(self) -> Plan[Any]:
        """Return the plan; it computes in float32, or in float64 if an array is float64."""
        xs, adapters, options = self.x, self.adapter, self.options
        copies = [adapter.copy(x) for x, adapter in zip(xs, adapters, strict=True)]
        flats = [adapter.flat(each) for each, adapter in zip(copies, adapters, strict=True)]
        wide = np.float64 if any(flat.dtype.name == "float64" for flat in flats) else np.float32
        fused = np.concatenate([np.empty(0, wide), *(_read(flat, wide) for flat in flats)])
        parts = consecutive([flat.count for flat in flats])
        with DefaultFpEnvironment():
            fused *= wide(options.own_prescale)

        async def run(t: Channel) -> list[Any]:
            if t.meeting is not None:
                await t.meet()  # ranks must agree on the size before they send messages
            total = await _combine(fused, parts, t)
            with DefaultFpEnvironment():
                total *= wide(options.postscale)
                for flat, part in zip(flats, parts, strict=True):
                    _write(flat, total[part])
            if not self.in_place:
                return copies
            for x, copy, adapter in zip(xs, copies, adapters, strict=True):
                adapter.assign(x, copy)
            return list(xs)

        return Plan(self.call, sum(flat.bytes.nbytes for flat in flats), run)


async def _combine(mine: _Vector, parts: Sequence[slice], t: Channel) -> _Vector:
    n_paired = 1 << (t.size.bit_length() - 1)  # the largest power of two
    n_beyond = t.size - n_paired
    if t.rank >= n_paired:
        await t.wait(t.isend(mine.view(np.uint8), t.rank - n_paired))
        return await _receive(mine, t.rank - n_paired, t)
    if t.rank < n_beyond:
        mine = combine(mine, await _receive(mine, t.rank + n_paired, t), parts)
    distance = 1
    while distance < n_paired:
        other = t.rank ^ distance
        theirs = np.empty_like(mine)
        await t.wait(t.isend(mine.view(np.uint8), other), t.irecv(theirs.view(np.uint8), other))
        first, second = (mine, theirs) if t.rank < other else (theirs, mine)
        with t.phase("reduce"):
            mine = combine(first, second, parts)
        distance *= 2
    if t.rank < n_beyond:
        await t.wait(t.isend(mine.view(np.uint8), t.rank + n_paired))
    return mine


async def _receive(like: _Vector, source: int, t: Channel) -> _Vector:
    theirs = np.empty_like(like)
    await t.wait(t.irecv(theirs.view(np.uint8), source))
    return theirs


def combine(a: _Vector, b: _Vector, parts: Sequence[slice]) -> _Vector:
    total = np.empty_like(a)
    with DefaultFpEnvironment():
        for part in parts:
            x, y = a[part], b[part]
            u, v = x.astype(np.float64), y.astype(np.float64)
            dot, xx, yy = float(np.dot(u, v)), float(np.dot(u, u)), float(np.dot(v, v))
            total[part] = x * a.dtype.type(_share(dot, xx)) + y * a.dtype.type(_share(dot, yy))
    return total


def _share(dot: float, square: float) -> float:
    return 1.0 if square == 0 else 1 - dot / (2 * square)


def _read(flat: Flat, wide: type) -> _Vector:
    if flat.dtype.name == "bfloat16":
        return from_bfloat16(flat.bytes.view(np.uint16)).astype(wide)
    return flat.bytes.view(flat.dtype.name).astype(wide)


def _write(flat: Flat, values: _Vector) -> None:
    if flat.dtype.name == "bfloat16":
        flat.bytes.view(np.uint16)[:] = to_bfloat16(values.astype(np.float32))
    else:
        with np.errstate(over="ignore"):
            flat.bytes.view(flat.dtype.name)[:] = values
