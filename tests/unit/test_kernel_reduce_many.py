"""The kernel k sources -> m destinations against numpy and ml_dtypes, bit for bit."""

import ctypes
import shutil
import subprocess
from functools import cache
from itertools import pairwise
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from harness import at_length
from numpy_operators import HALVES, NUMPY, is_defined

from ringcomm import _core
from ringcomm.arrays.dtypes import DTYPES
from ringcomm.collectives.operators import BAND, BXOR, MAX, MIN, PRODUCT, SUM

FLOATS = [*HALVES, "float32", "float64", "complex64", "complex128"]


def dtype_of(name):
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


DEFINED = [(op, name) for op in NUMPY for name in DTYPES if is_defined(op, name)]


@cache
def source(name, count, seed):
    """Return any bits of this dtype: NaN of all kinds, infinities, subnormals, wide exponents."""
    rng = np.random.default_rng([seed, count])
    if name == "bool":
        return rng.integers(0, 2, count).astype(bool)
    bits = rng.integers(0, 256, count * dtype_of(name).itemsize, np.uint8)
    x = bits.view(dtype_of(name))
    if name not in HALVES and DTYPES[name].name in FLOATS:  # random bits are nearly all extreme
        reals = x.view(x.real.dtype)
        is_tame = rng.random(reals.size) < 0.9
        reals[is_tame] = rng.standard_normal(is_tame.sum())
    x.flags.writeable = False
    return x


def sources(name, count, n):
    return [source(name, count, seed) for seed in range(n)]


def complex_product(a, b):
    """Return the product by numpy's formula, which numpy itself may evaluate with fused sums."""
    out = np.empty_like(a)
    out.real = a.real * b.real - a.imag * b.imag
    out.imag = a.real * b.imag + a.imag * b.real
    return out


def expected_of(op, rows, divisor=1):
    is_half = rows[0].dtype.name in HALVES
    combine = complex_product if op is PRODUCT and rows[0].dtype.kind == "c" else NUMPY[op]
    with np.errstate(all="ignore"):
        if divisor != 1 and rows[0].dtype.kind in "iu":
            is_average = divisor >= len(rows)  # its sum does not wrap
            total = sum(row.astype(object) if is_average else row for row in rows)
            quotient = np.abs(total.astype(object)) // divisor
            return np.where(total < 0, -quotient, quotient).astype(rows[0].dtype)
        total = rows[0].astype(np.float32) if is_half else rows[0].copy()
        for row in rows[1:]:
            total = combine(total, row.astype(total.dtype))
        if divisor != 1:
            reals = total.view(total.real.dtype)
            reals /= reals.dtype.type(divisor)
        return total.astype(rows[0].dtype)


def reduce_many(op, dsts, srcs, divisor=1):
    """Call the kernel; dsts and srcs are arrays of one dtype."""
    raw = [[x.reshape(-1).view(np.uint8) for x in xs] for xs in (dsts, srcs)]
    _core.reduce_many(*raw, DTYPES[srcs[0].dtype.name].kernel, op.kernel, divisor)


def reduced(op, srcs, divisor=1):
    out = np.empty_like(srcs[0])
    reduce_many(op, [out], srcs, divisor)
    return out


def bits(x):
    return x.view(np.uint8).tobytes()


def assert_same(actual, expected, *, is_signed_zero=True):
    """The same numbers with the same bits; of NaN only that they are NaN."""
    if expected.dtype.name in FLOATS:
        kind = np.float32 if expected.dtype.name in HALVES else expected.real.dtype
        wide = [
            x.astype(kind) if x.dtype.name in HALVES else x.view(kind) for x in (actual, expected)
        ]
        assert np.array_equal(*wide, equal_nan=True)
        if is_signed_zero:
            is_number = ~np.isnan(wide[1])
            assert np.array_equal(*(np.signbit(x[is_number]) for x in wide))
    else:
        assert np.array_equal(actual, expected)


def placed(srcs, where):
    """Return destinations and sources: one or two of their own, or all sources in place."""
    if where == "in place":
        srcs = [x.copy() for x in srcs]
        return srcs, srcs
    return [np.empty_like(srcs[0]) for _ in range(where)], srcs


