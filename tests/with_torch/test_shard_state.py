"""DistributedOptimizer(shard_state=1): ranks update their shares, and the result is the same."""

import harness
import pytest
import torch
from harness import at_length, run_ranks
from torch import nn, optim
from torch.nn.functional import mse_loss
from training_models import (
    SHARDED,
    SIZES,
    SMALL,
    STEPS,
    Checkpointed,
    Counting,
    Experts,
    adamw,
    assert_close,
    assert_equals_one_process,
    assert_sharded_equals_one_process,
    batches_for_experts,
    copies,
    data,
    fit,
    models,
    nesterov,
    on_replicas,
    seeded,
    sgd,
    share,
    weights,
    wrap,
)

import ringcomm as rc
import ringcomm.torch as hvd
from ringcomm.config import Settings
from ringcomm.torch.zero.sharded_optimizer import ShardedOptimizer

ADAPTIVE = {
    "ASGD": optim.ASGD,
    "Adadelta": optim.Adadelta,
    "Adagrad": lambda p: optim.Adagrad(p, lr=1e-2),
    "Adam": lambda p: optim.Adam(p, lr=1e-3, amsgrad=True, weight_decay=0.1),
    "Adam, fused": lambda p: optim.Adam(p, lr=1e-3, fused=True),
    "AdamW": adamw,
    "AdamW, foreach": lambda p: optim.AdamW(p, lr=1e-3, foreach=True),
    "Adamax": optim.Adamax,
    "NAdam": optim.NAdam,
    "RAdam": optim.RAdam,
    "RMSprop": lambda p: optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "Rprop": optim.Rprop,
}


# --- equal to one process -----------------------------------------------------------------------
@SIZES
@pytest.mark.parametrize("make", [lambda p: optim.SGD(p, lr=0.05), sgd, nesterov])
def test_sgd_equals_one_process(make, size):
    assert_sharded_equals_one_process(size, make=make)


@pytest.mark.parametrize("size", at_length([1, 2, 3], [3]))
@pytest.mark.parametrize("name", ADAPTIVE)
def test_adaptive_optimizers_equal_one_process(name, size):
    assert_sharded_equals_one_process(size, make=ADAPTIVE[name], tolerance=1e-10)


@pytest.mark.parametrize("size", at_length([1, 2, 3, 4], [3]))
@pytest.mark.parametrize(("make", "tolerance"), [(nesterov, 1e-12), (adamw, 1e-10)])
def test_many_steps_equal_one_process(make, tolerance, size):
    batches = data(at_length(200, 20), size)
    assert_sharded_equals_one_process(size, make=make, tolerance=tolerance, batches=batches)


@pytest.mark.parametrize("fusion_mib", [0, 0.0005, 1])
def test_whatever_is_a_bucket(fusion_mib, wire):
    settings = rc.config.Settings(timeout_s=120, fusion_mib=fusion_mib)
    assert_sharded_equals_one_process(3, make=adamw, tolerance=1e-10, settings=settings)


@pytest.mark.parametrize("make", [nesterov, adamw])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_has_the_bits_of_an_optimizer_that_keeps_all(dtype, make, monkeypatch):
    """On one node, sums are in rank order whoever computes them."""
    monkeypatch.setattr(harness, "wire", "node")
    batches = data(6, 3, dtype)
    results = []
    for stage in (0, 1):
        replicas = models(3, dtype=dtype)

        def body(rank, replicas=replicas, stage=stage):
            optimizer = wrap(replicas[rank], make, shard_state=stage)
            fit(replicas[rank], optimizer, share(batches, rank, 3))
            return weights(replicas[rank])

        results += run_ranks(3, body, settings=SMALL)
    assert_close(results, results[0], 0)


def test_groups_with_settings_of_their_own_under_a_schedule():
    batches = data(12, 2)
    alone, *replicas = models(3)

    def train(model, batches, wrapped):
        layers = [
            {"params": model[0].parameters(), "lr": 0.1, "weight_decay": 0.3},
            {"params": [*model[2].parameters(), model[3].bias], "lr": 0.02, "momentum": 0.5},
            {"params": [model[3].weight]},
        ]
        optimizer = wrapped(optim.SGD(layers, lr=0.05, momentum=0.9))
        schedule = optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        for number, batch in enumerate(batches):
            fit(model, optimizer, [batch])
            schedule.step()
            if number == 5:
                optimizer.param_groups[2]["weight_decay"] = 0.2
        return weights(model)

    expected = train(alone, batches, lambda each: each)

    def body(rank):
        mine = share(batches, rank, 2)
        wrapped = lambda each: hvd.DistributedOptimizer(each, shard_state=1)  # noqa: E731
        return train(replicas[rank], mine, wrapped)

    assert_close(run_ranks(2, body, settings=SMALL), expected, 1e-12)


def test_settings_that_a_step_changes_are_changed_once():
    assert_sharded_equals_one_process(3, make=lambda p: Counting(p, lr=0.1, momentum=0.9))


