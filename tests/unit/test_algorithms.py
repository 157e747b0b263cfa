"""Every algorithm against numpy, whatever the layout of the ranks over hosts."""

import ml_dtypes
import numpy as np
import pytest
from harness import at_length, run_ranks
from loopback import LoopbackHub
from sample_values import whole_numbers

import ringcomm as rc
from ringcomm.arrays import DTYPES, Flat
from ringcomm.collectives import message_patterns
from ringcomm.collectives.algorithms import (
    circulant,
    direct,
    hierarchical,
    ring,
    segmented,
    segments_under_way,
)
from ringcomm.collectives.message_patterns import chunks, consecutive
from ringcomm.collectives.ranks_by_host import hosts
from ringcomm.config import Settings
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.core.call import Call
from ringcomm.engine.core.plan import Plan

HALVES = {"ring": ring, "segmented": segmented, "direct": direct, "circulant": circulant}
LAYOUTS = {
    "one rank each": range(8),
    "one host": [0] * 8,
    "even": [0, 0, 2, 2, 4, 4, 6, 6],
    "uneven": [0, 1, 1, 1, 4, 4, 6, 6],
    "interleaved": [0, 1, 2, 0, 1, 2, 0, 1],
}
SIZES = at_length([1, 2, 3, 4, 7, 8], [1, 3, 6])
DTYPES_OF_RINGS = [np.float32, np.float64, np.int32, np.int8, np.complex64]
OPS = [rc.SUM, rc.AVERAGE, rc.MIN, rc.MAX, rc.PRODUCT]
DEFINED = [  # complex numbers have no order
    (dtype, op)
    for dtype in DTYPES_OF_RINGS
    for op in OPS
    if dtype is not np.complex64 or op not in (rc.MIN, rc.MAX)
]


class Hierarchical:
    """The 2-D composition under the signature of the others."""

    def __init__(self, within, across):
        self.within, self.across = within, across

    async def allreduce_(self, x, t, op):
        await hierarchical.allreduce_(x, t, op, within=self.within, across=self.across)


ALLREDUCE = HALVES | {
    f"{a} in {b}": Hierarchical(HALVES[b], HALVES[a])
    for a, b in [("ring", "direct"), ("direct", "ring"), ("segmented", "circulant")]
}


def cut(layout, size):
    """Return the layout of the first `size` ranks, by the lowest rank of each host."""
    first = {}
    return tuple(first.setdefault(node, rank) for rank, node in enumerate(LAYOUTS[layout][:size]))


def values(rank, count, dtype):
    """Return 1 to 5: products of them are exact, too."""
    return (whole_numbers(rank, count, np.int64) % 5 + 1).astype(dtype)


def expected(size, count, dtype, op):
    rows = np.stack([values(r, count, dtype) for r in range(size)])
    if op is rc.AVERAGE:
        mean = rows.sum(0, dtype=dtype).real / rows.real.dtype.type(size)
        return (np.trunc(mean) if np.issubdtype(dtype, np.integer) else mean).astype(dtype)
    reduce = {rc.SUM: np.add, rc.MIN: np.minimum, rc.MAX: np.maximum, rc.PRODUCT: np.multiply}[op]
    return reduce.reduce(rows, dtype=dtype)


def run_on(nodes, body, **options):
    """Run the coroutine body(rank, channel) on a rank per element of nodes."""

    def main(rank):
        plan = Plan(Call("test"), 0, lambda t: body(rank, t))
        return engine().execute("test", None, lambda _: plan)

    hub = LoopbackHub(len(nodes), tuple(nodes), **options)
    return run_ranks(len(nodes), main, hub=hub)


def flat(x):
    return Flat(x.view(np.uint8).reshape(-1), DTYPES[x.dtype.name])


def allreduced(algorithm, nodes, count, dtype=np.float32, op=rc.SUM):
    async def body(rank, t):
        x = values(rank, count, dtype)
        await ALLREDUCE[algorithm].allreduce_(flat(x), t, op)
        return x

    return run_on(nodes, body)