@pytest.mark.parametrize(("op", "name"), DEFINED)
@pytest.mark.parametrize("n_src", at_length([1, 2, 3, 4, 5, 8], [1, 2, 5]))
@pytest.mark.parametrize(
    ("count", "where"),
    [(0, 1), (1, 2), *at_length([(7, "in place"), (1003, 1)], []), (20011, "in place")],
)
def test_every_destination_equals_numpy(op, name, n_src, count, where):
    rows = sources(name, count, n_src)
    expected = expected_of(op, rows)
    dsts, srcs = placed(rows, where)
    reduce_many(op, dsts, srcs)
    assert_same(dsts[0], expected, is_signed_zero=op not in (MIN, MAX))
    assert len({bits(dst) for dst in dsts}) == 1


@pytest.mark.parametrize("name", [n for n in DTYPES if n != "bool"])
@pytest.mark.parametrize("n_src", at_length([1, 2, 3, 4, 5, 8], [1, 3, 8]))
@pytest.mark.parametrize("divisor", [2, 3, 1024, 70_001])
def test_the_sum_is_divided(name, n_src, divisor):
    rows = sources(name, 1003, n_src)
    dsts, srcs = placed(rows, "in place")
    expected = expected_of(SUM, rows, divisor)
    reduce_many(SUM, dsts, srcs, divisor)
    assert_same(dsts[0], expected)
    assert len({bits(dst) for dst in dsts}) == 1


@pytest.mark.parametrize("name", [n for n in DTYPES if "int" in n])
@pytest.mark.parametrize("n_src", [2, 3, 64, 1000])
def test_averages_at_both_ends_of_the_range_are_exact(name, n_src):
    info = np.iinfo(name)
    ends = np.array([info.min, info.min + 1, info.max - 1, info.max], name)
    which = np.random.default_rng(n_src).integers(0, 4, (n_src, 301))
    which[:, :4] = np.arange(4)  # all ranks at the same end
    rows = [*ends[which]]
    means = reduced(SUM, rows, n_src)
    assert_same(means, expected_of(SUM, rows, n_src))
    assert means[:4].tolist() == ends.tolist()


@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "uint16"])
@pytest.mark.parametrize("divisor", [1, 3, 7, 127, 181, 255, 256, 32767, 65535])
def test_every_small_integer_divides_toward_zero(name, divisor):
    every = np.arange(1 << 8 * np.dtype(name).itemsize, dtype=f"u{np.dtype(name).itemsize}")
    every = every.view(name)
    expected = np.trunc(every.astype(np.float64) / divisor).astype(name)
    assert np.array_equal(reduced(SUM, [every], divisor), expected)


