"""The fusion planner: numbers in, batches out."""

import numpy as np
import pytest

from ringcomm.collectives.fusion import Item, plan_fusion


def test_alike_items_share_a_message_up_to_the_limit():
    assert plan_fusion([Item(4, "f")] * 5, 8) == [[0, 1], [2, 3], [4]]


def test_a_message_may_be_exactly_full():
    assert plan_fusion([Item(3, "f"), Item(5, "f"), Item(1, "f")], 8) == [[0, 1], [2]]


def test_what_differs_in_its_key_is_kept_apart_and_does_not_close_a_message():
    items = [Item(1, "f"), Item(1, "h"), Item(1, "f"), Item(1, "h")]
    assert plan_fusion(items, 8) == [[0, 2], [1, 3]]


def test_an_item_beyond_the_limit_stands_alone():
    assert plan_fusion([Item(1, "f"), Item(9, "f"), Item(1, "f")], 8) == [[0], [1], [2]]


def test_nothing_is_fused_across_a_barrier():
    items = [Item(1, "f"), Item(0, None, is_barrier=True), Item(1, "f"), Item(1, "f")]
    assert plan_fusion(items, 8) == [[0], [2, 3]]


def test_a_limit_of_zero_fuses_nothing_but_empty_items():
    assert plan_fusion([Item(1, "f"), Item(0, "f"), Item(0, "f")], 0) == [[0], [1, 2]]


@pytest.mark.parametrize("seed", range(20))
def test_every_item_is_planned_once_within_the_limits(seed):
    rng = np.random.default_rng(seed)
    items = [
        Item(int(rng.integers(0, 12)), int(rng.integers(3)), bool(rng.random() < 0.1))
        for _ in range(60)
    ]
    batches = plan_fusion(items, 10)
    flat = sorted(i for batch in batches for i in batch)
    assert flat == [i for i, item in enumerate(items) if not item.is_barrier]
    for batch in batches:
        assert len({items[i].key for i in batch}) == 1
        assert len(batch) == 1 or sum(items[i].nbytes for i in batch) <= 10
        assert not any(items[i].is_barrier for i in range(batch[0], batch[-1]))
