"""The operators as numpy has them, and where they have a meaning."""

import numpy as np

from ringcomm.arrays.dtypes import DTYPES
from ringcomm.collectives.operators import AVERAGE, BAND, BOR, BXOR, MAX, MIN, PRODUCT, SUM

NUMPY = {
    SUM: np.add,
    PRODUCT: np.multiply,
    MIN: np.minimum,
    MAX: np.maximum,
    BAND: np.bitwise_and,
    BOR: np.bitwise_or,
    BXOR: np.bitwise_xor,
}
REDUCTIONS = {**NUMPY, AVERAGE: np.add}  # an average is a sum, which is divided afterwards
HALVES = ("float16", "bfloat16")


def is_defined(op, name):
    try:
        op.require(DTYPES[name])
    except TypeError:
        return False
    return True
