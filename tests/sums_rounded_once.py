"""Sums of 16-bit floats over hosts: what each rank has, and the exact result, rounded once."""

import ml_dtypes
import numpy as np

import ringcomm as rc

HALVES = [np.float16, ml_dtypes.bfloat16]


def values(rank, count, dtype):
    """Return integers whose sums are exact in float32, and have too many bits for `dtype`."""
    top = 2048 if dtype is np.float16 else 256
    return np.random.default_rng(rank).integers(-top // 2, top, count).astype(dtype)


def expected(size, count, dtype, op):
    """Return the exact result, rounded once."""
    rows = np.stack([values(r, count, dtype).astype(np.float32) for r in range(size)])
    if op is rc.MAX:
        return rows.max(0).astype(dtype)
    exact = rows.sum(0)
    return (exact / np.float32(size) if op is rc.AVERAGE else exact).astype(dtype)
