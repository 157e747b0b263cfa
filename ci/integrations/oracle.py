"""Shared by the scripts of this folder: digits, a small network, and training without a framework.

The network trains in float64: N ranks with batches of b must end with the weights of one process
with batches of N * b, to 1e-12 of the largest weight of each tensor.
"""

import copy

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

BATCH, N_TRAIN, N_TEST = 8, 288, 96  # of each rank; numbers that 2, 3 and 4 ranks share evenly
RATE, MOMENTUM = 0.05, 0.9


def digits():
    """Return the first digits of scikit-learn's as two datasets: for training, and for tests."""
    data = load_digits()
    x, y = torch.from_numpy(data.data) / 16, torch.from_numpy(data.target)
    train, test = slice(N_TRAIN), slice(N_TRAIN, N_TRAIN + N_TEST)
    return TensorDataset(x[train], y[train]), TensorDataset(x[test], y[test])


def network():
    """Return a network, the same on every rank and in every run."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM)


def trained_alone(model, dataset, *, batch, epochs, make=sgd):
    """Return what one process makes of the model: samples in order, whole batches."""
    model = copy.deepcopy(model)
    optimizer = make(model.parameters())
    x, y = dataset.tensors
    for _ in range(epochs):
        for start in range(0, len(x), batch):
            optimizer.zero_grad()
            part = slice(start, start + batch)
            nn.functional.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()
    return model


def judged_alone(model, dataset):
    """Return loss and accuracy of the whole dataset, seen by one process."""
    x, y = dataset.tensors
    with torch.no_grad():
        scores = model(x)
    accuracy = (scores.argmax(1) == y).double().mean().item()
    return nn.functional.cross_entropy(scores, y).item(), accuracy


def require_same_weights(model, expected, tolerance=1e-12):
    """Raise unless each tensor of the model is that of the other one, and they are not trivial."""
    for (name, mine), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        off = (mine - theirs).abs().max().item() / theirs.abs().max().item()
        assert off <= tolerance, f"{name} is off by {off:.2g} of its largest value"


def require_ringcomm(size):
    """Raise unless torch.distributed's default group is ringcomm's, of so many ranks."""
    assert dist.get_backend() == "ringcomm", dist.get_backend()
    assert dist.get_world_size() == size, dist.get_world_size()
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x)
    assert x.item() == size * (size - 1) / 2
