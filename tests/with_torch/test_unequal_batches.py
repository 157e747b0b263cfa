"""set_samples(n): ranks with unequal batches equal one process on all samples."""

import pytest
import torch
from harness import run_ranks
from torch import nn
from torch.nn.functional import mse_loss
from training_models import (
    SMALL,
    assert_close,
    assert_equals_one_process,
    copies,
    data,
    models,
    network,
    on_replicas,
    seeded,
    share,
    wrap,
)

import ringcomm as rc
import ringcomm.torch as hvd
from ringcomm.config import Settings

PARTS = {2: (3, 9), 3: (22, 21, 21), 4: (5, 0, 1, 2)}


def fit(model, optimizer, batches):
    """Train like training.fit, but say how many samples there are."""
    for x, y in batches:
        if hasattr(optimizer, "set_samples"):
            optimizer.set_samples(len(x))
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()  # NaN for an empty batch
        optimizer.step()


def unequal(batches, rank, size):
    return [tuple(part.split(PARTS[size])[rank] for part in batch) for batch in batches]


def batches_for(size, dtype=torch.float64):
    return [(x[: sum(PARTS[size])], y[: sum(PARTS[size])]) for x, y in data(6, 11, dtype)]


@pytest.mark.parametrize("size", PARTS)
def test_unequal_batches_equal_one_process(size):
    assert_equals_one_process(size, fit, batches=batches_for(size), split=unequal)


def test_without_it_unequal_batches_count_alike():
    from training_models import fit as plain

    with pytest.raises(AssertionError):
        assert_equals_one_process(2, plain, batches=batches_for(2), split=unequal)


@pytest.mark.parametrize("size", PARTS)
def test_adam_and_accumulation(size):
    def train(model, optimizer, batches):
        for first, second in zip(batches[::2], batches[1::2], strict=True):
            if hasattr(optimizer, "set_samples"):
                optimizer.set_samples(len(first[0]))
            optimizer.zero_grad()
            for x, y in (first, second):
                mse_loss(model(x), y).backward()
            optimizer.step()

    def make(parameters):
        return torch.optim.Adam(parameters, lr=1e-3)

    assert_equals_one_process(
        size,
        train,
        make=make,
        batches=batches_for(size),
        split=unequal,
        tolerance=1e-10,
        backward_passes_per_step=2,
    )


