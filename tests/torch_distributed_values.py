"""Values and waits of the suites of torch.distributed."""

import functools
import math

import torch
from sample_values import whole_numbers

HANG_S = 20


def values(rank, shape=(7,), dtype=torch.float32):
    """Return a rank's small integers: sums of them are exact in every dtype."""
    drawn = whole_numbers(rank, math.prod(shape), "int64") % 5
    return torch.from_numpy(drawn).reshape(shape).to(dtype)


def everyones(size, *args):
    return [values(rank, *args) for rank in range(size)]


def total(size, *args):
    return functools.reduce(torch.add, everyones(size, *args))


def waited(work):
    if work is not None:
        work.wait()


def same(x, y):
    """Return True for the same bits; float8 has no ==."""
    return (
        x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        if (x.dtype == torch.float8_e4m3fn)
        else torch.equal(x, y)
    )
