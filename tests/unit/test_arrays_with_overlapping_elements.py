"""Arrays whose elements share memory are not written in place."""

import numpy as np
import pytest
from harness import run_ranks

import ringcomm as rc
from ringcomm.arrays.self_overlap import overlaps


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((), (), False),
        ((4,), (1,), False),
        ((4,), (0,), True),
        ((1,), (0,), False),
        ((4, 0), (0, 1), False),
        ((3, 2), (2, 1), False),
        ((2, 3), (1, 2), False),  # transposed
        ((3, 2), (1, 1), True),  # a sliding window
        ((3, 2), (2, 3), False),  # 0 3 2 5 4 7: interleaved, and apart all the same
        ((4, 2), (2, 6), True),  # the fourth of one row is the first of the next
        ((3,), (-2,), False),
        ((3, 2), (-1, 1), True),
        ((2, 2, 2), (4, 2, 1), False),
        ((2, 2, 2), (3, 2, 1), True),
    ],
)
def test_overlap_is_found_and_nothing_else(shape, strides, expected):
    assert overlaps(shape, strides) is expected


@pytest.mark.parametrize("seed", range(40))
def test_overlap_is_what_counting_finds(seed):
    rng = np.random.default_rng(seed)
    shape, strides = rng.integers(1, 5, 3), rng.integers(-9, 10, 3)
    indices = np.indices(shape).reshape(3, -1)
    places = (indices * strides[:, None]).sum(0)
    assert overlaps(shape.tolist(), strides.tolist()) == (len(set(places)) < len(places))


def windows():
    return np.lib.stride_tricks.as_strided(np.ones(8), (4, 3), (8, 8), writeable=True)


def halves():
    """Return elements that share half of their bytes."""
    return np.lib.stride_tricks.as_strided(np.ones(8), (4,), (4,), writeable=True)


@pytest.mark.parametrize("make", [windows, halves])
def test_an_array_whose_elements_overlap_is_refused_in_place(make):
    def body(rank):
        with pytest.raises((ValueError, rc.MismatchError), match="overlap in memory"):
            rc.allreduce_(make())
        return float(rc.allreduce(np.ones(1))[0])

    assert run_ranks(2, body) == [2.0, 2.0]
