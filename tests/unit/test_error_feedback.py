"""Error feedback: nothing that was given is lost, at any learning rate."""

import numpy as np
import pytest

from ringcomm import codec
from ringcomm.codec import BF16, FP16, Identity, Int8, Residual, TopK

STEPS = 200
COUNT = 1000
LOSSY = [FP16(), BF16(), Int8(), TopK(0.01)]


def gradients(dtype="float32", steps=STEPS, seed=0):
    return np.random.default_rng(seed).standard_normal((steps, COUNT)).astype(dtype)


def schedule(steps=STEPS):
    """Return warm-up from 0, a restart, and a cosine down to 0."""
    up = np.linspace(0, 0.1, steps // 4, endpoint=False)
    down = 0.05 * (1 + np.cos(np.linspace(0, np.pi, steps - len(up))))
    rates = np.concatenate([up, down])
    rates[steps // 2] = 0.4
    return [float(lr) for lr in rates]


def pushed(residual, rows, rates=None, name="w"):
    """Return what the receiver decodes of each push, in float64."""
    decoded = []
    for step, row in enumerate(rows):
        lr = None if rates is None else rates[step]
        buffer = residual.encode(name, row, lr=lr, draw=codec.draw_number(name, step))
        decoded.append(codec.decode(buffer, np.empty_like(row)))
    return np.array(decoded, np.float64)


def kept(residual, name="w"):
    """Return what is kept, times the rate that it is kept for."""
    state = residual.state_dict()
    return state["dropped"][name].astype(np.float64) * state["lr"].get(name, 1.0)


def rounding(dtype):
    return np.finfo("float64" if dtype == "float64" else "float32").eps


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("c", LOSSY, ids=str)
def test_decoded_plus_residual_is_what_was_given(c, dtype):
    rows, residual = gradients(dtype), Residual(c)
    total = pushed(residual, rows).sum(axis=0) + kept(residual)
    given = rows.astype(np.float64)
    assert np.abs(total - given.sum(axis=0)).max() <= STEPS * rounding(dtype) * np.abs(given).max()
    assert dtype == "float16" or np.abs(kept(residual)).max() > 0


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("c", LOSSY, ids=str)
def test_it_holds_of_what_a_server_applies_when_the_rate_changes(c, dtype):
    rows, rates, residual = gradients(dtype), schedule(), Residual(c)
    applied = (np.array(rates)[:, None] * pushed(residual, rows, rates)).sum(axis=0)
    given = np.array(rates)[:, None] * rows
    error = np.abs(applied + kept(residual) - given.sum(axis=0)).max()
    assert error <= STEPS * rounding(dtype) * np.abs(given).max() * 8


@pytest.mark.parametrize("c", [TopK(0.05), BF16()], ids=str)
def test_it_is_ef_sgd_bit_for_bit(c):
    """Karimireddy et al. 2019, algorithm 2, with rates that scale without rounding."""
    rows = gradients("float64")
    rates = [2.0 ** -(step // 20 % 7) for step in range(STEPS)]
    decoded = pushed(Residual(c), rows, rates)
    error, ours, theirs = np.zeros(COUNT), np.zeros(COUNT), np.zeros(COUNT)
    for step, lr in enumerate(rates):
        wanted = lr * rows[step] + error
        sent = codec.decode(c.encode(wanted), np.empty(COUNT))
        error = wanted - sent
        theirs -= sent
        ours -= lr * decoded[step]
    assert np.array_equal(ours, theirs)


def test_without_the_rate_it_would_not_be():
    rows, residual = gradients("float64", 3), Residual(TopK(0.05))
    decoded = pushed(residual, rows)
    rates = np.array([1.0, 0.1, 0.1])
    applied = (rates[:, None] * decoded).sum(axis=0) + 0.1 * kept(residual)
    assert np.abs(applied - (rates[:, None] * rows).sum(axis=0)).max() > 0.1


def test_sgd_with_the_largest_percent_reaches_the_optimum():
    optimum, w = gradients("float64", 1)[0], np.zeros(COUNT)
    residual = Residual(TopK(0.01))
    for step in range(3000):
        lr = 0.02 if step < 2000 else 0.005
        buffer = residual.encode("w", w - optimum, lr=lr)
        w -= lr * codec.decode(buffer, np.empty(COUNT))
    assert np.abs(w - optimum).max() < 1e-3


def test_tensors_are_kept_apart_by_name():
    apart, together = {}, Residual(TopK(0.01))
    for name in ("a", "b"):
        rows = gradients(seed=ord(name))
        apart[name] = pushed(Residual(TopK(0.01)), rows, name=name)
    for name in ("a", "b"):
        rows = gradients(seed=ord(name))
        assert np.array_equal(pushed(together, rows, name=name), apart[name])


def test_the_gradient_itself_is_not_changed():
    row = gradients(steps=1)[0]
    before = row.copy()
    pushed(Residual(TopK(0.01)), [row, row])
    assert np.array_equal(row, before)


def test_out_holds_what_was_encoded():
    row, out = gradients(steps=1)[0], np.zeros(5000, np.uint8)
    buffer = Residual(FP16()).encode("w", row, out=out)
    assert buffer.base is out
    assert np.array_equal(buffer, FP16().encode(row))


class TestNotFinite:
    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("c", LOSSY, ids=str)
    def test_it_is_sent_and_leaves_the_residual_as_it_was(self, c, bad):
        rows, residual = gradients(), Residual(c)
        pushed(residual, rows[:5])
        before = kept(residual)
        spoilt = rows[5].copy()
        spoilt[17] = bad
        assert not np.isfinite(pushed(residual, [spoilt])).all()
        assert np.array_equal(kept(residual), before)

    @pytest.mark.parametrize("c", LOSSY, ids=str)
    def test_a_first_gradient_that_is_not_finite_keeps_nothing(self, c):
        residual = Residual(c)
        pushed(residual, [np.full(COUNT, np.nan, np.float32)])
        assert residual.state_dict() == {"dropped": {}, "lr": {}}

    def test_fp16_sends_the_gradient_alone_where_the_sum_would_be_infinite(self):
        rows, residual = gradients(steps=3), Residual(FP16())
        rates = [1.0, 1e-12, 0.5]
        applied = np.array(rates)[:, None] * pushed(residual, rows, rates)
        assert np.isfinite(applied).all()
        total = applied.sum(axis=0) + kept(residual)
        assert np.allclose(total, (np.array(rates)[:, None] * rows).sum(axis=0), atol=1e-6)


class TestRateZero:
    def test_what_is_sent_and_dropped_then_counts_for_nothing(self):
        rows, residual = gradients(), Residual(TopK(0.01))
        assert np.array_equal(
            pushed(residual, rows[:1], [0.0])[0],
            codec.decode(TopK(0.01).encode(rows[0]), np.empty(COUNT, np.float32)),
        )
        assert residual.state_dict()["dropped"] == {}

    def test_the_residual_waits(self):
        rows, residual = gradients(), Residual(TopK(0.01))
        pushed(residual, rows[:2], [0.1, 0.1])
        before = kept(residual)
        pushed(residual, rows[2:4], [0.0, 0.0])
        assert np.array_equal(kept(residual), before)


class TestGiveBack:
    @pytest.mark.parametrize("rates", [None, [0.1, 0.4, 0.01, 0.1, 0.2, 0.0]], ids=str)
    @pytest.mark.parametrize("c", LOSSY, ids=str)
    def test_what_was_not_applied_goes_with_the_next(self, c, rates):
        rows, residual = gradients("float64", 6), Residual(c)
        lrs = rates or [None] * 6
        buffers = [
            residual.encode("w", row, lr=lr, draw=step)
            for step, (row, lr) in enumerate(zip(rows, lrs, strict=True))
        ]
        late = (1, 4)  # answered when others have left already
        for step in late:
            residual.give_back("w", buffers[step], lr=lrs[step])
        factors = np.array(rates or [1.0] * 6)[:, None]
        decoded = np.array([codec.decode(each, np.empty(COUNT)) for each in buffers])
        applied = np.delete(factors * decoded, late, axis=0).sum(axis=0)
        total = applied + kept(residual)
        assert np.allclose(total, (factors * rows).sum(axis=0), rtol=0, atol=1e-12)

    @pytest.mark.parametrize("rates", [(1e-30, 1e10), (1e10, 1e-30)])
    def test_rates_that_lie_far_apart_overflow_nothing(self, rates):
        row, residual = gradients(steps=1)[0], Residual(BF16())
        for lr in rates:
            residual.give_back("w", BF16().encode(row), lr=lr)
        assert np.allclose(kept(residual), 1e10 * row, rtol=0.01)

    def test_nan_is_not_taken_back(self):
        rows, residual = gradients(), Residual(BF16())
        pushed(residual, rows[:1])
        before = kept(residual)
        residual.give_back("w", BF16().encode(np.full(COUNT, np.nan, np.float32)))
        assert np.array_equal(kept(residual), before)

    def test_a_buffer_of_another_tensor_is_refused(self):
        residual = Residual(BF16())
        pushed(residual, gradients(steps=1))
        with pytest.raises(ValueError, match=r"residual\[w\]: got 9 float32, after 1000 float32"):
            residual.give_back("w", BF16().encode(np.ones(9, np.float32)))


class TestState:
    @pytest.mark.parametrize("rates", [None, schedule(20)], ids=["no lr", "lr"])
    @pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
    def test_a_restored_one_sends_the_same_bytes(self, dtype, rates):
        rows, residual = gradients(dtype, 20), Residual(TopK(0.01))
        pushed(residual, rows[:10], rates and rates[:10])
        restored = Residual(TopK(0.01))
        restored.load_state_dict(residual.state_dict())
        rest = (rows[10:], rates and rates[10:])
        assert np.array_equal(pushed(restored, *rest), pushed(residual, *rest))

    def test_a_state_is_a_copy(self):
        rows, residual = gradients(), Residual(TopK(0.01))
        pushed(residual, rows[:2])
        state = residual.state_dict()
        before = state["dropped"]["w"].copy()
        restored = Residual(TopK(0.01))
        restored.load_state_dict(state)
        pushed(residual, rows[2:])
        pushed(restored, rows[2:])
        assert np.array_equal(state["dropped"]["w"], before)

    def test_a_forgotten_tensor_may_have_another_shape(self):
        residual = Residual(TopK(0.01))
        pushed(residual, gradients(steps=1))
        residual.forget("w")
        residual.forget("w")
        residual.encode("w", np.ones(3, np.float32))
        assert residual.state_dict()["dropped"]["w"].tolist() == [0, 1, 1]

    @pytest.mark.parametrize(
        "state",
        [
            {},
            {"dropped": {}},
            {"dropped": {}, "lr": {"w": np.array(0.1)}},
            {"dropped": {"w": np.full(3, np.nan)}, "lr": {}},
            {"dropped": {"w": np.ones(3, np.float16)}, "lr": {}},
            {"dropped": {"w": np.ones(3)}, "lr": {"w": np.array(np.nan)}},
            {"dropped": {"w": np.ones(3)}, "lr": {"w": np.array(0.0)}},
        ],
        ids=["empty", "no lr", "lr alone", "nan", "float16", "lr nan", "lr 0"],
    )
    def test_what_is_no_state_is_refused_and_changes_nothing(self, state):
        residual = Residual(TopK(0.01))
        pushed(residual, gradients(steps=2))
        before = kept(residual)
        with pytest.raises(ValueError, match="residual"):
            residual.load_state_dict(state)
        assert np.array_equal(kept(residual), before)


class TestMistakes:
    def residual(self, lr=None):
        residual = Residual(TopK(0.01))
        residual.encode("fc.weight", np.ones(4, np.float32), lr=lr)
        return residual

    @pytest.mark.parametrize(("count", "dtype"), [(5, "float32"), (4, "float64")])
    def test_another_shape_or_dtype_names_both(self, count, dtype):
        text = rf"residual\[fc.weight\]: got {count} {dtype}, after 4 float32"
        with pytest.raises(ValueError, match=text):
            self.residual().encode("fc.weight", np.ones(count, dtype))

    @pytest.mark.parametrize(("before", "now"), [(None, 0.1), (0.1, None)])
    def test_a_rate_is_given_always_or_never(self, before, now):
        with pytest.raises(ValueError, match=f"got lr={now}, after {before}"):
            self.residual(before).encode("fc.weight", np.ones(4, np.float32), lr=now)

    @pytest.mark.parametrize("lr", [-0.1, np.nan, np.inf])
    def test_a_senseless_rate_is_refused(self, lr):
        with pytest.raises(ValueError, match="lr must be finite and not negative"):
            self.residual(0.1).encode("fc.weight", np.ones(4, np.float32), lr=lr)


def test_identity_drops_nothing():
    residual = Residual(Identity())
    pushed(residual, gradients())
    assert not kept(residual).any()
