"""Finds elements of one strided array that share memory. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return True if two elements begin at the same address. Strides may be negative.

    Cost: little if the stride of each dimension exceeds the extent of the dimensions inside it, as
    in slices and transposes of an array. Else it takes 8 bytes per element, and a byte for each
    address between the first and the last.
    """
    steps = sorted((abs(step), n) for step, n in zip(strides, shape, strict=True) if n > 1)
    if 0 in shape:
        return False
    reach = 0
    for step, n in steps:
        if step <= reach:
            return _has_doubles(steps)
        reach += step * (n - 1)
    return False


def _has_doubles(steps: Sequence[tuple[int, int]]) -> bool:
    if steps[0][0] == 0:
        return True
    places = np.zeros(1, np.int64)
    for step, n in steps:
        places = np.add.outer(places, np.arange(n, dtype=np.int64) * step).reshape(-1)
    is_taken = np.zeros(int(places[-1]) + 1, np.bool_)
    is_taken[places] = True
    return int(np.count_nonzero(is_taken)) < len(places)