# --- which parameters have gradients ------------------------------------------------------------
@SIZES
@pytest.mark.parametrize(("make", "tolerance"), [(nesterov, 1e-12), (adamw, 1e-10)])
def test_a_parameter_is_updated_in_those_steps_only_in_which_it_is_used(make, tolerance, size):
    """Neither decay nor momentum moves it in others, and its count of steps stays."""
    assert_sharded_equals_one_process(
        size,
        model=seeded(lambda: Experts().double()),
        make=make,
        batches=batches_for_experts(size),
        tolerance=tolerance,
    )


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.turned = nn.Parameter(torch.randn(3, 5).t())
        self.gaps = nn.Parameter(torch.randn(3, 4)[:, :3])
        self.image = nn.Conv2d(1, 2, 3).to(memory_format=torch.channels_last)

    def forward(self, x):
        image = self.image(x[:, :1, None, None].expand(-1, 1, 3, 3)).flatten(1)
        return self.scale * (x @ self.turned @ self.gaps) + image.sum(1, keepdim=True)


def test_parameters_of_any_layout():
    model = seeded(lambda: Odd().double())
    assert_sharded_equals_one_process(3, model=model, make=adamw, tolerance=1e-10)


@pytest.mark.filterwarnings("ignore:.grad was changed")
def test_gradients_of_another_layout_than_their_parameters():
    def train(model, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            for p in model.parameters():
                p.grad = p.grad.contiguous()
            optimizer.step()

    model = seeded(lambda: Odd().double())
    assert_sharded_equals_one_process(3, train, model=model, make=adamw, tolerance=1e-10)


@SHARDED
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0), (2, 1, 3)])
def test_parameters_of_any_shape(shape, shard_state):
    def body(rank):
        parameter = nn.Parameter(torch.ones(shape))
        scale = nn.Parameter(torch.ones(()))
        make = optim.SGD([parameter, scale], lr=1, momentum=0.5)
        optimizer = hvd.DistributedOptimizer(make, shard_state=shard_state)
        for _ in range(2):
            optimizer.zero_grad()
            ((rank + 1) * scale + (rank + 1) * parameter.sum()).backward()
            optimizer.step()
        return parameter.detach()

    for parameter in run_ranks(2, body):
        assert torch.equal(parameter, torch.full(shape, -2.75))


# --- several backward(), and what users do with gradients ---------------------------------------
@SIZES
def test_several_passes_of_unequal_batches(size):
    def train(model, optimizer, batches):
        for first, second in zip(batches[::2], batches[1::2], strict=True):
            if isinstance(optimizer, ShardedOptimizer):
                optimizer.set_samples(len(first[0]))
            optimizer.zero_grad()
            for x, y in (first, second):
                mse_loss(model(x), y).backward()
            optimizer.step()

    def unequal(batches, rank, size):
        cuts = [len(batches[0][0]) - size + 1, *[1] * (size - 1)]
        return [tuple(part.split(cuts)[rank] for part in batch) for batch in batches]

    assert_sharded_equals_one_process(size, train, split=unequal, backward_passes_per_step=2)


@pytest.mark.parametrize(
    "arguments",
    [
        {"gradient_predivide_factor": 3.0},
        {"num_groups": 2},
        {"sparse_as_dense": True},
    ],
)
def test_other_arguments_change_no_result(arguments):
    assert_sharded_equals_one_process(3, **arguments)


@SIZES
def test_gradients_changed_element_by_element_are_honoured(size):
    def train(model, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            for p in model.parameters():
                p.grad = p.grad.clamp(-0.01, 0.01)
            if hasattr(optimizer, "skip_synchronize"):
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()

    with pytest.warns(UserWarning, match=r"use optimizer.clip_grad_norm_\(\)"):
        assert_sharded_equals_one_process(size, train)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("mode", ["reentrant", "a module twice"])
def test_gradients_are_the_mean_where_a_rank_updates_and_zero_elsewhere(mode, n):
    """Also those that came late, and those that were there before."""
    alone, *replicas = copies(seeded(lambda: Checkpointed(mode).double()), 4)
    batches = data(1, 3)

    def body(rank):
        model = replicas[rank]
        optimizer = wrap(model, shard_state=1)
        x, y = share(batches, rank, 3)[0]
        for _ in range(n):
            mse_loss(model(x), y).backward()
        own = [int((p.grad != 0).sum()) for p in model.parameters()]
        optimizer.step()
        return own, [hvd.allreduce(p.grad, op=hvd.Sum) for p in model.parameters()]

    for _ in range(n):
        mse_loss(alone(batches[0][0]), batches[0][1]).backward()
    results = run_ranks(3, body, settings=SMALL)
    assert_close([total for _, total in results], [p.grad for p in alone.parameters()], 1e-12)
    counts = [p.numel() for p in alone.parameters()]
    assert [sum(each) for each in zip(*(own for own, _ in results), strict=True)] == counts


@pytest.mark.parametrize("size", at_length([1, 2, 3], [3]))
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("stage", [0, 1])
def test_clip_grad_norm_is_that_of_all_gradients(stage, norm_type, size):
    norms = []

    def train(model, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            if hasattr(optimizer, "clip_grad_norm_"):
                norms.append(float(optimizer.clip_grad_norm_(0.1, norm_type)))
            else:
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type)))
            optimizer.step()

    assert_equals_one_process(size, train, shard_state=stage)
    assert sorted(norms[STEPS:]) == pytest.approx(sorted(norms[:STEPS] * size), rel=1e-12)
    assert min(norms) > 0.1


