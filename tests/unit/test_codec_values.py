"""Codecs: what comes back, and in how many bytes."""

import numpy as np
import pytest
from int8_reference import encode_int8

from ringcomm import codec
from ringcomm.codec import BF16, FP16, Identity, Int8, TopK

CODECS = [Identity(), FP16(), BF16(), Int8(), Int8(block=7), TopK(0.01), TopK(1.0)]
COUNTS = [0, 1, 2, 255, 256, 257, 1000, 1 << 18]
DTYPES = ["float16", "float32", "float64"]
INF, NAN = np.inf, np.nan


def values(count, dtype="float32", seed=1):
    return np.random.default_rng(seed).standard_normal(count).astype(dtype)


def there_and_back(c, x, **kwargs):
    return codec.decode(c.encode(x, **{"draw": 0} | kwargs), np.full_like(x, 7))


def bfloat16_of(x):
    """Round once to 8 bits, ties to even; right for what is normal in bfloat16."""
    mantissa, exponent = np.frexp(x.astype(np.float64))
    return np.ldexp(np.rint(mantissa * 256) / 256, exponent)


def scales_of(x, block):
    if x.size == 0:
        return x
    top = np.maximum.reduceat(np.abs(x), np.arange(0, x.size, block))
    return np.repeat(top / 127, block)[: x.size]


def largest(x, k):
    """Keep k elements by a stable sort, in which the lower of equal indices comes first."""
    kept = np.argsort(-np.abs(x), kind="stable")[:k]
    expected = np.zeros_like(x)
    expected[kept] = x[kept]
    return expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", COUNTS)
class TestRoundTrip:
    def test_identity_is_exact(self, count, dtype):
        x = values(count, dtype)
        assert np.array_equal(there_and_back(Identity(), x), x)

    def test_fp16_is_numpys_cast(self, count, dtype):
        x = values(count, dtype)
        assert np.array_equal(there_and_back(FP16(), x), x.astype(np.float16).astype(dtype))

    def test_bf16_rounds_once_to_8_bits(self, count, dtype):
        x = values(count, dtype)
        expected = x if dtype == "float16" else bfloat16_of(x)  # which is narrow enough as it is
        assert np.array_equal(there_and_back(BF16(), x), expected)

    @pytest.mark.parametrize("block", [7, 256])
    def test_int8_errs_by_less_than_one_step(self, count, dtype, block):
        x = values(count, dtype)
        error = np.abs(there_and_back(Int8(block), x).astype(np.float64) - x)
        rounding = np.finfo(dtype).eps * np.abs(x)
        assert (error <= scales_of(x.astype(np.float64), block) * (1 + 1e-6) + rounding).all()

    @pytest.mark.parametrize("ratio", [0.01, 0.3])
    def test_top_k_keeps_exactly_the_largest(self, count, dtype, ratio):
        x = values(count, dtype)
        k = min(count, max(1, int(np.ceil(ratio * count))))
        assert np.array_equal(there_and_back(TopK(ratio), x), largest(x, k))


@pytest.mark.parametrize("c", CODECS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_length_and_header_are_as_announced(c, dtype):
    buffers = [c.encode(values(count, dtype), draw=0) for count in COUNTS]
    headers = [codec.read_header(buffer) for buffer in buffers]
    assert [b.nbytes for b in buffers] == [c.encoded_nbytes(n, dtype) for n in COUNTS]
    assert [(h.kind, h.dtype.name, h.count) for h in headers] == [
        (c.kind, dtype, n) for n in COUNTS
    ]


@pytest.mark.parametrize(
    ("c", "dtype", "nbytes"),
    [
        (Identity(), "float32", 4000),
        (FP16(), "float64", 2000),
        (BF16(), "float32", 2000),
        (BF16(), "float16", 2000),
        (Int8(), "float32", 1000 + 4 * 4),
        (Int8(), "float64", 1000 + 4 * 8),
        (TopK(0.01), "float32", 10 * 8),
    ],
    ids=str,
)
def test_bytes_behind_the_header(c, dtype, nbytes):
    assert c.encoded_nbytes(1000, dtype) == 16 + nbytes


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("c", "limit"), [(FP16(), 65520.0), (BF16(), 255.5 * 2.0**120)], ids=str)
def test_16_bit_floats_carry_what_is_special(c, limit, dtype):
    x = np.array([INF, -INF, NAN, 0.0, -0.0, limit, -limit, limit * (1 - 2**-20), 1e-45], dtype)
    y = there_and_back(c, x)
    assert y[:2].tolist() == [INF, -INF]
    assert np.isnan(y[2])
    assert np.signbit(y[3:5]).tolist() == [False, True]
    assert y[5:7].tolist() == [INF, -INF]
    assert np.isfinite(y[7:]).all()
    assert abs(y[8]) < 1e-37


