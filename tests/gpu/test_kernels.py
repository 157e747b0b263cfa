"""kernels.cu, run on the CPU, against the CPU's own kernels, numpy and torch: the very bits.

Each check takes the text of the source, so that the last test can show what it catches.
"""

import ctypes
import ctypes.util

import gpu_codecs as reference
import ml_dtypes
import numpy as np
import pytest
from gpu_emulation import Memory, addresses, launch
from harness import at_length
from reductions import HALVES, NUMPY, is_defined

from ringcomm import _core
from ringcomm.arrays.dtypes import DTYPES
from ringcomm.collectives.op import AVERAGE, BAND, BXOR, MAX, MIN, PRODUCT, SUM
from ringcomm.gpu.kernels.codec import CODEC_BLOCKS, DequantiseKernel, QuantiseKernel
from ringcomm.gpu.kernels.kernel import source
from ringcomm.gpu.kernels.pack import CHUNK_COUNT, TENSORS_PER_LAUNCH, PackKernel, chunk_table
from ringcomm.gpu.kernels.reduce import ReduceKernel
from ringcomm.gpu.kernels.update import UpdateKernel, adam_numbers, sgd_numbers

F16, BF16, F32, F64 = (DTYPES[name] for name in (*HALVES, "float32", "float64"))
FLOATS = [*HALVES, "float32", "float64", "complex64", "complex128"]
CANONICAL = {"float16": 0x7E00, "bfloat16": 0x7FC0, "float32": 0x7FC00000, "float64": 0x7FF8 << 48}


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
    kernel = ReduceKernel(dtype, op, n, n)
    arguments = kernel.pack_arguments(
        addresses(sources), addresses(targets), hi=count, divisor=divisor
    )
    launch(kernel, arguments, text=text)
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
@pytest.mark.parametrize("divisor", [2, 3, 1024, 70_001, 2**40])
def test_quotients_have_the_bits_of_the_cpu(dtype, n, divisor):
    check_reduce(SUM, dtype, n, 1003, "shifted alike", divisor=divisor)


@pytest.mark.parametrize("dtype", [F32, F64, DTYPES["uint8"], DTYPES["complex64"]], ids=str)
def test_one_source_is_copied_with_its_very_bits(dtype):
    rows = [numbers(dtype, 1003, 5)]
    targets = [np.empty_like(rows[0]) for _ in range(3)]
    kernel = ReduceKernel(dtype, SUM, 1, 3)
    launch(kernel, kernel.pack_arguments(addresses(rows), addresses(targets), hi=1003))
    assert {bits(target) for target in targets} == {bits(rows[0])}


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("n", at_length([2, 3, 4, 8], [3]))
@pytest.mark.parametrize("shift", [0, 1])
def test_the_shards_of_all_ranks_are_the_whole_on_all_ranks(dtype, n, shift):
    memory, count = Memory(), 4099
    rows = [numbers(dtype, count, k) for k in range(n)]
    buffers = [memory.place(row, shift * dtype.itemsize) for row in rows]
    kernel = ReduceKernel(dtype, AVERAGE, n, n)
    bounds = [count * rank // n for rank in range(n + 1)]
    for rank in reversed(range(n)):
        arguments = kernel.pack_arguments(
            addresses(buffers), addresses(buffers), lo=bounds[rank], hi=bounds[rank + 1], divisor=n
        )
        launch(kernel, arguments, grid=kernel.grid(bounds[rank + 1] - bounds[rank], 132))
    assert {bits(buffer) for buffer in buffers} == {bits(reduced_on_cpu(SUM, rows, n))}
    memory.check()


@pytest.mark.parametrize("grid", [1, 2, 9])
def test_bits_do_not_depend_on_the_grid(grid):
    rows = [numbers(F32, 20_011, k) for k in range(2)]
    out = np.empty_like(rows[0])
    kernel = ReduceKernel(F32, SUM, 2, 1)
    launch(kernel, kernel.pack_arguments(addresses(rows), [out.ctypes.data], hi=20_011), grid=grid)
    assert bits(out) == bits(reduced_on_cpu(SUM, rows, 1))


def test_grids_are_as_large_as_the_work_and_the_gpu():
    kernel = ReduceKernel(F32, SUM, 4, 4)
    assert kernel.per_block == 256 * 2 * 4
    assert [kernel.grid(n, 132) for n in (0, 1, 2048, 2049, 1 << 30)] == [1, 1, 1, 2, 528]
    assert PackKernel(F32, BF16).grid(800, 132) == 528
    assert QuantiseKernel(F32, "Int8").grid(2049, 132) == 2


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: ReduceKernel(F32, BAND, 2, 2), "no meaning"),
        (lambda: ReduceKernel(F32, SUM, 249, 248), "249 sources"),
        (lambda: ReduceKernel(F32, SUM, 0, 1), "0 sources"),
        (lambda: ReduceKernel(F32, SUM, 2, 1).pack_arguments([1], [2], hi=3), "1 addresses"),
        (lambda: ReduceKernel(F32, SUM, 1, 1).pack_arguments([1], [2], hi=3, divisor=0), "by 0"),
        (
            lambda: ReduceKernel(DTYPES["uint8"], BAND, 1, 1).pack_arguments(
                [1], [2], hi=3, divisor=2
            ),
            "by 2",
        ),
        (lambda: PackKernel(DTYPES["int8"], F32), "not int8"),
        (lambda: PackKernel(F32, F32).pack_arguments([1] * 481, 1, chunks=1, n_chunks=1), "481"),
        (lambda: UpdateKernel(F64, F32, "Sgd", 2, 2), "not float64"),
        (
            lambda: UpdateKernel(F32, F32, "Adam", 1, 1).pack_arguments(
                [1], [1], [1], adam_numbers(1, lr=0.1), hi=3
            ),
            "owns 3 arrays",
        ),
        (lambda: QuantiseKernel(F32, "Int8", block=100), "not 100"),
        (lambda: DequantiseKernel(F32, "Int8", block=0), "not 0"),
    ],
)
def test_what_no_kernel_does_is_refused(make, what):
    with pytest.raises((TypeError, ValueError), match=what):
        make()


