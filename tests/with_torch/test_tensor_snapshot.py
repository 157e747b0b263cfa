"""What TensorSnapshot notices: exchanges, writes and moves of tensors."""

import gc
import weakref

import pytest
import torch

from ringcomm._core import TensorSnapshot

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
    snapshot = TensorSnapshot()
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
    snapshot = TensorSnapshot()
    snapshot.take([*tensors], 0)
    before = tensors[place]
    tensors[place] = torch.ones(3) if before is None else before.detach()
    assert snapshot.changed(tensors) == place


def test_a_tensor_of_another_layout_in_memory_that_is_known_is_read_as_it_is():
    memory = torch.zeros(SMALL)
    snapshot = TensorSnapshot()
    snapshot.take([memory[:]], 0)
    expanded = memory[:1].expand(4 * SMALL)  # has more elements than there is memory
    snapshot.take([expanded], 1)
    memory.data[1:].add_(1)  # none of its elements
    assert snapshot.changed([expanded]) is None
    memory.data[0] = 1
    assert snapshot.changed([expanded]) == 0


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_of_an_attribute_is_noticed(change):
    owners = [torch.nn.Parameter(torch.zeros(SMALL), requires_grad=False) for _ in range(3)]
    owners[1].grad, owners[2].grad = torch.ones(SMALL), torch.ones(SMALL)
    snapshot = TensorSnapshot("grad")
    snapshot.take(owners, 0)
    assert snapshot.changed(owners) is None
    CHANGES[change](owners[2])  # not its .grad
    assert snapshot.changed(owners) is None
    CHANGES[change](owners[2].grad)
    assert snapshot.changed(owners) == 2
    snapshot.take(owners, 1)
    owners[0].grad = torch.zeros(SMALL)
    assert snapshot.changed(owners) == 0
    snapshot.take(owners, 2)
    owners[1].grad = None
    assert snapshot.changed(owners) == 1


@pytest.mark.parametrize("place", [123, LARGE // 2, LARGE - 300])
def test_a_change_of_one_element_of_a_large_tensor_is_noticed_some_turns_later(place):
    x = torch.zeros(LARGE)
    snapshot, noticed = TensorSnapshot(), []
    for turn in range(LARGE * x.itemsize // (16 << 10) + 1):  # the turns that read all of it
        snapshot.take([x], turn)
        x.data[place] += 1
        noticed.append(snapshot.changed([x]) == 0)
    assert any(noticed)
    assert not all(noticed)


def test_a_number_of_tensors_that_is_another_one_is_an_error():
    snapshot = TensorSnapshot()
    snapshot.take([torch.zeros(2)], 0)
    with pytest.raises(ValueError, match=r"changed\(\): 2 tensors; take\(\) got 1"):
        snapshot.changed([torch.zeros(2)] * 2)


def test_an_error_of_taking_leaves_nothing_taken():
    snapshot = TensorSnapshot()
    snapshot.take([torch.zeros(2)], 0)
    with pytest.raises(AttributeError, match="_version"):
        snapshot.take([torch.zeros(2), 3], 0)
    assert not snapshot.is_taken


def test_tensors_live_until_forget_and_those_in_a_circle_are_collected():
    class Tensor(torch.Tensor):
        """May own its snapshot."""

    snapshot = TensorSnapshot()
    kept = Tensor(3)
    gone = weakref.ref(kept)
    snapshot.take([kept], None)
    del kept
    assert gone() is not None
    snapshot.forget()
    assert gone() is None
    kept = Tensor(3)
    gone, kept.snapshot = weakref.ref(kept), snapshot
    snapshot.take([kept], None)
    del kept, snapshot
    gc.collect()
    assert gone() is None