@pytest.mark.parametrize("norm_type", [2.0, "inf"])
def test_clip_grad_norm_takes_part_on_ranks_without_a_gradient(norm_type):
    def body(rank):
        model = nn.Linear(1, 1, bias=False)  # of 1 element, which one rank updates
        optimizer = wrap(model, shard_state=1)
        (model.weight * 3).sum().backward()
        assert float(optimizer.clip_grad_norm_(1.5, norm_type)) == 3
        return hvd.allreduce(model.weight.grad, op=hvd.Sum)

    for got in run_ranks(3, body):
        assert float(got) == pytest.approx(1.5, rel=1e-5)


def test_clipping_leaves_zeros_of_another_layout_the_tensor_that_they_were():
    base = seeded(lambda: nn.ModuleList([nn.Conv2d(2, 2, 3), nn.Linear(5, 5)]).double())
    replicas = copies(base, 3)

    def body(rank):
        conv, linear = replicas[rank]
        optimizer = wrap(replicas[rank], shard_state=1)
        (conv(torch.ones(1, 2, 3, 3).double()).sum() + linear.weight.sum()).backward()
        optimizer.step()
        gradient = conv.weight.grad
        gradient.data = torch.zeros_like(gradient, memory_format=torch.channels_last)
        replicas[rank].zero_grad(set_to_none=False)
        linear.weight.sum().backward()
        optimizer.clip_grad_norm_(0.1)
        # A new tensor would be the program's own; ranks that made none did not reduce it, and hung.
        assert conv.weight.grad is gradient
        optimizer.step()
        return weights(replicas[rank])

    results = run_ranks(3, body, settings=Settings(timeout_s=20))
    assert_close(results, results[0], 0)


def test_clip_grad_norm_refuses_a_norm_that_is_not_finite_on_every_rank():
    ((x, y),) = data(1, 1)

    def body(rank, model, optimizer, _):
        (mse_loss(model(x), y) * (torch.nan if rank else 1)).backward()
        with pytest.raises(RuntimeError, match="norm of the gradients is nan"):
            optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)

    on_replicas(2, body, shard_state=1)


def test_what_torch_would_clip_by_is_told_once():
    def body(rank, model, optimizer, mine):
        for x, y in mine:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

    with pytest.warns(UserWarning, match="part of the gradient") as told:
        on_replicas(2, body, steps=3, shard_state=1)
    assert [each.filename for each in told] == [__file__] * 2


@SIZES
def test_a_grad_scaler_skips_the_same_steps_on_every_rank(size):
    """Also where the gradient of one element is infinite, which one rank alone gets to see."""
    replicas = models(size, dtype=torch.float32)
    batches = data(4, size, torch.float32)

    def body(rank):
        model = replicas[rank]
        optimizer = wrap(model, shard_state=1)
        scaler = hvd.GradScaler("cpu", init_scale=2.0**10)
        moved = []
        for step, (x, y) in enumerate(share(batches, rank, size)):
            before = weights(model)
            optimizer.zero_grad()
            factor = torch.inf if step == 2 and rank == size - 1 else 0.0
            scaler.scale(mse_loss(model(x), y) + factor * model[0].weight[0, 0]).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                optimizer.clip_grad_norm_(1e9)
            scaler.step(optimizer)
            scaler.update()
            moved.append(not torch.equal(before[0], weights(model)[0]))
        return moved, scaler.get_scale(), weights(model)

    results = run_ranks(size, body, settings=SMALL)
    assert [moved for moved, _, _ in results] == [[True, True, False, True]] * size
    assert [scale for _, scale, _ in results] == [2.0**9] * size
    (alone,) = models(1, dtype=torch.float32)
    fit(alone, sgd(alone.parameters()), [*batches[:2], batches[3]])
    assert_close([got for _, _, got in results], weights(alone), 1e-5)


def test_torchs_own_grad_scaler_is_refused_on_every_rank():
    ((x, y),) = data(1, 1)

    def body(rank, model, optimizer, _):
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(mse_loss(model(x), y) * (torch.inf if rank else 1)).backward()
        with pytest.raises(rc.RingcommError, match=r"use hvd\.GradScaler"):
            scaler.step(optimizer)

    on_replicas(2, body, shard_state=1)


def test_hvds_grad_scaler_is_torchs_with_other_optimizers():
    (model,) = models(1, dtype=torch.float32)
    ((x, y),) = data(1, 1, torch.float32)
    optimizer, scaler = sgd(model.parameters()), hvd.GradScaler("cpu", init_scale=8.0)
    scaler.scale(mse_loss(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
    (alone,) = models(1, dtype=torch.float32)
    fit(alone, sgd(alone.parameters()), [(x, y)])
    assert_close([weights(model)], weights(alone), 1e-6)
