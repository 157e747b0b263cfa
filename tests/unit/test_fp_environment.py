"""Every rank holds the same bits, whatever its threads have set the processor to do with floats."""

import contextlib
import ctypes
import platform

import numpy as np
import pytest
from harness import run_ranks

import ringcomm as rc
from ringcomm import _core
from ringcomm.arrays import DTYPES
from ringcomm.arrays.base import Flat
from ringcomm.collectives.scale_factors import scale
from ringcomm.engine.operations.adasum import combine
from ringcomm.ps import initializers, optim
from ringcomm.ps.protocol.frame_meta import MISSING
from ringcomm.ps.server.rows.hash_shard import row_spec

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc",
    reason="sets the control word by the layout of glibc's fenv_t on x86",
)
FLUSHED, UPWARD = 0x8040, 0x4000  # of MXCSR: subnormal numbers are zero; rounds up
MXCSR_AT = 28  # in fenv_t
TINY = np.array([71362, 3, 0x80000005, 0x007FFFFF], np.uint32).view(np.float32)


@contextlib.contextmanager
def processor_set_to(bits):
    """Let this thread compute as torch.set_flush_denormal(True), or fesetround(), has it."""
    libm = ctypes.CDLL("libm.so.6")
    before, within = ctypes.create_string_buffer(32), ctypes.create_string_buffer(32)
    for each in (before, within):
        assert libm.fegetenv(each) == 0
    word = int.from_bytes(within[MXCSR_AT : MXCSR_AT + 4], "little") | bits
    within[MXCSR_AT : MXCSR_AT + 4] = word.to_bytes(4, "little")
    assert libm.fesetenv(within) == 0
    try:
        yield
        after = ctypes.create_string_buffer(32)
        libm.fegetenv(after)
        assert int.from_bytes(after[MXCSR_AT : MXCSR_AT + 4], "little") & bits == bits
    finally:
        libm.fesetenv(before)


def random_floats(dtype, count, seed):
    """Return numbers of all magnitudes, the subnormal ones among them."""
    rng = np.random.default_rng(seed)
    exponents = rng.integers(-148 if dtype == np.float32 else -1070, -100, count)
    return np.ldexp(rng.standard_normal(count), exponents).astype(dtype)


@pytest.mark.parametrize("bits", [FLUSHED, UPWARD])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
def test_kernels_round_to_nearest_and_keep_subnormal_numbers(bits, dtype):
    number = DTYPES[dtype]
    kind = np.float64 if dtype == "float64" else np.float32
    raw = [random_floats(kind, 1000, seed).view(np.uint8) for seed in range(3)]

    def results():
        total = np.empty_like(raw[0])
        _core.reduce_many([total], raw, number.kernel, rc.SUM.kernel, 3)
        pair = raw[0].copy()
        _core.combine(pair, raw[1], number.kernel, rc.SUM.kernel)
        third = raw[2].copy()
        _core.divide(third, 3, number.kernel)
        return [total.tobytes(), pair.tobytes(), third.tobytes()]

    right = results()
    with processor_set_to(bits):
        assert results() == right


@pytest.mark.parametrize("bits", [FLUSHED, UPWARD])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_floats_round_to_nearest_and_keep_subnormal_numbers(bits, dtype):
    number, wide = DTYPES[dtype], DTYPES["float32"]
    values = random_floats(np.float32, 2000, 1)
    values[:1000] *= np.float32(2.0**120)  # what is subnormal in float16

    def results():
        narrow = np.empty(4000, np.uint8)
        _core.convert(narrow, values.view(np.uint8), number.kernel, wide.kernel)
        total = np.empty(4000, np.uint8)
        _core.combine_at_once(total, [narrow, narrow], number.kernel, rc.SUM.kernel, 3)
        back = np.empty(8000, np.uint8)
        _core.convert(back, narrow, wide.kernel, number.kernel)
        return [narrow.tobytes(), total.tobytes(), back.tobytes()]

    right = results()
    with processor_set_to(bits):
        assert results() == right


@pytest.mark.parametrize("bits", [FLUSHED, UPWARD])
def test_int8_blocks_have_the_same_bits(bits):
    x, code = random_floats(np.float32, 1000, 1).view(np.uint8), DTYPES["float32"].kernel

    def results():
        packed, back = np.empty(4 * 10 + 1000, np.uint8), np.empty(4000, np.uint8)
        _core.encode_int8(packed, x, code, 100, 1, 2)
        _core.decode_int8(back, packed, code, 100)
        return packed.tobytes(), back.tobytes()

    right = results()
    with processor_set_to(bits):
        assert results() == right


@pytest.mark.parametrize("wire", ["node", "messages"])
@pytest.mark.parametrize("count", [8, 5000, 70_001])
def test_ranks_hold_the_same_bits_if_one_of_them_flushes(monkeypatch, wire, count):
    monkeypatch.setattr("harness.wire", wire)

    def body(rank):
        held = []
        with processor_set_to(FLUSHED) if rank == 0 else contextlib.nullcontext():
            for x in (np.empty(count, np.float32), rc.empty(count, "float32")):
                x[:] = np.resize(TINY, count)
                rc.allreduce_(x)
                held.append(x.tobytes())
                x[:] = np.resize(TINY, count)
                rc.allreduce_async_(x).wait()  # another thread may carry it out
                held.append(x.tobytes())
        return held

    first, *others = run_ranks(3, body)
    assert all(each == first for each in others)
    assert np.frombuffer(first[0], np.uint32)[0] == 3 * 71362


@pytest.mark.parametrize("bits", [FLUSHED, UPWARD])
def test_what_numpy_computes_for_all_ranks_has_the_same_bits(bits):
    x, y = (random_floats(np.float32, 1000, seed) for seed in (1, 2))

    def results():
        scaled = x.copy()
        scale(Flat(scaled.view(np.uint8), DTYPES["float32"]), 0.3)
        return scaled.tobytes(), combine(x, y, [slice(0, 500), slice(500, 1000)]).tobytes()

    right = results()
    with processor_set_to(bits):
        assert results() == right


@pytest.mark.parametrize("bits", [FLUSHED, UPWARD])
def test_blocks_have_the_same_bits(bits):
    x, grad = (random_floats(np.float32, 1000, seed) for seed in (1, 2))
    updater = optim.Adam(1e-38)

    def results():
        out, slots = np.empty_like(x), [np.zeros_like(x) for _ in range(2)]
        _core.apply_update(updater.code, updater.hyper, 1, x, out, slots, grad)
        return out.tobytes(), *(slot.tobytes() for slot in slots)

    right = results()
    with processor_set_to(bits):
        assert results() == right


@pytest.mark.parametrize("bits", [FLUSHED, UPWARD])
def test_rows_have_the_same_bits(bits):
    keys = np.arange(50, dtype=np.uint64)
    grads = random_floats(np.float32, 50 * 4, 1).reshape(50, 4)
    updater = optim.Adam(0.1)

    def results():
        spec = row_spec(4, updater, init=initializers.normal(std=1e-39, seed=3))
        rows = _core.Shard(spec, np.zeros(1, np.uint32), 0)
        rows.push([(keys, grads, 1.0, None)], updater.code, updater.hyper, 1.0, 0.0, 1, 0)
        out = np.empty((60, 4), np.float32)
        rows.gather(
            np.arange(60, dtype=np.uint64), out, MISSING.index("init")
        )  # some have no row yet
        return out.tobytes()

    right = results()
    with processor_set_to(bits):
        assert results() == right
