"""What a program does to .grad or to param_groups counts as in one process, or is an error.

The table of docs/torch.md has a test here for each row of the ring and of shard_state=1.
"""

import pytest
import torch
from harness import outcomes, run_ranks
from torch import nn
from torch.nn.functional import mse_loss
from training_models import (
    BATCH,
    SHARDED,
    SIZES,
    SMALL,
    assert_close,
    assert_equals_one_process,
    copies,
    data,
    fit,
    network,
    on_replicas,
    seeded,
    sgd,
    share,
    weights,
    wrap,
)

import ringcomm as rc
import ringcomm.torch as hvd
from ringcomm.errors import RingcommError


def is_alone(batches):
    """Return True in the process that has all samples."""
    return len(batches[0][0]) != BATCH


# --- after backward() -------------------------------------------------------------------------
def scale_data(p):
    p.grad.data = p.grad.data / 2


def clamp_data(p):
    p.grad.data.clamp_(-0.01, 0.01)


def mask_data(p):
    p.grad.data = p.grad.data * (torch.arange(p.numel()).view_as(p) % 3 > 0)


def scale_in_place(p):
    p.grad.mul_(0.5)


def scale_anew(p):
    p.grad = p.grad * 0.5


def drop_vectors(p):
    if p.ndim == 1:
        p.grad = None


CHANGES = [scale_data, clamp_data, mask_data, scale_in_place, scale_anew, drop_vectors]


@SIZES
@SHARDED
@pytest.mark.parametrize("is_once", [True, False])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings("ignore:.grad was changed")  # sharded, element by element
def test_a_change_after_backward_counts_and_later_steps_are_averaged(
    size, shard_state, is_once, change
):
    def train(model, optimizer, batches):
        for step, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            if step == 2 or not is_once:
                for p in model.parameters():
                    change(p)
            optimizer.step()

    assert_equals_one_process(size, train, shard_state=shard_state)


@SHARDED
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.filterwarnings("ignore:.grad was changed")
def test_a_new_memory_format_between_steps(shard_state, set_to_none):
    def make():
        return nn.Sequential(nn.Conv2d(3, 5, 3), nn.Tanh(), nn.Flatten(), nn.Linear(80, 2)).double()

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 8, 3, 6, 6, generator=generator, dtype=torch.float64)
    y = torch.randn(5, 8, 2, generator=generator, dtype=torch.float64)

    def train(model, optimizer, batches):
        for step, (x, y) in enumerate(batches):
            optimizer.zero_grad(set_to_none=set_to_none)
            mse_loss(model(x), y).backward()
            if step == 2:
                model.to(memory_format=torch.channels_last)
            optimizer.step()

    batches = list(zip(x, y, strict=True))
    assert_equals_one_process(
        2, train, model=seeded(make), batches=batches, shard_state=shard_state, tolerance=1e-11
    )


# --- in hooks ---------------------------------------------------------------------------------
def in_tensor_hook(p, change):
    p.register_hook(lambda g: g * 0.5 if change else None)


def in_post_accumulate_hook(p, change):
    p.register_post_accumulate_grad_hook(change)


def replace_by_double(p):
    p.grad = 2 * p.grad


def drop_every_third(p):
    p.grad = p.grad * (torch.arange(p.numel()).view_as(p) % 3 > 0)


@SIZES
@SHARDED
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("fusion_mib", [SMALL.fusion_mib, 1])
@pytest.mark.parametrize("change", [scale_in_place, scale_data, replace_by_double, None])
def test_what_a_parameters_hook_does_comes_before_the_reduction(
    size, shard_state, is_first, fusion_mib, change
):
    def hook(model):
        for p in model.parameters():
            if change is None:
                p.register_hook(lambda g: g * 0.5)
            else:
                p.register_post_accumulate_grad_hook(change)

    alone, *replicas = copies(network(), size + 1)
    batches = data(4, size)
    hook(alone)
    fit(alone, sgd(alone.parameters()), batches)

    def body(rank):
        model = replicas[rank]
        if is_first:
            hook(model)
        optimizer = wrap(model, shard_state=shard_state)
        if not is_first:
            hook(model)
        fit(model, optimizer, share(batches, rank, size))
        return weights(model)

    settings = rc.config.Settings(timeout_s=120, fusion_mib=fusion_mib)
    assert_close(run_ranks(size, body, settings=settings), weights(alone), 1e-12)


