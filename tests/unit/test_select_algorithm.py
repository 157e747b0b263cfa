"""The choice of algorithms is pure: tables of cases and what is to be chosen."""

import pytest

from ringcomm.arrays import DTYPES
from ringcomm.collectives.measured_times import TimeTable
from ringcomm.collectives.operators import AVERAGE
from ringcomm.collectives.ranks_by_host import describe
from ringcomm.collectives.select_algorithm import Case, across, choose, estimate
from ringcomm.config import ALGORITHMS, COLLECTIVES
from ringcomm.engine.core.algorithm_choice import MODULES

KIB, MIB = 1 << 10, 1 << 20
THREE_HOSTS = (0, 1, 2)
THREE_BY_FOUR = (0,) * 4 + (4,) * 4 + (8,) * 4
THREE_BY_TWO = (0, 0, 2, 2, 4, 4)
MANY_HOSTS = tuple(range(128))


def case(nbytes, nodes=THREE_HOSTS, collective="allreduce", dtype="float32", exact=False):
    return Case(collective, nbytes, DTYPES[dtype], nodes, exact)


def table_of(nodes, times, collective="allreduce"):
    return TimeTable(describe(nodes), "threads", "0", {collective: times})


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (case(KIB), "direct"),
        (case(256 * KIB), "direct"),
        (case(4 * MIB), "segmented"),
        (case(KIB, MANY_HOSTS), "circulant"),
        (case(MIB, MANY_HOSTS), "circulant"),
        (case(64 * MIB, THREE_BY_TWO), "hierarchical"),
        (case(64 * MIB, (0, 1, 2, 0, 1, 2)), "hierarchical"),
        (case(64 * MIB, THREE_BY_TWO, "reduce_scatter"), "segmented"),
        (case(4 * KIB, THREE_BY_TWO, "reduce_scatter"), "direct"),
        (case(64 * MIB, THREE_BY_TWO, "allgather"), "segmented"),
        (case(KIB, (0, 0, 0, 0)), "direct"),
        (case(64 * MIB, (0, 0)), "ring"),
    ],
)
def test_the_estimate_favours_few_rounds_when_small_and_few_bytes_when_large(wanted, expected):
    assert choose(wanted).algorithm == expected


@pytest.mark.parametrize("collective", ["allreduce", "reduce_scatter"])
@pytest.mark.parametrize(
    "how", [{"dtype": "float16"}, {"dtype": "bfloat16"}, {"exact": True}], ids=str
)
@pytest.mark.parametrize("nodes", [(0, 0), THREE_HOSTS])
def test_one_rounding_and_rank_order_go_all_pairs_at_once(nodes, how, collective):
    choice = choose(case(MIB, nodes, collective, **how))
    assert (choice.algorithm, choice.why) == ("direct", "only")
    assert set(choice.unfit) == set(ALGORITHMS) - {"direct"}


@pytest.mark.parametrize(
    ("wanted", "algorithm"),
    [
        (case(MIB, THREE_BY_TWO, dtype="bfloat16"), "hierarchical"),
        (case(MIB, THREE_BY_TWO, "reduce_scatter", dtype="bfloat16"), "direct"),
        (case(4 * MIB, THREE_BY_FOUR, "reduce_scatter", dtype="bfloat16"), "hierarchical"),
        (case(4 * MIB, THREE_BY_FOUR, "reduce_scatter", dtype="bfloat16", exact=True), "direct"),
        (case(MIB, THREE_BY_TWO, dtype="bfloat16", exact=True), "direct"),
        (Case("allreduce", MIB, DTYPES["int32"], THREE_BY_TWO, op=AVERAGE), "direct"),
    ],
)
def test_hosts_of_several_ranks_add_their_16_bit_floats_first(wanted, algorithm):
    assert choose(wanted).algorithm == algorithm


