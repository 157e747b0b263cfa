"""A state of which each rank has a share is saved, loaded and moved as if it were whole."""

import copy
import pickle

import pytest
import torch
from harness import at_length, outcomes, run_ranks, run_script
from torch import nn, optim
from training_models import (
    SMALL,
    assert_close,
    copies,
    data,
    fit,
    models,
    network,
    on_replicas,
    seeded,
    share,
    weights,
    wrap,
)

import ringcomm as rc
import ringcomm.torch as hvd
from ringcomm.collectives.message_patterns import within
from ringcomm.torch.zero import optimizer_shard
from ringcomm.torch.zero.optimizer_shard import shares_of
from ringcomm.torch.zero.parameter_state import ParameterState


def adam(parameters):
    return optim.Adam(parameters, lr=1e-3)


def momentum(parameters):
    return optim.SGD(parameters, lr=0.05, momentum=0.9)


def adagrad(parameters):
    return optim.Adagrad(parameters, lr=0.01)  # which has a state from the beginning


MAKES = [adam, momentum, adagrad]
GATE = pytest.mark.parametrize("make", at_length(MAKES, [adam]))


def trained(size, make, batches, model=None, **kwargs):
    """Train on `size` ranks; return each rank's weights and state."""
    replicas = copies(network() if model is None else model, size)

    def body(rank):
        optimizer = wrap(replicas[rank], make, shard_state=1, **kwargs)
        fit(replicas[rank], optimizer, share(batches, rank, size))
        return weights(replicas[rank]), copy.deepcopy(optimizer.state_dict())

    return run_ranks(size, body, settings=SMALL)


def assert_states_are_close(state, expected, tolerance=1e-10):
    assert state["param_groups"] == expected["param_groups"]
    assert state["state"].keys() == expected["state"].keys()
    for index, each in expected["state"].items():
        assert state["state"][index].keys() == each.keys()
        for key, want in each.items():
            got = state["state"][index][key]
            assert got.shape == want.shape
            assert got.dtype == want.dtype
            assert got.stride() == want.stride()
            assert (got - want).abs().max() <= tolerance * want.abs().max()


# --- whose is what ------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("counts", [[10], [3, 1, 5], [1], [0, 4], [2, 2, 2, 2]])
def test_every_element_is_one_ranks(counts, size):
    shares = shares_of([list(enumerate(counts))], size)
    assert [sum(shares[index]) for index in range(len(counts))] == counts
    of_ranks = [sum(share[rank] for share in shares.values()) for rank in range(size)]
    assert max(of_ranks) - min(of_ranks) <= 1


@pytest.mark.parametrize(
    ("place", "own", "expected"),
    [((2, 6), (4, 9), (2, 4)), ((2, 6), (0, 3), (0, 1)), ((2, 6), (0, 9), (0, 4))],
)
def test_a_part_is_counted_from_the_start_of_its_parameter(place, own, expected):
    assert within(slice(*place), slice(*own)) == slice(*expected)


@pytest.mark.parametrize("own", [(0, 2), (7, 9)])
def test_a_part_elsewhere_is_empty(own):
    part = within(slice(2, 6), slice(*own))
    assert part.start == part.stop


# --- as a plain optimizer's ---------------------------------------------------------------------
@GATE
@pytest.mark.parametrize("size", at_length([1, 2, 3], [3]))
def test_the_state_is_that_of_a_plain_optimizer_on_every_rank(make, size):
    batches = data(5, size)
    (alone,) = models(1)
    plain = make(alone.parameters())
    fit(alone, plain, batches)
    for _, state in trained(size, make, batches):
        assert_states_are_close(state, plain.state_dict())