@SIZES
@pytest.mark.parametrize("set_to_none", [True, False, None])
@pytest.mark.parametrize("passes", [1, 2])
def test_a_hook_sees_what_earlier_passes_have_added(size, set_to_none, passes):
    """set_to_none=None: gradients are never cleared."""
    replicas = copies(network(), size + 1)
    batches = data(4, size)

    def train(model, optimizer, batches):
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(scale_in_place)
        for x, y in batches:
            if set_to_none is not None:
                optimizer.zero_grad(set_to_none=set_to_none)
            mse_loss(model(x), y).backward()
            model(x).abs().mean().backward()
            optimizer.step()

    alone = replicas.pop()
    train(alone, sgd(alone.parameters()), batches)

    def body(rank):
        optimizer = wrap(replicas[rank], backward_passes_per_step=passes)
        train(replicas[rank], optimizer, share(batches, rank, size))
        return weights(replicas[rank])

    assert_close(run_ranks(size, body, settings=SMALL), weights(alone), 1e-12)


def test_a_hook_over_what_a_sum_has_left_is_refused_on_every_rank():
    def body(rank, model, optimizer, mine):
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(scale_in_place)
        x, y = mine[0]
        mse_loss(model(x), y).backward()
        with pytest.raises(
            RingcommError, match=r"0\.weight\.grad contains the result of .*zero_grad"
        ):
            mse_loss(model(x), y).backward()
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()

    on_replicas(2, body, steps=2, op=hvd.Sum)


@pytest.mark.parametrize("change", [scale_in_place, scale_anew])
def test_a_gradient_changed_when_it_is_under_way_is_refused_on_every_rank(change):
    def body(rank, model, optimizer, mine):
        fit(model, optimizer, mine)  # ranks agree, and know the order
        optimizer.zero_grad()
        first, last = model[0].weight, model[3].bias
        first.register_post_accumulate_grad_hook(lambda _: change(last) if rank == 1 else None)
        x, y = mine[0]
        with pytest.raises(RingcommError, match=r"3\.bias\.grad was changed within .*rank 1"):
            mse_loss(model(x), y).backward()

    on_replicas(2, body, steps=4)


@SHARDED
def test_a_step_within_a_hook_of_the_only_parameter(shard_state):
    """Optimizers of single parameters that step while backward() runs."""
    alone, *replicas = copies(network(), 3)
    batches = data(4, 2)

    def train(model, optimizers, batches):
        for p, optimizer in zip(model.parameters(), optimizers, strict=True):

            def step(p, optimizer=optimizer):
                optimizer.step()
                optimizer.zero_grad()

            p.register_post_accumulate_grad_hook(step)
        for x, y in batches:
            mse_loss(model(x), y).backward()

    train(alone, [sgd([p]) for p in alone.parameters()], batches)

    def body(rank):
        model = replicas[rank]
        optimizers = [
            hvd.DistributedOptimizer(sgd([p]), [(name, p)], shard_state=shard_state)
            for name, p in model.named_parameters()
        ]
        train(model, optimizers, share(batches, rank, 2))
        return weights(model)

    assert_close(run_ranks(2, body, settings=SMALL), weights(alone), 1e-12)


# --- gradients that the program makes -------------------------------------------------------------
def assign(p, g):
    p.grad = g


def fill(p, g):
    if p.grad is None:
        p.grad = torch.zeros_like(p)
    p.grad.copy_(g)


def fill_data(p, g):
    if p.grad is None:
        p.grad = g.clone()
    else:
        p.grad.data.copy_(g)


@SIZES
@pytest.mark.parametrize(("op", "shard_state"), [(hvd.Average, 0), (hvd.Sum, 0), (hvd.Average, 1)])
@pytest.mark.parametrize("clear", ["none", "zeros", "never"])
@pytest.mark.parametrize("put", [assign, fill, fill_data])
def test_gradients_set_by_hand_are_reduced(size, op, shard_state, clear, put):
    if clear == "never" and put is not assign and (shard_state or op is hvd.Sum):
        pytest.skip("refused: see the next test")

    def train(model, optimizer, batches):
        n = 1 if is_alone(batches) or op is hvd.Average else size
        parameters = list(model.parameters())
        for x, y in batches:
            if clear != "never":
                optimizer.zero_grad(set_to_none=clear == "none")
            made = torch.autograd.grad(mse_loss(model(x), y) / n, parameters)
            for p, g in zip(parameters, made, strict=True):
                put(p, g)
            optimizer.step()

    assert_equals_one_process(size, train, op=op, shard_state=shard_state)


@pytest.mark.parametrize("options", [{"op": hvd.Sum}, {"shard_state": 1}])
@pytest.mark.parametrize("put", [fill, fill_data])
def test_a_gradient_written_over_what_a_sum_has_left_is_refused(options, put):
    def body(rank, model, optimizer, _):
        for _ in range(2):
            for p in model.parameters():
                put(p, torch.full_like(p, rank + 1.0))
            optimizer.step()

    for error in on_replicas(2, body, **options, run=outcomes):
        assert isinstance(error, RingcommError)
        assert "zero_grad()" in str(error) or "assign a new tensor" in str(error)


