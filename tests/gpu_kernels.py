"""Which kernels are compiled: all of them, and a few that show most."""

from itertools import product

from reductions import is_defined

from ringcomm.arrays.dtypes import DTYPES
from ringcomm.collectives.op import MAX, PRODUCT, SUM
from ringcomm.gpu.kernels.codec import CODEC_BLOCKS, DequantiseKernel, QuantiseKernel
from ringcomm.gpu.kernels.kernel import COMPUTED
from ringcomm.gpu.kernels.pack import PACKED, PackKernel
from ringcomm.gpu.kernels.reduce import OPERATORS_OF_BOOL, ReduceKernel
from ringcomm.gpu.kernels.update import UpdateKernel


def all_variants():
    """Return every kind of kernel, each for some numbers of ranks."""
    for dtype, op, n in product(DTYPES.values(), OPERATORS_OF_BOOL, (1, 2, 4, 8, 12, 24)):
        if is_defined(op, dtype.name):
            yield ReduceKernel(dtype, op, n, n)
    packed = [DTYPES[name] for name in PACKED]
    for source_dtype, target, unpacks in product(packed, packed, (False, True)):
        yield PackKernel(source_dtype, target, unpacks)
    computed = [DTYPES[name] for name in COMPUTED]
    for gradient, weight, n in product(computed, computed, (1, 4, 8, 24)):
        for rule in ("Sgd", "Momentum", "Adam"):
            yield UpdateKernel(gradient, weight, rule, n, n)
    for dtype, block in product(computed, CODEC_BLOCKS):
        for code in ("Int8", "E4M3"):
            yield QuantiseKernel(dtype, code, block)
            yield DequantiseKernel(dtype, code, block)
            yield DequantiseKernel(dtype, code, block, accumulates=True)


def representative_variants():
    """Return one or a few of each kind, those that need the most registers among them."""
    f32, bf16, f16 = DTYPES["float32"], DTYPES["bfloat16"], DTYPES["float16"]
    yield ReduceKernel(f32, SUM, 4, 4)
    yield ReduceKernel(f16, SUM, 2, 2)
    yield ReduceKernel(bf16, SUM, 8, 8)
    yield ReduceKernel(bf16, SUM, 24, 24)
    yield ReduceKernel(DTYPES["int8"], MAX, 2, 2)
    yield ReduceKernel(DTYPES["complex128"], PRODUCT, 4, 4)
    yield PackKernel(f32, bf16)
    yield PackKernel(f16, DTYPES["float64"], unpacks=True)
    yield UpdateKernel(bf16, bf16, "Adam", 8, 8)
    yield QuantiseKernel(f32, "Int8")
    yield QuantiseKernel(f32, "E4M3", block=1024)
    yield DequantiseKernel(bf16, "Int8", accumulates=True)