def ragged(count, size):
    """Cut `count` into `size` parts of very different lengths, some of them empty."""
    shares = [count * (r % 3) // (size + r % 2) for r in range(size)]
    return consecutive([*shares[:-1], count - sum(shares[:-1])])


@pytest.fixture
def short_segments(monkeypatch):
    for limit in ("WIRE_SEGMENT_NBYTES", "NODE_SEGMENT_NBYTES"):
        monkeypatch.setattr(message_patterns, limit, 128)


def counts(size):
    return sorted({0, 1, size - 1, size, 1000})


CASES = [(size, count) for size in SIZES for count in counts(size)]


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize(("size", "count"), CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algorithm", ALLREDUCE)
def test_allreduce_sums_whatever_the_layout(algorithm, layout, size, count):
    results = allreduced(algorithm, cut(layout, size), count)
    assert all(np.array_equal(r, expected(size, count, np.float32, rc.SUM)) for r in results)


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize(("dtype", "op"), DEFINED)
@pytest.mark.parametrize("algorithm", ALLREDUCE)
def test_allreduce_reduces_every_dtype_by_every_operator(algorithm, dtype, op):
    results = allreduced(algorithm, cut("uneven", 7), 100, dtype, op)
    assert all(np.array_equal(r, expected(7, 100, dtype, op)) for r in results)


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("algorithm", ALLREDUCE)
def test_all_ranks_hold_the_same_bits_within_the_error_bound(algorithm):
    data = np.random.default_rng(7).standard_normal((7, 3001)).astype(np.float32)

    async def body(rank, t):
        x = data[rank].copy()
        await ALLREDUCE[algorithm].allreduce_(flat(x), t, rc.AVERAGE)
        return x

    results = run_on(cut("uneven", 7), body)
    assert all(np.array_equal(r, results[0]) for r in results)
    exact = data.astype(np.float64).mean(0)
    bound = 7 * np.finfo(np.float32).eps * np.abs(data).astype(np.float64).sum(0)
    assert (np.abs(results[0] - exact) <= bound).all()


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("split", [chunks, ragged])
@pytest.mark.parametrize(("size", "count"), CASES)
@pytest.mark.parametrize("algorithm", HALVES)
def test_rank_r_owns_chunk_r_after_reduce_scatter(algorithm, size, count, split):
    parts = split(count, size)

    async def body(rank, t):
        x = values(rank, count, np.float32)
        own = await HALVES[algorithm].reduce_scatter_(flat(x), parts, t, rc.SUM)
        assert np.shares_memory(own.bytes, x) or not own.count
        return own.bytes.copy().view(np.float32)

    whole = expected(size, count, np.float32, rc.SUM)
    results = run_on(cut("interleaved", size), body)
    assert all(np.array_equal(r, whole[part]) for r, part in zip(results, parts, strict=True))


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("split", [chunks, ragged])
@pytest.mark.parametrize(("size", "count"), CASES)
@pytest.mark.parametrize("algorithm", HALVES)
def test_allgather_brings_every_part_to_its_place(algorithm, size, count, split):
    parts = split(count, size)
    whole = values(0, count, np.int16)

    async def body(rank, t):
        x = np.zeros_like(whole)
        x[parts[rank]] = whole[parts[rank]]
        await HALVES[algorithm].allgather_(flat(x), parts, t)
        return x

    assert all(np.array_equal(r, whole) for r in run_on(cut("interleaved", size), body))


@pytest.mark.parametrize("size", range(1, 18))
def test_circulant_sums_for_any_number_of_ranks(size):
    results = allreduced("circulant", range(size), 50)
    assert all(np.array_equal(r, expected(size, 50, np.float32, rc.SUM)) for r in results)


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("size", SIZES)
def test_segments_leave_the_bits_of_the_plain_ring(size):
    data = np.random.default_rng(size).standard_normal((size, 999)).astype(np.float32)

    def reduced(algorithm):
        async def body(rank, t):
            x = data[rank].copy()
            await algorithm.allreduce_(flat(x), t, rc.SUM)
            return x

        return run_on(range(size), body)[0]

    assert np.array_equal(reduced(segmented), reduced(ring))


def spied(nodes, algorithm, count):
    """Return per rank the (destination, nbytes) of each message of an allreduce."""

    async def body(rank, t):
        sent = []
        isend = t.transport.isend

        def note(data, dest, tag):
            sent.append((dest, data.nbytes))
            return isend(data, dest, tag)

        t.transport.isend = note
        await ALLREDUCE[algorithm].allreduce_(flat(values(rank, count, np.float32)), t, rc.SUM)
        return sent

    return run_on(nodes, body, is_native=False)  # C++ would send past the spy


def over_the_wire(nodes, algorithm, count):
    """Return the bytes that leave each host."""
    sent = spied(nodes, algorithm, count)
    return [
        sum(n for rank in host for dest, n in sent[rank] if nodes[dest] != nodes[rank])
        for host in hosts(nodes)
    ]


def test_a_ring_host_by_host_crosses_each_wire_once():
    nodes = cut("interleaved", 6)
    nbytes = 6 * 1000 * 4
    assert over_the_wire(nodes, "segmented", 6000) == [2 * nbytes * 5 // 6] * 3
    assert over_the_wire(nodes, "ring", 6000) == [2 * 2 * nbytes * 5 // 6] * 3


def test_two_dimensions_send_least_over_the_wire():
    nodes, nbytes = cut("even", 6), 6000 * 4
    assert over_the_wire(nodes, "ring in direct", 6000) == [2 * nbytes * 2 // 3] * 3


@pytest.mark.usefixtures("short_segments")
def test_at_most_a_few_segments_are_under_way():
    async def body(rank, t):
        under_way = []
        isend = t.transport.isend

        def note(data, dest, tag):
            under_way.append(len(t._posted) + 1)
            return isend(data, dest, tag)

        t.transport.isend = note
        await segmented.allreduce_(flat(values(rank, 5000, np.float32)), t, rc.SUM)
        return max(under_way)

    assert run_on(range(3), body) == [2 * segments_under_way.AHEAD] * 3


@pytest.mark.parametrize("algorithm", ["segmented", "circulant", "hierarchical"])
@pytest.mark.parametrize("ranks", [[5, 0, 3, 1, 4], [3, 2, 0], [5, 1]])
def test_a_group_may_have_any_order_and_parts_of_hosts(algorithm, ranks):
    scatter = "segmented" if algorithm == "circulant" else algorithm

    def body(rank):
        if rank not in ranks:
            return None
        group = rc.Group(ranks)
        x = np.arange(10.0) * (rank + 1)
        return rc.allreduce(x, rc.AVERAGE, group=group), rc.reduce_scatter(x, group=group)

    results = run_ranks(
        6,
        body,
        hub=LoopbackHub(6, (0, 0, 2, 2, 4, 4)),
        settings=Settings(
            timeout_s=120, algorithm=f"allreduce:{algorithm},reduce_scatter:{scatter}"
        ),
    )
    weight = sum(rank + 1 for rank in ranks)
    parts = chunks(10, len(ranks))
    for rank, part in zip(ranks, parts, strict=True):
        mean, rows = results[rank]
        assert np.allclose(mean, np.arange(10.0) * weight / len(ranks), rtol=1e-15)
        assert np.array_equal(rows, (np.arange(10.0) * weight)[part])


def test_a_view_of_a_channel_numbers_its_ranks_anew():
    async def body(rank, t):
        if rank not in (3, 1, 2):
            return None
        part = t.among([3, 1, 2])
        token = np.full(1, rank, np.uint8)
        heard = np.zeros(1, np.uint8)
        await part.exchange(token, (part.rank + 1) % 3, heard, (part.rank - 1) % 3)
        return part.rank, part.size, part.nodes, int(heard[0])

    results = run_on((0, 0, 2, 2, 4), body)
    assert results[3] == (0, 3, (2, 0, 2), 2)
    assert results[1] == (1, 3, (2, 0, 2), 3)
    assert results[2] == (2, 3, (2, 0, 2), 1)


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_16_bit_floats_in_segments_are_rounded_once_in_rank_order(layout, dtype):
    data = np.random.default_rng(7).standard_normal((7, 1001)).astype(dtype)

    async def body(rank, t):
        x = data[rank].copy()
        await direct.allreduce_(flat(x), t, rc.SUM)
        return x

    wide = data.astype(np.float32)
    exact = sum(wide[1:], wide[0]).astype(dtype)
    assert all(np.array_equal(r, exact) for r in run_on(cut(layout, 7), body))
