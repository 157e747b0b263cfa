"""kernels.cu, run on the CPU, against the CPU's own kernels and numpy: the very bits.

Each check takes the text of the source, so that the last test can show what it catches.
"""

import math

import ml_dtypes
import numpy as np
import pytest
from gpu_emulation import Memory, addresses, launch
from harness import at_length
from numpy_operators import HALVES, NUMPY, is_defined

from ringcomm import _core
from ringcomm.arrays.base import Flat
from ringcomm.arrays.dtypes import DTYPES
from ringcomm.collectives.operators import AVERAGE, BAND, BXOR, MAX, MIN, PRODUCT, SUM
from ringcomm.collectives.scale_factors import scale
from ringcomm.gpu.kernels.base import source
from ringcomm.gpu.kernels.pack import (
    CHUNK_COUNT,
    PACKED_ITEMSIZES,
    TENSORS_PER_LAUNCH,
    PackKernel,
    chunk_table,
)
from ringcomm.gpu.kernels.reduce import ReduceKernel
from ringcomm.gpu.kernels.scale import ScaleKernel, can_scale
from ringcomm.gpu.kernels.write_number import WriteKernel

F16, BF16, F32, F64 = (DTYPES[name] for name in (*HALVES, "float32", "float64"))
FLOATS = [*HALVES, "float32", "float64", "complex64", "complex128"]


def numpy_of(dtype):
    return np.dtype(ml_dtypes.bfloat16 if dtype.name == "bfloat16" else dtype.name)


def numbers(dtype, count, seed):
    """Return any bits of this dtype, most floats among them of ordinary size."""
    rng = np.random.default_rng([seed, count])
    if dtype.name == "bool":
        return rng.integers(0, 2, count).astype(bool)
    x = rng.integers(0, 256, count * dtype.itemsize, np.uint8).view(numpy_of(dtype))
    if dtype.name in FLOATS:
        reals = x if dtype.is_16bit_float else x.view(x.real.dtype)
        is_tame = rng.random(reals.size) < 0.9
        reals[is_tame] = rng.standard_normal(is_tame.sum()).astype(reals.dtype)
        reals[::7] = near_ties(reals[::7].size, rng).astype(reals.dtype)
    return x


def near_ties(count, rng):
    """Return numbers at and beside the middles between two of float16, or of bfloat16."""
    half_ulp = rng.choice([2.0**-11, 2.0**-8], count)
    middles = 1 + (2 * rng.integers(0, 128, count) + 1) * half_ulp
    return middles + rng.choice([-1, 0, 1], count) * 2.0**-40


def bits(x):
    return x.reshape(-1).view(np.uint8).tobytes()


# --- REDUCE -------------------------------------------------------------------------------------


def reduced_on_cpu(op, sources, divisor):
    """Return the result of csrc/kernels, the oracle."""
    out = np.empty_like(sources[0])
    raw = [[x.view(np.uint8) for x in xs] for xs in ([out], sources)]
    _core.reduce_many(*raw, DTYPES[out.dtype.name].kernel, op.kernel, divisor)
    return out


# Of the sources, then of the targets, in numbers (two are complex); None: where the sources are.
WHERE = {
    "in place": ((0, 0), None),
    "aligned": ((0, 0), (0, 0)),
    "shifted alike": ((1, 1), (1, 1)),
    "shifted apart": ((0, 1), (3, 0)),
}


def check_reduce(op, dtype, n, count, where="in place", *, divisor=1, text=None):
    memory = Memory()
    rows = [numbers(dtype, count, k) for k in range(n)]
    of_sources, of_targets = WHERE[where]
    step = dtype.itemsize // (2 if dtype.is_complex else 1)
    sources = [memory.place(row, of_sources[k % 2] * step) for k, row in enumerate(rows)]
    targets = sources
    if of_targets is not None:
        targets = [
            memory.place(np.zeros_like(row), of_targets[k % 2] * step) for k, row in enumerate(rows)
        ]
    kernel = ReduceKernel(addresses(sources), addresses(targets), count, dtype, op, divisor)
    launch(kernel, text=text)
    assert {bits(t) for t in targets} == {bits(reduced_on_cpu(op, rows, divisor))}
    memory.check()


