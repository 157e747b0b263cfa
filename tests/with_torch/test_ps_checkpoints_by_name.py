"""Checkpoints are read, and loaded, by the names that values have in a model."""

import sys

import numpy as np
import pytest
import torch
from harness import run_command
from ps_optimizer_wrap import wrap
from ps_ranks_as_threads import run_workers
from torch import nn

import ringcomm as rc
from ringcomm.torch import ps

IN_ANOTHER_PROCESS = """
import sys
from ringcomm import ps
names = ps.export_safetensors(sys.argv[1], sys.argv[2])
assert not {"torch", "mpi4py.MPI"} & {*sys.modules}, "it needs only numpy"
print(" ".join(names))
"""


class Net(nn.Module):
    """Small parameters, which share a table, a large one, one in channels_last, and buffers."""

    def __init__(self, *, n_layers=2):
        super().__init__()
        self.convolution = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(5)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(n_layers))
        self.large = nn.Linear(5, 70_000, bias=False)  # more than 256 KiB
        self.register_buffer("low", torch.tensor([1.5, 2.5], dtype=torch.bfloat16))

    def forward(self, x):
        x = self.norm(self.convolution(x)).mean((2, 3))
        for layer in self.layers:
            x = layer(x)
        return self.large(x)


def trained(net, rank, n=2):
    optimizer = wrap(net)
    for step in range(n):
        optimizer.zero_grad()
        seed = torch.Generator().manual_seed(2 * step + rank)
        net(torch.randn(4, 3, 4, 4, generator=seed)).square().mean().backward()
        optimizer.step()
    return optimizer


def save_trained(tmp_path):
    """Save a model that two workers have trained; return its state_dict()."""
    states = []

    def body(rank):
        torch.manual_seed(rank)
        net = Net()
        trained(net, rank)
        users = ps.Embedding(None, 3, name="user")
        users(torch.tensor([7, 2**62])).sum().backward()
        rc.barrier()
        if ps.is_chief():
            states.append(net.state_dict())
            ps.save(tmp_path, step=2, background=False)

    run_workers(2, body, 2)
    return states[0]


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def test_a_plain_model_is_filled_from_a_checkpoint(tmp_path):
    wanted = save_trained(tmp_path)
    found = ps.model_state_dict(tmp_path)
    assert_same(found, wanted)
    Net().load_state_dict(found)
    arrays = ps.load_state_dict(tmp_path)
    assert arrays.keys() == wanted.keys() | {"user"}
    np.testing.assert_array_equal(arrays["large.weight"], wanted["large.weight"].numpy())
    assert arrays["norm.num_batches_tracked"].dtype == np.int64
    assert sorted(arrays["user"]["keys"]) == [7, 2**62]


def test_a_checkpoint_becomes_safetensors_in_a_process_without_torch_or_mpi(tmp_path):
    from safetensors.torch import load_file

    wanted = save_trained(tmp_path / "ps")
    file = tmp_path / "model.safetensors"
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, tmp_path / "ps", file]
    process = run_command(command)
    found = load_file(file)
    assert sorted(found) == process.stdout.split(), process.stderr
    assert sorted(found.pop("user.keys").tolist()) == [7, 2**62]
    assert found.pop("user.values").shape == (2, 3)
    wanted["low"] = wanted["low"].float()
    assert_same(found, wanted)


def test_another_layer_leaves_the_others_loadable(tmp_path, caplog):
    wanted = save_trained(tmp_path)

    def body(rank):
        net = Net(n_layers=3)
        own = {name: x.clone() for name, x in net.state_dict().items()}
        optimizer = trained(net, rank, 0)
        own |= {name: x.clone() for name, x in net.state_dict().items()}  # the chief's
        if ps.is_chief():
            with pytest.raises(ValueError, match=r"it has no layers.2.bias.*strict=False"):
                ps.load(tmp_path)
            told = ps.load(tmp_path, strict=False)
            assert told["missing"] == ["layers.2.bias", "layers.2.weight"]
            assert (told["mismatched"], told["unexpected"]) == ([], ["user"])
        rc.barrier()
        optimizer.pull_parameters()
        assert_same(net.state_dict(), own | wanted)

    run_workers(2, body, 3)
    assert "layers.2.bias, layers.2.weight stay as they are" in caplog.text


def test_another_shape_is_told_and_the_rest_is_loaded(tmp_path):
    wanted = save_trained(tmp_path)

    def body(rank):
        net = Net(n_layers=1)
        net.large = nn.Linear(5, 3, bias=False)
        optimizer = trained(net, rank, 0)
        with pytest.raises(ValueError, match=r"large.weight: shape is \(70000, 5\) .*and \(3, 5\)"):
            ps.load(tmp_path)
        told = ps.load(tmp_path, strict=False)
        assert told["missing"] == []
        assert [each.partition(":")[0] for each in told["mismatched"]] == ["large.weight"]
        assert "layers.1.bias (optimizer 1)" in told["unexpected"]
        before = net.large.weight.clone()
        optimizer.pull_parameters()
        assert torch.equal(net.large.weight, before)
        assert torch.equal(net.layers[0].weight, wanted["layers.0.weight"])

    run_workers(1, body)


def test_models_with_the_same_names_are_told_apart(tmp_path):
    def body(rank):
        nets = [nn.Linear(3, 2), nn.Linear(3, 2)]
        optimizers = [trained(net, rank, 0) for net in nets]
        ps.table("bias", 2, init=5.0)
        ps.save(tmp_path, background=False)
        assert len(optimizers) == 2, "the tables of one that is gone are closed"
        return [net.bias.detach() for net in nets]

    [(first, second)] = run_workers(1, body)
    found = ps.load_state_dict(tmp_path)
    names = ["bias", "bias (optimizer 1)", "bias (optimizer 2)"]
    assert sorted(name for name in found if "bias" in name) == names
    with pytest.raises(ValueError, match=r"is in optimizer 1 and in optimizer 2. Pass optimizer=1"):
        ps.model_state_dict(tmp_path)
    for number, bias in ((1, first), (2, second)):
        assert torch.equal(ps.model_state_dict(tmp_path, optimizer=number)["bias"], bias)
    with pytest.raises(ValueError, match="optimizer is 3, and the checkpoint has 1, 2"):
        ps.model_state_dict(tmp_path, optimizer=3)

    def split(rank):  # another job wraps the second model alone
        net = nn.Linear(3, 2)
        trained(net, rank, 0)
        ps.load(tmp_path)

    run_workers(1, split)


def test_a_restore_notices_that_a_layer_has_another_name(tmp_path):
    save_trained(tmp_path)

    def body(rank):
        net = Net()
        net.other = net.layers
        del net.layers
        wrap(net)
        with pytest.raises(ValueError, match=r"of the checkpoint is not open|its content is"):
            ps.restore(tmp_path)

    run_workers(1, body)


def test_means_of_gradients_do_not_pass_for_parameters(tmp_path):
    def body(rank):
        net = nn.Linear(3, 2)
        optimizer = wrap(net, apply="worker")
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        ps.save(tmp_path, background=False)

    run_workers(1, body)
    assert list(ps.load_state_dict(tmp_path)) == ["bias+1 (means of optimizer 1)"]
    assert ps.model_state_dict(tmp_path) == {}