def test_the_state_has_the_layout_of_its_parameters():
    def make_model():
        model = nn.Module()
        model.image = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
        model.turned = nn.Parameter(torch.randn(3, 5).t())
        model.scale = nn.Parameter(torch.ones(()))
        model.forward = lambda x: None
        return model

    model = seeded(make_model)
    factors = [torch.randn(p.shape) for p in model.parameters()]

    def train(model, optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            sum((p * f).sum() for p, f in zip(model.parameters(), factors, strict=True)).backward()
            optimizer.step()
        return optimizer.state_dict()

    alone, *replicas = copies(model, 4)
    expected = train(alone, adam(alone.parameters()))
    results = run_ranks(
        3, lambda rank: train(replicas[rank], wrap(replicas[rank], adam, shard_state=1))
    )
    for state in results:
        assert_states_are_close(state, expected, 1e-6)


def test_one_rank_may_get_it_alone():
    def body(rank, model, optimizer, _):
        before = optimizer.state_dict(root_rank=1)
        fit(model, optimizer, data(1, 1))
        return before, optimizer.state_dict(root_rank=1)

    results = on_replicas(3, body, adam, shard_state=1)
    assert [[each is not None for each in result] for result in results] == [
        [False, False],
        [True, True],
        [False, False],
    ]
    assert len(results[1][1]["state"]) == 6


@pytest.mark.parametrize("make", MAKES)
def test_a_plain_optimizer_goes_on_from_it(make):
    batches = data(10, 2)
    (alone,) = models(1)
    fit(alone, make(alone.parameters()), batches)
    ended, state = trained(2, make, batches[:5])[0]
    (model,) = models(1)
    with torch.no_grad():
        for p, weight in zip(model.parameters(), ended, strict=True):
            p.copy_(weight)
    optimizer = make(model.parameters())
    optimizer.load_state_dict(pickle.loads(pickle.dumps(state)))
    fit(model, optimizer, batches[5:])
    assert_close([weights(model)], weights(alone), 1e-10)


@GATE
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("n_before", [0, 2])
def test_it_goes_on_from_a_state_of_any_number_of_ranks(make, size, n_before):
    """Also if it has made steps of its own, and has other settings."""
    batches = data(10, 6)
    (alone,) = models(1)
    fit(alone, make(alone.parameters()), batches)
    ended, state = trained(2, make, batches[:5])[0]
    replicas = models(size)

    def body(rank):
        model = replicas[rank]
        optimizer = wrap(model, make, shard_state=1)
        optimizer.param_groups[0]["lr"] = 9.0
        mine = share(batches, rank, size)
        fit(model, optimizer, mine[:n_before])
        with torch.no_grad():
            for p, weight in zip(model.parameters(), ended, strict=True):
                p.copy_(weight)
        optimizer.load_state_dict(state)
        fit(model, optimizer, mine[5:])
        return weights(model)

    assert_close(run_ranks(size, body, settings=SMALL), weights(alone), 1e-10)


@pytest.mark.parametrize("make", MAKES)
def test_a_state_from_before_the_wrapping_is_shared_out(make):
    batches = data(8, 2)
    alone, *replicas = models(3)
    fit(alone, make(alone.parameters()), batches)

    def body(rank):
        model = replicas[rank]
        plain = make(model.parameters())
        fit(model, plain, batches[:3])
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), shard_state=1)
        fit(model, optimizer, share(batches, rank, 2)[3:])
        assert not plain.state
        return weights(model)

    assert_close(run_ranks(2, body, settings=SMALL), weights(alone), 1e-10)


def test_16_bit_parameters_go_on_from_their_masters():
    batches = data(8, 2, torch.bfloat16)
    whole, first = (
        trained(2, adam, part, network(torch.bfloat16)) for part in (batches, batches[:4])
    )
    ended, state = first[0]
    replicas = models(2, dtype=torch.bfloat16)

    def body(rank):
        model = replicas[rank]
        optimizer = wrap(model, adam, shard_state=1)
        optimizer.load_state_dict(state)
        with torch.no_grad():
            for p, weight in zip(model.parameters(), ended, strict=True):
                p.copy_(weight)
        fit(model, optimizer, share(batches, rank, 2)[4:])
        return weights(model), optimizer.state_dict()

    for got, state_of_rank in run_ranks(2, body, settings=SMALL):
        assert_close([got], whole[0][0], 0)
        assert_states_are_close(state_of_rank, whole[0][1], 0)
    plain = adam(network(torch.bfloat16).parameters())
    plain.load_state_dict(state)
    assert plain.state_dict()["state"][0]["exp_avg"].dtype == torch.bfloat16


# --- on its way ---------------------------------------------------------------------------------
def test_only_what_changes_hands_is_sent(monkeypatch):
    moved = {0: [], 1: []}
    gather_states = optimizer_shard.gather_states

    def spied(mine, shares, *args):
        moved[rc.rank()].append(sorted(shares))
        return gather_states(mine, shares, *args)

    monkeypatch.setattr(optimizer_shard, "gather_states", spied)

    class Turned(nn.Module):
        """Its layers are used in the order in which they were made, so buckets change once."""

        def __init__(self):
            super().__init__()
            self.last, self.first = nn.Linear(4, 3), nn.Linear(5, 4)

        def forward(self, x):
            return self.last(torch.tanh(self.first(x)))

    replicas = copies(seeded(lambda: Turned().double()), 2)

    def body(rank):
        optimizer = wrap(replicas[rank], adam, shard_state=1)
        fit(replicas[rank], optimizer, share(data(4, 2), rank, 2))

    run_ranks(2, body, settings=rc.config.Settings(timeout_s=120, fusion_mib=0))
    assert moved == {0: [], 1: []}
    run_ranks(2, body, settings=rc.config.Settings(timeout_s=120, fusion_mib=1))
    assert moved[0] == moved[1]
    assert len(moved[0]) == 1


class Liar(optim.Optimizer):
    """Scales by the norm of all that it sees, and keeps that."""

    is_elementwise = True

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.state[p]["norm"] = p.grad.norm()
                p.sub_(p.grad, alpha=float(1 / self.state[p]["norm"]))