EVERY_REDUCTION = [
    (op, dtype, n)
    for dtype in DTYPES.values()
    for op in NUMPY
    for n in (1, 2, 3, 4, 8, 20)
    if is_defined(op, dtype.name)
]
REDUCTIONS = [
    *((SUM, F32, 2), (SUM, F32, 3), (SUM, F32, 20), (SUM, BF16, 4), (SUM, F16, 8)),
    *((MIN, F32, 3), (MAX, BF16, 2), (SUM, F64, 4), (MAX, DTYPES["int8"], 3)),
    *((SUM, DTYPES["uint16"], 2), (PRODUCT, DTYPES["int64"], 2), (BXOR, DTYPES["int32"], 3)),
    *((SUM, DTYPES["bool"], 4), (PRODUCT, DTYPES["bool"], 2), (PRODUCT, DTYPES["complex64"], 3)),
    *((SUM, DTYPES["complex128"], 2),),
]


@pytest.mark.parametrize(("op", "dtype", "n"), at_length(EVERY_REDUCTION, REDUCTIONS), ids=str)
@pytest.mark.parametrize("count", at_length([0, 1, 7, 1000, 4099], [0, 7, 4099]))
@pytest.mark.parametrize("where", WHERE)
def test_reductions_have_the_bits_of_the_cpu(op, dtype, n, count, where):
    check_reduce(op, dtype, n, count, where)


EVERY_DIVISION = [(d, n) for d in DTYPES.values() if d.name != "bool" for n in (1, 2, 3, 4)]
DIVISIONS = [
    *((F32, 1), (F32, 3), (BF16, 1), (BF16, 4), (F64, 4)),
    *((DTYPES[name], 3) for name in ("int8", "uint64", "complex64")),
]


@pytest.mark.parametrize(("dtype", "n"), at_length(EVERY_DIVISION, DIVISIONS), ids=str)
@pytest.mark.parametrize("divisor", [2, 3, 1024, 70_001, 2**32 - 1])
def test_quotients_have_the_bits_of_the_cpu(dtype, n, divisor):
    check_reduce(SUM, dtype, n, 1003, "shifted alike", divisor=divisor)


@pytest.mark.parametrize("dtype", [F32, F64, DTYPES["uint8"], DTYPES["complex64"]], ids=str)
def test_one_source_is_copied_with_its_very_bits(dtype):
    rows = [numbers(dtype, 1003, 5)]
    targets = [np.empty_like(rows[0]) for _ in range(3)]
    launch(ReduceKernel(addresses(rows), addresses(targets), 1003, dtype, SUM))
    assert {bits(target) for target in targets} == {bits(rows[0])}


@pytest.mark.parametrize("half", [F16, BF16], ids=str)
@pytest.mark.parametrize(("count", "shifts"), [(0, (0, 0)), (4099, (0, 0)), (4099, (1, 2))])
def test_sums_of_hosts_in_float32_are_those_of_the_cpu_rounded_once(half, count, shifts):
    memory = Memory()
    rows = [numbers(half, count, k) for k in range(6)]
    wide = [np.zeros(count, np.float32) for _ in range(2)]
    totals = [memory.place(each, 4 * shifts[1]) for each in wide]
    for host, total in enumerate(totals):
        sources = [memory.place(row, 2 * shifts[0]) for row in rows[3 * host : 3 * host + 3]]
        launch(ReduceKernel(addresses(sources), addresses([total]), count, half, SUM, 1, F32))
    out = memory.place(np.zeros_like(rows[0]), 2 * shifts[0])
    launch(ReduceKernel(addresses(totals), addresses([out]), count, F32, AVERAGE, 6, half))
    with np.errstate(all="ignore"):
        x = [row.astype(np.float32) for row in rows]
        sums = [x[0] + x[1] + x[2], x[3] + x[4] + x[5]]
        exact = ((sums[0] + sums[1]) / np.float32(6)).astype(numpy_of(half))
    is_nan = np.isnan(exact)
    assert np.array_equal(np.isnan(out), is_nan)
    assert bits(out[~is_nan]) == bits(exact[~is_nan])
    assert len({bits(x) for x in np.array_split(out[is_nan], max(1, is_nan.sum()))}) <= 1
    memory.check()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("n", at_length([2, 3, 4, 8], [3]))
