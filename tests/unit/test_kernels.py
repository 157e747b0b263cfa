"""The C++ kernels against numpy and ml_dtypes, bit for bit."""

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from ringcomm import _core
from ringcomm.arrays.dtypes import DTYPES
from ringcomm.collectives.op import BAND, BOR, BXOR, MAX, MIN, PRODUCT, SUM

HALVES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def raw(x):
    return x.reshape(-1).view(np.uint8)


def code(name):
    return DTYPES[name].kernel


def codes_of(enum):
    header = Path(__file__).parents[2] / "csrc" / "kernels" / "dtype.hpp"
    names = re.search(rf"enum class {enum} : int \{{(.*?)\}}", header.read_text(), re.DOTALL).group(
        1
    )
    return [name.split("=")[0].strip() for name in names.split(",")]


def test_codes_are_those_of_the_header():
    by_code = sorted(DTYPES.values(), key=lambda d: d.kernel)
    assert [d.kernel for d in by_code] == list(range(len(DTYPES)))
    assert codes_of("DType") == [d.name.replace("bool", "boolean") for d in by_code]
    assert codes_of("Op") == [op.value for op in (SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR)]
    assert [op.kernel for op in (SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR)] == list(range(7))


NUMPY = {
    SUM: np.add,
    PRODUCT: np.multiply,
    MIN: np.minimum,
    MAX: np.maximum,
    BAND: np.bitwise_and,
    BOR: np.bitwise_or,
    BXOR: np.bitwise_xor,
}


def is_defined(op, name):
    try:
        op.require(DTYPES[name])
    except TypeError:
        return False
    return True


WIDE = [name for name in DTYPES if name not in HALVES]
DEFINED = [(op, name) for op in NUMPY for name in WIDE if is_defined(op, name)]


def any_values(name, count, seed):
    rng = np.random.default_rng(seed)
    if name == "bool":
        return rng.integers(0, 2, count).astype(bool)
    if DTYPES[name].is_complex:
        parts = rng.standard_normal((2, count))
        return (parts[0] + 1j * parts[1]).astype(name)
    if DTYPES[name].is_float:
        return rng.standard_normal(count).astype(name)
    return rng.integers(0, 256, (count, np.dtype(name).itemsize), np.uint8).reshape(-1).view(name)


@pytest.mark.parametrize(("op", "name"), DEFINED)
@pytest.mark.parametrize("count", [0, 1, 7, 64, 4099])
def test_combine_equals_numpy(op, name, count):
    a, b = any_values(name, count, 1), any_values(name, count, 2)
    with np.errstate(all="ignore"):
        expected = NUMPY[op](a, b)
    _core.combine(raw(a), raw(b), code(name), op.kernel)
    if op is PRODUCT and DTYPES[name].is_complex:  # numpy may fuse a product and a sum
        assert np.allclose(a, expected, rtol=8 * np.finfo(name).eps, atol=1e-6)
    else:
        assert np.array_equal(a, expected)


@pytest.mark.parametrize("name", ["float32", "float64"])
@pytest.mark.parametrize("op", [MIN, MAX])
def test_nan_wins_on_either_side(name, op):
    a, b = np.array([np.nan, 1, np.nan], name), np.array([1, np.nan, np.nan], name)
    _core.combine(raw(a), raw(b), code(name), op.kernel)
    assert np.isnan(a).all()


UNDEFINED = [(op, name) for op in NUMPY for name in WIDE if not is_defined(op, name)]


@pytest.mark.parametrize(("op", "name"), UNDEFINED)
def test_an_operator_without_meaning_is_refused(op, name):
    x = np.ones(4, name)
    with pytest.raises(ValueError, match="no meaning"):
        _core.combine(raw(x), raw(x.copy()), code(name), op.kernel)