# --- PACK and UNPACK ----------------------------------------------------------------------------


def canonical(x):
    """Return x with every NaN the one that kernels write."""
    name = x.dtype.name
    out = x.copy()
    out.view(f"u{x.dtype.itemsize}")[np.isnan(x.astype(np.float64))] = CANONICAL[name]
    return out


def cast(x, target, scale):
    """Return x * scale as another dtype, rounded once."""
    if scale == 1 and x.dtype == numpy_of(target):
        return x.copy()
    wide = np.dtype(np.float64 if "float64" in (x.dtype.name, target.name) else np.float32)
    with np.errstate(all="ignore"):
        y = x.astype(wide) if scale == 1 else x.astype(wide) * wide.type(np.float32(scale))
        if wide == np.float64 and target.is_16bit_float:
            out = np.empty(x.size, numpy_of(target))
            codes = (target.kernel, F64.kernel)
            _core.convert(out.view(np.uint8), y.view(np.uint8), *codes)
            return canonical(out)
        return canonical(y.astype(numpy_of(target)))


COUNTS = [0, 1, 7, 8, 9, 1000, CHUNK_COUNT, CHUNK_COUNT + 33]
# Where a tensor begins after a multiple of 16 bytes, in elements.
SHIFTS = [0, 0, 3, 0, 1, 1, 0, 5]


