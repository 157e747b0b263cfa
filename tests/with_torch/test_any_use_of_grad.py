"""Whatever .grad is made of, and whatever is done with it, N ranks end where one process does."""

import warnings
from contextlib import nullcontext

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
    assert_close,
    assert_equals_one_process,
    copies,
    data,
    models,
    on_replicas,
    seeded,
    sgd,
    share,
    weights,
    wrap,
)

import ringcomm as rc


@SHARDED
@pytest.mark.parametrize("size", at_length([2, 4], [2]))
def test_grad_can_be_differentiated_again(size, shard_state):
    """It gives this rank's second derivative; the values are the mean's."""
    batches = data(3, size)
    replicas = models(size)

    def train(model, optimizer, batches, *, is_checked):
        for x, y in batches:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward(create_graph=True)
            ps = list(model.parameters())
            vs = [torch.ones_like(p) for p in ps]
            again = torch.autograd.grad([p.grad for p in ps], ps, vs, retain_graph=True)
            if is_checked:
                mine = torch.autograd.grad(mse_loss(model(x), y), ps, create_graph=True)
                assert_close([again], torch.autograd.grad(mine, ps, vs), 1e-12)
            optimizer.step()
        return weights(model)

    def body(rank):
        optimizer = wrap(replicas[rank], shard_state=shard_state)
        return train(replicas[rank], optimizer, share(batches, rank, size), is_checked=True)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward")  # of the memory that graphs keep
        results = run_ranks(size, body, settings=SMALL)
        (alone,) = models(1)
        expected = train(alone, sgd(alone.parameters()), batches, is_checked=False)
    assert_close(results, expected, 1e-12)


# --- what users do with .grad -------------------------------------------------------------------
@SIZES
@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_in_all_its_forms(size, is_own, set_to_none):
    def train(model, optimizer, batches):
        for x, y in batches:
            (optimizer if is_own else model).zero_grad(set_to_none=set_to_none)
            mse_loss(model(x), y).backward()
            optimizer.step()

    assert_equals_one_process(size, train)


@SIZES
@pytest.mark.parametrize("k", [1, 2])
def test_gradients_that_are_never_zeroed_go_on_adding_up(size, k):
    def train(model, optimizer, batches):
        for first in range(0, len(batches), k):
            for x, y in batches[first : first + k]:
                mse_loss(model(x), y).backward()
            optimizer.step()

    def make(parameters):
        return torch.optim.SGD(parameters, lr=0.01)

    assert_equals_one_process(size, train, make=make, backward_passes_per_step=k)


def replace_after_backward(p):
    p.grad = p.grad.clamp(-0.01, 0.01)


def drop_after_backward(p):
    p.grad = None if p.ndim == 1 else p.grad


def change_after_backward(p):
    p.grad.mul_(0.5).add_(p.detach(), alpha=0.1)


def view_after_backward(p):
    p.grad = p.grad.view_as(p)


