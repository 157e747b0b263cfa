"""Whatever parameters a script uses, and however often, N ranks end where one process does."""

import copy

import pytest
import torch
from harness import at_length, run_ranks
from torch import nn
from torch.nn.functional import mse_loss
from training_models import (
    BATCH,
    SHARDED,
    SIZES,
    SMALL,
    Checkpointed,
    Experts,
    assert_close,
    assert_equals_one_process,
    batches_for_experts,
    copies,
    data,
    fit,
    models,
    nesterov,
    network,
    on_replicas,
    seeded,
    share,
    wrap,
)

import ringcomm as rc
from ringcomm.torch.backward.autograd_hooks import Hooks


# --- which parameters are used ------------------------------------------------------------------
@pytest.mark.parametrize("size", at_length([1, 2, 3, 4], [4]))
def test_parameters_used_on_some_ranks_count_as_zeros_on_the_others(size):
    model = seeded(lambda: Experts().double())
    assert_equals_one_process(size, model=model, batches=batches_for_experts(size))


@SHARDED
def test_a_parameter_used_nowhere_keeps_its_bits_and_grad_none_in_its_bucket(
    shard_state,
):
    replicas = copies(seeded(lambda: Experts().double()), 2)
    batches = batches_for_experts(2)

    def body(rank):
        model = replicas[rank]
        optimizer = wrap(model, nesterov, shard_state=shard_state)
        unused = model.experts[3].weight
        before = unused.detach().clone()
        fit(model, optimizer, share(batches, rank, 2))
        (bucket,) = optimizer._reducer.plan.buckets
        assert len(bucket.members) == len(list(model.parameters()))
        assert unused.grad is None
        return torch.equal(unused, before)

    assert all(run_ranks(2, body))


def test_a_rank_without_a_backward_takes_part_from_step():
    ((x, y),) = data(1, 1)

    def body(rank, model, optimizer, _):
        if rank == 1:
            mse_loss(model(x), y).backward()
        optimizer.step()
        return [p.grad for p in model.parameters()]

    (alone,) = models(1)
    (mse_loss(alone(x), y) / 3).backward()
    results = on_replicas(3, body)
    assert_close(results, [p.grad for p in alone.parameters()], 1e-12)


@SIZES
def test_parameters_shared_between_modules(size):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(5, 5), nn.Linear(5, 5)
            self.down.weight = self.up.weight
            self.out = nn.Linear(5, 3)

        def forward(self, x):
            return self.out(self.down(torch.tanh(self.up(x))))

    assert_equals_one_process(size, model=seeded(lambda: Tied().double()))


@SIZES
def test_frozen_parameters_take_no_part(size):
    model = network()
    model[2].requires_grad_(False)
    assert_equals_one_process(size, model=model)


@SIZES
@SHARDED
def test_parameters_frozen_unfrozen_and_added_after_wrapping(size, shard_state):
    """Each of these changes whose elements are whose, and a sharded state goes along."""
    model = network()
    model[0].requires_grad_(False)

    def train(model, optimizer, batches):
        fit(model, optimizer, batches[:3])
        model[0].requires_grad_(True)
        fit(model, optimizer, batches[3:6])
        optimizer.add_param_group({"params": list(model[3].parameters()), "lr": 0.01})
        fit(model, optimizer, batches[6:9])
        model[2].requires_grad_(False)
        fit(model, optimizer, batches[9:])

    def first_layers(parameters):
        return torch.optim.Adam(list(parameters)[:4], lr=1e-3)

    assert_equals_one_process(
        size,
        train,
        model=model,
        make=first_layers,
        batches=data(12, size),
        tolerance=1e-10,
        shard_state=shard_state,
    )


@SIZES
def test_only_parameters_unfrozen_after_wrapping_have_gradients(size):
    model = network()
    model[0].requires_grad_(False)

    def train(model, optimizer, batches):
        model.requires_grad_(False)
        model[0].requires_grad_(True)
        fit(model, optimizer, batches)

    assert_equals_one_process(size, train, model=model)


@SIZES
def test_parameters_frozen_between_forward_and_backward_keep_their_gradient(size):
    def train(model, optimizer, batches):
        fit(model, optimizer, batches[:2])
        for x, y in batches[2:]:  # the gradients of the last step are still there
            loss = mse_loss(model(x), y)
            model[2].requires_grad_(False)
            loss.backward()
            model[2].requires_grad_(True)
            optimizer.step()

    assert_equals_one_process(size, train, make=lambda p: torch.optim.SGD(p, lr=0.01))