def check_pack(source, target, scale, padding, *, unpacks=False, text=None):
    memory = Memory()
    rows = [numbers(source, count, k) for k, count in enumerate(COUNTS)]
    expected = [cast(row, target, scale) for row in rows]
    places = np.cumsum([3 if padding == 1 else 0, *(-(-c // padding) * padding for c in COUNTS)])
    whole = np.zeros(int(places[-1]) + 5, numpy_of(source if unpacks else target))
    filled = whole.copy()
    for place, row in zip(places, rows if unpacks else expected, strict=False):
        filled[place : place + row.size] = row
    buffer = memory.place(filled if unpacks else whole)
    shifts = [s * (target if unpacks else source).itemsize for s in SHIFTS]
    given = [np.zeros_like(row) for row in expected] if unpacks else rows
    tensors = [memory.place(x, shift) for x, shift in zip(given, shifts, strict=True)]
    table = memory.place(chunk_table(COUNTS, places[:-1].tolist()))
    kernel = PackKernel(source, target, unpacks)
    arguments = kernel.pack_arguments(
        addresses(tensors),
        buffer.ctypes.data,
        chunks=table.ctypes.data,
        n_chunks=table.size,
        scale=scale,
    )
    launch(kernel, arguments, text=text)
    written, right = (tensors, expected) if unpacks else ([buffer], [filled])
    assert [bits(x) for x in written] == [bits(x) for x in right]
    memory.check()


PACKED = [(F32, BF16), (F64, F16), (F16, F32), (F32, F32)]
EVERY_PACKED = [(s, t) for s in (F16, BF16, F32, F64) for t in (F16, BF16, F32, F64)]


@pytest.mark.parametrize(("source", "target"), at_length(EVERY_PACKED, PACKED), ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.25, 1 / 3])
@pytest.mark.parametrize("padding", [8, 1])
def test_tensors_are_packed_scaled_and_cast(source, target, scale, padding):
    check_pack(source, target, scale, padding)


@pytest.mark.parametrize(
    ("source", "target"), at_length(EVERY_PACKED, [(BF16, F32), (F32, F32)]), ids=str
)
@pytest.mark.parametrize("scale", [1.0, 1 / 3])
@pytest.mark.parametrize("padding", [8, 1])
def test_tensors_are_unpacked_scaled_and_cast(source, target, scale, padding):
    check_pack(source, target, scale, padding, unpacks=True)


def test_a_launch_takes_as_many_tensors_as_it_says():
    tensors = [np.array([k], np.float32) for k in range(TENSORS_PER_LAUNCH)]
    buffer = np.empty(TENSORS_PER_LAUNCH, np.float32)
    table = chunk_table([1] * len(tensors), range(len(tensors)))
    kernel = PackKernel(F32, F32)
    arguments = kernel.pack_arguments(
        addresses(tensors), buffer.ctypes.data, chunks=table.ctypes.data, n_chunks=table.size
    )
    launch(kernel, arguments)
    assert buffer.tolist() == [*range(TENSORS_PER_LAUNCH)]
    assert sum(argument.nbytes for argument in arguments) < 4096


# --- UPDATE -------------------------------------------------------------------------------------

_fmaf = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
_fmaf.restype, _fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
fused = np.vectorize(_fmaf, otypes=[np.float32])  # a * b + c, rounded once
f32 = np.float32


def pulled(grad, weights, options):
    grad = -grad if options.get("maximize") else grad
    decay = options.get("weight_decay", 0)
    return fused(f32(decay), weights, grad) if decay else grad


def sgd(weights, grad, states, step, *, lr, momentum=0.0, dampening=0.0, nesterov=False, **options):
    """As _single_tensor_sgd of torch.optim, with the fused products of its loops."""
    grad = pulled(grad, weights, options)
    if momentum:
        (buffer,) = states
        if step == 1:
            buffer[:] = grad
        else:
            buffer[:] = fused(f32(1 - dampening), grad, buffer * f32(momentum))
        grad = fused(f32(momentum), buffer, grad) if nesterov else buffer
    weights[:] = fused(f32(-lr), grad, weights)


def adam(
    weights, grad, states, step, *, lr, betas=(0.9, 0.999), eps=1e-8, decoupled=False, **options
):
    """As _single_tensor_adam of torch.optim, with the fused products of its loops."""
    average, square = states
    if decoupled:
        weights *= f32(1 - lr * options.pop("weight_decay"))
    grad = pulled(grad, weights, options)
    share = f32(1 - betas[0])
    start, share = (average, share) if share < 0.5 else (grad, share - f32(1))
    average[:] = fused(share, grad - average, start)
    square[:] = fused(f32(1 - betas[1]) * grad, grad, square * f32(betas[1]))
    root = np.sqrt(square) / f32((1 - betas[1] ** step) ** 0.5) + f32(eps)
    weights += f32(-(lr / (1 - betas[0] ** step))) * average / root


STEPS = {"Sgd": (sgd, sgd_numbers), "Momentum": (sgd, sgd_numbers), "Adam": (adam, adam_numbers)}


class Owner:
    """The owner of elements [lo, hi) of weights, whose copies are everywhere."""

    def __init__(self, kernel, options, *, lo, hi, shift):
        rng = np.random.default_rng(lo + hi)
        self.memory, self.kernel, self.options = Memory(), kernel, options
        self.lo, self.hi = lo, hi
        states = {"Sgd": 0, "Momentum": 1, "Adam": 2}[kernel.rule]
        self.numpy_step, self.numbers = STEPS[kernel.rule]
        first = [rng.standard_normal(hi - lo, np.float32), *[np.zeros(hi - lo, f32)] * states]
        self.owned = [self.memory.place(x, 4 * shift) for x in first]
        self.expected = [x.copy() for x in first]
        empty = np.zeros(hi + 5, numpy_of(kernel.weight))
        self.weights = [
            self.memory.place(empty, shift * empty.itemsize) for _ in range(kernel.n_targets)
        ]

    def step(self, step, gradients, scale, text=None):
        arguments = self.kernel.pack_arguments(
            addresses(gradients),
            addresses(self.weights),
            addresses(self.owned),
            self.numbers(step, **self.options),
            lo=self.lo,
            hi=self.hi,
            scale=scale,
        )
        launch(self.kernel, arguments, text=text)
        total = gradients[0].astype(f32)
        for gradient in gradients[1:]:
            total = total + gradient.astype(f32)
        weights, *states = self.expected
        grad = total[self.lo : self.hi] * f32(scale)
        self.numpy_step(weights, grad, states, step, **self.options)

    def check(self):
        for ours, numpys in zip(self.owned, self.expected, strict=True):
            assert bits(ours) == bits(numpys)
        right = np.zeros_like(self.weights[0])
        right[self.lo : self.hi] = self.expected[0].astype(right.dtype)
        assert {bits(x) for x in self.weights} == {bits(right)}
        self.memory.check()


def check_update(gradient, weight, rule, options, *, lo=3, shift=0, text=None):
    n, hi = 3, lo + 1000
    kernel = UpdateKernel(gradient, weight, rule, n, n)
    owner = Owner(kernel, options, lo=lo, hi=hi, shift=shift)
    for step in (1, 2, 3):
        rng = np.random.default_rng(step)
        rows = [rng.standard_normal(hi).astype(numpy_of(gradient)) for _ in range(n)]
        gradients = [owner.memory.place(row, shift * gradient.itemsize) for row in rows]
        owner.step(step, gradients, 1 / n, text)
    owner.check()


RULES = [
    ("Sgd", {"lr": 0.1}),
    ("Sgd", {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
    ("Momentum", {"lr": 0.1, "momentum": 0.9}),
    ("Momentum", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    ("Momentum", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    ("Adam", {"lr": 0.01}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1, "betas": (0.3, 0.9), "eps": 1e-3}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1, "decoupled": True, "maximize": True}),
]
KINDS = [(F32, F32), (BF16, BF16)]
EVERY_KIND = [(g, w) for g in (F16, BF16, F32) for w in (F16, BF16, F32)]


@pytest.mark.parametrize(("rule", "options"), RULES, ids=str)
@pytest.mark.parametrize(("gradient", "weight"), at_length(EVERY_KIND, KINDS), ids=str)
@pytest.mark.parametrize(("lo", "shift"), [(0, 0), (3, 0), (16, 1)])
def test_updates_equal_the_formulas_bit_for_bit(gradient, weight, rule, options, *, lo, shift):
    check_update(gradient, weight, rule, options, lo=lo, shift=shift)


class Twin:
    """One parameter, updated by torch on the CPU and by us."""

    def __init__(self, name, options, count=1003):
        torch = pytest.importorskip("torch", reason="the core is tested without torch, too")
        self.torch = torch
        rng = np.random.default_rng(0)
        self.weights = rng.standard_normal(count, f32)
        self.param = torch.nn.Parameter(torch.from_numpy(self.weights.copy()))
        self.optimizer = getattr(torch.optim, name)([self.param], foreach=False, **options)
        self.rule = "Adam" if "Adam" in name else "Momentum" if options.get("momentum") else "Sgd"
        self.options = options | ({"decoupled": True} if name == "AdamW" else {})
        self.states = [np.zeros(count, f32) for _ in range(len(self.names))]

    @property
    def names(self):
        return {"Sgd": (), "Momentum": ("momentum_buffer",), "Adam": ("exp_avg", "exp_avg_sq")}[
            self.rule
        ]

    def step(self, step, grad):
        self.param.grad = self.torch.from_numpy(grad.copy())
        self.optimizer.step()
        kernel = UpdateKernel(F32, F32, self.rule, 1, 1)
        pushed = np.empty_like(self.weights)
        arguments = kernel.pack_arguments(
            [grad.ctypes.data],
            [pushed.ctypes.data],
            addresses([self.weights, *self.states]),
            STEPS[self.rule][1](step, **self.options),
            hi=grad.size,
        )
        launch(kernel, arguments)
        assert bits(pushed) == bits(self.weights)

    def torchs_states(self):
        state = self.optimizer.state[self.param]
        return [state[name].numpy() for name in self.names]


def require_fused_products():
    """torch's loops fuse products on processors with AVX2 or more."""
    torch = pytest.importorskip("torch", reason="the core is tested without torch, too")
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in ("AVX2", "AVX512"):
        pytest.skip(f"torch fuses no products here: its CPU capability is {capability}")


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 0.1},
        {"lr": 0.1, "weight_decay": 0.1, "maximize": True},
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ],
    ids=str,
)
def test_20_steps_of_sgd_have_the_bits_of_torch(options):
    require_fused_products()
    twin, rng = Twin("SGD", options), np.random.default_rng(1)
    for step in range(1, 21):
        twin.step(step, rng.standard_normal(1003, f32))
    assert bits(twin.weights) == bits(twin.param.detach().numpy())
    assert [bits(s) for s in twin.states] == [bits(s) for s in twin.torchs_states()]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Adam", {"lr": 0.01}),
        ("Adam", {"lr": 0.01, "betas": (0.3, 0.9), "maximize": True, "eps": 1e-3}),
        ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
    ],
    ids=str,
)
def test_20_steps_of_adam_equal_torch_as_far_as_its_roots_are_rounded(name, options):
    """Moments have its bits; torch's root, of MKL, may be off by an ulp, and weights with it."""
    require_fused_products()
    twin, rng = Twin(name, options), np.random.default_rng(1)
    bound = np.zeros(1003)
    for step in range(1, 21):
        before = twin.weights.copy()
        twin.step(step, rng.standard_normal(1003, f32))
        bound += 2.0**-22 * np.abs(twin.weights - before) + np.spacing(np.abs(before))
        assert [bits(s) for s in twin.states] == [bits(s) for s in twin.torchs_states()]
    assert (np.abs(twin.weights.astype(float) - twin.param.detach().numpy()) <= bound).all()