@SIZES
@pytest.mark.parametrize(
    "change",
    [replace_after_backward, drop_after_backward, change_after_backward, view_after_backward],
)
@pytest.mark.parametrize("n", [1, 2])
def test_a_grad_changed_after_backward_is_honoured(size, change, n):
    def train(model, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            for _ in range(n):
                mse_loss(model(x), y).backward()
                for p in model.parameters():
                    change(p)
            optimizer.step()

    assert_equals_one_process(size, train)


@SIZES
@pytest.mark.parametrize("op", [rc.AVERAGE, rc.SUM])
def test_a_grad_set_before_backward_is_added_to(size, op):
    def train(model, optimizer, batches):
        n = size if op is rc.SUM and len(batches[0][0]) == BATCH else 1
        for x, y in batches:
            for p in model.parameters():
                p.grad = 0.1 * p.detach() / n  # each rank's own, as what backward() adds
            (mse_loss(model(x), y) / n).backward()
            optimizer.step()

    assert_equals_one_process(size, train, op=op)


@SIZES
def test_a_grad_replaced_between_passes_is_this_ranks_own(size):
    def train(model, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            for p in model.parameters():
                p.grad = 0.5 * p.grad
            mse_loss(model(x), y).backward()
            optimizer.step()

    assert_equals_one_process(size, train, backward_passes_per_step=2)


@SIZES
def test_autograd_may_use_a_gradient_after_the_next_backward(size):
    def body(rank):
        model = nn.Linear(3, 2)
        optimizer = wrap(model)
        for _ in range(2):  # after the first step the buckets are made anew
            optimizer.zero_grad()
            model(torch.ones(4, 3)).sum().backward()
        factor = torch.ones(2, 3, requires_grad=True)
        penalty = (factor * model.weight.grad).sum()
        before = model.weight.grad.clone()
        optimizer.zero_grad()
        (5 * model(torch.ones(4, 3)).sum()).backward()
        penalty.backward()
        assert torch.equal(factor.grad, before)
        assert torch.equal(model.weight.grad, 5 * before)

    run_ranks(size, body)


@SIZES
def test_horovods_pattern_of_synchronize_and_skip_synchronize(size):
    def train(model, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            is_wrapped = hasattr(optimizer, "synchronize")
            if is_wrapped:
                optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with optimizer.skip_synchronize() if is_wrapped else nullcontext():
                optimizer.step()

    assert_equals_one_process(size, train)


# --- precision and layout -----------------------------------------------------------------------
@SIZES
def test_grad_scaler_skips_a_step_on_every_rank_when_one_overflows(size):
    batches = data(6, size)
    batches[2][0][0, 0] = float("inf")  # in the first rank's share

    def train(model, optimizer, batches):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for x, y in batches:
            optimizer.zero_grad()
            scaler.scale(mse_loss(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0**9

    assert_equals_one_process(size, train, batches=batches)


@SIZES
@pytest.mark.parametrize("set_to_none", [True, False])
def test_channels_last_gradients_keep_their_layout(size, set_to_none):
    def make():
        convolutions = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 3, (2, 1)))
        return convolutions.double().to(memory_format=torch.channels_last)

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, size * 2, 3, 8, 8, generator=generator, dtype=torch.float64)
    y = torch.randn(4, size * 2, 3, 5, 6, generator=generator, dtype=torch.float64)

    def train(model, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad(set_to_none=set_to_none)
            mse_loss(model(x.to(memory_format=torch.channels_last)), y).backward()
            assert [p.grad.stride() for p in model.parameters()] == [
                p.stride() for p in model.parameters()
            ]
            optimizer.step()

    batches = list(zip(x, y, strict=True))
    assert_equals_one_process(size, train, model=seeded(make), batches=batches, tolerance=1e-11)


# --- sparse -------------------------------------------------------------------------------------
class Words(nn.Module):
    """Scores three words; how the embedding's gradient is laid out may differ between ranks."""

    def __init__(self, is_sparse=True):
        super().__init__()
        self.table = nn.Embedding(20, 4, sparse=is_sparse)
        self.out = nn.Linear(12, 3)

    def forward(self, words):
        return self.out(self.table(words).flatten(1))


def texts(steps, size):
    generator = torch.Generator().manual_seed(2)
    words = torch.randint(0, 12, (steps, size * BATCH, 3), generator=generator)
    y = torch.randn(steps, size * BATCH, 3, generator=generator, dtype=torch.float64)
    return list(zip(words, y, strict=True))


@pytest.mark.parametrize("size", at_length([1, 2, 3, 4], [3]))
@pytest.mark.parametrize("n", [1, 2])
def test_sparse_gradients(size, n):
    def train(model, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            for _ in range(n):
                mse_loss(model(x), y).backward()
            assert model.table.weight.grad.layout is torch.sparse_coo
            optimizer.step()

    def plain(parameters):
        return torch.optim.SGD(parameters, lr=0.05)

    model = seeded(lambda: Words().double())
    assert_equals_one_process(size, train, model=model, make=plain, batches=texts(6, size))


def test_sparse_gradients_under_sparse_adam():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(20, 3, sparse=True)

        def forward(self, words):
            return self.table(words).sum(1)

    assert_equals_one_process(
        2,
        model=seeded(lambda: Table().double()),
        make=lambda p: torch.optim.SparseAdam(list(p), lr=0.01),
        batches=texts(6, 2),
        tolerance=1e-10,
    )


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kinds", ["sparse on rank 0 alone", "none on rank 0", "in turns"])
def test_sparse_gradients_on_some_ranks(size, kinds):
    """The others have a dense one, or none."""
    first = seeded(lambda: Words().double())
    alone, *replicas = copies(first, size + 1)
    batches = texts(4, size)

    def step(model, x, y, *, is_alone=False, rank=0, number=0):
        is_sparse = {
            "sparse on rank 0 alone": rank == 0,
            "none on rank 0": True,
            "in turns": (rank + number) % 2 == 0,
        }[kinds]
        model.table.sparse = is_sparse
        if kinds == "none on rank 0" and (rank == 0 or is_alone):
            embedded = model.table(x)
            keep = torch.ones(len(x), 1, 1).double()
            keep[:BATCH] = 0
            embedded = embedded * keep if is_alone else embedded.detach() * 0
            return mse_loss(model.out(embedded.flatten(1)), y)
        return mse_loss(model(x), y)

    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05)
    for x, y in batches:
        optimizer.zero_grad()
        step(alone, x, y, is_alone=True).backward()
        optimizer.step()

    def body(rank):
        model = replicas[rank]
        optimizer = wrap(model, lambda p: torch.optim.SGD(p, lr=0.05))
        for number, (x, y) in enumerate(share(batches, rank, size)):
            optimizer.zero_grad()
            step(model, x, y, rank=rank, number=number).backward()
            optimizer.step()
        return weights(model)

    assert_close(run_ranks(size, body, settings=SMALL), weights(alone), 1e-12)


@SIZES
def test_gradients_of_a_sparse_dimension_of_two(size):
    """torch.sparse.mm makes gradients whose every element has an index of its own."""

    class Masked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight, x):
            ctx.save_for_backward(x)
            return x @ weight

        @staticmethod
        def backward(ctx, out):
            (x,) = ctx.saved_tensors
            return (x.T @ out).to_sparse(2), None

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(5, 3, dtype=torch.float64))

        def forward(self, x):
            return Masked.apply(self.weight, x)

    assert_equals_one_process(size, model=Net(), make=lambda p: torch.optim.SGD(p, lr=0.05))


# --- closures -----------------------------------------------------------------------------------
@pytest.mark.parametrize("size", at_length([2, 3], [2]))
@pytest.mark.parametrize(
    ("make", "shard_state", "tolerance"),
    [
        (sgd, 0, 1e-12),
        (sgd, 1, 1e-12),
        (lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=4, history_size=3), 0, 1e-9),
    ],
)
def test_closures(size, make, shard_state, tolerance):
    def train(model, optimizer, batches):
        for x, y in batches:

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = mse_loss(model(x), y)
                loss.backward()
                return rc.allreduce(loss.detach(), rc.AVERAGE) if len(x) == BATCH else loss

            assert optimizer.step(closure) > 0

    assert_equals_one_process(size, train, make=make, shard_state=shard_state, tolerance=tolerance)


