"""Copies, state_dict() and pickles of models whose embeddings are on the servers."""

import copy
import io
import pickle

import pytest
import torch
from ps_ranks_as_threads import run_workers
from torch import nn

import ringcomm as rc
from ringcomm.torch import ps


class Net(nn.Module):
    def __init__(self, dim=4, name="user"):
        super().__init__()
        self.user = ps.Embedding(50, dim, name=name)
        self.top = nn.Linear(dim, 1)

    def forward(self, ids):
        return self.top(self.user(ids))


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        copy.copy,
        pickle.dumps,
        lambda user: torch.save(user, io.BytesIO()),
        lambda user: copy.deepcopy(nn.Sequential(user)),
        torch.optim.swa_utils.AveragedModel,
    ],
)
def test_a_copy_is_refused_by_name_with_the_way(copied):
    def body(rank):
        with pytest.raises(TypeError, match=r"embedding\[user\].*model.state_dict\(\) and ps.save"):
            copied(Net().user)

    run_workers(1, body)


def test_a_copy_may_share_the_rows():
    def body(rank):
        net = Net()
        shared = copy.deepcopy(net, {id(net.user): net.user})
        ids = torch.tensor([1, 2])
        assert torch.equal(net(ids), shared(ids))
        assert shared.top is not net.top

    run_workers(1, body)


@pytest.mark.parametrize("kind", ["table", "hashtable"])
def test_tables_are_no_data_either(kind):
    def body(rank):
        t = getattr(ps, kind)("w", 3)
        with pytest.raises(TypeError, match=rf"{kind}\[w\]: it cannot be copied.*pull\(\)"):
            copy.deepcopy({"best": t})

    run_workers(1, body)


def test_a_state_names_the_rows_that_it_has_not(caplog):
    def body(rank):
        net = Net()
        state = net.state_dict()
        assert list(state) == ["user._extra_state", "top.weight", "top.bias"]
        assert b"user" in bytes(state["user._extra_state"].tolist())
        kept = {name: x.clone().cpu() for name, x in state.items()}
        stream = io.BytesIO()
        torch.save(copy.deepcopy(kept), stream)
        stream.seek(0)
        net.load_state_dict(torch.load(stream, weights_only=True))
        with pytest.raises(RuntimeError, match=r"embedding\[item\].*user.*dim.*4"):
            Net(name="item").load_state_dict(kept)
        with pytest.raises(RuntimeError, match=r"Missing key.*user._extra_state"):
            net.load_state_dict(net.top.state_dict(prefix="top."))
        net.load_state_dict(net.top.state_dict(prefix="top."), strict=False)

    run_workers(1, body)
    assert "embedding[user]: load_state_dict() leaves its rows" in caplog.text


def test_weights_of_torch_are_not_left_out_silently():
    def body(rank):
        net = Net()
        state = {**net.state_dict(), "user.weight": torch.ones(50, 4)}
        with pytest.raises(RuntimeError, match=r"embedding\[user\]: user.weight is not loaded"):
            net.load_state_dict(state)
        net.user.is_in_state_dict = True
        del state["user._extra_state"]
        net.load_state_dict(state)
        rc.barrier()
        assert (net.user(torch.arange(50)) == 1).all()
        assert torch.equal(net.state_dict()["user.weight"], torch.ones(50, 4))

    run_workers(2, body)