def test_a_step_of_adam_has_the_bits_of_torch_where_its_root_is_the_nearest():
    require_fused_products()
    twin = Twin("Adam", {"lr": 0.01})
    twin.step(1, np.random.default_rng(1).standard_normal(1003, f32))
    square = twin.states[1]
    is_nearest = twin.torch.from_numpy(square).sqrt().numpy() == np.sqrt(square)
    assert is_nearest.mean() > 0.5
    assert bits(twin.weights[is_nearest]) == bits(twin.param.detach().numpy()[is_nearest])


# --- QUANTISE and DEQUANTISE --------------------------------------------------------------------


LARGEST = float(np.finfo(f32).max)  # 127 times its 127th part overflow


def gradients(dtype, count, seed):
    """Return numbers of very different sizes in different blocks, with all that is special."""
    rng = np.random.default_rng([seed, count])
    x = (
        rng.standard_normal(count)
        * 10.0 ** np.repeat(rng.integers(-3, 3, count // 32 + 1), 32)[:count]
    )
    x[rng.random(count) < 0.05] *= 0
    for place, special in enumerate([np.nan, np.inf, -LARGEST, 3e-39, -1e-44]):
        x[place * 513 + 100 : place * 513 + 101] = special
    x[3072:] = 0
    with np.errstate(over="ignore"):
        return x.astype(numpy_of(dtype))


def check_quantise(code, dtype, block, count, *, with_residual=True, text=None):
    memory, draws = Memory(), (7, 2**40 + 1)
    residual = np.zeros(count, f32) if with_residual else None
    kept = memory.place(np.zeros(count, f32), 4)
    scales = memory.place(np.zeros(-(-count // block), f32), 4)
    codes = memory.place(np.zeros(count, np.uint8), 3)
    kernel = QuantiseKernel(dtype, code, block)
    for draw in draws:
        x = memory.place(gradients(dtype, count, draw), dtype.itemsize)
        arguments = kernel.pack_arguments(
            x.ctypes.data,
            residual=kept.ctypes.data if with_residual else 0,
            scales=scales.ctypes.data,
            codes=codes.ctypes.data,
            count=count,
            seed=2**33 + 5,
            draw=draw,
        )
        launch(kernel, arguments, grid=2, text=text)
        expected = reference.quantise(
            x, residual, code=code, block=block, seed=2**33 + 5, draw=draw
        )
        assert bits(scales) == bits(expected.scales)
        assert bits(codes) == bits(expected.codes)
        assert residual is None or bits(kept) == bits(residual)
    memory.check()


EVERY_CODED = [(dtype, block) for dtype in (F32, BF16, F16) for block in CODEC_BLOCKS]
CODED = [(F32, 64), (F32, 256), (F32, 512), (BF16, 256)]


@pytest.mark.parametrize("code", ["Int8", "E4M3"])
@pytest.mark.parametrize(("dtype", "block"), at_length(EVERY_CODED, CODED), ids=str)
@pytest.mark.parametrize("count", [0, 1, 255, 4099])
@pytest.mark.parametrize("with_residual", [True, False])
def test_encoding_has_the_bits_of_the_reference(code, dtype, block, count, with_residual):
    check_quantise(code, dtype, block, count, with_residual=with_residual)


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_int8_without_a_residual_is_the_payload_of_the_cpu_codec(dtype):
    x = gradients(dtype, 4099, 1)
    encoded = reference.quantise(x, None, code="Int8", seed=11, draw=12)
    payload = np.empty(encoded.scales.nbytes + 4099, np.uint8)
    _core.encode_int8(payload, x.view(np.uint8), dtype.kernel, 256, 11, 12)
    assert bits(payload) == bits(encoded.scales) + bits(encoded.codes)


def check_dequantise(code, dtype, block, accumulates, text=None):
    memory, count = Memory(), 4099
    encoded = reference.quantise(gradients(F32, count, 1), None, code=code, block=block)
    first = gradients(dtype, count, 2)
    out = memory.place(first, dtype.itemsize)
    scales, codes = memory.place(encoded.scales, 4), memory.place(encoded.codes, 1)
    kernel = DequantiseKernel(dtype, code, block, accumulates)
    arguments = kernel.pack_arguments(
        scales=scales.ctypes.data, codes=codes.ctypes.data, out=out.ctypes.data, count=count
    )
    launch(kernel, arguments, text=text)
    with np.errstate(all="ignore"):
        value = reference.dequantise(encoded, code=code, block=block)
        value = first.astype(f32) + value if accumulates else value
        assert bits(out) == bits(canonical(value.astype(numpy_of(dtype))))
    memory.check()


@pytest.mark.parametrize("code", ["Int8", "E4M3"])
@pytest.mark.parametrize(("dtype", "block"), at_length(EVERY_CODED, [(BF16, 256)]), ids=str)
@pytest.mark.parametrize("accumulates", [True, False])
def test_decoding_has_the_bits_of_the_reference(code, dtype, block, accumulates):
    check_dequantise(code, dtype, block, accumulates)


def test_int8_is_decoded_as_by_the_cpu_codec():
    encoded = reference.quantise(gradients(F32, 4099, 1), None, code="Int8")
    payload = np.concatenate([encoded.scales.view(np.uint8), encoded.codes])
    out = np.empty(4099, f32)
    _core.decode_int8(out.view(np.uint8), payload, F32.kernel, 256)
    assert np.array_equal(out, reference.dequantise(encoded, code="Int8"), equal_nan=True)


def test_e4m3_is_float8_e4m3fn():
    every = np.arange(256, dtype=np.uint8)
    values = every.view(ml_dtypes.float8_e4m3fn).astype(f32)
    assert np.array_equal(reference.E4M3, values, equal_nan=True)


def test_e4m3_rounds_to_nearest_even():
    middles = (reference.E4M3[:126] + reference.E4M3[1:127]) / 2
    near = [middles, np.nextafter(middles, f32(0)), np.nextafter(middles, f32(448))]
    rng = np.random.default_rng(0)
    wide = (rng.standard_normal(10_000) * 10.0 ** rng.integers(-5, 3, 10_000)).astype(f32)
    x = np.concatenate([*near, *(-y for y in near), reference.E4M3[:127], wide])
    x = x[np.abs(x) <= 448]
    right = x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert np.array_equal(reference.nearest_e4m3(x), right)


@pytest.mark.parametrize("code", ["Int8", "E4M3"])
def test_what_is_decoded_plus_the_residual_is_what_was_given(code):
    rng = np.random.default_rng(3)
    residual, given, taken = np.zeros(1000, f32), np.zeros(1000), np.zeros(1000)
    for draw in range(20):
        x = rng.standard_normal(1000, f32)
        encoded = reference.quantise(x, residual, code=code, draw=draw)
        given += x
        taken += reference.dequantise(encoded, code=code)
    np.testing.assert_allclose(taken + residual, given, atol=1e-5)


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
        "? body.begin : hi;",
        "? body.begin : body.end;",
        lambda text: check_reduce(SUM, F32, 3, 1003, text=text),
    ),
    "the elements before the vectors are dropped": (
        "side == 0 ? lo : body.end",
        "body.end",
        lambda text: check_reduce(SUM, F32, 3, 1003, "shifted alike", text=text),
    ),
    "the last vector is not whole": (
        "(hi - begin) / kWidth * kWidth",
        "(hi - begin + kWidth - 1) / kWidth * kWidth",
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
    "float64 is rounded twice": (
        "static RC_INLINE f16 from(double x) { return from(round_to_odd(x)); }",
        "static RC_INLINE f16 from(double x) { return from(static_cast<float>(x)); }",
        lambda text: check_pack(F64, F16, 1.0, 8, text=text),
    ),
    "the scale is applied after rounding": (
        "To<T>::from(is_scaled ? widen(x) * scale : widen(x))",
        "To<T>::from(widen(To<T>::from(widen(x))) * scale)",
        lambda text: check_pack(F32, BF16, 1 / 3, 8, text=text),
    ),
    "a chunk begins where its tensor does": (
        "tensors.at[chunk.tensor]) + chunk.start;\n    void* target",
        "tensors.at[chunk.tensor]);\n    void* target",
        lambda text: check_pack(F32, BF16, 1.0, 8, text=text),
    ),
    "a product is not fused": (
        "fmaf(n.fresh, g, state[0] * n.momentum)",
        "n.fresh * g + state[0] * n.momentum",
        lambda text: check_update(F32, F32, *RULES[3], text=text),
    ),
    "gradients are scaled before they are summed": (
        "const Wide<T> next = widen(pieces[u][k][e]);",
        "const Wide<T> next = widen(pieces[u][k][e]) * (1.0f / kSources);",
        lambda text: check_update(F32, F32, *RULES[0], text=text),
    ),
    "the second moment is not kept": (
        "for (int k = 0; k < kStates; ++k) states[k].store",
        "for (int k = 0; k < kStates && k < 1; ++k) states[k].store",
        lambda text: check_update(F32, F32, *RULES[5], text=text),
    ),
    "the residual is not updated": (
        "residual[i] = sum - Code::value(code) * scale;",
        "(void)residual;",
        lambda text: check_quantise("Int8", F32, 256, 4099, text=text),
    ),
    "the residual of a block with NaN is lost": (
        "if (residual != nullptr && is_number) residual",
        "if (residual != nullptr) residual",
        lambda text: check_quantise("E4M3", F32, 256, 4099, text=text),
    ),
    "random numbers change places": (
        "const int k = run * 8 + quarter * 2 + half;",
        "const int k = run * 8 + quarter + half * 4;",
        lambda text: check_quantise("Int8", F32, 256, 4099, text=text),
    ),
    "ties are rounded up": (
        "0x7ffffu + (magnitude >> 20 & 1u)",
        "0x7ffffu + 1u",
        lambda text: check_quantise("E4M3", BF16, 64, 4099, text=text),
    ),
    "a scale overflows": (
        "return fits ? scale :",
        "return fits || true ? scale :",
        lambda text: check_quantise("Int8", F32, 256, 4099, text=text),
    ),
    "decoding does not accumulate": (
        "value[u] = widen(out[at]) + value[u];",
        ";",
        lambda text: check_dequantise("Int8", F32, 256, True, text=text),
    ),
}


@pytest.mark.parametrize("fault", at_length(list(FAULTS), list(FAULTS)[::3]))
def test_a_planted_fault_is_caught(fault):
    old, new, check = FAULTS[fault]
    assert source().count(old) == 1
    with pytest.raises(AssertionError):
        check(source().replace(old, new))
