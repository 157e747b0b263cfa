"""set_samples(n) with compression: a weighted mean is as exact in 16 bits as a plain one."""

from collections import Counter

import pytest
import torch
from harness import run_ranks
from torch import nn
from training_models import SMALL, wrap

import ringcomm as rc
import ringcomm.torch as hvd
from ringcomm.torch.optim.buckets import BucketReduction, unit_for

SIZE, N_PARAMETERS = 3, 4
EPSILON = {"fp16": 2**-11, "bf16": 2**-8}
COMPRESSIONS = pytest.mark.parametrize("name", EPSILON)
# samples of each rank in each step: more on some rank in the 3rd and 5th, which send again
SAMPLES = [(32, 31, 30), (1, 2, 0), (1, 40, 40), (7, 7, 7), (1, 0, 5000), (0.5, 0.25, 1e-3)]


class Given(nn.Module):
    """Its gradients are what it is called with."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(100, dtype=dtype) for _ in range(N_PARAMETERS))

    def forward(self, gradients):
        return sum((p * g).sum() for p, g in zip(self.parts, gradients, strict=True))


def gradients_of(rank, step, largest=60000.0):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [largest * (1 - torch.rand(100, generator=generator) / 64) for _ in range(N_PARAMETERS)]


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=1.0)


def change_of_weights(rank, model, optimizer, samples, step):
    """Train one step from weights of 0, and return what it has subtracted."""
    with torch.no_grad():
        for p in model.parts:
            p.zero_()
    optimizer.zero_grad()
    if samples is not None:
        optimizer.set_samples(samples)
    passes = optimizer._reducer.passes_per_step
    for _ in range(passes):
        model([g.to(model.parts[0].dtype) / passes for g in gradients_of(rank, step)]).backward()
    optimizer.step()
    return torch.cat([-p.detach() for p in model.parts])


def weighted_mean(samples, step):
    weights = torch.tensor(samples, dtype=torch.float64)
    values = torch.stack([torch.cat(gradients_of(rank, step)).double() for rank in range(SIZE)])
    return (values * weights[:, None]).sum(0) / weights.sum()


@COMPRESSIONS
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_predivide_factor": 3.0},
        {"backward_passes_per_step": 2},
        {"shard_state": 1},
        {"groups": 2},
    ],
    ids=str,
)
def test_a_weighted_mean_is_finite_wherever_gradients_are(name, options):
    def body(rank):
        model = Given()
        optimizer = wrap(model, plain_sgd, compression=getattr(hvd.Compression, name), **options)
        return [
            change_of_weights(rank, model, optimizer, samples[rank], step)
            for step, samples in enumerate(SAMPLES)
        ]

    for found in run_ranks(SIZE, body, settings=SMALL):
        for step, samples in enumerate(SAMPLES):
            exact = weighted_mean(samples, step)
            assert ((found[step] - exact).abs() <= 3 * EPSILON[name] * exact).all(), step


@COMPRESSIONS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_it_is_finite_for_parameters_of_16_bits(name, dtype):
    def body(rank):
        model = Given(dtype)
        optimizer = wrap(model, plain_sgd, compression=getattr(hvd.Compression, name))
        return [
            change_of_weights(rank, model, optimizer, samples[rank], step)
            for step, samples in enumerate(SAMPLES)
        ]

    for found in run_ranks(SIZE, body, settings=SMALL):
        for step, samples in enumerate(SAMPLES):
            exact = weighted_mean(samples, step)
            assert ((found[step].double() - exact).abs() <= 4 * 2**-8 * exact).all(), step


@COMPRESSIONS
def test_equal_batches_of_a_power_of_two_give_the_bits_of_a_plain_mean(name):
    """So gradients that are small in float16, such as 1e-7, lose no more than without weights."""
    tiny = [torch.linspace(1e-8, 3e-6, 100) for _ in range(N_PARAMETERS)]

    def body(rank, samples):
        model = Given()
        optimizer = wrap(model, plain_sgd, compression=getattr(hvd.Compression, name))
        if samples is not None:
            optimizer.set_samples(samples)
        model([g * (rank + 1) for g in tiny]).backward()
        return torch.cat([p.grad for p in model.parts])

    plain = run_ranks(SIZE, lambda rank: body(rank, None), settings=SMALL)
    weighted = run_ranks(SIZE, lambda rank: body(rank, 32), settings=SMALL)
    assert plain[0].count_nonzero() > 0
    for a, b in zip(plain, weighted, strict=True):
        assert torch.equal(a, b)


def test_only_steps_with_more_samples_than_any_before_send_buckets_again(monkeypatch):
    sent, launch = Counter(), BucketReduction.launch
    step_of = {}

    def counted(self, bucket, op, group):
        sent[step_of[group.index], group.index] += 1
        return launch(self, bucket, op, group)

    monkeypatch.setattr(BucketReduction, "launch", counted)

    def body(rank):
        model = Given()
        optimizer = wrap(model, plain_sgd, compression=hvd.Compression.fp16)
        for step, samples in enumerate(SAMPLES):
            step_of[rank] = step
            change_of_weights(rank, model, optimizer, samples[rank], step)

    run_ranks(SIZE, body, settings=SMALL)
    assert [sent[step, 0] for step in range(len(SAMPLES))] == [4, 4, 8, 4, 8, 4]


def test_weights_that_begin_later_than_training_count():
    def body(rank):
        model = Given()
        optimizer = wrap(model, plain_sgd, compression=hvd.Compression.fp16)
        for step in range(3):
            change_of_weights(rank, model, optimizer, None, step)
        return change_of_weights(rank, model, optimizer, (1, 2, 30)[rank], 3)

    exact = weighted_mean((1, 2, 30), 3)
    for found in run_ranks(SIZE, body, settings=SMALL):
        assert ((found - exact).abs() <= 2**-9 * exact).all()


def test_ranks_in_join_have_no_samples():
    def body(rank):
        model = Given()
        optimizer = wrap(model, plain_sgd, compression=hvd.Compression.fp16)
        changes = [
            change_of_weights(rank, model, optimizer, samples[rank], step)
            for step, samples in enumerate(SAMPLES[: 2 if rank == 1 else None])
        ]
        hvd.broadcast_optimizer_state(optimizer, root_rank=hvd.join())
        return [*changes, change_of_weights(rank, model, optimizer, 2 + rank, 9)]

    found = run_ranks(SIZE, body, settings=SMALL)
    for step in range(2, len(SAMPLES)):
        exact = weighted_mean((SAMPLES[step][0], 0, SAMPLES[step][2]), step)
        assert ((found[0][step] - exact).abs() <= 2**-9 * exact).all(), step
    exact = weighted_mean((2, 3, 4), 9)
    for each in found:
        assert ((each[-1] - exact).abs() <= 2**-9 * exact).all()


def test_a_backward_that_fails_in_a_larger_step_can_be_repeated():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ZeroDivisionError

    def body(rank):
        model = Given()
        optimizer = wrap(model, plain_sgd, compression=hvd.Compression.fp16)
        for step in range(2):
            change_of_weights(rank, model, optimizer, 4, step)
        optimizer.zero_grad()
        optimizer.set_samples(4 + 1000 * rank)
        last = Fails.apply(model.parts[0]).sum() if rank == 1 else 0  # after the other gradients
        loss = last + model(gradients_of(rank, 2))
        with pytest.raises(ZeroDivisionError if rank == 1 else rc.MismatchError):
            loss.backward()
        return change_of_weights(rank, model, optimizer, 4 + 1000 * rank, 2)

    exact = weighted_mean((4, 1004, 2004), 2)
    for found in run_ranks(SIZE, body, settings=SMALL):
        assert ((found - exact).abs() <= 2**-9 * exact).all()


def test_a_compressor_that_sends_the_gradients_own_memory_works():
    class Unchanged:
        @staticmethod
        def compress(tensor):
            return tensor, None

        @staticmethod
        def decompress(tensor, ctx):
            return tensor

    def body(rank):
        model = Given()
        optimizer = wrap(model, plain_sgd, compression=Unchanged)
        return [
            change_of_weights(rank, model, optimizer, samples[rank], step)
            for step, samples in enumerate(SAMPLES)
        ]

    for found in run_ranks(SIZE, body, settings=SMALL):
        for step, samples in enumerate(SAMPLES):
            torch.testing.assert_close(
                found[step].double(), weighted_mean(samples, step), rtol=1e-6, atol=0
            )


@pytest.mark.parametrize(
    ("samples", "unit"), [(1, 1), (32, 32), (33, 64), (0.3, 0.5), (1e-300, 2.0**-996)]
)
def test_a_unit_is_the_next_power_of_two(samples, unit):
    assert unit_for(samples) == unit