@pytest.mark.parametrize("name", ["int32", "uint32"])
@pytest.mark.parametrize("divisor", [3, 65_537, 2**31 - 1, 2**31, 2**32 - 1])
def test_multiples_and_their_neighbours_divide_toward_zero(name, divisor):
    info = np.iinfo(name)
    multiples = np.arange(-400, 401) * divisor * max(1, info.max // divisor // 400)
    near = (multiples[:, None] + np.array([-1, 0, 1])).reshape(-1)
    x = near[(near >= info.min) & (near <= info.max)].astype(name)
    expected = [int(abs(int(v)) // divisor) * (1 if v >= 0 else -1) for v in x]
    assert reduced(SUM, [x], divisor).tolist() == expected


def widened(halves):
    with np.errstate(invalid="ignore"):  # signalling NaNs on aarch64
        return halves.astype(np.float32)


@pytest.mark.parametrize("name", HALVES)
def test_widening_and_narrowing_are_exact_for_every_bit_pattern(name):
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype_of(name))
    out = reduced(PRODUCT, [every, np.ones_like(every)])
    is_number = ~np.isnan(widened(every))
    assert np.array_equal(out.view(np.uint16)[is_number], every.view(np.uint16)[is_number])
    assert np.isnan(widened(out[~is_number])).all()


@pytest.mark.parametrize("name", HALVES)
def test_midpoints_and_their_neighbours_round_to_even(name):
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype_of(name))
    every = every[np.isfinite(widened(every))]
    tiny = np.full_like(every, 2.0**-24 if name == "float16" else 2.0**-133)
    ulp_halves = (
        np.abs(every.astype(np.float32)) * 2.0 ** (-11 if name == "float16" else -8)
    ).astype(every.dtype)
    for rows in ([every, ulp_halves], [every, ulp_halves, tiny], [every, tiny, ulp_halves, -tiny]):
        assert_same(reduced(SUM, rows), expected_of(SUM, rows))


@pytest.mark.parametrize("name", [*HALVES, "uint8", "int64"])
def test_combine_at_once_is_the_same_for_one_destination(name):
    rows = sources(name, 1004, 3)
    out, raw = np.empty_like(rows[0]), [row.view(np.uint8) for row in rows]
    _core.combine_at_once(out.view(np.uint8), raw, DTYPES[name].kernel, SUM.kernel, 3)
    assert bits(out) == bits(reduced(SUM, rows, 3))


def test_sum_is_in_the_order_of_the_sources():
    rows = [np.array([v], np.float16) for v in (2048, 1, 1)]
    assert reduced(SUM, rows)[0] == 2050  # a sum in float16 would stay at 2048
    rows = [np.array([v], np.float32) for v in (1e8, 1, 1, 1, -1e8, 3)]
    assert reduced(SUM, rows)[0] == 3


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("n_src", [2, 3, 5])
@pytest.mark.parametrize("divisor", [1, 2, 3])
def test_bits_do_not_depend_on_where_a_range_is_cut(name, n_src, divisor):
    divisor = 1 if name == "bool" else divisor
    rows = sources(name, 20011, n_src)
    whole = reduced(SUM, rows, divisor)
    cuts = [0, *sorted(np.random.default_rng(n_src).integers(0, 20011, 60)), 20011]
    out = np.empty_like(whole)
    for start, stop in pairwise(cuts):
        second = np.empty_like(out[start:stop])
        reduce_many(SUM, [second, out[start:stop]], [r[start:stop] for r in rows], divisor)
    assert bits(out) == bits(whole)


@pytest.mark.parametrize("name", DTYPES)
def test_bits_do_not_depend_on_alignment(name):
    shifts = (0, 1, 3)
    store = [np.resize(source(name, 1000, k), 1010) for k in range(3)]
    rows = [x[shift : shift + 1000] for x, shift in zip(store, shifts, strict=True)]
    out = np.empty_like(store[0])[5:1005]
    reduce_many(SUM, [out], rows)
    assert bits(out) == bits(reduced(SUM, [row.copy() for row in rows]))


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("op", [SUM, PRODUCT])
def test_a_computed_nan_is_always_the_same_one(name, op):
    rows = sources(name, 20011, 4)
    out = reduced(op, rows)
    kind = np.dtype(np.uint16) if name in HALVES else np.dtype(f"u{out.real.itemsize}")
    is_nan = np.isnan(out.astype(np.float32) if name in HALVES else out.view(out.real.dtype))
    assert len(set(out.view(kind)[is_nan].tolist())) == 1


def test_any_byte_but_zero_is_true():
    a, b = np.array([0, 2, 4, 0], np.uint8), np.array([0, 1, 0, 255], np.uint8)
    out = np.empty(4, np.uint8)
    for op, expected in ((SUM, [0, 1, 1, 1]), (BAND, [0, 1, 0, 0]), (BXOR, [0, 0, 1, 1])):
        _core.reduce_many([out], [a, b], DTYPES["bool"].kernel, op.kernel, 1)
        assert out.tolist() == expected


def test_a_destination_may_be_named_twice_or_be_the_last_source():
    rows = [np.arange(5, dtype=np.float32) + k for k in range(6)]
    expected = expected_of(SUM, rows)
    reduce_many(SUM, [rows[5], rows[5], rows[0]], rows)
    assert rows[5].tolist() == rows[0].tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("op", "name"), [(o, n) for o in NUMPY for n in DTYPES if (o, n) not in DEFINED]
)
def test_an_operator_without_meaning_is_refused(op, name):
    with pytest.raises(ValueError, match="no meaning"):
        reduced(op, sources(name, 4, 2))


