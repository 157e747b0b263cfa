"""A shard with one partition does what a dict of rows would do."""

import copy
import math
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from harness import DEADLINE_S
from ps_shard_model import Model, initial, stream_bits

from ringcomm import _core
from ringcomm.ps import initializers, optim, row_policies
from ringcomm.ps.protocol.frame_meta import MISSING
from ringcomm.ps.row_policies import Admit, Evict
from ringcomm.ps.server.rows.hash_shard import row_spec

SGD = optim.SGD(1.0)
HELPERS = Path(__file__).parents[1]
ENDS = [0, 1, (1 << 64) - 1, (1 << 63), (1 << 63) - 1, (1 << 32) - 1]


def u64(keys):
    return np.array(list(keys), np.uint64)


def make(dim=4, updater=SGD, **options):
    return shard_of(row_spec(dim, updater, **options))


def shard_of(spec):
    return _core.Shard(spec, np.zeros(1, np.uint32), 0)


def push(rows, keys, grads, updater=SGD, *, now=0.0, stamp=1):
    sources = [(u64(keys), grads, 1.0, None)]
    return rows.push(sources, updater.code, updater.hyper, 1.0, now, stamp, stamp)


def ones(n, dim=4, dtype=np.float32):
    return np.ones((n, dim), dtype)


def gather(rows, keys, dim=4, missing="init", dtype=np.float32, *, held=None):
    out = np.full((len(keys), dim), 77, dtype)
    rows.gather(u64(keys), out, MISSING.index(missing), held=held)
    return out


def metadata(rows, keys):
    """Return counts, steps and times."""
    arrays = [np.empty(len(keys), dtype) for dtype in (np.uint32, np.uint32, np.float64)]
    rows.metadata(u64(keys), *arrays)
    return arrays


def everything(rows):
    """Return {key: (values, slots, count, steps, time)}."""
    found = {int(key): rest for key, *rest in zip(*rows.own(0).export(), strict=True)}
    assert len(found) == len(rows)
    return found


def assert_same_rows(rows, model_rows):
    for key, (values, slots, count, steps, time) in rows.items():
        row = model_rows[key]
        np.testing.assert_array_equal(values, row.values)
        np.testing.assert_array_equal(slots, row.packed_slots)
        assert (count, steps, time) == (row.count, row.steps, row.time)
    assert rows.keys() == model_rows.keys()


# -- against the model


