"""ringcomm.data with torch: its DataLoader, and training on batches of unequal sizes."""

import itertools

import pytest
import torch
from harness import at_length, run_ranks
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from training_models import SMALL, assert_close, network, sgd, weights, wrap
from training_models import copies as copied

from ringcomm.data import Loader, ShardedSampler

SAMPLES = 29


def samples(n=SAMPLES):
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(n, k, generator=generator, dtype=torch.float64) for k in (5, 3))


def sampler(rank, size, **kwargs):
    return ShardedSampler(SAMPLES, rank=rank, size=size, **({"remainder": "uneven"} | kwargs))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("is_batched", [True, False])
def test_torchs_data_loader_sees_each_sample_once(workers, is_batched):
    data, seen, n_batches = TensorDataset(torch.arange(SAMPLES)), [], []
    for rank in range(3):
        mine = sampler(rank, 3)
        how = (
            {"batch_sampler": mine.batches(4)} if is_batched else {"sampler": mine, "batch_size": 4}
        )
        loader = DataLoader(data, num_workers=workers, **how)
        for epoch in range(2):
            assert mine.epoch == epoch
            batches = [batch.tolist() for (batch,) in loader]
            assert len(batches) == len(loader)
        seen += itertools.chain.from_iterable(batches)
        n_batches.append(len(batches))
    assert sorted(seen) == list(range(SAMPLES))
    assert n_batches == [3, 3, 3]


@pytest.mark.parametrize("drop_last", [True, False])
def test_data_loader_that_could_give_ranks_unequal_batches_is_refused_on_all(drop_last):
    data = TensorDataset(torch.arange(5))

    def body(rank):
        loaders = [
            DataLoader(data, 2, sampler=ShardedSampler(5, remainder=each), drop_last=drop_last)
            for each in ("uneven", "drop")
        ]
        with pytest.raises(ValueError, match=r"batch_sampler=sampler.batches\(2\)\), or pass"):
            next(iter(loaders[0]))
        assert len(list(ShardedSampler(5, remainder="uneven"))) == 3 - rank
        return len(list(loaders[1]))

    assert run_ranks(2, body) == [1, 1]


def train(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
    return weights(model)


def global_batches(size, batch_size, epochs):
    """Return the batches of all ranks put together, as one process would have them."""
    x, y = samples()
    ranks = [sampler(rank, size).batches(batch_size) for rank in range(size)]
    for _ in range(epochs):
        for parts in zip(*ranks, strict=True):
            rows = torch.tensor(list(itertools.chain.from_iterable(parts)))
            yield x[rows], y[rows]


@pytest.mark.parametrize("size", at_length([1, 2, 3, 4], [1, 3]))
@pytest.mark.parametrize("batch_size", [1, 3, 5])
@pytest.mark.parametrize("is_dataset", [True, False])
def test_training_with_a_loader_equals_one_process(size, batch_size, is_dataset):
    alone, *replicas = copied(network(), size + 1)
    expected = train(alone, sgd(alone.parameters()), global_batches(size, batch_size, 2))
    data = TensorDataset(*samples()) if is_dataset else samples()

    def body(rank):
        model = replicas[rank]
        optimizer = wrap(model)
        loader = Loader(data, batch_size, sampler=sampler(rank, size), optimizer=optimizer)
        for _ in range(2):
            train(model, optimizer, loader)
        return weights(model)

    assert_close(run_ranks(size, body, settings=SMALL), expected, 1e-12)


def test_without_the_optimizer_the_last_batches_would_count_wrongly():
    alone, *replicas = copied(network(), 3)
    expected = train(alone, sgd(alone.parameters()), global_batches(2, 5, 1))

    def body(rank):
        loader = Loader(samples(), 5, sampler=sampler(rank, 2))
        return train(replicas[rank], wrap(replicas[rank]), loader)

    results = run_ranks(2, body, settings=SMALL)
    with pytest.raises(AssertionError):
        assert_close(results, expected, 1e-12)


def test_a_batch_of_tensors_is_of_tensors():
    for data in (samples(), TensorDataset(*samples())):
        x, y = next(iter(Loader(data, 4, sampler=sampler(0, 1))))
        assert (x.shape, y.shape, x.dtype) == ((4, 5), (4, 3), torch.float64)


def test_samples_of_different_shapes_want_a_collate():
    ragged = [torch.zeros(1 + i) for i in range(SAMPLES)]
    with pytest.raises(ValueError, match=r"shapes .* pass collate="):
        next(iter(Loader(ragged, 4, sampler=sampler(0, 1))))
    batch = next(iter(Loader(ragged, 4, sampler=sampler(0, 1), collate=list)))
    assert len({len(x) for x in batch}) == 4
