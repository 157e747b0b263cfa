"""Updaters: what they hold, how they travel, and the updates of those that torch has not."""

import itertools
import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest

from ringcomm import _core
from ringcomm.ps import optim

ALL = [
    optim.Assign(),
    optim.Add(),
    optim.SGD(0.1),
    optim.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    optim.Adagrad(0.1, lr_decay=0.1, initial_accumulator_value=0.5),
    optim.Adam(0.1, betas=(0.5, 0.75)),
    optim.Adam(0.1, amsgrad=True),
    optim.AdamW(0.1),
    optim.RMSprop(0.1),
    optim.RMSprop(0.1, momentum=0.9),
    optim.RMSprop(0.1, centered=True),
    optim.RMSprop(0.1, momentum=0.9, centered=True),
    optim.Adadelta(0.1),
    optim.NAdam(0.1),
    optim.RAdam(0.1),
    optim.FTRL(0.1, l1=0.01, l2=0.1),
    optim.RowwiseAdagrad(0.1),
]
ELEMENTWISE = [u for u in ALL if not isinstance(u, optim.RowwiseAdagrad)]
each = pytest.mark.parametrize("updater", ALL, ids=str)


def update(updater, values, slots, grad, step, *, out=None):
    out = values if out is None else out
    _core.apply_update(updater.code, updater.hyper, step, values, out, slots, grad)
    return out


def test_codes_are_those_of_the_header():
    header = Path(__file__).parents[2] / "csrc" / "ps" / "update.hpp"
    names = re.search(r"enum class Updater : int \{(.*?)\}", header.read_text(), re.DOTALL)[1]
    codes = {
        name.split("=")[0].strip().replace("_", ""): k for k, name in enumerate(names.split(","))
    }
    for updater in ALL:
        if not isinstance(updater, optim.AdamW):
            assert updater.code == codes[type(updater).__name__.lower()]


@each
def test_updaters_travel(updater):
    assert optim.from_json(json.loads(json.dumps(updater.to_json()))) == updater
    assert pickle.loads(pickle.dumps(updater)) == updater
    assert updater.hyper.dtype == np.float64


@each
def test_slots_are_as_many_as_the_core_takes(updater):
    full, per_row, fill = _core.slot_plan(updater.code, updater.hyper)
    assert (full, full + per_row) == (updater.n_full_slots, updater.n_slots)
    assert len(fill) == updater.n_slots
    slots = updater.new_slots((4, 3))
    assert len(slots) == updater.n_slots
    update(updater, np.ones(12, np.float32), slots, np.ones(12, np.float32), 1)


