"""ShardedSampler: whose sample is whose, in every epoch, across restarts."""

import itertools
import json

import numpy as np
import pytest
from harness import run_ranks

import ringcomm as rc
from ringcomm.data import Loader, ShardedSampler
from ringcomm.data.epoch_order import batch_lengths, epoch_order, n_remaining, remaining

SIZES = [1, 2, 3, 4, 7]
COUNTS = [0, 1, 2, 6, 29, 84]


def samplers(n, size, **kwargs):
    return [ShardedSampler(n, rank=r, size=size, **kwargs) for r in range(size)]


def epoch_of(group):
    return [list(sampler) for sampler in group]


def flat(lists):
    return sorted(itertools.chain.from_iterable(lists))


# --- an epoch -----------------------------------------------------------------------------------
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("shuffle", [True, False])
def test_uneven_sees_each_sample_once(n, size, shuffle):
    group = samplers(n, size, remainder="uneven", shuffle=shuffle)
    lengths = [len(sampler) for sampler in group]
    shares = epoch_of(group)
    assert flat(shares) == list(range(n))
    assert [len(share) for share in shares] == lengths
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("n", COUNTS)
def test_drop_leaves_out_what_does_not_go_round(n, size):
    group = samplers(n, size, remainder="drop")
    lengths = [len(sampler) for sampler in group]
    shares = epoch_of(group)
    seen = flat(shares)
    assert lengths == [len(share) for share in shares] == [n // size] * size
    assert len(set(seen)) == len(seen) == n - n % size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("n", COUNTS)
def test_pad_sees_all_and_as_few_twice_as_it_takes(n, size):
    group = samplers(n, size, remainder="pad")
    lengths = [len(sampler) for sampler in group]
    shares = epoch_of(group)
    seen = flat(shares)
    assert lengths == [len(share) for share in shares] == [-(-n // size)] * size
    assert set(seen) == set(range(n))
    if n >= size:
        assert max(map(seen.count, range(n)), default=0) <= 2


def test_without_shuffling_the_ranks_take_turns():
    assert epoch_of(samplers(7, 3, shuffle=False, remainder="uneven")) == [
        [0, 3, 6],
        [1, 4],
        [2, 5],
    ]


def test_the_order_is_a_function_of_seed_and_epoch_alone():
    def order(**kwargs):
        return epoch_order(50, **({"seed": 3, "epoch": 5, "is_shuffled": True} | kwargs)).tolist()

    assert order() == order()
    orders = [order(), order(seed=4), order(epoch=6), order(seed=5, epoch=3)]
    assert all(a != b for a, b in itertools.combinations(orders, 2))


def test_the_order_stays_what_it_was_in_other_versions():
    """A run that is resumed after an upgrade goes on with the rest of the same epoch."""
    assert epoch_order(10, seed=1, epoch=2, is_shuffled=True).tolist() == ORDER


ORDER = [5, 6, 9, 3, 2, 1, 0, 8, 4, 7]


def test_shuffled_positions_are_uniform():
    """Each of 5 samples is at each place in a fifth of 4000 epochs, within 5 deviations."""
    orders = np.stack([epoch_order(5, seed=0, epoch=e, is_shuffled=True) for e in range(4000)])
    counts = np.array([[np.sum(orders[:, place] == i) for place in range(5)] for i in range(5)])
    assert abs(counts - 800).max() < 5 * np.sqrt(4000 * 0.2 * 0.8)


def test_by_default_it_deals_to_the_ranks_of_the_job():
    shares = run_ranks(3, lambda _: list(ShardedSampler(range(9))))
    assert flat(shares) == list(range(9))


# --- ranks that differ --------------------------------------------------------------------------
def sampler_of(n=12, **kwargs):
    return ShardedSampler(n, **kwargs)


def resumed(state):
    sampler = sampler_of()
    sampler.load_state_dict(state)
    return sampler


def in_a_new_view(position):
    sampler = sampler_of()
    list(sampler)  # compared once, among the ranks of then
    sampler.set_elastic_position({"phases": (), "first_size": 3} | position)
    return sampler


MID_EPOCH = {"epoch": 1, "phases": [], "taken": 2, "rank": 0, "size": 2, "samples": 12}
DIFFERENT = {
    "seed": (lambda r: sampler_of(seed=r // 2), "rank 0 has seed=0, rank 2 seed=1"),
    "length": (lambda r: sampler_of(12 + r), "rank 0 has samples=12, rank 1 samples=13"),
    "shuffle": (lambda r: sampler_of(shuffle=r != 1), "rank 0 has shuffle=True, rank 1 shuffle=F"),
    "remainder": (
        lambda r: sampler_of(remainder="pad" if r else "drop"),
        "rank 0 has remainder=drop, rank 1 remainder=pad",
    ),
    "batch size": (
        lambda r: sampler_of().batches(2 + (r == 2)),
        "rank 0 has batch_size=2, rank 2 batch_size=3",
    ),
    "drop_last": (
        lambda r: sampler_of().batches(2, drop_last=r == 1),
        "rank 0 has drop_last=False, rank 1 drop_last=True",
    ),
    "epoch": (
        lambda r: resumed(MID_EPOCH | {"shuffle": True, "seed": 0, "taken": 0, "epoch": r}),
        "rank 0 has epoch=0, rank 1 epoch=1",
    ),
    "what is resumed": (
        lambda r: resumed(MID_EPOCH | {"shuffle": True, "seed": 0, "taken": 2 + r}),
        "rank 0 has phases=((2, 2),), rank 1 phases=((3, 3),)",
    ),
    "epoch in a new view": (
        lambda r: in_a_new_view({"epoch": r}),
        "rank 0 has epoch=0, rank 1 epoch=1",
    ),
    "a loader's data": (
        lambda r: Loader(np.arange(12 + r), 2, prefetch=0),
        "rank 0 has samples=12, rank 1 samples=13",
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_deal_differently_all_hear_of_it_in_the_first_iteration(what):
    make, expected = DIFFERENT[what]

    def body(rank):
        iterable = make(rank)
        with pytest.raises(rc.MismatchError) as caught:
            list(iterable)
        return str(caught.value), float(rc.allreduce(np.ones(1))[0])

    texts, sums = zip(*run_ranks(3, body), strict=True)
    assert sums == (3.0,) * 3
    assert len(set(texts)) == 1
    assert expected in texts[0]


def test_arguments_are_compared_once_and_only_among_all_ranks_of_the_job():
    """A rank may iterate alone over what it does not share, and more often than others later."""

    def body(rank):
        shared = sampler_of()
        alone = [list(sampler_of(5 + rank, rank=0, size=1)) for _ in range(rank)]
        list(shared)
        return alone, [list(shared) for _ in range(rank)]

    run_ranks(3, body)


def test_the_share_of_a_rank_in_join_is_not_left_out_without_a_word():
    def body(rank):
        if rank == 2:
            return rc.join()
        for iterable in (sampler_of(), sampler_of().batches(2), rc.data.Loader(np.ones(6), 2)):
            with pytest.raises(rc.MismatchError, match=r"ranks \[2\] are in join\(\).*WorkQueue"):
                list(iterable)
        list(sampler_of(rank=rank, size=2))
        return rc.join()

    run_ranks(3, body)


def test_a_rank_may_join_while_another_has_yet_to_take_its_own_share():
    def body(rank):
        shared = sampler_of()
        list(shared)
        if rank == 2:
            list(shared)
            return rc.join()
        rc.sendrecv(np.ones(1), 1 - rank, np.ones(1), 1 - rank)  # meanwhile rank 2 joins
        list(shared)
        return rc.join()

    run_ranks(3, body)


# --- epochs -------------------------------------------------------------------------------------
def test_it_advances_its_own_epoch():
    sampler, again = samplers(20, 1)[0], samplers(20, 1)[0]
    first, second = list(sampler), list(sampler)
    assert first != second
    assert sampler.epoch == 2
    again.set_epoch(1)
    assert list(again) == second
    assert again.epoch == 2


def test_an_epoch_left_by_break_is_over():
    sampler, whole = samplers(20, 1)[0], samplers(20, 1)[0]
    assert next(iter(sampler)) == next(iter(whole))
    assert sampler.epoch == 0
    whole.set_epoch(1)
    assert list(sampler) == list(whole)
    assert sampler.epoch == 2


def test_an_iterator_that_is_never_used_is_no_epoch():
    """torch's DataLoader with workers makes one before the one that it uses."""
    sampler, whole = samplers(20, 1)[0], samplers(20, 1)[0]
    for iterable in (sampler, sampler.batches(4)):
        iter(iterable)
    assert list(sampler) == list(whole)


def test_set_epoch_of_the_one_under_way_begins_it_anew():
    sampler = samplers(20, 1)[0]
    first = list(itertools.islice(sampler, 5))
    sampler.set_epoch(0)
    assert list(itertools.islice(sampler, 5)) == first


# --- batches ------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("batch_size", [1, 2, 4, 100])
@pytest.mark.parametrize("remainder", ["uneven", "drop", "pad"])
def test_every_rank_gets_as_many_batches_of_its_share(n, size, batch_size, remainder):
    group = samplers(n, size, remainder=remainder)
    shares = epoch_of(group)
    batches = [s.batches(batch_size) for s in samplers(n, size, remainder=remainder)]
    lengths = [len(each) for each in batches]
    got = [list(each) for each in batches]
    assert lengths == [len(each) for each in got]
    assert len(set(lengths)) == 1
    assert [list(itertools.chain.from_iterable(each)) for each in got] == shares
    sizes = [[len(batch) for batch in each] for each in got]
    assert max(itertools.chain.from_iterable(sizes), default=0) <= batch_size
    if batch_size > 1 and n >= size * 2:
        assert min(itertools.chain.from_iterable(sizes), default=1) >= 1
    if remainder != "uneven":
        assert all(each == sizes[0] for each in sizes)


@pytest.mark.parametrize(
    ("n", "rank", "size", "per_step", "lengths"),
    [
        (20, 0, 2, 8, [4, 4, 2]),
        (17, 1, 2, 8, [4, 3, 1]),
        (17, 0, 2, 8, [4, 4, 1]),
        (1, 1, 2, 8, [0]),
        (9, 1, 2, 2, [1, 1, 1, 1, 0]),
        (0, 0, 2, 8, []),
        (20, 0, 3, 8, [3, 3, 1]),  # a number of ranks that does not divide a step's samples
        (20, 1, 3, 8, [3, 2, 2]),
        (20, 2, 3, 8, [2, 3, 1]),
    ],
)
def test_lengths_of_batches(n, rank, size, per_step, lengths):
    assert batch_lengths(n, rank, size, per_step) == lengths


@pytest.mark.parametrize("n", [8, 9, 10, 11, 15])
def test_drop_last_has_full_batches_alone(n):
    for sampler in samplers(n, 3, remainder="uneven"):
        batches = sampler.batches(2, drop_last=True)
        assert len(batches) == n // 3 // 2
        assert [len(batch) for batch in batches] == [2] * (n // 3 // 2)
        assert sampler.epoch == 1
        assert sampler.state_dict()["epoch"] == 1


# --- restarts -----------------------------------------------------------------------------------
def take(sampler, count):
    return list(itertools.islice(sampler, count))


@pytest.mark.parametrize("sizes", list(itertools.product([1, 2, 3, 4], repeat=3)))
@pytest.mark.parametrize("is_alike", [True, False])
def test_across_restarts_on_other_numbers_of_ranks_each_sample_is_seen_once(sizes, is_alike):
    n, seen = 61, []
    rng = np.random.default_rng(sizes)
    states = None
    for size in sizes:
        group = samplers(n, size, remainder="uneven", seed=7)
        counts = [3] * size if is_alike else rng.integers(0, 7, size).tolist()
        for sampler, count in zip(group, counts, strict=True):
            if states is not None:
                sampler.load_state_dict(states[-1] if is_alike else states)
            seen += take(sampler, count)
        states = json.loads(json.dumps([sampler.state_dict() for sampler in group]))
    group = samplers(n, 2, remainder="uneven", seed=7)
    for sampler in group:
        sampler.load_state_dict(states)
        assert sampler.epoch == 0
        length = len(sampler)
        rest = list(sampler)
        assert len(rest) == length
        seen += rest
        assert sampler.epoch == 1
    assert sorted(seen) == list(range(n))
    assert flat(epoch_of(group)) == list(range(n))


def test_what_pads_the_rest_of_an_epoch_is_from_its_beginning():
    """1 sample of 9 is left for 4 ranks: it is not what all of them get."""
    group = samplers(9, 2, remainder="pad", seed=1)
    taken = [take(sampler, 4) for sampler in group]
    rest = samplers(9, 4, remainder="pad", seed=1)
    for sampler in rest:
        sampler.load_state_dict([each.state_dict() for each in group])
    left, *padding = (share[0] for share in epoch_of(rest))
    assert left not in flat(taken)
    assert padding == [taken[0][0], taken[1][0], taken[0][1]]


def test_the_same_ranks_go_on_with_the_same_samples():
    for whole, before, after in zip(*(samplers(40, 3, seed=2) for _ in range(3)), strict=True):
        first = take(before, 5)
        after.load_state_dict(before.state_dict())
        assert first + list(after) == list(whole)
        assert list(after) == list(whole)


def test_set_epoch_keeps_what_was_resumed_and_no_other():
    before, after, other = (samplers(40, 2)[0] for _ in range(3))
    list(before)
    take(before, 5)
    after.load_state_dict(before.state_dict())
    other.load_state_dict(before.state_dict())
    after.set_epoch(1)
    assert len(after) == 15
    other.set_epoch(2)
    assert len(other) == 20


def test_samples_handed_out_ahead_are_told_from_those_trained_on():
    before, after, whole = (samplers(40, 2)[1] for _ in range(3))
    take(before, 12)  # by a loader whose workers are ahead
    after.load_state_dict(before.state_dict(consumed=4))
    assert list(after) == list(whole)[4:]


@pytest.mark.parametrize("consumed", [20, None])
def test_a_state_at_the_end_of_an_epoch_is_the_next_one(consumed):
    before, after, whole = (samplers(40, 2)[1] for _ in range(3))
    list(before)
    after.load_state_dict(before.state_dict(consumed))
    whole.set_epoch(1)
    assert after.epoch == 1
    assert list(after) == list(whole)


def test_a_sampler_that_is_exhausted_may_have_samples_under_way():
    before, after, whole = (samplers(40, 2)[1] for _ in range(3))
    list(before)
    after.load_state_dict(before.state_dict(consumed=18))
    assert after.epoch == 0
    assert list(after) == list(whole)[18:]


def test_ranks_that_are_through_with_an_epoch_and_ranks_that_are_not_have_one_state():
    group = samplers(7, 3, remainder="uneven")
    seen = take(group[0], 2) + take(group[1], 2) + take(group[2], 1)  # 3, 2, 2
    resumed = samplers(7, 2, remainder="uneven")
    for sampler in resumed:
        sampler.load_state_dict([each.state_dict() for each in group])
        assert sampler.epoch == 0
    assert sorted([*seen, *flat(epoch_of(resumed))]) == list(range(7))


def test_what_a_smaller_job_has_left_out_does_not_make_an_epoch():
    group = samplers(5, 2, remainder="drop")
    for sampler in group:
        take(sampler, 1)
    resumed = samplers(5, 4, remainder="drop")  # 3 are left, for 4 ranks
    for sampler in resumed:
        sampler.load_state_dict([each.state_dict() for each in group])
        assert (sampler.epoch, len(sampler)) == (1, 1)


@pytest.mark.parametrize("phases", [(), ((2, 2),), ((3, 0, 9), (1,)), ((1, 1), (4, 0), (0, 2, 0))])
def test_the_count_of_what_is_left_is_its_length(phases):
    order = np.arange(23)
    assert n_remaining(23, phases) == len(remaining(order, phases))


# --- what is refused ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"remainder": "keep", "rank": 0, "size": 1}, ValueError, "drop, pad, uneven, not 'keep'"),
        ({"rank": 3, "size": 3}, ValueError, "rank 3 is not one of 3"),
        ({"rank": 1}, TypeError, "both rank and size"),
        ({"seed": -1, "rank": 0, "size": 1}, ValueError, "seed is at least 0, not -1"),
        ({"seed": 0.5, "rank": 0, "size": 1}, TypeError, "float"),
        ({}, rc.NotInitializedError, "init"),
    ],
)
def test_arguments_that_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        ShardedSampler(10, **arguments)


@pytest.mark.parametrize("data", [(np.ones(9), np.ones(9)), {"x": np.ones(9)}])
def test_a_tuple_of_arrays_is_not_taken_for_its_samples(data):
    with pytest.raises(TypeError, match=r"pass the number of rows: len\(x\)"):
        ShardedSampler(data, rank=0, size=1)


def test_a_stream_has_no_samples_to_deal_out():
    with pytest.raises(TypeError, match=r"a generator has no len\(\).*islice"):
        ShardedSampler((x for x in range(3)), rank=0, size=1)


def test_a_batch_of_none_is_refused():
    with pytest.raises(ValueError, match="at least 1, not 0"):
        samplers(3, 1)[0].batches(0)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"n": 11}, "the state has samples=10, this sampler 11"),
        ({"seed": 1}, "the state has seed=0, this sampler 1"),
        ({"shuffle": False}, "the state has shuffle=True, this sampler False"),
    ],
)
def test_a_state_of_other_data_is_refused(other, message):
    state = samplers(10, 2)[0].state_dict()
    sampler = samplers(**({"n": 10, "size": 2} | other))[0]
    with pytest.raises(ValueError, match=message):
        sampler.load_state_dict(state)


@pytest.mark.parametrize(
    ("pick", "message"),
    [
        (lambda states: states[:2], r"states of ranks \[0, 1\], of a job of 3"),
        (lambda states: states[:1], r"states of ranks \[0\], of a job of 3"),
        (lambda states: states[::-1], r"states of ranks \[2, 1, 0\]"),
        (lambda states: [], r"states of ranks \[\]"),
        (lambda states: [*states[:2], states[2] | {"epoch": 5}], "not of one moment"),
        (lambda states: [*states[:2], states[2] | {"seed": 5}], "not of one job"),
    ],
)
def test_states_that_do_not_belong_together_are_refused(pick, message):
    states = [sampler.state_dict() for sampler in samplers(10, 3)]
    with pytest.raises(ValueError, match=message):
        samplers(10, 2)[0].load_state_dict(pick(states))


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ({"a": 1}, ValueError, "the state has no epoch, phases, .*seed; it has a. Pass what state"),
        ({}, ValueError, "it has nothing"),
        ([{"epoch": 1}], ValueError, "the state has no phases"),
        ([3], TypeError, "not a int"),
    ],
)
def test_what_is_no_state_is_refused_with_what_is_missing(state, error, message):
    for target in (samplers(10, 1)[0], Loader(np.arange(10), 2, sampler=samplers(10, 1)[0])):
        with pytest.raises(error, match=message):
            target.load_state_dict(state)


def test_nothing_can_have_been_consumed_before_an_iteration():
    sampler = samplers(10, 2)[0]
    with pytest.raises(ValueError, match="no iteration over this sampler has begun"):
        sampler.state_dict(consumed=2)
    assert sampler.state_dict(consumed=0)["taken"] == 0


def test_a_loader_forgets_what_was_consumed_when_its_sampler_starts_elsewhere():
    loader = Loader(np.arange(10), 2, sampler=samplers(10, 1)[0])
    next(iter(loader))
    loader.set_epoch(3)
    assert (loader.state_dict()["epoch"], loader.state_dict()["taken"]) == (3, 0)


@pytest.mark.parametrize("consumed", [-1, 6])
def test_more_than_was_there_cannot_have_been_consumed(consumed):
    sampler = samplers(10, 2)[0]
    list(sampler)
    with pytest.raises(ValueError, match="this rank has 5 samples"):
        sampler.state_dict(consumed)