# --- several backward() -------------------------------------------------------------------------
@SIZES
@SHARDED
@pytest.mark.parametrize("set_to_none", [True, False])
def test_two_losses_with_two_backward_calls(size, shard_state, set_to_none):
    def train(model, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad(set_to_none=set_to_none)
            mse_loss(model(x), y).backward()
            model(x).abs().mean().backward()
            optimizer.step()

    assert_equals_one_process(size, train, shard_state=shard_state)


@SIZES
@pytest.mark.parametrize("op", [rc.AVERAGE, rc.SUM])
def test_two_losses_over_different_parameters(size, op):
    def train(model, optimizer, batches):
        for x, y in batches:
            weight = 1 / size if op is rc.SUM and len(x) == BATCH else 1
            optimizer.zero_grad()
            (weight * model[0](x).pow(2).mean()).backward()
            hidden = model[1](model[0](x)).detach()
            (weight * mse_loss(model[2:](hidden), y)).backward()
            (weight * model[0](x).abs().mean()).backward()
            optimizer.step()

    assert_equals_one_process(size, train, op=op)


@SIZES
def test_retain_graph(size):
    def train(model, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            loss = mse_loss(model(x), y)
            loss.backward(retain_graph=True)
            (0.5 * loss).backward()
            optimizer.step()

    assert_equals_one_process(size, train)


@SIZES
@pytest.mark.parametrize(
    ("n", "announced"), [(1, 1), (2, 2), (4, 4), (1, 3), (2, 3), (5, 3)], ids=str
)
def test_gradients_of_several_passes_add_up_however_many_are_announced(size, n, announced):
    def train(model, optimizer, batches):
        for first in range(0, len(batches), n):
            optimizer.zero_grad()
            for x, y in batches[first : first + n]:
                mse_loss(model(x), y).backward()
            optimizer.step()

    assert_equals_one_process(size, train, backward_passes_per_step=announced)


@SIZES
def test_passes_that_use_different_parameters_add_up(size):
    def train(model, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            model[0](x).abs().mean().backward()
            mse_loss(model[3](torch.ones(len(x), 8).double()), y).backward()
            optimizer.step()

    assert_equals_one_process(size, train, backward_passes_per_step=2)


def test_synchronize_between_passes_makes_what_follows_final_too():
    batches = data(3, 2)

    def body(rank, model, optimizer, mine):
        one, two, _ = mine
        mse_loss(model(one[0]), one[1]).backward()
        optimizer.synchronize()
        mse_loss(model(two[0]), two[1]).backward()
        return [p.grad.clone() for p in model.parameters()]

    (alone,) = models(1)
    mse_loss(alone(batches[0][0]), batches[0][1]).backward()
    mse_loss(alone(batches[1][0]), batches[1][1]).backward()
    expected = [p.grad for p in alone.parameters()]
    assert_close(on_replicas(2, body, steps=3, backward_passes_per_step=3), expected, 1e-12)


@SIZES
def test_a_gradient_penalty_by_double_backward(size):
    def train(model, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            leaf = x.clone().requires_grad_()
            loss = mse_loss(model(leaf), y)
            slopes = torch.autograd.grad(loss * len(x), leaf, create_graph=True)[0]
            (loss + slopes.pow(2).sum(1).mean()).backward()
            optimizer.step()

    assert_equals_one_process(size, train, tolerance=1e-11)


@SIZES
def test_autograd_grad_leaves_gradients_alone(size):
    def train(model, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            torch.autograd.grad(model(x).sum(), list(model.parameters()))
            optimizer.step()

    assert_equals_one_process(size, train)


# --- checkpointing ------------------------------------------------------------------------------
@SIZES
@SHARDED
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # an inner checkpoint
@pytest.mark.parametrize("fusion_mib", [SMALL.fusion_mib, 1])
@pytest.mark.parametrize(
    "mode", ["reentrant", "not reentrant", "everything", "nested", "a module twice"]
)
def test_checkpointing(mode, fusion_mib, shard_state, size):
    model = seeded(lambda: Checkpointed(mode).double())
    settings = rc.config.Settings(timeout_s=120, fusion_mib=fusion_mib)
    assert_equals_one_process(size, model=model, settings=settings, shard_state=shard_state)


def test_a_module_checkpointed_twice_on_one_rank_only():
    replicas = copies(seeded(lambda: Checkpointed("a module twice").double()), 2)
    replicas[1].mode = "reentrant"
    ((x, y),) = data(1, 2)

    def body(rank):
        model = replicas[rank]
        optimizer = wrap(model)
        a, b = share([(x, y)], rank, 2)[0]
        mse_loss(model(a), b).backward()
        optimizer.step()
        return [p.grad.clone() for p in model.parameters()]

    alone = copy.deepcopy(replicas[0])
    (mse_loss(alone(x.chunk(2)[0]), y.chunk(2)[0]) / 2).backward()
    alone.mode = "reentrant"
    (mse_loss(alone(x.chunk(2)[1]), y.chunk(2)[1]) / 2).backward()
    assert_close(run_ranks(2, body, settings=SMALL), [p.grad for p in alone.parameters()], 1e-12)


class Listener:
    def before_gradient(self, index):
        self.before = index

    def after_gradient(self, index):
        self.after = index


def test_a_hook_that_torch_forgets_is_an_error_and_no_wrong_gradient():
    parameter, listener = torch.nn.Parameter(torch.ones(3)), Listener()
    hooks = Hooks(listener)
    hooks.add(5, parameter)
    parameter.sum().backward()
    assert (listener.before, listener.after) == (5, 5)
    hooks._handles[0].remove()  # as torch 2.6 does within checkpoints
    with pytest.raises(
        rc.RingcommError, match=r"gradient of parameter 5 .* without calling the hook"
    ):
        parameter.sum().backward()