class Sequence:
    """Random operations on a partition and on its model."""

    def __init__(self, seed, updater, **policy):
        self.rng, self.updater = np.random.default_rng(seed), updater
        self.init = initializers.normal(std=0.5, seed=seed)
        evict = policy.get("evict")
        self.spec = row_spec(3, updater, table=9, init=self.init, **policy)
        self.rows = shard_of(self.spec)
        self.model = Model(
            3,
            updater,
            self.init,
            table=9,
            min_count=policy["admit"].min_count if "admit" in policy else 1,
            ttl_s=evict.ttl_s if evict else math.inf,
            max_rows=(evict.max_rows if evict else None) or 1 << 32,
            is_lfu=bool(evict) and evict.policy == "lfu",
        )
        self.now, self.stamp = 0.0, 0
        self.saved = self.save()

    def keys(self):
        keys = self.rng.zipf(1.3, self.rng.integers(0, 12)) % 150
        return [int(k) if k < 140 else ENDS[k % 6] for k in keys]

    def run(self, n):
        names = (["push"] * 6 + ["gather"] * 4 + ["erase", "evict", "meta", "reload"]) * 3
        names += ["save", "restore"]
        for _ in range(n):
            self.now += float(self.rng.integers(0, 3))
            self.stamp += 1
            getattr(self, self.rng.choice(names))()
            assert len(self.rows) == len(self.model.rows)
        assert_same_rows(everything(self.rows), self.model.rows)
        keys, counts = self.rows.own(0).candidates()
        assert dict(zip(keys.tolist(), counts.tolist(), strict=True)) == self.model.seen

    def push(self):
        keys = self.keys()
        grads = self.rng.standard_normal((len(keys), 3)).astype(np.float32)
        kind = self.rng.integers(0, 10)
        updater = optim.Assign() if kind == 0 else optim.Add() if kind == 1 else self.updater
        if kind > 6:
            updater = updater.with_(lr=float(self.rng.random()) + 0.01)
        if kind == 5:
            grads = grads.astype(np.float16)
        counts = push(self.rows, keys, grads, updater, now=self.now, stamp=self.stamp)
        assert counts == self.model.push(keys, grads, updater, self.now)

    def gather(self):
        keys, missing = self.keys(), str(self.rng.choice(["init", "zero"]))
        expected = self.model.gather(keys, missing)
        np.testing.assert_array_equal(
            gather(self.rows, keys, 3, missing), np.reshape(expected, (-1, 3))
        )

    def erase(self):
        keys = self.keys()
        assert self.rows.erase(u64(keys), self.stamp) == self.model.erase(keys)

    def evict(self):
        n = self.rows.evict(self.now, self.stamp, 4096)
        assert n == len(self.model.evict(self.now))
        assert everything(self.rows).keys() == self.model.rows.keys()

    def meta(self):
        keys = self.keys()
        counts, steps, times = metadata(self.rows, keys)
        for i, key in enumerate(keys):
            row = self.model.rows.get(key)
            if row is None:
                assert (counts[i], steps[i]) == (0, 0)
                assert math.isnan(times[i])
            else:
                assert (counts[i], steps[i], times[i]) == (row.count, row.steps, row.time)

    def reload(self):
        """Move the partition, as another server would get it."""
        before, other = self.rows.own(0), shard_of(self.spec)
        other.own(0).load(*before.export())
        other.own(0).load_candidates(*before.candidates())
        self.rows = other

    def save(self):
        """Note all there is, as a checkpoint does."""
        own, model = self.rows.own(0), copy.deepcopy((self.model.rows, self.model.seen))
        self.saved = own.export(), own.candidates(), model
        return self.saved

    def restore(self):
        """Go back to what was noted, within the same partition."""
        rows, candidates, model = self.saved
        own = self.rows.own(0)
        own.clear()
        own.load(*rows)
        own.load_candidates(*candidates)
        self.model.rows, self.model.seen = copy.deepcopy(model)


