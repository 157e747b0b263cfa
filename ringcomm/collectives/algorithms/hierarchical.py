"""Reduces within each host through its memory, and between hosts by several ranks of each.

Let k be the smallest number of ranks on any host. Each of the first k ranks of a host gets a k-th
of the host's sum. The first ranks of all hosts reduce their parts among themselves, as do
the second ranks, and so on. Then the ranks of a host share the results. Each host sends
(hosts - 1) / hosts of the buffer in each direction, where a ring over all ranks sends
(size - 1) / size: a fifth less for 3 hosts x 2 ranks, and in fewer steps.

The sum of a host's 16-bit floats is in float32, and so it travels; the owner of each element rounds
the complete sum once, and the results travel in 16 bits. Each host sends 3 (hosts - 1) / hosts of
the buffer, where direct.py sends 2 (hosts - 1) / hosts for each rank of the host.

A reduce-scatter is the first half. So that each rank gets its chunk, the k ranks of a host reduce
copies of the chunks in another order: the first one those of the first ranks of all hosts, and so
on. Of 16-bit floats, each host sends 2 (hosts - 1) / hosts of the buffer, and direct.py half of
that for each rank of the host.

Not for deterministic sums, which are in rank order, nor for averages of integers, which would wrap:
direct.py is for these.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np

from ringcomm.arrays.base import Flat
from ringcomm.arrays.dtypes import DTYPES
from ringcomm.collectives import select_algorithm
from ringcomm.collectives.algorithms import direct, node, segmented
from ringcomm.collectives.message_patterns import chunks, consecutive
from ringcomm.collectives.operators import AVERAGE, SUM, Op
from ringcomm.collectives.ranks_by_host import columns, host_of, hosts, owned
from ringcomm.collectives.recording import live, perform
from ringcomm.transport.channel import Channel


@live
async def allreduce_(
    x: Flat,
    t: Channel,
    op: Op = SUM,
    *,
    within: ModuleType | None = None,
    across: ModuleType | None = None,
) -> None:
    """Replace x by its reduction over all ranks, with the contract of ring.allreduce_.

    Args:
        x, op: array and operator, as for ring.allreduce_.
        t: channel of all ranks, in any order, on any number of hosts.
        within: the algorithm among the ranks of a host; it must accept empty chunks. By default
            node.py if they share memory, else direct.py.
        across: the algorithm between hosts; by default select_algorithm.across() chooses.

    Cost: each host sends and receives 2 (hosts - 1) / hosts * nbytes; of 16-bit floats half as much
    again.
    """
    of_place = columns(t.nodes)
    k = len(of_place)
    here = host_of(t.rank, t.nodes)
    place = here.index(t.rank)
    parts = chunks(x.count, k) + [slice(x.count, x.count)] * (len(here) - k)
    across = across or _across(x, t)
    partial = SUM if op is AVERAGE else op
    local = t.among(here)  # no pair is in `local` and in `column`: messages cannot mix
    within = within or _within(local)
    share = await _reduce_within(x, parts, local, partial, within)
    if place < k:
        column = t.among(of_place[place])
        pieces = chunks(share.count, column.size)
        own = await perform(across.reduce_scatter_, column, share, pieces, op=partial)
        t.finish(own, op, t.size)
        result = x[parts[place]]
        if x.dtype.is_16bit_float:
            t.cast(result[pieces[column.rank]], own)
        await perform(across.allgather_, column, result, pieces)
    await perform(within.allgather_, local, x, parts)


@live
async def reduce_scatter_(
    x: Flat,
    parts: list[slice],
    t: Channel,
    op: Op = SUM,
    *,
    within: ModuleType | None = None,
    across: ModuleType | None = None,
) -> Flat:
    """Return this rank's reduced chunk, a view of x; the rest of x keeps this rank's values.

    The arguments are those of allreduce_(), and the chunk of each rank.
    """
    order = owned(t.nodes)
    here = host_of(t.rank, t.nodes)
    place, k = here.index(t.rank), len(order)
    lengths = [[sum(_length(parts[r]) for r in ranks) for ranks in column] for column in order]
    copied = t.scratch(x, sum(map(sum, lengths)))
    wanted = (parts[r] for column in order for ranks in column for r in ranks)
    at = 0
    for part in wanted:
        t.copy(copied[at : at + _length(part)], x[part])
        at += _length(part)
    local = t.among(here)
    within = within or _within(local)
    partial = SUM if op is AVERAGE else op
    shares = consecutive([*map(sum, lengths), *[0] * (len(here) - k)])
    share = await _reduce_within(copied, shares, local, partial, within)
    own = x[parts[t.rank]]
    if place >= k:  # another rank of this host has it
        await t.wait(t.irecv(own.bytes, here[place % k]))
        return own
    column = t.among(columns(t.nodes)[place])
    pieces = consecutive(lengths[place])
    across = across or _across(x, t)
    total = await perform(across.reduce_scatter_, column, share, pieces, op=partial)
    t.finish(total, op, t.size)
    result = total
    if x.dtype.is_16bit_float:
        result = t.scratch(x, total.count)
        t.cast(result, total)
    ranks = order[place][column.rank]
    each = [result[part] for part in consecutive([_length(parts[r]) for r in ranks])]
    t.copy(own, each[0])  # the first of them is this rank
    await t.wait(*(t.isend(x.bytes, r) for x, r in zip(each[1:], ranks[1:], strict=True)))
    return own


def _length(part: slice) -> int:
    length: int = part.stop - part.start
    return length


def _within(local: Channel) -> ModuleType:
    return direct if local.meeting is None else node


def _across(x: Flat, t: Channel) -> ModuleType:
    return _ACROSS[select_algorithm.across(x.bytes.nbytes, len(hosts(t.nodes)))]


async def _reduce_within(
    x: Flat, parts: list[slice], local: Channel, op: Op, within: ModuleType
) -> Flat:
    """Return this rank's part of its host's reduction: of x, or in float32 of 16-bit floats."""
    if not x.dtype.is_16bit_float:
        return await perform(within.reduce_scatter_, local, x, parts, op=op)
    if within is node:
        return await node.reduce_scatter_to_float32(x, parts, local, op)
    wide = Flat(np.empty(2 * x.bytes.nbytes, np.uint8), DTYPES["float32"])
    local.cast(wide, x)
    return await perform(within.reduce_scatter_, local, wide, parts, op=op)


_ACROSS: dict[str, ModuleType] = {"direct": direct, "segmented": segmented}
