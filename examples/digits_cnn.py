"""Train a small CNN on real handwritten digits, on any number of ranks.

    mpirun -np 2 python examples/digits_cnn.py

Two lines make it distributed: hvd.init(), and the DistributedOptimizer around the optimizer.
The rest is what any data-parallel script does: shard the data by rank, report on rank 0.
The data are scikit-learn's digits: 1,797 real scans of 8 x 8 pixels, shipped with it.
"""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import ringcomm as rc
import ringcomm.torch as hvd

GLOBAL_BATCH = 60
GOAL = 0.97


def main() -> None:
    args = arguments()
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    train, test = digits()

    model = cnn()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    hvd.broadcast_parameters(model.state_dict())

    start = time.monotonic()
    for epoch in range(args.epochs):
        loss = train_one_epoch(model, optimizer, train, epoch, args.seed)
        schedule.step()
        accuracy = evaluate(model, test)
        if hvd.rank() == 0:
            print(
                f"epoch {epoch + 1:2}/{args.epochs}  loss {loss:.4f}  accuracy {accuracy:.2%}  "
                f"{time.monotonic() - start:.1f} s",
                flush=True,
            )
    assert accuracy >= GOAL, f"accuracy {accuracy:.2%} is below {GOAL:.0%}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def digits() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    images, labels = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(
        images, labels, test_size=0.2, random_state=0, stratify=labels
    )

    def tensors(x, y):
        return torch.tensor(x / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(y)

    return tensors(x_train, y_train), tensors(x_test, y_test)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def train_one_epoch(model, optimizer, data, epoch, seed) -> float:
    """Return the mean loss over all ranks. All ranks draw one order; each takes its share of it."""
    images, labels = data
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed + epoch))
    batch = GLOBAL_BATCH // hvd.size()
    steps = len(order) // (batch * hvd.size())
    mine = order[: steps * batch * hvd.size()].view(steps, hvd.size(), batch)[:, hvd.rank()]
    model.train()
    total = torch.zeros(())
    for indices in mine:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[indices]), labels[indices])
        loss.backward()
        optimizer.step()
        total += loss.detach()
    return float(rc.allreduce(total / steps, rc.AVERAGE))


def evaluate(model, data) -> float:
    """Return the accuracy over the test set, of which each rank looks at its share."""
    images, labels = data
    model.eval()
    with torch.no_grad():
        hits = model(images[hvd.rank() :: hvd.size()]).argmax(1) == labels[hvd.rank() :: hvd.size()]
    return float(rc.allreduce(hits.sum()) / len(labels))


if __name__ == "__main__":
    main()