def test_a_sum_of_many_hosts_takes_little_longer_in_16_bits_than_in_twice_as_many_bytes():
    nodes = tuple(rank // 8 for rank in range(128 * 8))
    half = choose(case(25 * MIB // 2, nodes, dtype="bfloat16"))
    whole = choose(case(25 * MIB, nodes))
    assert half.algorithm == "hierarchical"
    assert min(half.seconds.values()) < min(whole.seconds.values())
    assert half.seconds["direct"] > 5 * half.seconds["hierarchical"]


def test_what_was_measured_in_float32_counts_for_the_bytes_that_16_bits_send():
    table = table_of(THREE_BY_TWO, {MIB: {"direct": 1.4, "hierarchical": 1.0}})
    choice = choose(case(MIB, THREE_BY_TWO, dtype="float16"), None, table)
    assert choice.seconds == {"direct": 1.4, "hierarchical": 1.5}


def test_an_allgather_rounds_nothing():
    assert choose(case(MIB, collective="allgather", dtype="float16"), "ring").why == "forced"


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (case(KIB, (0, 0, 0)), "all ranks are on one host"),
        (case(KIB, THREE_HOSTS), "no host has more than one rank"),
        (case(KIB, THREE_BY_TWO, "allgather"), "it is for reductions alone"),
    ],
)
def test_two_dimensions_need_both_of_them(wanted, reason):
    assert choose(wanted).unfit["hierarchical"] == reason


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_is_forced_is_chosen_where_it_fits(algorithm):
    shares_memory = algorithm == "node"
    wanted = Case("allreduce", MIB, DTYPES["float32"], THREE_BY_TWO, False, shares_memory)
    choice = choose(wanted, algorithm)
    assert (choice.algorithm, choice.why, choice.overruled) == (algorithm, "forced", "")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_exact", [False, True])
def test_ranks_that_share_memory_use_it(dtype, is_exact):
    nodes = (0, 0, 0)
    wanted = Case("allreduce", MIB, DTYPES[dtype], nodes, is_exact, shares_memory=True)
    measured = table_of(nodes, {MIB: {"direct": 1e-9}})
    assert choose(wanted, None, measured).algorithm == "node"
    assert choose(case(MIB, nodes, dtype=dtype, exact=is_exact)).algorithm != "node"


def test_what_is_forced_but_does_not_fit_is_overruled_and_named():
    choice = choose(case(MIB, dtype="float16"), "ring")
    assert (choice.algorithm, choice.overruled) == ("direct", "ring")
    assert "round" in choice.unfit["ring"]


def test_what_was_measured_beats_the_estimate():
    table = table_of(THREE_HOSTS, {KIB: {"ring": 1.0, "direct": 2.0}})
    choice = choose(case(KIB), None, table)
    assert (choice.algorithm, choice.why) == ("ring", "measured")
    assert choice.seconds == {"ring": 1.0, "direct": 2.0}


def test_what_is_forced_beats_what_was_measured():
    table = table_of(THREE_HOSTS, {KIB: {"ring": 1.0, "direct": 2.0}})
    assert choose(case(KIB), "direct", table).algorithm == "direct"


@pytest.mark.parametrize(
    "wanted",
    [
        case(KIB, THREE_BY_TWO),  # another layout
        case(KIB, collective="allgather"),  # not measured
        case(KIB, dtype="float16"),  # nothing that was measured fits
    ],
)
def test_a_table_counts_for_what_was_measured_only(wanted):
    table = table_of(THREE_HOSTS, {KIB: {"ring": 1.0}})
    assert choose(wanted, None, table) == choose(wanted)


@pytest.mark.parametrize("nodes", [THREE_HOSTS, THREE_BY_TWO, (0, 1, 1, 1), (0, 0), (0,)])
@pytest.mark.parametrize("algorithm", ["ring", "segmented", "direct", "circulant"])
def test_an_allreduce_is_estimated_as_its_two_halves(algorithm, nodes):
    whole, *halves = [estimate(algorithm, case(MIB, nodes, name)) for name in COLLECTIVES]
    assert whole == pytest.approx(sum(halves))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_more_bytes_take_longer(algorithm):
    times = [estimate(algorithm, case(n, THREE_BY_TWO)) for n in (0, KIB, MIB, 64 * MIB)]
    assert times == sorted(set(times))


def test_an_interleaved_placement_costs_a_ring_in_rank_order_twice_the_wire():
    even, mixed = (estimate("ring", case(1 << 30, n)) for n in (THREE_BY_TWO, (0, 1, 2) * 2))
    assert 1.3 < mixed / even < 2
    assert estimate("segmented", case(1 << 30, (0, 1, 2) * 2)) == pytest.approx(
        estimate("segmented", case(1 << 30, THREE_BY_TWO))
    )


def test_columns_go_all_pairs_at_once_when_small_and_round_the_ring_when_large():
    assert [across(n, 3) for n in (KIB, 64 * MIB)] == ["direct", "segmented"]


def test_every_algorithm_that_can_be_forced_has_a_module_and_an_estimate():
    assert tuple(MODULES) == ALGORITHMS
    assert {*choose(case(KIB)).seconds, *choose(case(KIB)).unfit} == set(ALGORITHMS)
