"""One model over many ranks: stages of a pipeline, each of them split by tensor parallelism.

    mpirun -np 4 python examples/pipeline_tp.py

Ranks form a mesh of pipeline stages x tensor-parallel ranks: 2 x 2 of 4, n x 1 of an odd number.
The gradients of each stage are compared with those of one process that has the whole model.
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import ringcomm.torch

WIDTH, BATCH, PIECES, STEPS = 8, 16, 8, 3


def main() -> None:
    ringcomm.torch.init_process_group()
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    n_split = 2 if size % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (size // n_split, n_split), mesh_dim_names=("stage", "split"))
    n_stages, index = mesh["stage"].size(), mesh["stage"].get_local_rank()

    stages = network(n_stages)
    alone = copy.deepcopy(stages)
    own = stages[index]
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(own, mesh["split"], plan)
    group = mesh["stage"].get_group()
    stage = PipelineStage(own, index, n_stages, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, n_microbatches=PIECES, loss_fn=loss)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    for x, y in samples():
        optimizer.zero_grad()
        inputs = [x] if index == 0 else []
        targets = {"target": y, "losses": []} if index == n_stages - 1 else {}
        schedule.step(*inputs, **targets)
        optimizer.step()

    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for x, y in samples():
        plain.zero_grad()
        for piece, target in zip(x.chunk(PIECES), y.chunk(PIECES), strict=True):
            (loss(alone(piece), target) / PIECES).backward()
        plain.step()
    difference = distance(own, alone[index])
    print(
        f"rank {rank}: stage {index} of {n_stages}, split {n_split} times; weights differ from one "
        f"process by {difference:.1e}",
        flush=True,
    )
    assert difference <= 1e-12
    dist.destroy_process_group()


def network(n_stages: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(n_stages)
        )
    ).double()


def samples() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(STEPS, 2, BATCH, WIDTH, generator=generator, dtype=torch.float64)
    return [(x, y) for x, y in values]


def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(out, target)


def distance(model: nn.Module, other: nn.Module) -> float:
    """Return the largest difference of weights, relative to the largest weight of its tensor."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    full = [(p.full_tensor() if isinstance(p, DTensor) else p, q) for p, q in pairs]
    return max(((p - q).abs().max() / q.abs().max()).item() for p, q in full)


if __name__ == "__main__":
    main()