@SIZES
@SHARDED
def test_gradients_set_by_hand_beside_those_of_backward_are_reduced(size, shard_state):
    def train(model, optimizer, batches):
        for step, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            by_hand = [model[3].weight, model[3].bias]
            hidden = model[:3](x)
            made = torch.autograd.grad(mse_loss(model[3](hidden.detach()), y), by_hand)
            if step % 2:
                for p, g in zip(by_hand, made, strict=True):
                    p.grad = g
            hidden.pow(2).mean().backward()
            if not step % 2:
                for p, g in zip(by_hand, made, strict=True):
                    p.grad = g
            optimizer.step()

    assert_equals_one_process(size, train, shard_state=shard_state)


@SIZES
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_a_gradient_dropped_between_passes_stays_dropped(size, op):
    def train(model, optimizer, batches):
        n = size if op is hvd.Sum and not is_alone(batches) else 1
        for first, second in zip(batches[::2], batches[1::2], strict=True):
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.data.zero_()
            (mse_loss(model(first[0]), first[1]) / n).backward()
            model[3].weight.grad = None
            (model[:3](second[0]).pow(2).mean() / n).backward()
            optimizer.step()

    assert_equals_one_process(size, train, op=op, backward_passes_per_step=2)


@SIZES
def test_a_gradient_set_by_hand_counts_for_a_frozen_parameter(size):
    def train(model, optimizer, batches):
        model[0].requires_grad_(False)
        for x, y in batches:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            model[0].weight.grad = x.mean(0).expand(16, 5).clone()
            optimizer.step()

    assert_equals_one_process(size, train)


def test_a_second_step_with_the_same_gradients():
    def train(model, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.step()

    assert_equals_one_process(2, train)


def test_ranks_of_which_one_clears_what_is_left_are_told():
    def body(rank, model, optimizer, mine):
        x, y = mine[0]
        mse_loss(model(x), y).backward()
        optimizer.step()
        if rank == 1:
            optimizer.zero_grad()
        with pytest.raises(RingcommError, match="is what an earlier step left on some ranks"):
            mse_loss(model(x), y).backward()

    on_replicas(2, body, steps=1)


# --- references that a program keeps --------------------------------------------------------------
@SIZES
@SHARDED
@pytest.mark.parametrize("kept", ["object", "view", "array"])
def test_a_gradient_that_is_kept_stays_as_it_was(size, shard_state, kept):
    of = {"object": lambda g: g, "view": lambda g: g.view(-1)[1:], "array": lambda g: g.numpy()}

    def body(rank, model, optimizer, mine):
        history = []
        for x, y in mine:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            kept_now = [of[kept](p.grad) for p in model.parameters()]
            history.append((kept_now, [torch.as_tensor(g).clone() for g in kept_now]))
            optimizer.step()
        for kept_now, copied in history:
            for g, copy in zip(kept_now, copied, strict=True):
                assert torch.equal(torch.as_tensor(g), copy)

    on_replicas(size, body, steps=6, shard_state=shard_state)


def test_memory_that_nobody_refers_to_is_used_again():
    batches = data(1, 1) * 12

    def body(rank, model, optimizer, _):
        fit(model, optimizer, batches[:3])
        places = set()
        for step, batch in enumerate(batches):
            fit(model, optimizer, [batch])
            kept = [p.grad for p in model.parameters()] if step % 3 == 0 else None
            places.add(optimizer._reducer.plan.buckets[0].buffer.data_ptr())
            assert kept is None or len(kept) == 6
        return len(places)

    (n_places,) = on_replicas(1, body)
    assert n_places <= 5


@SIZES
@SHARDED
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.filterwarnings("ignore:.grad was changed")
def test_a_tensor_that_is_grad_before_backward_is_grad_after_it(size, shard_state, passes):
    """Gradients as views of the program's own flat tensor, which it clips and zeroes."""

    def train(model, optimizer, batches):
        flat = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
        pieces = flat.split([p.numel() for p in model.parameters()])
        mine = [g.view_as(p) for g, p in zip(pieces, model.parameters(), strict=True)]
        for p, g in zip(model.parameters(), mine, strict=True):
            p.grad = g
        for x, y in batches:
            flat.zero_()
            mse_loss(model(x), y).backward()
            if passes == 2:
                model(x).abs().mean().backward()
            flat.clamp_(-0.05, 0.05)
            assert all(p.grad is g for p, g in zip(model.parameters(), mine, strict=True))
            optimizer.step()

    assert_equals_one_process(size, train, shard_state=shard_state, backward_passes_per_step=passes)


def test_a_reference_kept_by_a_hook_has_the_mean_after_backward():
    def train(model, optimizer, batches):
        kept = {}
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: kept.__setitem__(p, p.grad))
        for x, y in batches:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            for g in kept.values():
                g.clamp_(-0.05, 0.05)
            optimizer.step()

    assert_equals_one_process(2, train)