def test_ranks_that_hold_different_things_of_a_parameter_are_told():
    def body(rank, model, optimizer, _):
        fit(model, optimizer, share(data(1, 2), rank, 2))
        with pytest.raises(rc.RingcommError, match=r"does not update each element by itself"):
            optimizer.state_dict()

    on_replicas(2, body, lambda p: Liar(p, {}), shard_state=1)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_would_have_a_share_alone_and_is_refused(copied):
    (model,) = models(1)

    def body(rank):
        with pytest.raises(TypeError, match=r"take optimizer\.state_dict\(\), on every rank"):
            copied(wrap(model, shard_state=1))

    run_ranks(1, body)


@pytest.mark.parametrize("n_steps", [0, 2])
@pytest.mark.parametrize("is_loaded", [True, False])
def test_broadcast_of_a_state(n_steps, is_loaded):
    """Whether root has loaded it, alone, or all ranks have their share of it."""
    batches = data(8, 2)
    _, state = trained(2, adam, batches[:4])[0]

    def body(rank, model, optimizer, mine):
        fit(model, optimizer, mine[:n_steps])
        if rank == 1:
            optimizer.param_groups[0]["lr"] = 0.5
            if is_loaded:
                optimizer.load_state_dict(state)
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        assert optimizer.param_groups[0]["lr"] == (1e-3 if is_loaded else 0.5)
        return optimizer.state_dict()

    expected = state["state"] if is_loaded else trained(2, adam, batches[:n_steps])[0][1]["state"]
    for found in on_replicas(2, body, adam, shard_state=1, steps=8):
        assert found["state"].keys() == expected.keys()
        assert all(
            torch.equal(found["state"][i]["exp_avg"], expected[i]["exp_avg"]) for i in expected
        )


def test_a_broadcast_over_a_rank_that_has_loaded_is_one_error():
    def body(rank, model, optimizer, _):
        fit(model, optimizer, data(1, 1))
        state = optimizer.state_dict()
        if rank == 1:
            optimizer.load_state_dict(state)
        with pytest.raises(rc.MismatchError, match=r"rank 1 has loaded a whole one"):
            hvd.broadcast_optimizer_state(optimizer)

    on_replicas(2, body, adam, shard_state=1)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_checkpoints_go_on_with_any_number_of_ranks(size, tmp_path):
    batches = data(8, 6)
    (alone,) = models(1)
    fit(alone, adam(alone.parameters()), batches)
    replicas, others = models(2), models(size)

    def save(rank):
        optimizer = wrap(replicas[rank], adam, shard_state=1)
        fit(replicas[rank], optimizer, share(batches, rank, 2)[:5])
        hvd.Checkpoint(tmp_path).save(5, model=replicas[rank], optimizer=optimizer)

    def restore(rank):
        model = others[rank]
        optimizer = wrap(model, adam, shard_state=1)
        hvd.Checkpoint(tmp_path).restore(rng=False, model=model, optimizer=optimizer)
        fit(model, optimizer, share(batches, rank, size)[5:])
        return weights(model)

    run_ranks(2, save, settings=SMALL)
    assert_close(run_ranks(size, restore, settings=SMALL), weights(alone), 1e-10)
    plain = adam(network().parameters())
    plain.load_state_dict(torch.load(tmp_path / "step-5.pt", weights_only=True)["optimizer"])


def test_a_rank_that_dies_while_states_are_collected():
    def body(rank, model, optimizer, _):
        fit(model, optimizer, data(1, 1))
        if rank:
            raise ValueError("boom")
        optimizer.state_dict()

    error, _ = on_replicas(2, body, adam, shard_state=1, run=outcomes)
    assert isinstance(error, rc.PeerFailedError)
    assert "boom" in str(error)


def test_what_goes_by_element_is_what_has_the_parameters_shape():
    state = {"step": torch.tensor(3.0), "sum": torch.ones(()), "name": "x", "pair": torch.ones(2)}
    held = ParameterState.of(state, torch.zeros(()))
    assert held.by_element.keys() == {"sum"}
    assert held.shaped(torch.zeros(())) == state


AGAIN = """
import torch
import ringcomm.torch as hvd

def train(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 300)).pow(2).mean().backward()
    optimizer.step()

torch.manual_seed(0)
model = torch.nn.Linear(300, 200)
alone = torch.nn.Linear(300, 200)
alone.load_state_dict(model.state_dict())
hvd.init()
optimizer = torch.optim.Adam(model.parameters())
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), shard_state=1)
plain = torch.optim.Adam(alone.parameters())
for _ in range(3):
    train(model, optimizer), train(alone, plain)
hvd.shutdown()
total = model.weight.sum()                      # weights outlive the memory of the job
hvd.init()
assert model.weight.sum() == total
for _ in range(2):
    train(model, optimizer), train(alone, plain)
for p, q in zip(model.parameters(), alone.parameters()):
    assert (p - q).abs().max() <= 1e-6
print("right", flush=True)
"""


@pytest.mark.at_length
def test_weights_and_states_outlive_a_shutdown(tmp_path):
    job = run_script(2, AGAIN, cwd=tmp_path)
    assert job.code == 0, job.output
    assert job.output.count("right") == 2
