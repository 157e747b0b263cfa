"""Compares training on N ranks with batches of b with training on one process with N * b.

usage: mpirun -np 4 python -m gpu_suite.training [cpu]
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

import ringcomm as rc
import ringcomm.torch as hvd

STEPS, BATCH, WIDTH, CLASSES = 50, 16, 64, 10
DTYPES = (torch.float64, torch.float32)
Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Method:
    """An optimizer, and how much the final weights may differ."""

    make: Optimizer
    # By dtype. Gradients that are summed in other orders differ by a few ulp, and Adam may divide
    # them by numbers as small.
    tolerance: dict[torch.dtype, float]


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01)


METHODS = {
    "SGD, momentum": Method(sgd, {torch.float64: 1e-12, torch.float32: 1e-5}),
    "AdamW": Method(adamw, {torch.float64: 1e-10, torch.float32: 1e-4}),
}


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    hvd.init()
    if device == "cuda":
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
        torch.backends.cuda.matmul.allow_tf32 = False
    worst = 0.0
    for name, dtype, shard_state in itertools.product(METHODS, DTYPES, (0, 1)):
        begin = time.monotonic()
        gap = compare(METHODS[name].make, dtype, device, shard_state)
        gap = float(rc.allreduce(torch.tensor([gap], dtype=torch.float64), rc.MAX)[0])
        limit = METHODS[name].tolerance[dtype]
        worst = max(worst, gap / limit)
        if hvd.rank() == 0:
            print(
                f"| {name:<14} {str(dtype)[6:]:<8} shard_state={shard_state}  largest difference "
                f"{gap:.1e}, allowed {limit:.0e}  {time.monotonic() - begin:.1f} s",
                flush=True,
            )
        assert gap <= limit, f"{name}, {dtype}, shard_state={shard_state}: {gap} > {limit}"
    if hvd.rank() == 0:
        print(f"figure: {STEPS} steps, at most {worst:.2g} of the allowed difference", flush=True)


def compare(make: Optimizer, dtype: torch.dtype, device: str, shard_state: int) -> float:
    """Return the largest difference between the weights of one process and of this job."""
    x, y = data(dtype, device)
    alone = model(dtype, device)
    fit(alone, make(list(alone.parameters())), x, y)
    ours = model(dtype, device, is_equal=hvd.rank() == 0)
    hvd.broadcast_parameters(ours.state_dict())
    optimizer = hvd.DistributedOptimizer(
        make(list(ours.parameters())), ours.named_parameters(), shard_state=shard_state
    )
    fit(ours, optimizer, *(part.chunk(hvd.size(), 1)[hvd.rank()] for part in (x, y)))
    assert distance(alone, model(dtype, device)) > 0.01, "the weights have hardly changed"
    return distance(alone, ours)


def distance(one: nn.Module, other: nn.Module) -> float:
    """Return the largest difference between two weights; NaN counts as infinity."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max().nan_to_num(math.inf)) for a, b in pairs)


def data(dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batches of all ranks, the same on each rank."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS, hvd.size() * BATCH, 20, generator=generator, dtype=torch.float64)
    y = torch.randint(0, CLASSES, x.shape[:2], generator=generator)
    return x.to(device, dtype), y.to(device)


def model(dtype: torch.dtype, device: str, *, is_equal: bool = True) -> nn.Module:
    torch.manual_seed(0 if is_equal else 1 + hvd.rank())  # broadcast_parameters() must matter
    layers: Sequence[nn.Module] = (
        nn.Linear(20, WIDTH),
        nn.Tanh(),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, WIDTH),
        nn.GELU(),
        nn.Linear(WIDTH, CLASSES),
    )
    return nn.Sequential(*layers).to(device, dtype)


def fit(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
) -> None:
    for inputs, labels in zip(x, y, strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