# --- parameters in param_groups -------------------------------------------------------------------
def exchange(model, optimizer, at, make):
    """Put a new Parameter into the model and into param_groups, and move its state."""
    layer, name = at
    old = getattr(model[layer], name)
    new = nn.Parameter(make(old.detach()))
    setattr(model[layer], name, new)
    for group in optimizer.param_groups:
        group["params"] = [new if p is old else p for p in group["params"]]
    state = optimizer.state.pop(old, None)
    if state:
        optimizer.state[new] = state
    return new


@SIZES
@pytest.mark.parametrize("moment", ["before zero_grad", "before forward", "before step"])
@pytest.mark.parametrize(
    "what", [[(0, "weight")], [(k, n) for k in (0, 2, 3) for n in ("weight", "bias")]]
)
def test_a_parameter_exchanged_in_param_groups_is_averaged(size, moment, what):
    def train(model, optimizer, batches):
        for step, (x, y) in enumerate(batches):
            is_due = step in (2, 5)
            if is_due and moment == "before zero_grad":
                for at in what:
                    exchange(model, optimizer, at, lambda old: 0.5 * old)
            optimizer.zero_grad()
            if is_due and moment == "before forward":
                for at in what:
                    exchange(model, optimizer, at, lambda old: 0.5 * old)
            mse_loss(model(x), y).backward()
            if is_due and moment == "before step":
                for at in what:
                    exchange(model, optimizer, at, lambda old: 0.5 * old)
            optimizer.step()

    assert_equals_one_process(size, train)


def test_a_parameter_that_grows_is_averaged():
    class Cloud(nn.Module):
        def __init__(self):
            super().__init__()
            self.points = nn.Parameter(torch.arange(18, dtype=torch.float64).view(6, 3) / 9)

        def forward(self, x):
            return -torch.logsumexp(-torch.cdist(x, self.points).pow(2), 1).mean()

    def train(model, optimizer, batches):
        for step, (x, _) in enumerate(batches):
            if step in (2, 4):
                old = model.points
                model.points = nn.Parameter(torch.cat([old.detach()[1:], 1.1 * old.detach()[:2]]))
                optimizer.param_groups[0]["params"][0] = model.points
                optimizer.state.pop(old, None)
            optimizer.zero_grad()
            model(x[:, :3]).backward()
            optimizer.step()

    assert_equals_one_process(3, train, model=Cloud())


def test_a_parameter_that_only_one_rank_exchanges_is_an_error_on_both():
    def body(rank, model, optimizer, mine):
        fit(model, optimizer, mine[:1])
        if rank == 1:
            exchange(model, optimizer, (0, "weight"), torch.clone)
            optimizer.param_groups[0]["params"].append(nn.Parameter(torch.zeros(2)))
        fit(model, optimizer, mine[1:])

    soon = rc.config.Settings(timeout_s=2)
    assert all(
        isinstance(error, RingcommError)
        for error in on_replicas(2, body, steps=2, settings=soon, run=outcomes)
    )


def test_an_exchanged_parameter_whose_state_is_sharded_is_refused():
    def body(rank, model, optimizer, mine):
        exchange(model, optimizer, (0, "weight"), torch.clone)  # no state yet
        fit(model, optimizer, mine[:2])
        exchange(model, optimizer, (0, "weight"), torch.clone)
        with pytest.raises(RingcommError, match="shard_state=0 to exchange"):
            optimizer.zero_grad()

    on_replicas(2, body, steps=3, shard_state=1)


def test_adasum_follows_an_exchanged_parameter():
    def body(rank, model, optimizer, mine):
        fit(model, optimizer, mine[:1])
        exchange(model, optimizer, (0, "weight"), torch.clone)
        fit(model, optimizer, mine[1:])
        return weights(model)

    first, second = on_replicas(2, body, steps=3, op=hvd.Adasum)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


class Precise(torch.autograd.Function):
    """A sum whose gradient is float32, whatever is added up."""

    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x.float().sum()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.full(ctx.shape, 1 + 2**-10)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="older than grad_dtype")
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("grad_dtype", [torch.float32, None])
def test_a_gradient_of_another_dtype_than_its_parameter_is_refused(grad_dtype, by_hand):
    def body(rank):
        p = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        p.grad_dtype = grad_dtype
        optimizer = wrap(nn.ParameterList([p]))
        if by_hand:
            p.grad = torch.full((3,), 1 + 2**-10)
        with pytest.raises(rc.RingcommError, match=r"0.grad is torch.float32 by the grad_dtype"):
            optimizer.step() if by_hand else Precise.apply(p).backward()

    run_ranks(2, body)