@pytest.mark.parametrize("shift", [0, 1])
def test_the_shards_of_all_ranks_are_the_whole_on_all_ranks(dtype, n, shift):
    memory, count = Memory(), 4099
    rows = [numbers(dtype, count, k) for k in range(n)]
    buffers = [memory.place(row, shift * dtype.itemsize) for row in rows]
    bounds = [count * rank // n for rank in range(n + 1)]
    for rank in reversed(range(n)):
        shards = addresses(buffer[bounds[rank] : bounds[rank + 1]] for buffer in buffers)
        length = bounds[rank + 1] - bounds[rank]
        kernel = ReduceKernel(shards, shards, length, dtype, AVERAGE, divisor=n)
        launch(kernel, grid=kernel.grid(132))
    assert {bits(buffer) for buffer in buffers} == {bits(reduced_on_cpu(SUM, rows, n))}
    memory.check()


@pytest.mark.parametrize("grid", [1, 2, 9])
def test_bits_do_not_depend_on_the_grid(grid):
    rows = [numbers(F32, 20_011, k) for k in range(2)]
    out = np.empty_like(rows[0])
    launch(ReduceKernel(addresses(rows), addresses([out]), 20_011, F32, SUM), grid=grid)
    assert bits(out) == bits(reduced_on_cpu(SUM, rows, 1))


def test_grids_are_as_large_as_the_work_and_the_gpu():
    counts = [0, 1, 2048, 2049, 1 << 30]
    grids = [ReduceKernel((0,) * 4, (0,) * 4, count, F32, SUM).grid(132) for count in counts]
    assert grids == [1, 1, 1, 2, 528]
    assert PackKernel((), 0, 4, False, 0, 800).grid(132) == 528


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: ReduceKernel((0,), (0,), 3, F32, BAND), "no meaning"),
        (lambda: ReduceKernel((0,) * 249, (0,) * 248, 3, F32, SUM), "249 sources"),
        (lambda: ReduceKernel((), (0,), 3, F32, SUM), "0 sources"),
        (lambda: ReduceKernel((0,), (0,), 3, F32, SUM, 0), "by 0"),
        (lambda: ReduceKernel((0,), (0,), 3, DTYPES["uint8"], BAND, 2), "by 2"),
        (lambda: ReduceKernel((0,), (0,), 3, F64, SUM, 1, F32), "cannot be float32"),
        (lambda: PackKernel((0,) * 481, 0, 4, False, 0, 1), "481"),
    ],
)
def test_what_no_kernel_does_is_refused(make, what):
    with pytest.raises((TypeError, ValueError), match=what):
        make()


# --- SCALE --------------------------------------------------------------------------------------

FACTORS = (2.0, -1 / 3, 0.0, 1e30, math.inf)
REALS = ["float16", "bfloat16", "float32", "float64"]


def test_factors_of_real_floats_are_applied_on_gpus():
    assert [name for name, dtype in DTYPES.items() if can_scale(dtype)] == sorted(
        REALS, key=list(DTYPES).index
    )


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("name", REALS)
def test_factors_give_the_bits_of_host_memory(name, factor):
    dtype = DTYPES[name]
    for count, shift in [(0, 0), (1, 2), (5000, 0), (4999, 10)]:
        memory, values = Memory(), numbers(dtype, count, 3)
        x = memory.place(values, shift * dtype.itemsize)
        launch(ScaleKernel(x.ctypes.data, count, dtype, factor))
        expected = values.copy()
        scale(Flat(expected.view(np.uint8), dtype), factor)
        memory.check()
        found, wanted = (np.frombuffer(bits(each), np.uint8) for each in (x, expected))
        assert np.array_equal(found, wanted), np.flatnonzero(found != wanted)[:9]


# --- PACK and UNPACK ----------------------------------------------------------------------------


COUNTS = [0, 1, 7, 8, 9, 1000, CHUNK_COUNT, CHUNK_COUNT + 33]
# Where a tensor begins after a multiple of 16 bytes, in elements.
SHIFTS = [0, 0, 3, 0, 1, 1, 0, 5]