@pytest.mark.parametrize(("op", "name"), [(SUM, "bool"), (BAND, "int32"), (BXOR, "uint8")])
def test_bits_are_not_divided(op, name):
    with pytest.raises(ValueError, match="no kernel divides"):
        reduced(op, sources(name, 4, 2), 2)


EIGHT = np.zeros(8, np.uint8)


@pytest.mark.parametrize(
    ("dsts", "srcs", "divisor", "message"),
    [
        ([], [EIGHT], 1, "no destination"),
        ([EIGHT.copy()], [], 1, "no source"),
        ([EIGHT.copy()], [EIGHT], 0, "divisor is 0"),
        ([EIGHT.copy()], [EIGHT, EIGHT[:4]], 1, "4 bytes, the first destination 8"),
        ([EIGHT.copy(), EIGHT[:4].copy()], [EIGHT], 1, "4 bytes, the first destination 8"),
        ([EIGHT[:6].copy()], [EIGHT[:6]], 1, "no whole number"),
        ([np.zeros(12, np.uint8)[1:9]], [EIGHT], 1, "aligned"),
        ([EIGHT.copy()], [np.zeros(12, np.uint8)[1:9]], 1, "aligned"),
    ],
)
def test_sizes_and_alignment_are_checked(dsts, srcs, divisor, message):
    with pytest.raises(ValueError, match=message):
        _core.reduce_many(dsts, srcs, DTYPES["float32"].kernel, SUM.kernel, divisor)


@pytest.mark.parametrize(
    "bad", [np.ones(2, np.float32), np.ones(16, np.uint8)[::2], EIGHT.reshape(2, 4)]
)
@pytest.mark.parametrize("is_destination", [True, False])
def test_arrays_are_never_converted(bad, is_destination):
    dsts, srcs = ([bad], [EIGHT]) if is_destination else ([EIGHT.copy()], [bad])
    with pytest.raises(TypeError):
        _core.reduce_many(dsts, srcs, DTYPES["float32"].kernel, SUM.kernel, 1)


def test_read_only_destination_is_refused():
    frozen = np.frombuffer(bytes(8), np.uint8)
    with pytest.raises(TypeError):
        _core.reduce_many([frozen], [EIGHT], DTYPES["float32"].kernel, SUM.kernel, 1)


@pytest.fixture(scope="module")
def portable(tmp_path_factory):
    """The loops for float16 that a processor with F16C never takes, compiled here."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no c++ here: the portable loops of float16 are built apart from the package")
    here = Path(__file__)
    library = tmp_path_factory.mktemp("portable") / "portable.so"
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC"]
    include = f"-I{here.parents[2] / 'csrc' / 'kernels'}"
    subprocess.run(
        [
            compiler,
            *flags,
            include,
            here.with_name("float16_reduction_without_f16c.cpp"),
            "-o",
            library,
        ],
        check=True,
    )
    return ctypes.CDLL(str(library)).reduce_float16


@pytest.mark.long
@pytest.mark.parametrize("op", [SUM, PRODUCT, MIN, MAX])
@pytest.mark.parametrize("n_src", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("divisor", [1, 3, 4])
def test_float16_has_the_same_bits_without_f16c(portable, op, n_src, divisor):
    rows = [np.arange(1 << 16, dtype=np.uint16), *(source("uint16", 1 << 16, k) for k in range(8))]
    rows = rows[:n_src]
    here = np.empty_like(rows[0])
    pointers = (ctypes.c_void_p * n_src)(*(row.ctypes.data for row in rows))
    portable(op.kernel, ctypes.c_void_p(here.ctypes.data), pointers, n_src, 1 << 16, divisor)
    shipped = reduced(op, [row.view(np.float16) for row in rows], divisor)
    assert np.array_equal(here, shipped.view(np.uint16))
