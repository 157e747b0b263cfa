"""Where partitions lie, and how they move."""

from collections import Counter
from itertools import pairwise

import pytest

from ringcomm.ps.placement.partitions import (
    PlacementView,
    cuts,
    place_dense,
    place_hashed,
    plan_moves,
)


@pytest.mark.parametrize("count", [0, 1, 5, 100, 1001])
@pytest.mark.parametrize("block", [1, 7, 100, 5000])
def test_slices_cover_a_table_and_none_is_too_large(count, block):
    bounds = cuts(count, block)
    sizes = [b - a for a, b in pairwise(bounds)]
    assert bounds[0] == 0
    assert bounds[-1] == count
    assert max(sizes) <= block
    assert max(sizes) - min(sizes) <= 1


def test_the_largest_slices_come_first_and_go_where_there_is_least():
    assert place_dense([1, 9, 5, 5], {}, [0, 1]) == [0, 0, 1, 1]
    assert place_dense([4], {0: 10, 1: 3}, [0, 1]) == [1]


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_a_hash_table_is_spread_evenly(n):
    loads = Counter(place_hashed("emb", range(n)))
    assert len(loads) == n
    assert max(loads.values()) < 1.35 * 1024 / n


def test_a_server_that_joins_takes_its_share_and_moves_nothing_else():
    before, after = place_hashed("emb", range(3)), place_hashed("emb", range(4))
    moved = [a for b, a in zip(before, after, strict=True) if a != b]
    assert set(moved) == {3}
    assert 0.7 < len(moved) / (1024 / 4) < 1.3


def test_tables_lie_differently():
    assert place_hashed("a", range(3)) != place_hashed("b", range(3))


def test_moves_even_out_what_was_measured():
    view = PlacementView(1, {(1, i): (0,) for i in range(8)} | {(2, 0): (1,)})
    traffic = {(1, i): 10.0 for i in range(8)} | {(2, 0): 1.0}
    moves = plan_moves(view, traffic, [0, 1])
    assert all(move.source == 0 and move.dest == 1 for move in moves)
    assert len(moves) == 4


def test_an_even_load_is_left_alone():
    view = PlacementView(1, {(1, 0): (0,), (1, 1): (1,)})
    assert plan_moves(view, {(1, 0): 5.0, (1, 1): 5.0}, [0, 1]) == []


def test_a_partition_that_outweighs_all_is_not_sent_to_and_fro():
    view = PlacementView(1, {(1, 0): (0,), (1, 1): (1,)})
    assert plan_moves(view, {(1, 0): 100.0, (1, 1): 1.0}, [0, 1]) == []


def test_a_change_makes_the_next_view():
    first = PlacementView().with_({(1, 0): (2, 1)})
    assert (first.number, first.owner((1, 0))) == (1, 2)
    assert first.with_({(1, 0): (1,)}).owner((1, 0)) == 1
    assert first.owner((1, 0)) == 2