@pytest.mark.parametrize("size", [2, 3])
def test_sparse_gradients_and_a_rank_without_backward(size):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(30, 3, sparse=True)
            self.out = nn.Linear(3, 2)

        def forward(self, words):
            return self.out(self.table(words))

    counts = {2: (3, 9), 3: (4, 0, 2)}[size]
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, 20, (5, sum(counts)), generator=generator)
    y = torch.randn(5, sum(counts), 2, generator=generator, dtype=torch.float64)

    def train(model, optimizer, batches):
        for x, y in batches:
            if hasattr(optimizer, "set_samples"):
                optimizer.set_samples(len(x))
            optimizer.zero_grad()
            if len(x):
                mse_loss(model(x), y).backward()
            optimizer.step()

    assert_equals_one_process(
        size,
        train,
        model=seeded(lambda: Words().double()),
        make=lambda p: torch.optim.SGD(p, lr=0.05),
        batches=list(zip(words, y, strict=True)),
        split=lambda batches, rank, _: [
            tuple(part.split(counts)[rank] for part in batch) for batch in batches
        ],
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_gradients_are_weighed_in_float32(dtype):
    """1000 samples x 100 would overflow float16."""

    def body(rank):
        parameter = nn.Parameter(torch.zeros(3, dtype=dtype))
        optimizer = wrap_one(parameter)
        optimizer.set_samples(1000 if rank else 3000)
        (parameter.sum() * (100 if rank else 20)).backward()
        return parameter.grad

    for gradient in run_ranks(2, body):
        assert torch.equal(gradient, torch.full((3,), 40, dtype=dtype))


def wrap_one(parameter, **kwargs):
    holder = nn.Module()
    holder.only = parameter
    return wrap(holder, **kwargs)


@pytest.mark.parametrize("is_sparse", [True, False])
def test_the_nan_of_an_empty_batch_counts_as_zeros(is_sparse):
    first = seeded(lambda: nn.Embedding(4, 2, sparse=is_sparse))
    tables = copies(first, 2)
    words = torch.tensor([1, 1, 2])

    def loss_of(table, n):
        return table(words).sum() * torch.full((n,), 3.0).mean()  # NaN for n = 0

    def body(rank):
        optimizer = wrap(tables[rank], make=lambda p: torch.optim.SGD(p, lr=0.1))
        optimizer.set_samples(4 * rank)
        loss_of(tables[rank], 4 * rank).backward()
        return tables[rank].weight.grad.to_dense()

    loss_of(first, 4).backward()
    for gradient in run_ranks(2, body):
        assert torch.equal(gradient, first.weight.grad.to_dense())


def test_it_holds_for_one_step():
    def body(rank):
        parameter = nn.Parameter(torch.zeros(1))
        optimizer = wrap_one(parameter, make=lambda p: torch.optim.SGD(p, lr=1))
        optimizer.set_samples(1 if rank else 3)
        (parameter.sum() * (4 if rank else 8)).backward()
        weighted = parameter.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
        (parameter.sum() * (4 if rank else 8)).backward()
        return weighted.item(), parameter.grad.item()

    assert run_ranks(2, body) == [(7, 6), (7, 6)]


@pytest.mark.parametrize("is_16_bit", [True, False])
def test_ranks_that_disagree_get_one_error_and_can_go_on(is_16_bit):
    replicas = copies(network(torch.bfloat16 if is_16_bit else torch.float64), 3)
    batches = data(2, 3, torch.bfloat16 if is_16_bit else torch.float64)

    def body(rank):
        model = replicas[rank]
        optimizer = wrap(model)
        (x, y), (z, w) = share(batches, rank, 3)
        if rank != 1:
            optimizer.set_samples(5)
        with pytest.raises(rc.MismatchError) as caught:
            mse_loss(model(x), y).backward()
        optimizer.zero_grad()
        optimizer.set_samples(5)
        mse_loss(model(z), w).backward()
        optimizer.step()
        return str(caught.value), [p.grad.clone() for p in model.parameters()]

    results = run_ranks(3, body, settings=SMALL)
    (text,) = {text for text, _ in results}
    assert "rank 0 called set_samples(5) for this step, rank 1 did not" in text
    if not is_16_bit:
        (alone,) = models(1)
        mse_loss(alone(batches[1][0]), batches[1][1]).backward()
        assert_close([g for _, g in results], [p.grad for p in alone.parameters()], 1e-12)


def test_no_samples_anywhere_is_an_error_everywhere():
    def body(rank, model, optimizer, mine):
        x, y = mine[0]
        optimizer.set_samples(0)
        with pytest.raises(ValueError, match="set_samples\\(0\\) on every rank"):
            mse_loss(model(x), y).backward()
        optimizer.zero_grad()
        optimizer.set_samples(1)
        mse_loss(model(x), y).backward()
        optimizer.step()

    on_replicas(2, body, steps=1)


@pytest.mark.parametrize("n", [-1, float("nan"), float("inf")])
def test_what_is_no_number_of_samples_is_refused(n):
    (model,) = models(1)

    def body(rank):
        with pytest.raises(ValueError, match=r"set_samples\(.*finite and at least 0"):
            wrap(model).set_samples(n)

    run_ranks(1, body)


def test_a_sum_is_not_weighed():
    (model,) = models(1)

    def body(rank):
        with pytest.raises(ValueError, match="op is SUM"):
            wrap(model, op=rc.SUM).set_samples(1)

    run_ranks(1, body)


def test_samples_told_after_backward_are_refused_at_step():
    ((x, y),) = data(1, 1)

    def body(rank, model, optimizer, _):
        mse_loss(model(x), y).backward()
        optimizer.set_samples(3)
        with pytest.raises(rc.RingcommError, match=r"after backward\(\)"):
            optimizer.step()

    on_replicas(1, body)


# --- ranks in join() ------------------------------------------------------------------------------
def steps(model, optimizer, n, samples=None):
    for _ in range(n):
        optimizer.zero_grad()
        if samples is not None:
            optimizer.set_samples(samples)
        model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((3, 5), "rank 0 is in step 4, rank 1 in step 6"),
        ((3, 0, 5), "rank 0 is in step 4, rank 2 in step 6"),  # rank 1 is in join() again
        ((0, 5), "rank 0 is in step 1, rank 1 in step 6"),
        ((5, 0), "rank 0 is in step 6, rank 1 in step 1"),
    ],
)
def test_steps_that_differ_after_join_are_an_error_on_all_ranks_that_train(numbers, expected):
    def body(rank, model, optimizer, _):
        steps(model, optimizer, numbers[rank])
        hvd.join()
        is_idle = 0 in numbers[:-1] and len(numbers) == 3 and rank == 1
        if not is_idle:
            with pytest.raises(rc.MismatchError, match=expected) as caught:
                steps(model, optimizer, 1)
            assert "broadcast_optimizer_state" in str(caught.value)
        hvd.join()

    on_replicas(len(numbers), body, settings=Settings(timeout_s=20))


def test_the_rank_that_has_not_called_set_samples_is_named_and_none_in_join():
    def body(rank, model, optimizer, _):
        if rank != 1:
            with pytest.raises(rc.MismatchError, match="rank 2 did not call set_samples"):
                steps(model, optimizer, 1, samples=2 if rank == 0 else None)
        hvd.join()

    on_replicas(3, body, settings=Settings(timeout_s=20))


def test_a_sampler_that_is_known_by_now_refuses_to_leave_out_the_share_of_a_rank_in_join():
    def body(rank, model, optimizer, _):
        sampler = rc.data.ShardedSampler(12, shuffle=False)
        hvd.barrier()
        list(sampler)  # compares
        steps(model, optimizer, 1 if rank == 1 else 2)
        if rank != 1:
            with pytest.raises(rc.MismatchError, match=r"ranks \[1\] are in join"):
                list(sampler)
        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        hvd.broadcast_optimizer_state(optimizer, root_rank=last)
        sampler.set_epoch(3)
        return list(sampler)

    assert sorted(i for own in on_replicas(3, body) for i in own) == list(range(12))