@pytest.mark.parametrize("updater", ELEMENTWISE, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_cutting_a_tensor_changes_no_bit(updater, dtype):
    rng = np.random.default_rng(3)
    whole, cuts = rng.standard_normal(1000).astype(dtype), [0, 1, 8, 65, 500, 999, 1000]
    parts = [whole[a:b].copy() for a, b in itertools.pairwise(cuts)]
    slots = updater.new_slots(whole.shape, dtype)
    part_slots = [updater.new_slots(part.shape, dtype) for part in parts]
    for step in range(1, 11):
        grad = rng.standard_normal(1000).astype(dtype)
        update(updater, whole, slots, grad, step)
        for k, part in enumerate(parts):
            update(updater, part, part_slots[k], grad[cuts[k] : cuts[k + 1]].copy(), step)
    assert np.array_equal(np.concatenate(parts), whole)


@each
def test_out_of_place_leaves_the_old_values_and_has_the_same_bits(updater):
    rng = np.random.default_rng(4)
    values, grad = rng.standard_normal((2, 60)).astype(np.float32)
    before, out = values.copy(), np.empty_like(values)
    slots, more = updater.new_slots((60,)), updater.new_slots((60,))
    update(updater, values, slots, grad, 1, out=out)
    assert np.array_equal(values, before)
    assert np.array_equal(update(updater, values, more, grad, 1), out)
    assert all(np.array_equal(a, b) for a, b in zip(slots, more, strict=True))


@each
@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_16_bit_gradients_are_converted_exactly(updater, kind, dtype):
    rng = np.random.default_rng(5)
    bits = rng.integers(0, 1 << 16, 6000, np.uint16)
    narrow = bits.view(np.float16) if kind == "float16" else bits
    exact = narrow if kind == "float16" else (bits.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        wide = exact.astype(dtype)
    values = rng.standard_normal(6000).astype(dtype)
    slots, more = (updater.new_slots((3, 2000), dtype) for _ in range(2))
    expected = update(updater, values.copy(), slots, wide, 1)
    assert np.array_equal(update(updater, values, more, narrow, 1), expected, equal_nan=True)


def test_assign_and_add():
    values, grad = np.array([1.0, 2.0]), np.array([np.nan, 5.0])
    assert np.array_equal(
        update(optim.Add(), values.copy(), [], grad, 1), [np.nan, 7], equal_nan=True
    )
    assert np.array_equal(update(optim.Assign(), values, [], grad, 7), grad, equal_nan=True)


def ftrl(w, z, n, g, u):
    """McMahan et al. 2013, algorithm 1."""
    sigma = (np.sqrt(n + g * g) - np.sqrt(n)) / u.lr
    z, n = z + g - sigma * w, n + g * g
    moved = -(z - np.sign(z) * u.l1) / ((u.beta + np.sqrt(n)) / u.lr + u.l2)
    return np.where(np.abs(z) <= u.l1, 0, moved), z, n


def test_ftrl_is_that_of_the_paper():
    rng, u = np.random.default_rng(6), optim.FTRL(0.5, beta=2.0, l1=0.8, l2=0.1)
    w, z, n = np.zeros((3, 500))
    values, slots = w.copy(), u.new_slots((500,), np.float64)
    for step in range(1, 51):
        grad = rng.standard_normal(500)
        w, z, n = ftrl(w, z, n, grad, u)
        update(u, values, slots, grad, step)
    np.testing.assert_allclose(values, w, rtol=1e-12, atol=1e-14)
    assert 0 < (values == 0).sum() < 500


def test_ftrl_keeps_the_values_that_it_finds():
    values = np.array([0.5, -2.0, 0.0])
    u = optim.FTRL(0.1, l1=0.3)
    kept = update(u, values.copy(), u.new_slots((3,), np.float64), np.zeros(3), 1)
    np.testing.assert_allclose(kept, values, rtol=1e-14)


def test_rowwise_adagrad_keeps_one_number_per_row():
    rng, u = np.random.default_rng(7), optim.RowwiseAdagrad(0.5, eps=1e-3)
    w, total = rng.standard_normal((4, 13)), np.zeros(4)
    values, slots = w.copy(), u.new_slots((4, 13), np.float64)
    assert slots[0].shape == (4,)
    for step in range(1, 20):
        grad = rng.standard_normal((4, 13))
        total += (grad**2).mean(axis=1)
        w -= 0.5 * grad / (np.sqrt(total) + 1e-3)[:, None]
        update(u, values, slots, grad, step)
    np.testing.assert_allclose(values, w, rtol=1e-12)


def test_a_schedule_changes_what_travels_and_nothing_else():
    u = optim.Adam(0.1, weight_decay=0.5)
    assert u.with_(lr=0.2) == optim.Adam(0.2, weight_decay=0.5)
    assert (u.with_(lr=0.2).hyper != u.hyper).sum() == 1


@pytest.mark.parametrize(
    ("updater", "change"),
    [
        (optim.SGD(0.1), {"momentum": 0.9}),
        (optim.Adam(), {"amsgrad": True}),
        (optim.RMSprop(), {"centered": True}),
        (optim.RMSprop(centered=True, momentum=0.9), {"centered": False}),
    ],
)
def test_a_change_that_needs_other_state_is_refused(updater, change):
    with pytest.raises(ValueError, match="state"):
        updater.with_(**change)


@pytest.mark.parametrize(
    "make",
    [
        lambda: optim.SGD(-1),
        lambda: optim.SGD(float("nan")),
        lambda: optim.SGD(0.1, nesterov=True),
        lambda: optim.Adam(betas=(0.9, 1.0)),
        lambda: optim.Adadelta(rho=1.5),
        lambda: optim.FTRL(0),
        lambda: optim.from_json({"updater": "Sgd"}),
        lambda: optim.from_json({"updater": "SGD", "lrr": 1}),
    ],
)
def test_what_makes_no_sense_is_refused(make):
    with pytest.raises(ValueError, match=r"must|needs|known|no hyper"):
        make()


ones = np.ones(4, np.float32)
frozen = ones.copy()
frozen.flags.writeable = False


@pytest.mark.parametrize(
    ("out", "slots", "grad", "error"),
    [
        (np.ones(5, np.float32), [ones], ones, "5 elements, not 4"),
        (ones, [], ones, "has 1, got 0"),
        (ones, [np.ones(3, np.float32)], ones, "3 elements, not 4"),
        (ones, [np.ones(4)], ones, "dtype"),
        (ones, [ones], np.ones(4), "grad"),
        (ones, [ones], np.ones(4, np.int32), "grad"),
        (ones, [ones], np.ones(3, np.float16), "3 elements, not 4"),
        (ones, [ones], np.ones(8, np.float32)[::2], "incompatible"),
        (np.ones(8, np.float32)[::2], [ones], ones, "incompatible"),
        (frozen, [ones], ones, "incompatible"),
        (ones, [frozen], ones, "incompatible"),
        (ones, [ones], [1.0] * 4, "incompatible"),
    ],
)
def test_arrays_are_checked_and_never_converted(out, slots, grad, error):
    u = optim.Adagrad()
    with pytest.raises((TypeError, ValueError), match=error):
        _core.apply_update(u.code, u.hyper, 1, ones, out, slots, grad)


def test_overlapping_values_are_refused():
    x = np.ones(10, np.float32)
    with pytest.raises(ValueError, match="overlaps"):
        _core.apply_update(1, optim.Add().hyper, 1, x[:6], x[2:8], [], np.ones(6, np.float32))


@pytest.mark.parametrize(("code", "n", "step"), [(99, 0, 1), (-1, 0, 1), (2, 5, 1), (0, 0, 0)])
def test_codes_counts_and_steps_are_checked(code, n, step):
    with pytest.raises(ValueError, match=r"code|counted"):
        _core.apply_update(code, np.ones(n), step, ones, ones.copy(), [], ones)
