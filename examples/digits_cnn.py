"""Train a small CNN on real handwritten digits, on any number of ranks.

    mpirun -np 2 python examples/digits_cnn.py
    mpirun -np 2 python examples/digits_cnn.py --data-dir mnist --epochs 3 --checkpoints runs/mnist

Two lines make it distributed: hvd.init(), and the DistributedOptimizer around the optimizer.
The rest is what any data-parallel script does: rc.data.Loader gives each rank its share of each
batch, rank 0 reports, and rc.log() is for `ringcomm top` and `ringcomm dashboard`. The data are
scikit-learn's digits: 1,797 real scans of 8 x 8 pixels, shipped with it; or MNIST's four IDX files,
plain or .gz, in the folder --data-dir. With --checkpoints a run that was ended goes on after its
last epoch, on any number of ranks.
"""

import argparse
import gzip
import importlib.util
import time
from pathlib import Path

import numpy as np
import torch
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
    train, test = mnist(args.data_dir) if args.data_dir else digits()

    model = cnn(pixels=train[0].shape[-1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    hvd.broadcast_parameters(model.state_dict())
    sampler = rc.data.ShardedSampler(len(train[1]), seed=args.seed, remainder="uneven")
    loader = rc.data.Loader(train, GLOBAL_BATCH // hvd.size(), sampler=sampler, optimizer=optimizer)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "sampler": loader}
    checkpoint = hvd.Checkpoint(args.checkpoints) if args.checkpoints else None
    if checkpoint is not None:
        checkpoint.restore(**parts)

    start = time.monotonic()
    accuracy = evaluate(model, test)
    for epoch in range(sampler.epoch, args.epochs):
        metrics = train_one_epoch(model, optimizer, loader)
        schedule.step()
        accuracy = evaluate(model, test)
        rc.log(step=epoch + 1, accuracy=accuracy)
        if checkpoint is not None:
            checkpoint.save(epoch + 1, **parts)
        if hvd.rank() == 0:
            print(
                f"epoch {epoch + 1:2}/{args.epochs}  loss {metrics['loss']:.4f}  "
                f"accuracy {accuracy:.2%}  {time.monotonic() - start:.1f} s",
                flush=True,
            )
    assert accuracy >= args.goal, f"accuracy {accuracy:.2%} is below {args.goal:.0%}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data-dir", help="folder of MNIST's IDX files")
    parser.add_argument("--checkpoints", help="folder to save each epoch in, and to go on from")
    parser.add_argument("--goal", type=float, default=GOAL, help="accuracy below which it fails")
    return parser.parse_args()


def digits():
    """Return (images, labels) to train with, and to test with: every fifth.

    From scikit-learn's file: to import it takes as long as some epochs, on each rank.
    """
    sklearn = importlib.util.find_spec("sklearn")
    if sklearn is None or sklearn.origin is None:
        raise ModuleNotFoundError("the digits are scikit-learn's: pip install scikit-learn")
    data = np.loadtxt(Path(sklearn.origin).parent / "datasets/data/digits.csv.gz", delimiter=",")
    images = torch.tensor(data[:, :-1] / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    labels = torch.tensor(data[:, -1], dtype=torch.long)
    is_test = torch.arange(len(labels)) % 5 == 0
    return (images[~is_test], labels[~is_test]), (images[is_test], labels[is_test])


def mnist(folder):
    """Return MNIST as digits() does, from its files, plain or .gz; every rank reads them."""

    def read(file, header_nbytes):
        path = Path(folder) / file
        packed = path.with_name(f"{file}.gz")
        content = path.read_bytes() if path.exists() else gzip.decompress(packed.read_bytes())
        return torch.frombuffer(bytearray(content[header_nbytes:]), dtype=torch.uint8)

    def tensors(part):
        images = read(f"{part}-images-idx3-ubyte", 16).view(-1, 1, 28, 28)
        return images.float() / 255, read(f"{part}-labels-idx1-ubyte", 8).long()

    return tensors("train"), tensors("t10k")


def cnn(pixels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(64 * (pixels // 2) ** 2, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def train_one_epoch(model, optimizer, loader) -> dict[str, float]:
    """Return the mean loss over all ranks' samples."""
    model.train()
    metrics = hvd.Metrics()
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        rc.log(loss=loss.detach())
        metrics.add(len(labels), loss=loss)
    return metrics.average()


def evaluate(model, data) -> float:
    """Return the accuracy over the test set, of which each rank looks at its share."""
    images, labels = data
    model.eval()
    with torch.no_grad():
        hits = model(images[hvd.rank() :: hvd.size()]).argmax(1) == labels[hvd.rank() :: hvd.size()]
    return float(rc.allreduce(hits.sum()) / len(labels))


if __name__ == "__main__":
    main()
