"""combine and divide, and the codes of dtypes and operators."""

import re
from pathlib import Path

import numpy as np
import pytest
from numpy_operators import HALVES, NUMPY, is_defined

from ringcomm import _core
from ringcomm.arrays.dtypes import DTYPES
from ringcomm.collectives.operators import BAND, BOR, BXOR, MAX, MIN, PRODUCT, SUM


def raw(x):
    return x.reshape(-1).view(np.uint8)


def code(name):
    return DTYPES[name].kernel


def codes_of(enum):
    header = Path(__file__).parents[2] / "csrc" / "kernels" / "dtype_and_op_codes.hpp"
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
        (8, 8, "float16", "reduce_many"),
    ],
)
def test_sizes_and_dtypes_are_checked(dst, src, dtype, message):
    with pytest.raises(ValueError, match=message):
        _core.combine(np.zeros(dst, np.uint8), np.zeros(src, np.uint8), code(dtype), SUM.kernel)


@pytest.mark.parametrize(
    ("dtype", "op", "message"),
    [
        (len(DTYPES), 0, "dtype 15: the codes are 0 to 14"),
        (-1, 0, "dtype -1"),
        (2, 7, "op 7: the codes are 0 to 6"),
        (2, -1, "op -1"),
    ],
)
def test_codes_are_checked_wherever_they_come_in(dtype, op, message):
    x, out = np.zeros(8, np.uint8), np.zeros(8, np.uint8)
    calls = [
        lambda: _core.combine(out, x, dtype, op),
        lambda: _core.reduce_many([out], [x, x], dtype, op, 1),
        lambda: _core.combine_at_once(out, [x], dtype, op, 1),
        lambda: _core.Schedule([8, 8]).combine((0, 0, 8), (1, 0, 8), dtype, op),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call()


def test_complex_needs_the_alignment_of_its_parts_only():
    store = np.zeros(5, np.float64)
    x = store[1:].view(np.complex128)
    _core.combine(raw(x), raw(np.ones(2, np.complex128)), code("complex128"), SUM.kernel)
    assert x.tolist() == [1, 1]


def test_unaligned_buffer_is_refused():
    store = np.zeros(12, np.uint8)
    with pytest.raises(ValueError, match="aligned"):
        _core.combine(store[1:9], np.zeros(8, np.uint8), code("float32"), SUM.kernel)


@pytest.mark.parametrize("shift", [0, 1, 63, 64])
@pytest.mark.parametrize("nbytes", [0, 1, 100, (1 << 20) - 1, 1 << 20, (1 << 20) + 65, 3 << 20])
def test_a_streamed_copy_writes_what_it_is_to_and_no_more(nbytes, shift):
    rng = np.random.default_rng(nbytes)
    x = rng.integers(0, 256, nbytes + 7, np.uint8)
    out = np.full(nbytes + 192, 171, np.uint8)
    _core.copy_memory(out.ctypes.data + 64 + shift, x.ctypes.data + 7, nbytes)
    assert (out[64 + shift : 64 + shift + nbytes] == x[7:]).all()
    assert (out[: 64 + shift] == 171).all()
    assert (out[64 + shift + nbytes :] == 171).all()