def test_every_nan_becomes_the_same():
    bits = np.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFFC00000] * 5, np.uint32)
    for c, quiet in ((FP16(), 0x7E00), (BF16(), 0x7FC0)):
        buffer = c.encode(bits.view(np.float32))
        assert (buffer[codec.HEADER_NBYTES :].view(np.uint16) == quiet).all()


@pytest.mark.parametrize(("c", "last_bit"), [(FP16(), -10), (BF16(), -7)], ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_float64_is_rounded_once(c, last_bit, sign):
    tie = 1 + 2.0 ** (last_bit - 1)  # float32 cannot tell the three apart
    x = sign * np.array([tie, tie + 2**-40, tie - 2**-40])
    up = 1 + 2.0**last_bit
    assert (sign * there_and_back(c, x)).tolist() == [1, up, 1]


def test_every_float16_survives():
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    with np.errstate(invalid="ignore"):  # signalling NaNs on aarch64
        x = every.astype(np.float32)
    assert np.array_equal(there_and_back(FP16(), x), x, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_int8_decodes_a_block_that_is_not_finite_as_nan(dtype, bad):
    x = values(600, dtype)
    x[300] = bad
    y = there_and_back(Int8(), x)
    assert np.isnan(y[256:512]).all()
    assert np.isfinite(y[:256]).all()
    assert np.isfinite(y[512:]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("extreme", ["max", "tiny", "smallest_subnormal"])
def test_int8_takes_the_extremes_of_a_dtype(dtype, extreme):
    top = getattr(np.finfo(dtype), extreme)
    x = np.array([top, -top, top / 2, 0], dtype)
    decoded = [there_and_back(Int8(), x, draw=draw).astype(np.float64) for draw in range(64)]
    floor = np.finfo("float64" if dtype == "float64" else "float32").tiny
    step = max(float(top) / 127, float(floor))
    errors = (np.array(decoded) - x) / step
    assert np.abs(errors).max() < 1.001
    assert np.abs(errors.mean(axis=0)).max() < 0.3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [1, 7, 256, 1000, 1 << 20])
def test_int8_is_bit_for_bit_its_reference(dtype, block):
    x = values(5000, dtype)
    x[:256] = 0
    x[4900:] *= np.finfo(dtype).max / 16
    c = Int8(block, seed=0x0123456789ABCDEF)
    draw = 0xFEDCBA9876543210
    got = c.encode(x, draw=draw)[codec.HEADER_NBYTES :]
    assert got.tobytes() == encode_int8(x, block, c.seed, draw)


class TestUnbiased:
    DRAWS = 4000

    def errors(self, x):
        decoded = [there_and_back(Int8(), x, draw=draw) for draw in range(self.DRAWS)]
        return np.array(decoded).astype(np.float64) - x

    def test_the_mean_of_every_value_is_that_value(self):
        x = values(257, "float64")
        x[:6] = np.abs(x[:256]).max() * np.array([1, -1, 1.5 / 127, 1e-3 / 127, 126.999 / 127, 0])
        errors, scale = self.errors(x), scales_of(x, 256)
        fraction = np.abs(x) / scale % 1
        deviation = scale * np.sqrt(fraction * (1 - fraction) / self.DRAWS)
        z = errors.mean(axis=0) / np.maximum(deviation, 1e-9 * scale)
        assert np.abs(z).max() < 4.5
        assert 0.8 < np.mean(z[6:256] ** 2) < 1.2  # neither biased nor less random than it must be

    def test_what_needs_no_rounding_is_exact_in_every_draw(self):
        x = np.arange(-127.0, 128.0)
        assert not self.errors(x).any()

    def test_errors_of_neighbours_draws_and_seeds_are_independent(self):
        x = np.full(1 << 18, 0.5 / 127, np.float32)
        x[::256] = 1  # the maxima, which make the others lie half-way between two codes
        is_between = np.arange(x.size) % 256 != 0

        def rounded_up(seed, draw):
            return np.where(there_and_back(Int8(seed=seed), x, draw=draw) > x, 1, -1)[is_between]

        first = rounded_up(1, 1)
        for other in (
            rounded_up(1, 2),
            rounded_up(2, 1),
            rounded_up(1, 1 << 32),
            np.roll(first, 1),
        ):
            assert abs(np.mean(first * other)) < 5 / np.sqrt(first.size)
        assert abs(first.mean()) < 5 / np.sqrt(first.size)


@pytest.mark.parametrize("c", CODECS, ids=str)
def test_the_same_call_gives_the_same_bytes(c):
    x = values(1000)
    out = np.full(c.encoded_nbytes(1000, "float32") + 9, 171, np.uint8)
    into = c.encode(x, out=out, draw=5)
    assert into.base is out
    assert np.array_equal(into, c.encode(x, draw=5))
    assert (out[into.size :] == 171).all()


def test_draw_numbers_differ_in_every_part_and_not_between_processes():
    parts = [(), (0,), (1,), ("1",), (1, 2), (12,), ("1", "2"), ("w", 1), (1, "w"), (1, 2, 3)]
    assert len({codec.draw_number(*each) for each in parts}) == len(parts)
    assert codec.draw_number(np.int64(3), "w") == codec.draw_number(3, "w") == 0x11786205BB4474C0


@pytest.mark.parametrize(
    ("ratio", "count", "k"),
    [(0.07, 100, 7), (0.01, 100, 1), (0.01, 101, 2), (1e-9, 5, 1), (1, 5, 5), (0.1, 30, 3)],
)
def test_k_is_the_ceiling_of_the_decimal_that_was_written(ratio, count, k):
    assert codec.read_header(TopK(ratio).encode(values(count))).parameter == k


class TestTopK:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_of_equal_magnitudes_the_lower_index_is_sent(self, dtype):
        x = np.resize(np.array([1, -1, 2, 0], dtype), 1 << 17)
        assert np.array_equal(there_and_back(TopK(0.4), x), largest(x, int(np.ceil(0.4 * x.size))))

    def test_a_sample_that_misleads_changes_nothing(self):
        x = values(1 << 18) * 1e-3
        x[32 : 32 + 64 * 100 : 64] = 5  # where the kernel looks for its first guess
        assert np.array_equal(there_and_back(TopK(0.01), x), largest(x, 2622))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_what_is_not_finite_is_sent_first(self, dtype):
        x = values(1000, dtype)
        x[[10, 500, 900]] = INF, NAN, -INF
        y = there_and_back(TopK(0.003), x)
        assert np.flatnonzero(y).tolist() == [10, 500, 900]
        assert np.array_equal(y[[10, 500, 900]], x[[10, 500, 900]], equal_nan=True)
        assert np.flatnonzero(there_and_back(TopK(0.001), x)).tolist() == [500]


@pytest.mark.parametrize("c", CODECS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_buffer_may_lie_at_any_address_in_any_kind_of_memory(c, dtype):
    x = values(1001, dtype)
    buffer = c.encode(x, draw=3)
    store = np.zeros(buffer.size + 1, np.uint8)
    store[1:] = buffer
    kinds = [store[1:], buffer.tobytes(), bytearray(buffer), memoryview(store)[1:]]
    expected = c.decode(buffer, np.empty_like(x))
    decoded = [codec.decode(each, np.empty_like(x)) for each in kinds]
    assert all(np.array_equal(each, expected) for each in decoded)


@pytest.mark.parametrize("draw", [None, -1, 2**64])
def test_int8_without_a_proper_draw_is_refused(draw):
    with pytest.raises(ValueError, match="draw"):
        Int8().encode(values(4), draw=draw)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Int8(block=0),
        lambda: Int8(block=2**32),
        lambda: Int8(seed=-1),
        lambda: TopK(0),
        lambda: TopK(1.01),
        lambda: TopK(NAN),
    ],
)
def test_senseless_settings_are_refused(make):
    with pytest.raises(ValueError, match=r"must be .*, not"):
        make()