def in_parts(batches, rank, size):
    """Return this rank's part of each batch: 1 sample on the first rank, most on the last."""
    cuts = (1,) * (size - 1) + (len(batches[0][0]) - size + 1,)
    return [tuple(each.split(cuts)[rank] for each in batch) for batch in batches]


@pytest.mark.parametrize("split", [share, in_parts])
@pytest.mark.parametrize("size", [2, 3])
def test_a_line_search_goes_by_the_loss_of_all_ranks(size, split):
    def train(model, optimizer, batches):
        for x, y in batches:
            if split is in_parts and hasattr(optimizer, "set_samples"):
                optimizer.set_samples(len(x))

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = mse_loss(model(x), y)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())

    def search(p):
        return torch.optim.LBFGS(p, max_iter=5, history_size=3, line_search_fn="strong_wolfe")

    losses = []
    batches = data(3, size)
    assert_equals_one_process(
        size, train, make=search, batches=batches, split=split, tolerance=1e-8
    )
    alone = losses[:3]
    assert sorted(losses[3:]) == pytest.approx(sorted(alone * size), rel=1e-8)


def test_a_rank_whose_closure_runs_no_backward_takes_part():
    ((x, y),) = data(1, 1)

    def body(rank, model, optimizer, _):

        def closure():
            optimizer.zero_grad()
            if rank == 0:
                mse_loss(model(x), y).backward()
            return 0.0

        optimizer.step(closure)
        optimizer.step(closure)
        return weights(model)

    (alone,) = models(1)
    optimizer = sgd(alone.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        (mse_loss(alone(x), y) / 2).backward()
        optimizer.step()
    assert_close(on_replicas(2, body), weights(alone), 1e-12)
