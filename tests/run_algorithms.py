"""Every algorithm as perform() carries it out, and one thread that drives several of them."""

import os
import time

import ml_dtypes
import numpy as np

from ringcomm.arrays import Flat, adapter_for
from ringcomm.collectives.algorithms import chain, direct, linear, ring, tree
from ringcomm.collectives.message_patterns import chunks, consecutive
from ringcomm.collectives.operators import AVERAGE, BXOR, MAX, PRODUCT, SUM
from ringcomm.collectives.recording import perform
from ringcomm.transport.channel import Channel
from ringcomm.transport.control_messages import Watch

DEADLINE_S = 20
WIDE = [
    (np.float32, SUM),
    (np.float32, AVERAGE),
    (np.float64, MAX),
    (np.int16, AVERAGE),
    (np.complex64, PRODUCT),
    (np.bool_, SUM),
    (np.uint8, BXOR),
]
HALVES = [(np.float16, AVERAGE), (ml_dtypes.bfloat16, SUM), (ml_dtypes.bfloat16, MAX)]


def channel(transport, tag=0):
    """Return the messages of all ranks of a transport."""
    transport.loop.start_thread()  # nobody parks here
    return Channel(Watch(transport), 1, tuple(range(transport.size)), stream=tag)


def drive(*strands):
    """Advance coroutines in turns until all have returned; return their results."""
    results = {}
    pending = {strand: [] for strand in strands}
    deadline = time.monotonic() + DEADLINE_S
    while pending:
        os.sched_yield()  # ranks may outnumber the cores
        assert time.monotonic() < deadline, f"{len(pending)} of {len(strands)} hang"
        for strand, requests in list(pending.items()):
            requests[:] = [request for request in requests if not request.test()]
            if requests:
                continue
            try:
                requests[:] = strand.send(None)
            except StopIteration as stop:
                results[strand] = stop.value
                del pending[strand]
    return [results[strand] for strand in strands]


def values(rank, count, dtype):
    """Return random values, other ones for each rank; their sums depend on the order."""
    rng = np.random.default_rng([rank, count])
    if np.dtype(dtype).kind in "biu":
        return rng.integers(0, 2 if dtype is np.bool_ else 100, count).astype(dtype)
    return (rng.standard_normal(count) + 0.5).astype(dtype)


def flat(x):
    return adapter_for(x).flat(x)


def uneven(count, size):
    """Cut range(count) into parts of different lengths, some of them empty."""
    cuts = sorted(count * (r * r % (size + 1)) // (size + 1) for r in range(1, size))
    return [slice(a, b) for a, b in zip([0, *cuts], [*cuts, count], strict=True)]


# --- each takes a Channel, and returns what this rank holds at the end --------------------------
def allreduce(module):
    async def body(t, count, dtype, op):
        x = values(t.rank, count, dtype)
        await perform(module.allreduce_, t, flat(x), op=op)
        return x

    return body


def reduce_scatter(module, cut):
    async def body(t, count, dtype, op):
        x = values(t.rank, count, dtype)
        own = await perform(module.reduce_scatter_, t, flat(x), cut(count, t.size), op=op)
        assert isinstance(own, Flat)
        assert own.count == 0 or np.shares_memory(own.bytes, x)
        return own.bytes.copy()

    return body


async def allgather(t, count, dtype, op):
    x, mine = np.zeros(count, dtype), uneven(count, t.size)[t.rank]
    x[mine] = values(t.rank, mine.stop - mine.start, dtype)
    await perform(ring.allgather_, t, flat(x), uneven(count, t.size))
    return x


async def broadcast(t, count, dtype, op):
    x = values(t.rank, count, dtype)
    await perform(tree.broadcast_, t, flat(x), t.size - 1)
    return x


async def gather(t, count, dtype, op):
    parts, root = chunks(count, t.size), t.size // 2
    mine = values(t.rank, parts[t.rank].stop - parts[t.rank].start, dtype)
    if t.rank != root:
        await perform(linear.gather_, t, None, flat(mine), parts, root)
        return mine
    x = np.zeros(count, dtype)
    x[parts[root]] = mine
    await perform(linear.gather_, t, flat(x), flat(x)[parts[root]], parts, root)
    return x


async def scatter(t, count, dtype, op):
    parts, root = chunks(count, t.size), t.size // 2
    whole = flat(values(root, count, dtype)) if t.rank == root else None
    out = np.zeros(parts[t.rank].stop - parts[t.rank].start, dtype)
    await perform(linear.scatter_, t, whole, flat(out), parts, root)
    return out


async def alltoall(t, count, dtype, op):
    def n_sent(source, dest):
        return (source * 3 + dest * 5 + count) % 7

    sent = [n_sent(t.rank, r) for r in range(t.size)]
    received = [n_sent(r, t.rank) for r in range(t.size)]
    x, out = values(t.rank, sum(sent), dtype), np.zeros(sum(received), dtype)
    await perform(linear.alltoall_, t, flat(x), consecutive(sent), flat(out), consecutive(received))
    return out


def scan(*, is_exclusive):
    async def body(t, count, dtype, op):
        x, out = values(t.rank, count, dtype), np.zeros(count, dtype)
        await chain.scan(flat(x), flat(out), t, op, is_exclusive=is_exclusive)
        return out

    return body


ALGORITHMS = {
    "ring.allreduce_": (allreduce(ring), WIDE),
    "ring.reduce_scatter_": (reduce_scatter(ring, chunks), WIDE),
    "ring.reduce_scatter_ uneven": (reduce_scatter(ring, uneven), WIDE),
    "ring.allgather_": (allgather, [(np.float32, SUM), (np.uint8, SUM)]),
    "direct.allreduce_": (allreduce(direct), WIDE + HALVES),
    "direct.reduce_scatter_": (reduce_scatter(direct, chunks), WIDE + HALVES),
    "tree.broadcast_": (broadcast, [(np.float32, SUM), (np.int16, SUM)]),
    "linear.gather_": (gather, [(np.float64, SUM)]),
    "linear.scatter_": (scatter, [(np.float64, SUM)]),
    "linear.alltoall_": (alltoall, [(np.float32, SUM)]),
    "chain.scan": (scan(is_exclusive=False), [(np.float32, SUM), (ml_dtypes.bfloat16, SUM)]),
    "chain.scan exclusive": (scan(is_exclusive=True), [(np.float64, SUM), (np.float16, MAX)]),
}
CASES = [
    (name, np.dtype(dtype).name, op)
    for name, (_, kinds) in ALGORITHMS.items()
    for dtype, op in kinds
]


def body_of(case, count):
    """Return the coroutine function of a case, which takes a Channel alone."""
    name, dtype, op = case
    body = ALGORITHMS[name][0]
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype)).type
    return lambda t: body(t, count, dtype, op)
