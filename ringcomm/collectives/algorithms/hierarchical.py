"""Two dimensions: within each host by memory, between hosts by as many wires' ends as ranks.

Each of the first k ranks of a host gets a k-th of the host's sum, k being the smallest number of
ranks on any host; the k-th ranks of all hosts reduce among themselves; the host's ranks share what
came. A ring over all ranks sends (size - 1) / size of the buffer over each wire and way, this
(hosts - 1) / hosts of it: a fifth less for 3 hosts x 2 ranks, and fewer steps.

Not for 16-bit floats or deterministic sums: the sum of each host would be rounded, or would break
the rank order. They go all pairs at once (direct.py); partial sums in float32 would be twice as
long, which for 2 ranks per host is what direct.py sends.
"""

from __future__ import annotations

from types import ModuleType

from ringcomm.arrays.base import Flat
from ringcomm.collectives import select
from ringcomm.collectives.algorithms import direct, node, segmented
from ringcomm.collectives.layout import columns, host_of
from ringcomm.collectives.op import AVERAGE, SUM, Op
from ringcomm.collectives.recording import live, perform
from ringcomm.collectives.schedule import chunks
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
    """Replace x by its reduction over all ranks; all ranks end up with the same bits.

    Args:
        x: same count and dtype on every rank; not 16-bit floats.
        t: all ranks, in any order, on any number of hosts.
        op: AVERAGE divides each element once, at its one owner.
        within: the algorithm among the ranks of a host; some of its chunks may be empty. By default
            shared memory, or direct.py where there is none.
        across: the algorithm among ranks of different hosts; by default as their number and the
            size of x suggest.

    Raises:
        PeerFailedError: a rank died; x is undefined.
        CommTimeoutError: a rank did not come in time; x is undefined.

    Cost: 2 (hosts - 1) / hosts * nbytes over the wire of each host and way.
    """
    of_place = columns(t.nodes)
    k, n_hosts = len(of_place), len(of_place[0])
    here = host_of(t.rank, t.nodes)
    place = here.index(t.rank)
    parts = chunks(x.count, k) + [slice(x.count, x.count)] * (len(here) - k)
    if across is None:
        across = _ACROSS[select.across(x.bytes.nbytes, n_hosts)]
    partial = SUM if op is AVERAGE else op
    local = t.among(here)  # its pairs and those of `column` are others: no message is mistaken
    if within is None:
        within = direct if local.meeting is None else node
    share = await perform(within.reduce_scatter_, local, x, parts, op=partial)
    if place < k:
        column = t.among(of_place[place])
        pieces = chunks(share.count, column.size)
        own = await perform(across.reduce_scatter_, column, share, pieces, op=partial)
        t.finish(own, op, t.size)
        await perform(across.allgather_, column, share, pieces)
    await perform(within.allgather_, local, x, parts)


_ACROSS: dict[str, ModuleType] = {"direct": direct, "segmented": segmented}
