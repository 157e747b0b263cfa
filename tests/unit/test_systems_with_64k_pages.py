"""Systems with larger pages: what is given back there is whole pages, and no part of one."""

import numpy as np
import pytest

from ringcomm._core import NodeMemory, take, view

LARGE = (300 << 20) + 5 * 4096  # more than is kept, and it ends within a page
PAGE = 65536


def pattern(nbytes):
    return (1 + np.arange(nbytes) % 61).astype(np.uint8)


def test_only_whole_pages_of_a_freed_block_are_given_back():
    memory = NodeMemory.create(5, 1 << 30, PAGE)
    before, freed, behind = take(memory, 100), take(memory, LARGE), take(memory, 100)
    start, stop = memory.offset_of(freed), memory.offset_of(freed) + LARGE
    before[:] = behind[:] = pattern(100)
    freed[: 2 * PAGE] = freed[-2 * PAGE :] = pattern(2 * PAGE)
    del freed
    assert memory.usage() == (256, 0, LARGE + 256)  # it was given back
    assert np.array_equal(before, pattern(100))
    assert np.array_equal(behind, pattern(100))
    first, last = -(-start // PAGE) * PAGE, stop // PAGE * PAGE
    assert 4096 < first - start < PAGE
    assert 4096 < stop - last < PAGE
    assert view(memory, start, first - start).all()  # the page that it shares with its neighbour
    assert view(memory, last, stop - last).all()
    assert not view(memory, first, PAGE).any()
    assert not view(memory, last - PAGE, PAGE).any()


def test_pages_too_large_for_the_layout_are_refused():
    with pytest.raises(RuntimeError, match=r"pages of 131072 bytes.* at most 65536"):
        NodeMemory.create(5, 1 << 20, 2 * PAGE)
