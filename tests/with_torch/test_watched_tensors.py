"""What Snapshot notices: exchanges, writes and moves of tensors, also where it knows the memory."""

import pytest
import torch

from ringcomm.torch.backward.watched_tensors import Snapshot

SMALL, LARGE = 64, 50_000  # elements; of the large one samples are taken


def several():
    """Return tensors of all kinds that a bucket may have."""
    grid = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    sparse = torch.sparse_coo_tensor([[1]], [2.0], (3,), check_invariants=True)
    return [torch.randn(SMALL), grid, torch.randn(LARGE), None, sparse, torch.empty(0)]


def write(x):
    x.add_(1)


def write_through_data(x):
    x.data.view(-1).add_(1) if x.is_contiguous() else x.data.add_(1)


def move(x):
    x.data = x.data.clone()


CHANGES = {"write": write, "write through .data": write_through_data, "move": move}


@pytest.mark.parametrize("kinds", ["several", "dense"])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_each_change_is_noticed_in_each_step(change, place, kinds):
    tensors = several()
    tensors = tensors[:3] if kinds == "dense" else tensors
    snapshot = Snapshot()
    for turn in range(3):  # after the first one it knows where the tensors lie
        snapshot.take([*tensors], turn)
        assert snapshot.changed(tensors) is None
        CHANGES[change](tensors[place])
        assert snapshot.changed(tensors) == place
        if change == "write through .data":
            assert snapshot.changed(tensors, is_thorough=False) is None
    snapshot.take(tensors, None)
    write_through_data(tensors[place])
    assert snapshot.changed(tensors) is None  # it has no samples
    snapshot.forget()
    assert not snapshot.is_taken
    assert snapshot.changed([]) is None


@pytest.mark.parametrize("place", range(6))
def test_another_tensor_in_the_same_memory_is_noticed(place):
    tensors = several()
    snapshot = Snapshot()
    snapshot.take([*tensors], 0)
    before = tensors[place]
    tensors[place] = torch.ones(3) if before is None else before.detach()
    assert snapshot.changed(tensors) == place


def test_a_tensor_of_another_layout_in_memory_that_is_known_is_read_as_it_is():
    memory = torch.zeros(SMALL)
    snapshot = Snapshot()
    snapshot.take([memory[:]], 0)
    expanded = memory[:1].expand(4 * SMALL)  # has more elements than there is memory
    snapshot.take([expanded], 1)
    memory.data[1:].add_(1)  # none of its elements
    assert snapshot.changed([expanded]) is None
    memory.data[0] = 1
    assert snapshot.changed([expanded]) == 0