POLICIES = {
    "plain": {},
    "admit": {"admit": Admit(min_count=3)},
    "ttl": {"evict": Evict(ttl=40)},
    "lru": {"evict": Evict(max_rows=30)},
    "lfu": {"evict": Evict(max_rows=30, policy="lfu"), "admit": Admit(min_count=2)},
    "all": {"evict": Evict(ttl=60, max_rows=40), "admit": Admit(min_count=2)},
}
UPDATERS = [
    optim.SGD(0.1, momentum=0.9),
    optim.Adam(0.1, amsgrad=True),
    optim.NAdam(0.1),
    optim.Adagrad(0.1, lr_decay=0.1, initial_accumulator_value=0.2),
    optim.FTRL(0.1),
    optim.RowwiseAdagrad(0.1),
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("updater", UPDATERS, ids=lambda u: type(u).__name__)
def test_random_sequences_equal_a_dict_of_rows(policy, updater):
    Sequence(hash_of(policy), updater, **POLICIES[policy]).run(400)


def hash_of(name):
    return initializers.table_number(name) % 1000


# -- keys


@pytest.mark.parametrize("stride", [1, 1024, 1 << 20, 1 << 40, (1 << 54) + 3])
def test_many_keys_of_any_pattern_grow_and_shrink(stride):
    keys = [(k * stride) & ((1 << 64) - 1) for k in range(20_000)]
    rows, step = make(1), 5000
    for start in range(0, len(keys), step):
        part = keys[start : start + step]
        push(rows, part, -np.arange(start, start + step, dtype=np.float32)[:, None])
    assert len(rows) == len(keys)
    assert gather(rows, keys, 1, "raise")[:, 0].tolist() == list(range(len(keys)))
    assert rows.erase(u64(keys[::2]), 2) == len(keys) // 2
    assert gather(rows, keys[1::2], 1, "raise")[:, 0].tolist() == list(range(1, len(keys), 2))
    with pytest.raises(KeyError):
        gather(rows, keys[:1], 1, "raise")


def test_any_key_is_a_key():
    rows = make()
    push(rows, ENDS, -np.arange(24, dtype=np.float32).reshape(6, 4))
    assert gather(rows, ENDS, missing="raise").reshape(-1).tolist() == list(range(24))


def test_a_missing_key_is_named_and_out_stays_as_it_was():
    rows = make()
    push(rows, [1, 2], ones(2))
    out = np.full((3, 4), 5, np.float32)
    with pytest.raises(KeyError, match="key 18446744073709551615 has no row"):
        rows.gather(u64([1, ENDS[2], 2]), out, MISSING.index("raise"))
    assert (out == 5).all()


@pytest.mark.parametrize("n_servers", [1, 3])
def test_keys_of_calls_are_dealt_to_servers_in_their_order(n_servers):
    rng = np.random.default_rng(n_servers)
    keys = [rng.integers(0, 2**63, n).astype(np.uint64) for n in (0, 1, 1000, 61)]
    owners = [rng.integers(0, n_servers, 1024).astype(np.uint32) for _ in keys]
    n = sum(map(len, keys))
    dealt, order = np.empty(n, np.uint64), np.empty(n, np.int64)
    counts = np.empty((n_servers, len(keys)), np.int64)
    _core.deal_keys(list(zip(keys, owners, strict=True)), dealt, order, counts)
    expected, places, numbers = [], [], []
    for server in range(n_servers):
        for of_call, owner in zip(keys, owners, strict=True):
            parts = np.empty(len(of_call), np.uint32)
            _core.partition_of(of_call, 1024, parts)
            chosen = np.flatnonzero(owner[parts] == server)
            expected.append(of_call[chosen])
            places.append(chosen)
            numbers.append(len(chosen))
    assert np.array_equal(dealt, np.concatenate(expected))
    assert np.array_equal(order, np.concatenate(places))
    assert counts.ravel().tolist() == numbers


def test_keys_are_dealt_only_to_servers_that_there_are_and_into_room_for_all():
    keys, owners = np.arange(9, dtype=np.uint64), np.full(1024, 2, np.uint32)
    out, order, counts = np.empty(9, np.uint64), np.empty(9, np.int64), np.empty((2, 1), np.int64)
    with pytest.raises(IndexError, match="not so many servers"):
        _core.deal_keys([(keys, owners)], out, order, counts)
    with pytest.raises(ValueError, match="room for 9 keys"):
        _core.deal_keys([(keys, owners)], out[:8], order, counts)
    with pytest.raises(ValueError, match="a column for each of 1 calls"):
        _core.deal_keys([(keys, owners)], out, order, np.empty((3, 2), np.int64))
    with pytest.raises(ValueError, match="as many for each call"):
        _core.deal_keys([(keys, owners), (keys, owners[:5])], out, order, counts)


def test_small_integers_spread_over_partitions_and_servers():
    out = np.empty(102_400, np.uint32)
    _core.partition_of(np.arange(102_400, dtype=np.uint64), 1024, out)
    counts = np.bincount(out, minlength=1024)
    assert counts.min() > 50
    assert counts.max() < 160


# -- pushes


def test_duplicates_are_summed_in_float64_then_rounded_once():
    rows = make(1)
    grads = np.array([[1e8], [3.0], [1.0], [-1e8], [7.0]], np.float32)
    assert push(rows, [5, 6, 5, 5, 6], grads) == (2, 0, 2)
    assert gather(rows, [5, 6], 1)[:, 0].tolist() == [-1.0, -10.0]
    assert metadata(rows, [5, 6])[0].tolist() == [1, 1]


def test_a_rejected_key_does_not_shift_the_gradients_of_its_neighbours():
    rows = make(4, admit=Admit(min_count=2))
    grads = -np.arange(1, 6, dtype=np.float32)[:, None] * ones(1)
    push(rows, [10, 30, 50], ones(3))
    assert push(rows, [10, 20, 30, 40, 50], grads) == (3, 2, 3)
    assert gather(rows, [10, 20, 30, 40, 50])[:, 0].tolist() == [1, 0, 3, 0, 5]


def test_an_accumulator_accumulates():
    rows = make(1, optim.Adagrad(1.0, eps=0.0))
    for _ in range(4):
        push(rows, [3], np.full((1, 1), 2, np.float32), optim.Adagrad(1.0, eps=0.0))
    expected = -sum(1 / math.sqrt(k) for k in range(1, 5))
    assert gather(rows, [3], 1)[0, 0] == pytest.approx(expected, rel=1e-6)


def test_a_learning_rate_reaches_the_rows_with_its_push():
    rows = make(1)
    for lr in (1.0, 0.5, 0.25):
        push(rows, [3], ones(1, 1), SGD.with_(lr=lr))
    assert gather(rows, [3], 1)[0, 0] == -1.75


@pytest.mark.parametrize(
    "updater", [optim.Adam(), optim.SGD(0.1, momentum=0.9), optim.RMSprop(centered=True)]
)
def test_another_updater_than_the_tables_is_refused(updater):
    with pytest.raises(ValueError, match="push: the"):
        push(make(), [1], ones(1), updater)
    rows = make(4, optim.RMSprop(momentum=0.9))
    with pytest.raises(ValueError, match="push: the"):
        push(rows, [1], ones(1), updater)
    assert len(rows) == 0


def test_a_first_assignment_is_no_step_of_the_optimizer():
    adam, values = optim.Adam(0.5), np.full((1, 4), 3, np.float32)
    rows = make(4, adam)
    push(rows, [1], values, optim.Assign())
    push(rows, [1], ones(1), adam)
    counts, steps, _ = metadata(rows, [1])
    assert (counts[0], steps[0]) == (2, 1)
    assert gather(rows, [1])[0, 0] == pytest.approx(2.5, abs=1e-6)


def test_rows_at_many_steps_are_updated_together_as_they_are_alone():
    adam, rng = optim.Adam(0.1), np.random.default_rng(8)
    together, alone = make(4, adam), make(4, adam)
    for key in range(0, 130):
        for _ in range(key):
            push(together, [key], ones(1), adam)
            push(alone, [key], ones(1), adam)
    keys, grads = rng.permutation(130), rng.standard_normal((130, 4)).astype(np.float32)
    push(together, keys, grads, adam)
    for key, grad in zip(keys, grads, strict=True):
        push(alone, [key], grad[None], adam)
    np.testing.assert_array_equal(gather(together, keys), gather(alone, keys))


def test_arguments_are_checked_and_never_converted():
    rows = make()
    bad = [
        (np.array([1, 2]), ones(2)),
        (u64([1, 2]), ones(3)),
        (u64([1, 2]), ones(2, dtype=np.float64)),
        (u64([1, 2]), ones(4)[::2]),
    ]
    for keys, grads in bad:
        with pytest.raises((TypeError, ValueError), match=r"grad|incompatible"):
            rows.push([(keys, grads, 1.0, None)], SGD.code, SGD.hyper, 1.0, 0.0, 1, 1)
    with pytest.raises(ValueError, match="missing"):
        rows.gather(u64([1]), ones(1), 3)
    assert len(rows) == 0


# -- initial values

INITS = [
    initializers.constant(0.25),
    initializers.uniform(-1, 3, seed=5),
    initializers.normal(1, 2, seed=ENDS[2]),
    initializers.truncated_normal(0, 0.1, seed=3),
    initializers.truncated_normal(0, 1, 6.0, 9.0, seed=3),
]


@pytest.mark.parametrize("init", INITS, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_new_row_has_the_bits_of_the_reference(init, dtype):
    keys = [*ENDS, *range(100, 150)]
    rows = make(130, init=init, table=77, dtype=np.dtype(dtype).name)
    expected = np.array([initial(init, 77, key, 130) for key in keys]).astype(dtype)
    before = gather(rows, keys[::-1], 130, dtype=dtype)[::-1]
    np.testing.assert_array_equal(before, expected)
    push(rows, keys, np.zeros((len(keys), 130), dtype), optim.Add())
    np.testing.assert_array_equal(gather(rows, keys, 130, "raise", dtype), expected)


def test_seeds_tables_keys_and_columns_differ():
    streams = [stream_bits(s, t, k, 64) for s in (0, 1) for t in (0, 1) for k in (0, 1, 2)]
    assert len(np.unique(streams)) == 12 * 64


def test_the_distributions_are_what_they_say():
    n = 4000
    draws = {
        name: gather(make(50, init=init, dtype="float64"), range(n), 50, dtype=np.float64)
        for name, init in {
            "uniform": initializers.uniform(2, 4, seed=1),
            "normal": initializers.normal(1, 3, seed=1),
            "cut": initializers.truncated_normal(0, 1, -1, 2, seed=1),
        }.items()
    }
    error = 5 / math.sqrt(n * 50)
    assert draws["uniform"].mean() == pytest.approx(3, abs=error)
    assert draws["uniform"].std() == pytest.approx(1 / math.sqrt(3), abs=error)
    z = (draws["normal"] - 1) / 3
    assert [(z**k).mean() for k in (1, 2, 3, 4)] == pytest.approx([0, 1, 0, 3], abs=10 * error)
    assert np.abs(z).max() > 4
    assert (draws["cut"] >= -1).all()
    assert (draws["cut"] <= 2).all()
    assert draws["cut"].mean() == pytest.approx(0.22964, abs=error)  # (phi(-1) - phi(2)) / 0.81859
    assert abs(np.corrcoef(draws["normal"][:-1].ravel(), draws["normal"][1:].ravel())[0, 1]) < error


@pytest.mark.parametrize("init", INITS, ids=str)
def test_initializers_travel(init):
    assert initializers.from_json(init.to_json()) == init


# -- admission


def test_pulls_count_for_nothing():
    rows = make(4, admit=Admit(min_count=2), init=initializers.constant(9))
    for _ in range(5):
        assert (gather(rows, [1]) == 9).all()
    assert push(rows, [1], ones(1)) == (0, 1, 0)
    assert (gather(rows, [1], missing="zero") == 0).all()
    assert push(rows, [1], ones(1)) == (1, 0, 1)


def test_a_snapshot_has_rows_as_they_were_whatever_is_done_to_them():
    rows = make(4, init=initializers.constant(9), evict=Evict(ttl=10))
    push(rows, [1, 2, 3, 4], ones(4))
    rows.hold(5)
    push(rows, [1, 2, 6], ones(3), now=20.0)  # the row of 6 is new
    rows.erase(u64([2]), 2)
    assert rows.evict(20.0, 3, 1000) == 2
    push(rows, [2, 3], ones(2))  # they begin anew
    then = [[8] * 4] * 4 + [[0] * 4]
    assert gather(rows, [1, 2, 3, 4, 6], missing="zero", held=5).tolist() == then
    with pytest.raises(KeyError, match="key 6 has no row"):
        gather(rows, [1, 6], missing="raise", held=5)
    now = [[7] * 4, [8] * 4, [8] * 4, [0] * 4, [8] * 4]
    assert gather(rows, [1, 2, 3, 4, 6], missing="zero").tolist() == now
    rows.release(5)
    with pytest.raises(ValueError, match="no snapshot 5"):
        gather(rows, [1], held=5)


def test_a_push_counts_a_key_once_however_often_it_stands_there():
    rows = make(4, admit=Admit(min_count=2))
    assert push(rows, [1, 1, 1], ones(3)) == (0, 1, 0)
    assert rows.own(0).candidates()[1].tolist() == [1]


def test_candidates_are_bounded_and_age_and_are_never_admitted_early():
    rows = make(4, admit=Admit(min_count=4, max_candidates=100))
    for _ in range(3):
        push(rows, range(50), ones(50))
    for start in range(1000, 3000, 40):
        push(rows, range(start, start + 40), ones(40))
        assert rows.own(0).n_candidates <= 100
    assert len(rows) == 0
    assert push(rows, range(50), ones(50))[2] == 0


def test_admission_by_chance_is_as_likely_as_it_says_and_the_same_on_replicas():
    pair = [make(4, admit=Admit(probability=0.25), table=3) for _ in range(2)]
    counts = [push(rows, range(4000), ones(4000), stamp=7) for rows in pair]
    assert counts[0] == counts[1]
    assert 900 < counts[0][2] < 1100
    push(pair[0], range(4000), ones(4000), stamp=8)
    assert 1600 < len(pair[0]) < 1900


# -- eviction


@pytest.mark.parametrize(
    "updater", [optim.Adagrad(1.0, initial_accumulator_value=0.5), optim.NAdam()]
)
def test_a_key_that_comes_back_begins_as_a_new_row(updater):
    init = initializers.normal(seed=1)
    rows, fresh = (make(4, updater, init=init, evict=Evict(ttl=10)) for _ in range(2))
    for now in range(5):
        push(rows, [1, 2], ones(2) * 1e30, updater, now=now)
    assert rows.evict(14.0, 9, 100) == 2
    push(rows, [1], ones(1), updater, now=20.0, stamp=10)
    push(fresh, [1], ones(1), updater, now=20.0, stamp=10)
    for a, b in zip(rows.own(0).export(), fresh.own(0).export(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("max_work", [1, 7, 64, 5000])
def test_expiry_in_slices_ends_where_expiry_at_once_does(max_work):
    rows = make(1, evict=Evict(ttl=300))
    rng = np.random.default_rng(1)
    model = Model(1, SGD, initializers.zeros(), ttl_s=300)
    for now in range(60):
        keys = sorted({int(k) for k in rng.zipf(1.2, 10) % 300})
        push(rows, keys, ones(len(keys), 1), now=now * 10)
        model.push(keys, ones(len(keys), 1), SGD, now * 10)
    n, gone = len(rows), 0
    victims = model.evict(601.0)
    for _ in range(n // max_work + 2):
        evicted = rows.evict(601.0, 2, max_work)
        assert evicted <= max_work
        gone += evicted
    assert gone == len(victims)
    assert everything(rows).keys() == model.rows.keys()


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("n_partitions", [1, 7])
def test_the_first_in_order_go_whatever_their_partition_and_no_more(policy, n_partitions):
    spec = row_spec(1, SGD, evict=Evict(ttl=400, max_rows=40, policy=policy))
    rows = _core.Shard(spec, np.zeros(n_partitions, np.uint32), 0)
    rng = np.random.default_rng(1)
    model = Model(1, SGD, initializers.zeros(), ttl_s=400, max_rows=40, is_lfu=policy == "lfu")
    for now in range(60):
        keys = sorted({int(k) for k in rng.zipf(1.2, 30) % 300})
        push(rows, keys, ones(len(keys), 1), now=now * 10)
        model.push(keys, ones(len(keys), 1), SGD, now * 10)
        assert rows.evict(now * 10, 2, 10_000) == len(model.evict(now * 10))
        assert len(rows) == len(model.rows) <= 40
        assert not np.isnan(metadata(rows, [*model.rows])[2]).any()


def test_a_row_that_was_about_to_go_stays_once_it_is_pushed_again():
    most = 160
    rows = make(1, evict=Evict(max_rows=most, policy="lru"))

    def push_one(key, now):
        push(rows, [key], ones(1, 1), now=now)
        rows.evict(now, 2, 10)

    for key in range(most + 1):  # with the last the first goes, and those behind it are found
        push_one(key, float(key))
    for key in (1, 3, 5):
        push_one(key, 500.0)
    for key in range(1000, 1005):
        push_one(key, float(key))
    gone = {key for key in range(most + 1) if np.isnan(metadata(rows, [key])[2][0])}
    assert gone == {0, 2, 4, 6, 7, 8}


def test_a_shard_has_a_share_of_the_rows_by_its_partitions():
    spec = row_spec(1, SGD, evict=Evict(max_rows=1000))
    rows = _core.Shard(spec, np.array([0, 0, 1, 0], np.uint32), 0)
    assert rows.max_rows == 750
    rows.disown(0)
    assert rows.max_rows == 500


@pytest.mark.parametrize(("policy", "least"), [("lru", 1.0), ("lfu", 0.99)])
def test_many_rows_are_capped_to_within_one_percent(policy, least):
    most = 50_000
    rows = make(1, evict=Evict(max_rows=most, policy=policy))
    rng = np.random.default_rng(0)
    for k in range(60):
        keys = np.unique(rng.integers(0, 2**63, 2000))
        push(rows, keys, ones(len(keys), 1), now=float(k))
        rows.evict(float(k), 2, 10)
        assert len(rows) <= most
        assert not np.isnan(metadata(rows, keys)[2]).any()
    assert len(rows) >= least * most


def test_memory_of_evicted_rows_is_used_again():
    rows = make(16, evict=Evict(ttl=1))
    most = 0
    for k in range(30):
        push(rows, range(k * 1000, k * 1000 + 1000), ones(1000, 16), now=float(k), stamp=k + 1)
        rows.evict(float(k + 1), k + 1, 10_000)
        most = rows.nbytes if k == 2 else most
    assert rows.nbytes <= most


# -- size, threads


def test_clear_empties_and_gives_memory_back():
    rows = make(4)
    push(rows, range(5000), ones(5000))
    rows.own(0).clear()
    assert len(rows) == 0
    assert rows.nbytes < 1000


def test_an_empty_partition_is_small():
    spec, n = row_spec(64, optim.Adam()), 1000
    shard = _core.Shard(spec, np.zeros(n, np.uint32), 0)
    for number in range(n):
        shard.own(number)
    assert shard.nbytes < n * 256


def test_memory_is_in_proportion_to_the_rows():
    rows = make(64)
    push(rows, range(20_000), ones(20_000, 64))
    assert rows.nbytes < 20_000 * (64 * 4 + 32 + 64) * 1.6


@pytest.mark.parametrize("case", ["new", "counts", "snapshot"])
def test_a_push_for_which_there_is_no_memory_changes_nothing(case):
    """Neither rows that it has, nor which keys were counted, nor what a snapshot has."""
    program = [sys.executable, HELPERS / "ps_rows_without_memory.py", case]
    said = subprocess.run(program, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert said.stdout.splitlines() == [
        "refused: std::bad_alloc",
        "same state: True",
        "memory was given back: True",
        "rows in the end: 20000",
    ], said.stderr


def test_reads_run_beside_each_other_and_a_write_beside_them_is_refused_not_torn():
    rows, n = make(64), 3000
    push(rows, range(n), ones(n, 64))
    errors, wrong = [], []

    def read():
        keys, out = np.arange(n, dtype=np.uint64), np.empty((n, 64), np.float32)
        for _ in range(100):
            try:
                rows.gather(keys, out, MISSING.index("init"))
                if (out.min(axis=1) != out.max(axis=1)).any():
                    wrong.append(out.copy())
            except RuntimeError as error:
                errors.append(str(error))

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        try:
            push(rows, range(n), ones(n, 64))
        except RuntimeError as error:
            errors.append(str(error))
    for thread in threads:
        thread.join(120)
    assert not wrong
    assert all("another thread" in error for error in errors)


# -- policies


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (5, 5),
        ("90s", 90),
        ("15m", 900),
        ("12h", 43_200),
        ("7d", 604_800),
        ("2w", 1_209_600),
        ("1.5h", 5400),
    ],
)
def test_durations(text, expected):
    assert row_policies.seconds(text) == expected == Evict(ttl=text).ttl_s


@pytest.mark.parametrize(
    "bad",
    [
        Evict,
        lambda: Evict(ttl="7 days"),
        lambda: Evict(ttl=0),
        lambda: Evict(ttl=math.nan),
        lambda: Evict(max_rows=0),
        lambda: Evict(max_rows=3, policy="fifo"),
        lambda: Admit(min_count=0),
        lambda: Admit(probability=0),
        lambda: Admit(min_count=2, probability=0.5),
        lambda: initializers.normal(std=-1),
        lambda: initializers.uniform(2, 1),
        lambda: initializers.uniform(seed=1 << 64),
        lambda: initializers.constant(math.inf),
        lambda: initializers.truncated_normal(low=3, high=3),
    ],
)
def test_what_makes_no_sense_is_refused(bad):
    with pytest.raises(ValueError, match=r"must|give|less|more|both|finite|not in|nothing"):
        bad()
