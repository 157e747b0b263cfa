"""16-bit sums between hosts: one rounding, the same bits on every rank, and few bytes sent."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from harness import at_length, run_ranks
from loopback import LoopbackHub
from sums_rounded_once import HALVES, expected, values

import ringcomm as rc
from ringcomm.arrays import DTYPES, Flat
from ringcomm.collectives.algorithms import direct, hierarchical
from ringcomm.collectives.message_patterns import chunks
from ringcomm.collectives.ranks_by_host import hosts
from ringcomm.config import Settings
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.core.call import Call
from ringcomm.engine.core.plan import Plan

LAYOUTS = {
    "2 hosts x 2": (0, 0, 2, 2),
    "3 hosts x 2": (0, 0, 2, 2, 4, 4),
    "uneven": (0, 1, 1, 1, 4, 4),
    "interleaved": (0, 1, 2, 0, 1, 2),
}
# In shared memory, sums are inlined, go through lanes, or straight from and to registered arrays.
CASES = at_length(
    list(itertools.product(LAYOUTS, (1, 5, 1000, 300_007), ("private", "registered", "mixed"))),
    [
        ("2 hosts x 2", 1, "private"),
        ("2 hosts x 2", 300_007, "registered"),
        ("3 hosts x 2", 300_007, "private"),
        ("uneven", 5, "private"),
        ("uneven", 300_007, "mixed"),
        ("interleaved", 100_003, "registered"),
    ],
)


def arrays_of(rank, count, memory):
    """Yield (dtype, op, array) for each case."""
    is_registered = memory == "registered" or (memory == "mixed" and rank % 2)
    for dtype, op in itertools.product(HALVES, (rc.SUM, rc.AVERAGE, rc.MAX)):
        x = rc.empty(count, dtype) if is_registered else np.empty(count, dtype)
        x[:] = values(rank, count, dtype)
        yield dtype, op, x


def same_bits(x, y):
    return np.array_equal(x.view(np.uint16), y.view(np.uint16))


@pytest.mark.parametrize(("layout", "count", "memory"), CASES)
def test_the_exact_sum_is_rounded_once(layout, count, memory):
    nodes = LAYOUTS[layout]

    def body(rank):
        results = {}
        for dtype, op, x in arrays_of(rank, count, memory):
            assert ": hierarchical," in str(rc.explain(x.nbytes, x.dtype, op=op))
            rc.allreduce_(x, op)
            results[dtype, op] = x
        return results

    found = run_ranks(
        len(nodes),
        body,
        hub=LoopbackHub(len(nodes), nodes),
        settings=Settings(timeout_s=120, algorithm="allreduce:hierarchical"),
    )
    for (dtype, op), whole in ((key, expected(len(nodes), count, *key)) for key in found[0]):
        assert all(same_bits(results[dtype, op], whole) for results in found), (dtype, op)


@pytest.mark.parametrize("dtype", HALVES)
def test_so_it_is_if_the_ranks_of_a_host_share_no_memory(dtype):
    nodes = LAYOUTS["uneven"]

    def body(rank):
        async def run(t):
            x = values(rank, 1001, dtype)
            flat = Flat(x.view(np.uint8), DTYPES[np.dtype(dtype).name])
            await hierarchical.allreduce_(flat, t, rc.SUM, within=direct)
            return x

        plan = Plan(Call("test"), 0, run)
        return engine().execute("test", None, lambda _: plan)

    whole = expected(6, 1001, dtype, rc.SUM)
    assert all(same_bits(x, whole) for x in run_ranks(6, body, hub=LoopbackHub(6, nodes)))


def bytes_from_each_host(nodes, body, **settings):
    """Return the bytes that each host sends to others while its ranks run body(rank)."""

    def main(rank):
        transport = engine().transport
        isend, sent = transport.isend, []

        def note(data, dest, tag):
            sent.append(data.nbytes if nodes[dest] != nodes[rank] else 0)
            return isend(data, dest, tag)

        transport.isend = note
        body(rank)
        return sum(sent)

    hub = LoopbackHub(len(nodes), nodes, is_native=False)  # C++ would send past note()
    settings = Settings(timeout_s=120, **settings)
    sent = run_ranks(len(nodes), main, hub=hub, settings=settings)
    return [sum(sent[rank] for rank in host) for host in hosts(nodes)]


@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize("n_hosts", [2, 3])
def test_a_host_sends_float32_once_and_the_result_once(n_hosts, n_ranks):
    """Whatever the ranks per host: all pairs would send 2 * n_ranks bytes where these are 3."""
    nodes = tuple(host * n_ranks for host in range(n_hosts) for _ in range(n_ranks))
    count = 1_000_003
    sent = bytes_from_each_host(
        nodes, lambda rank: rc.allreduce_(values(rank, count, ml_dtypes.bfloat16))
    )
    assert sum(sent) == (4 + 2) * count * (n_hosts - 1)
    assert max(sent) <= sum(sent) / n_hosts + 6 * n_hosts * n_ranks


def test_deterministic_sums_stay_in_rank_order():
    data = np.random.default_rng(3).standard_normal((6, 5001)).astype(ml_dtypes.bfloat16)
    wide = data.astype(np.float32)
    in_order = sum(wide[1:], wide[0]).astype(ml_dtypes.bfloat16)
    nodes = LAYOUTS["interleaved"]
    results = run_ranks(
        6, lambda rank: rc.allreduce(data[rank], deterministic=True), hub=LoopbackHub(6, nodes)
    )
    assert all(same_bits(x, in_order) for x in results)


@pytest.mark.parametrize(("layout", "count", "memory"), CASES)
def test_the_rows_of_a_rank_are_rounded_once(layout, count, memory):
    nodes = LAYOUTS[layout]

    def body(rank):
        results = {}
        for dtype, op, x in arrays_of(rank, count, memory):
            apart, whole = rc.reduce_scatter(x, op), rc.reduce(x, op, root=1)
            assert same_bits(x, values(rank, count, dtype))
            results[dtype, op] = apart, rc.reduce_scatter_(x, op), whole
        return results

    found = run_ranks(
        len(nodes),
        body,
        hub=LoopbackHub(len(nodes), nodes),
        settings=Settings(timeout_s=120, algorithm="reduce_scatter:hierarchical"),
    )
    for dtype, op in found[0]:
        total = expected(len(nodes), count, dtype, op)
        for rank, part in enumerate(chunks(count, len(nodes))):
            apart, in_place, whole = found[rank][dtype, op]
            assert same_bits(apart, total[part]), (dtype, op, rank)
            assert same_bits(in_place, total[part]), (dtype, op, rank)
            assert same_bits(whole, total) if rank == 1 else whole is None


@pytest.mark.parametrize("seed", at_length(range(40), range(6)))
def test_any_hosts_any_ranks_and_any_dtype_get_their_rows(seed):
    random = np.random.default_rng(seed)
    size, n_hosts = int(random.integers(3, 9)), int(random.integers(2, 4))
    hub = [int(host) for host in random.integers(0, n_hosts, size)]
    nodes = tuple(hub.index(host) for host in hub)  # the first rank of a host is its number
    shape = (int(random.integers(0, 40)), *(3, 7)[: random.integers(0, 3)])
    dtype = [np.float16, ml_dtypes.bfloat16, np.float32, np.int64][seed % 4]
    rows = random.integers(-8, 8, (size, *shape)).astype(dtype)

    def body(rank):
        parts = rc.reduce_scatter(rows[rank])
        return parts, rc.reduce(rows[rank], root=size - 1)

    total = rows.astype(np.float64).sum(0).astype(dtype)
    found = run_ranks(
        size,
        body,
        hub=LoopbackHub(size, nodes),
        settings=Settings(timeout_s=120, algorithm="reduce_scatter:hierarchical"),
    )
    assert np.array_equal(np.concatenate([part for part, _ in found]), total)
    assert np.array_equal(found[-1][1], total)


@pytest.mark.parametrize("n_hosts", [2, 3])
@pytest.mark.parametrize("call", ["reduce_scatter", "reduce"])
def test_a_host_of_four_ranks_sends_its_float32_sums_once(call, n_hosts):
    """All pairs would send 4 values of 2 bytes where these are one of 4."""
    nodes = tuple(host * 4 for host in range(n_hosts) for _ in range(4))
    count = 1_000_003 // n_hosts * n_hosts * 4
    sent = bytes_from_each_host(
        nodes,
        lambda rank: getattr(rc, call)(values(rank, count, ml_dtypes.bfloat16)),
        algorithm="reduce_scatter:hierarchical",
    )
    results = 2 * count * (n_hosts - 1) // n_hosts if call == "reduce" else 0
    assert sum(sent) == 4 * count * (n_hosts - 1) + results


def test_reduce_scatters_in_rank_order_stay_so():
    data = np.random.default_rng(3).standard_normal((6, 5001)).astype(ml_dtypes.bfloat16)
    wide = data.astype(np.float32)
    in_order = sum(wide[1:], wide[0]).astype(ml_dtypes.bfloat16)
    hub = LoopbackHub(6, LAYOUTS["interleaved"])
    results = run_ranks(6, lambda rank: rc.reduce_scatter(data[rank], deterministic=True), hub=hub)
    assert same_bits(np.concatenate(results), in_order)