def check_pack(itemsize, padding, *, unpacks=False, text=None):
    memory, dtype = Memory(), np.dtype(("V", itemsize))
    rows = [numbers(DTYPES["uint8"], count * itemsize, count).view(dtype) for count in COUNTS]
    places = np.cumsum([3 if padding == 1 else 0, *(-(-c // padding) * padding for c in COUNTS)])
    whole = np.zeros(int(places[-1]) + 5, dtype)
    filled = whole.copy()
    for place, row in zip(places, rows, strict=False):
        filled[place : place + row.size] = row
    buffer = memory.place(filled if unpacks else whole)
    shifts = [shift * itemsize for shift in SHIFTS]
    given = [np.zeros_like(row) for row in rows] if unpacks else rows
    tensors = [memory.place(x, shift) for x, shift in zip(given, shifts, strict=True)]
    table = memory.place(chunk_table(COUNTS, places[:-1].tolist()))
    place = (buffer.ctypes.data, itemsize, unpacks, table.ctypes.data, table.size)
    launch(PackKernel(addresses(tensors), *place), text=text)
    written, right = (tensors, rows) if unpacks else ([buffer], [filled])
    assert [bits(x) for x in written] == [bits(x) for x in right]
    memory.check()


@pytest.mark.parametrize("itemsize", PACKED_ITEMSIZES)
@pytest.mark.parametrize("padding", [8, 1])
@pytest.mark.parametrize("unpacks", [False, True])
def test_tensors_are_packed_and_unpacked_with_their_very_bits(itemsize, padding, unpacks):
    check_pack(itemsize, padding, unpacks=unpacks)


def test_a_launch_takes_as_many_tensors_as_it_says():
    tensors = [np.array([k], np.float32) for k in range(TENSORS_PER_LAUNCH)]
    buffer = np.empty(TENSORS_PER_LAUNCH, np.float32)
    table = chunk_table([1] * len(tensors), range(len(tensors)))
    place = (buffer.ctypes.data, 4, False, table.ctypes.data, table.size)
    kernel = PackKernel(addresses(tensors), *place)
    launch(kernel)
    assert buffer.tolist() == [*range(TENSORS_PER_LAUNCH)]
    assert kernel.parameters.packed.nbytes < 4096


# --- what the checks catch ----------------------------------------------------------------------

FAULTS = {
    "the order of ranks is reversed": (
        "load(sources.at[first + k]",
        "load(sources.at[kSources - 1 - first - k]",
        lambda text: check_reduce(SUM, F32, 3, 1000, text=text),
    ),
    "16 bits are rounded at every sum": (
        ": O::of(total[u][e], next);",
        ": widen(To<T>::from(O::of(total[u][e], next)));",
        lambda text: check_reduce(SUM, BF16, 3, 1000, text=text),
    ),
    "the elements behind the vectors are dropped": (
        "? body.begin : count;",
        "? body.begin : body.end;",
        lambda text: check_reduce(SUM, F32, 3, 1003, text=text),
    ),
    "the elements before the vectors are dropped": (
        "side == 0 ? 0 : body.end",
        "body.end",
        lambda text: check_reduce(SUM, F32, 3, 1003, "shifted alike", text=text),
    ),
    "the last vector is not whole": (
        "(count - begin) / kWidth * kWidth",
        "(count - begin + kWidth - 1) / kWidth * kWidth",
        lambda text: check_reduce(SUM, F32, 3, 1001, text=text),
    ),
    "NaN loses in MIN": (
        "a < b || a != a ? a : b",
        "a < b ? a : b",
        lambda text: check_reduce(MIN, F32, 3, 1000, text=text),
    ),
    "NaN keep their bits": (
        "RC_INLINE float canonical(float x) { return x != x ? __uint_as_float(0x7fc00000u) : x; }",
        "RC_INLINE float canonical(float x) { return x; }",
        lambda text: check_reduce(SUM, F32, 3, 4099, text=text),
    ),
    "every quotient is a product": (
        "is_product((divisor & (divisor - 1)) == 0)",
        "is_product(true)",
        lambda text: check_reduce(SUM, F32, 3, 1000, divisor=3, text=text),
    ),
    "complex products lose a sign": (
        "a.re * b.re - a.im * b.im",
        "a.re * b.re + a.im * b.im",
        lambda text: check_reduce(PRODUCT, DTYPES["complex64"], 3, 1000, text=text),
    ),
    "a chunk begins where its tensor does": (
        "tensors.at[chunk.tensor]) + chunk.start;",
        "tensors.at[chunk.tensor]);",
        lambda text: check_pack(4, 8, text=text),
    ),
}


@pytest.mark.parametrize("fault", at_length(list(FAULTS), list(FAULTS)[1::6]))
def test_a_planted_fault_is_caught(fault):
    old, new, check = FAULTS[fault]
    assert source().count(old) == 1
    with pytest.raises(AssertionError):
        check(source().replace(old, new))


# --- WRITE ----------------------------------------------------------------------------------------
def test_a_number_is_written_once():
    memory = Memory()
    word = memory.place(np.zeros(1, np.uint32))
    launch(WriteKernel(word.ctypes.data, 0xFFFFFFF0))
    memory.check()
    assert word[0] == 0xFFFFFFF0
