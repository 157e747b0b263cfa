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
    def __init__(self, dim=4, name="user", *, is_in_state_dict=False):
        super().__init__()
        self.user = ps.Embedding(50, dim, name=name)
        self.user.is_in_state_dict = is_in_state_dict
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


@pytest.mark.parametrize("n", [50, None])
def test_a_state_without_rows_says_so_once_with_the_ways(n):
    def body(rank):
        user = ps.Embedding(n, 4, name="user")
        model, said = nn.Sequential(user, nn.Linear(4, 1)), []
        if rank == 0:  # it alone saves
            with pytest.warns(
                UserWarning, match=r"embedding\[user\]: state_dict\(\) has none"
            ) as said:
                model.state_dict()
            model.state_dict()  # warnings are errors here
        rc.barrier()
        return [str(each.message) for each in said]

    (text,), others = run_workers(2, body)
    assert others == []
    assert "ps.save() saves them" in text
    assert ("is_in_state_dict = True" in text) == (n is not None)


def test_a_state_that_is_to_have_no_rows_does_not_warn():
    assert run_workers(1, lambda _: "user.weight" in Net().state_dict()) == [False]


def test_one_worker_alone_saves_all_rows_and_loads_them_back():
    ids = torch.arange(50)

    def body(rank):
        net = Net(is_in_state_dict=True)
        before = net.user(ids).detach()
        stream = io.BytesIO()
        if rank == 0:
            torch.save(net.state_dict(), stream)
        rc.barrier()
        net(ids).sum().backward()
        net.user.pushed.wait()
        rc.barrier()
        after = net.user(ids).detach()
        rc.barrier()
        if rank == 0:
            stream.seek(0)
            state = torch.load(stream, weights_only=True)
            net.load_state_dict(state)
            plain = nn.ModuleDict({"user": nn.Embedding(50, 4), "top": nn.Linear(4, 1)})
            plain.load_state_dict(state)
            assert torch.equal(plain["user"].weight, before)
        rc.barrier()
        return torch.equal(before, after), torch.equal(before, net.user(ids))

    assert run_workers(2, body) == [(False, True)] * 2


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
