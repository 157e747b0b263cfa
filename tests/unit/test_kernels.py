"""The C++ kernels against numpy and ml_dtypes, bit for bit."""

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from ringcomm import _core
from ringcomm.arrays.dtypes import DTYPES

HALVES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def raw(x):
    return x.reshape(-1).view(np.uint8)


def code(name):
    return DTYPES[name].kernel


def test_codes_are_those_of_the_header():
    header = Path(__file__).parents[2] / "csrc" / "kernels" / "dtype.hpp"
    names = re.search(r"enum class DType : int \{(.*)\}", header.read_text()).group(1)
    names = [name.split("=")[0].strip() for name in names.split(",")]
    assert names == [d.name for d in sorted_by_code()]


def sorted_by_code():
    return sorted((d for d in DTYPES.values() if d.kernel is not None), key=lambda d: d.kernel)


@pytest.mark.parametrize("name", ["float32", "float64", "int32", "int64"])
@pytest.mark.parametrize("count", [0, 1, 7, 64, 4099])
def test_add_equals_numpy(name, count):
    rng = np.random.default_rng(count)
    a, b = (rng.integers(-(2**31), 2**31 - 1, count).astype(name) for _ in range(2))
    expected = a + b
    _core.add(raw(a), raw(b), code(name))
    assert np.array_equal(a, expected)


@pytest.mark.parametrize("name", ["int32", "int64"])
def test_integers_wrap(name):
    top = np.array([np.iinfo(name).max], name)
    _core.add(raw(top), raw(np.ones(1, name)), code(name))
    assert top[0] == np.iinfo(name).min


@pytest.mark.parametrize("name", ["int32", "int64"])
def test_integers_divide_toward_zero(name):
    x = np.array([7, -7, 6, -1, 0], name)
    _core.divide(raw(x), 3, code(name))
    assert x.tolist() == [2, -2, 2, 0, 0]


@pytest.mark.parametrize("name", HALVES)
def test_widening_and_narrowing_are_exact_for_every_bit_pattern(name):
    every = np.arange(1 << 16, dtype=np.uint16)
    out = np.empty_like(every)
    _core.sum_rounded(raw(out), [raw(every)], 1, code(name))
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
    _core.sum_rounded(raw(out), [raw(row) for row in rows], 5, code(name))
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
    _core.sum_rounded(raw(out), [raw(row) for row in rows], 1, code(name))
    exact = rows[0].astype(np.float32) + rows[1].astype(np.float32)
    expected = exact.astype(HALVES[name])
    assert np.array_equal(out.view(np.uint16), expected.view(np.uint16))


def test_sum_is_in_rank_order():
    big, small = np.float16(2048), np.float16(1)
    rows = [np.array([v], np.float16) for v in (big, small, small)]
    out = np.empty(1, np.float16)
    _core.sum_rounded(raw(out), [raw(r) for r in rows], 1, code("float16"))
    assert out[0] == np.float16(2050)  # a sum in float16 would stay at 2048


def test_out_may_be_one_of_the_sources():
    a, b = np.array([1, 2], np.float16), np.array([10, 20], np.float16)
    _core.sum_rounded(raw(a), [raw(b), raw(a)], 1, code("float16"))
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
        _core.add(bad, np.ones(8, np.uint8), code("float32"))


def test_read_only_destination_is_refused():
    frozen = np.ones(8, np.uint8)
    frozen.flags.writeable = False
    with pytest.raises(TypeError):
        _core.add(frozen, np.ones(8, np.uint8), code("float32"))
    _core.add(np.ones(8, np.uint8), frozen, code("float32"))


@pytest.mark.parametrize(
    ("dst", "src", "dtype", "message"),
    [
        (8, 4, "float32", "8 bytes, source 4"),
        (6, 6, "float32", "no whole number"),
        (8, 8, "float16", "no kernel"),
    ],
)
def test_sizes_and_dtypes_are_checked(dst, src, dtype, message):
    with pytest.raises(ValueError, match=message):
        _core.add(np.zeros(dst, np.uint8), np.zeros(src, np.uint8), code(dtype))


def test_unaligned_buffer_is_refused():
    store = np.zeros(12, np.uint8)
    with pytest.raises(ValueError, match="aligned"):
        _core.add(store[1:9], np.zeros(8, np.uint8), code("float32"))
