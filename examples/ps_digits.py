"""Train a classifier of real handwritten digits whose parameters live on a server.

    mpirun -np 3 python examples/ps_digits.py                       two workers and one server
    RINGCOMM_PS_SERVERS=2 mpirun -np 4 python examples/ps_digits.py --mode async

Two lines make a plain training script one of the parameter server: ps.init(), and the
DistributedOptimizer around the optimizer. On a server ps.init() serves until the workers are done.
The data are scikit-learn's digits: 1,797 real scans of 8 x 8 pixels, shipped with it.
"""

import argparse
import importlib.util
from pathlib import Path

import numpy as np
import torch
from torch import nn

import ringcomm as rc
from ringcomm.torch import ps

MODES = {"sync": "sync", "async": "async", "ssp": ps.SSP(2), "first-of": ps.FirstOf(1)}
GLOBAL_BATCH, GOAL = 48, 0.95


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=MODES, default="sync")
    parser.add_argument("--epochs", type=int, default=12)
    args = parser.parse_args()

    ps.init()
    torch.set_num_threads(1)
    torch.manual_seed(rc.rank())  # whatever a worker begins with, the chief's values count
    train, test = digits()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
    optimizer = ps.DistributedOptimizer(optimizer, model.named_parameters(), mode=MODES[args.mode])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    sampler = rc.data.ShardedSampler(len(train[1]), seed=1, remainder="uneven")
    loader = rc.data.Loader(train, GLOBAL_BATCH // rc.size(), sampler=sampler, optimizer=optimizer)

    for epoch in range(args.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        schedule.step()
        if ps.is_chief():
            print(f"epoch {epoch + 1:2}/{args.epochs}  loss {loss.item():.4f}", flush=True)

    accuracy = (model(test[0]).argmax(1) == test[1]).double().mean().item()
    if ps.is_chief():
        print(f"{rc.size()} workers, mode {args.mode}: accuracy {accuracy:.2%}", flush=True)
    assert accuracy >= GOAL, f"accuracy {accuracy:.2%} is below {GOAL:.0%}"


def digits():
    """Return (images, labels) to train with, and to test with: every fifth.

    From scikit-learn's file: to import it takes as long as some epochs, on each rank.
    """
    sklearn = importlib.util.find_spec("sklearn")
    if sklearn is None or sklearn.origin is None:
        raise ModuleNotFoundError("the digits are scikit-learn's: pip install scikit-learn")
    data = np.loadtxt(Path(sklearn.origin).parent / "datasets/data/digits.csv.gz", delimiter=",")
    images = torch.tensor(data[:, :-1] / 16, dtype=torch.float32)
    labels = torch.tensor(data[:, -1], dtype=torch.long)
    is_test = torch.arange(len(labels)) % 5 == 0
    return (images[~is_test], labels[~is_test]), (images[is_test], labels[is_test])


if __name__ == "__main__":
    main()
