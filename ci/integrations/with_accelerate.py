"""Accelerate over ringcomm: training, gathered metrics, a checkpoint and going on from it.

    mpirun -np 2 python ci/integrations/with_accelerate.py

Ranks print a line each if they equal one process; ci/matrix --frameworks runs it.
"""

import tempfile

import accelerate
import torch
from accelerate import Accelerator, DistributedType
from oracle import (
    BATCH,
    digits,
    judged_alone,
    network,
    require_ringcomm,
    require_same_weights,
    sgd,
    trained_alone,
)
from torch import nn
from torch.utils.data import DataLoader

import ringcomm.torch


def prepared():
    """Return an accelerator with a network, an optimizer and a loader that it has prepared."""
    accelerator = Accelerator(cpu=True)
    model = network()
    optimizer, loader = sgd(model.parameters()), DataLoader(digits()[0], BATCH)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def train_epoch(accelerator, model, optimizer, loader):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()


def accumulate(accelerator, model, optimizer, loader):
    """Train an epoch in which two batches make a step, without sums in between."""
    accelerator.gradient_accumulation_steps = 2
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()


def judged(accelerator, model):
    """Return loss and accuracy of the test set, of which each rank sees its share."""
    _, tests = digits()
    loader = accelerator.prepare(DataLoader(tests, 7))  # the last batches are padded
    scores, answers = [], []
    model.eval()
    for x, y in loader:
        with torch.no_grad():
            both = accelerator.gather_for_metrics((model(x), y))
        scores.append(both[0])
        answers.append(both[1])
    scores, y = torch.cat(scores), torch.cat(answers)
    assert len(y) == len(tests)
    accuracy = (scores.argmax(1) == y).double().mean().item()
    return nn.functional.cross_entropy(scores, y).item(), accuracy


def main():
    ringcomm.torch.init_process_group()  # it knows no backend of this name, and takes a group
    size = ringcomm.torch.size()
    folder = ringcomm.broadcast_object(tempfile.mkdtemp() if ringcomm.rank() == 0 else None)
    dataset, tests = digits()
    first, *parts = prepared()
    assert first.distributed_type == (DistributedType.MULTI_CPU if size > 1 else DistributedType.NO)
    assert (first.num_processes, first.process_index) == (size, ringcomm.torch.rank())
    # Not local_rank(): mpirun may number the ranks of a host in another order than by their ranks.
    assert sorted(ringcomm.allgather_object(first.local_process_index)) == list(range(size))
    require_ringcomm(size)
    train_epoch(first, *parts)
    first.save_state(folder)

    second, model, optimizer, loader = prepared()
    second.load_state(folder)
    train_epoch(second, model, optimizer, loader)
    expected = trained_alone(network(), dataset, batch=BATCH * size, epochs=2)
    require_same_weights(second.unwrap_model(model), expected)
    mine, alone = judged(second, model), judged_alone(expected, tests)
    assert all(abs(a - b) < 1e-12 for a, b in zip(mine, alone, strict=True)), (mine, alone)

    accumulate(second, model, optimizer, loader)
    require_same_on_all(second.unwrap_model(model))
    print(f"accelerate {accelerate.__version__}: equal", flush=True)


def require_same_on_all(model):
    weights = ringcomm.allgather_object([p.detach() for p in model.parameters()])
    for theirs in weights:
        assert all(torch.equal(a, b) for a, b in zip(theirs, weights[0], strict=True))


if __name__ == "__main__":
    main()
