"""The kernels that the tests compile without launching them: all, and a few that show most."""

from itertools import product

from numpy_operators import is_defined

from ringcomm.arrays.dtypes import DTYPES
from ringcomm.collectives.operators import MAX, PRODUCT, SUM
from ringcomm.gpu.kernels.pack import PACKED_ITEMSIZES, PackKernel
from ringcomm.gpu.kernels.reduce import OPERATORS_OF_BOOL, ReduceKernel
from ringcomm.gpu.kernels.scale import ScaleKernel, can_scale
from ringcomm.gpu.kernels.write_number import WriteKernel


def reduction(dtype, op, n):
    return ReduceKernel((0,) * n, (0,) * n, 0, dtype, op)


def between(dtype, result, n):
    return ReduceKernel((0,) * n, (0,), 0, dtype, SUM, 1, result)


def packing(itemsize, unpacks=False):
    return PackKernel((), 0, itemsize, unpacks, 0, 0)


def all_variants():
    """Return every kind of kernel, each for some numbers of ranks."""
    yield WriteKernel(0, 0)
    for dtype in filter(can_scale, DTYPES.values()):
        yield ScaleKernel(0, 0, dtype, 2.0)
    for dtype, op, n in product(DTYPES.values(), OPERATORS_OF_BOOL, (1, 2, 4, 8, 12, 24)):
        if is_defined(op, dtype.name):
            yield reduction(dtype, op, n)
    float32, halves = DTYPES["float32"], [DTYPES["float16"], DTYPES["bfloat16"]]
    for half, n in product(halves, (1, 2, 4, 8, 12, 24)):
        yield between(half, float32, n)
        yield between(float32, half, n)
    for itemsize, unpacks in product(PACKED_ITEMSIZES, (False, True)):
        yield packing(itemsize, unpacks)


def representative_variants():
    """Return one or a few of each kind, those that need the most registers among them."""
    f32, bf16, f16 = DTYPES["float32"], DTYPES["bfloat16"], DTYPES["float16"]
    yield WriteKernel(0, 0)
    yield ScaleKernel(0, 0, f16, 2.0)
    yield reduction(f32, SUM, 4)
    yield reduction(f16, SUM, 2)
    yield reduction(bf16, SUM, 8)
    yield reduction(bf16, SUM, 24)
    yield between(bf16, f32, 8)
    yield between(f32, bf16, 8)
    yield reduction(DTYPES["int8"], MAX, 2)
    yield reduction(DTYPES["complex128"], PRODUCT, 4)
    yield packing(4)
    yield packing(2, unpacks=True)