@pytest.mark.parametrize("name", [n for n in WIDE if n.startswith(("int", "uint"))])
@pytest.mark.parametrize("divisor", [1, 3, 200, 70_000])
def test_integers_divide_toward_zero_also_by_what_they_cannot_hold(name, divisor):
    x = any_values(name, 1000, 3)
    expected = [int(abs(int(v)) // divisor) * (1 if v >= 0 else -1) for v in x]
    _core.divide(raw(x), divisor, code(name))
    assert x.tolist() == expected


@pytest.mark.parametrize("name", ["float32", "float64", "complex64", "complex128"])
def test_floats_and_complex_divide(name):
    x = any_values(name, 100, 4)
    expected = x / np.dtype(name).type(3)
    _core.divide(raw(x), 3, code(name))
    assert np.allclose(x, expected, rtol=4 * np.finfo(name).eps, atol=0)


def test_bool_is_not_divided():
    with pytest.raises(ValueError, match="no kernel"):
        _core.divide(np.ones(4, np.uint8), 2, code("bool"))


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("op", [PRODUCT, MIN, MAX])
def test_16_bit_floats_are_combined_in_float32_and_rounded_once(name, op):
    rows = [np.random.default_rng(k).standard_normal(5000).astype(HALVES[name]) for k in range(5)]
    acc = rows[0].astype(np.float32)
    for row in rows[1:]:
        acc = NUMPY[op](acc, row.astype(np.float32))
    out = np.empty(5000, HALVES[name])
    _core.combine_rounded(raw(out), [raw(row) for row in rows], code(name), op.kernel, 1)
    assert np.array_equal(out.view(np.uint16), acc.astype(HALVES[name]).view(np.uint16))


@pytest.mark.parametrize("name", HALVES)
def test_widening_and_narrowing_are_exact_for_every_bit_pattern(name):
    every = np.arange(1 << 16, dtype=np.uint16)
    out = np.empty_like(every)
    _core.combine_rounded(raw(out), [raw(every)], code(name), SUM.kernel, 1)
    values = every.view(HALVES[name])
    is_number = ~np.isnan(values.astype(np.float32))
    assert np.array_equal(out[is_number], every[is_number])
    assert np.isnan(out.view(HALVES[name])[~is_number].astype(np.float32)).all()


@pytest.mark.parametrize("name", HALVES)
def test_rounds_once_to_nearest_even_like_the_reference(name):
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 16, (5, 1 << 15), dtype=np.uint16)
    rows = [row.view(HALVES[name]) for row in bits]
    total = rows[0].astype(np.float32)
    with np.errstate(all="ignore"):
        for row in rows[1:]:
            total = total + row.astype(np.float32)
        expected = (total / np.float32(5)).astype(HALVES[name])
    out = np.empty(1 << 15, HALVES[name])
    _core.combine_rounded(raw(out), [raw(row) for row in rows], code(name), SUM.kernel, 5)
    same = (out.view(np.uint16) == expected.view(np.uint16)) | (
        np.isnan(out.astype(np.float32)) & np.isnan(expected.astype(np.float32))
    )
    assert same.all()


@pytest.mark.parametrize("name", HALVES)
def test_every_midpoint_and_its_neighbours_round_like_the_reference(name):
    """One rounding of a float32: built as a sum of two 16-bit numbers is not enough to hit all."""
    half = np.arange(0, 1 << 16, dtype=np.uint16).view(HALVES[name]).astype(np.float32)
    half = half[np.isfinite(half)]
    expected = (half * np.float32(1)).astype(HALVES[name])
    small = np.full(half.size, 2.0**-24 if name == "float16" else 2.0**-133, np.float32)
    rows = [half.astype(HALVES[name]), small.astype(HALVES[name])]
    out = np.empty(half.size, HALVES[name])
    _core.combine_rounded(raw(out), [raw(row) for row in rows], code(name), SUM.kernel, 1)
    exact = rows[0].astype(np.float32) + rows[1].astype(np.float32)
    expected = exact.astype(HALVES[name])
    assert np.array_equal(out.view(np.uint16), expected.view(np.uint16))


def test_sum_is_in_rank_order():
    big, small = np.float16(2048), np.float16(1)
    rows = [np.array([v], np.float16) for v in (big, small, small)]
    out = np.empty(1, np.float16)
    _core.combine_rounded(raw(out), [raw(r) for r in rows], code("float16"), SUM.kernel, 1)
    assert out[0] == np.float16(2050)  # a sum in float16 would stay at 2048


def test_out_may_be_one_of_the_sources():
    a, b = np.array([1, 2], np.float16), np.array([10, 20], np.float16)
    _core.combine_rounded(raw(a), [raw(b), raw(a)], code("float16"), SUM.kernel, 1)
    assert a.tolist() == [11, 22]


@pytest.mark.parametrize(
    "bad",
    [
        np.ones(4, np.float32),  # not bytes: converting would sum into a copy
        np.ones(16, np.uint8)[::2],  # strided
        np.ones((2, 4), np.uint8),
    ],
)
def test_arrays_are_never_converted(bad):
    with pytest.raises(TypeError):
        _core.combine(bad, np.ones(8, np.uint8), code("float32"), SUM.kernel)


def test_read_only_destination_is_refused():
    frozen = np.ones(8, np.uint8)
    frozen.flags.writeable = False
    with pytest.raises(TypeError):
        _core.combine(frozen, np.ones(8, np.uint8), code("float32"), SUM.kernel)
    _core.combine(np.ones(8, np.uint8), frozen, code("float32"), SUM.kernel)


@pytest.mark.parametrize(
    ("dst", "src", "dtype", "message"),
    [
        (8, 4, "float32", "8 bytes, source 4"),
        (6, 6, "float32", "no whole number"),
        (8, 8, "float16", "combine_rounded"),
    ],
)
def test_sizes_and_dtypes_are_checked(dst, src, dtype, message):
    with pytest.raises(ValueError, match=message):
        _core.combine(np.zeros(dst, np.uint8), np.zeros(src, np.uint8), code(dtype), SUM.kernel)


def test_complex_needs_the_alignment_of_its_parts_only():
    store = np.zeros(5, np.float64)
    x = store[1:].view(np.complex128)
    _core.combine(raw(x), raw(np.ones(2, np.complex128)), code("complex128"), SUM.kernel)
    assert x.tolist() == [1, 1]


def test_unaligned_buffer_is_refused():
    store = np.zeros(12, np.uint8)
    with pytest.raises(ValueError, match="aligned"):
        _core.combine(store[1:9], np.zeros(8, np.uint8), code("float32"), SUM.kernel)
