"""DDP with the optimizer's state spread over the ranks: ZeRO-1.

    mpirun -np 4 python examples/zero1.py

Every rank has all weights and gradients, and Adam's two moments for its share of the parameters.
The final weights are compared with those of one process and a plain AdamW.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import ringcomm.torch

GLOBAL_BATCH, STEPS = 24, 10


def main() -> None:
    ringcomm.torch.init_process_group()
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()

    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-2
    )
    train(model, optimizer, [batch.chunk(size)[rank] for batch in batches()])

    alone = network()
    train(alone, torch.optim.AdamW(alone.parameters(), lr=1e-2), batches())
    difference = distance(model.module, alone)
    held = sum(state["exp_avg"].numel() for state in optimizer.optim.state.values())
    whole = sum(p.numel() for p in alone.parameters())
    if rank == 0:
        print(
            f"rank 0 of {size} holds {held / whole:.0%} of the moments; weights differ from one "
            f"process by {difference:.1e}",
            flush=True,
        )
    assert difference <= 1e-10
    assert size == 1 or held < whole
    dist.destroy_process_group()


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 32), *(nn.Linear(32, 32) for _ in range(6)), nn.Linear(32, 4)]
    return nn.Sequential(*layers).double()


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return list(torch.randn(STEPS, GLOBAL_BATCH, 16, generator=generator, dtype=torch.float64))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, samples: list[torch.Tensor]) -> None:
    for x in samples:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()


def distance(model: nn.Module, other: nn.Module) -> float:
    """Return the largest difference of weights, relative to the largest weight of its tensor."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(((p - q).abs().max() / q.abs().max()).item() for p, q in pairs)


if __name__ == "__main__":
    main()
