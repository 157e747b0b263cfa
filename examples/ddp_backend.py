"""A plain DistributedDataParallel script on MPI ranks: one line differs.

    mpirun -np 2 python examples/ddp_backend.py

The line is init_process_group("ringcomm"). Rank and size come from mpirun, so there is no torchrun,
no MASTER_ADDR and no port. At the end the weights are compared with those of one process that
trained on all batches.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringcomm.torch  # makes the backend known

GLOBAL_BATCH, STEPS = 24, 20  # the batch is the same on any number of ranks


def main() -> None:
    dist.init_process_group("ringcomm")  # was: "gloo"
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()

    model = DistributedDataParallel(network())
    model.register_comm_hook(None, ringcomm.torch.node_hook)  # optional: through shared memory
    train(model, [batch.chunk(size)[rank] for batch in batches()])

    alone = network()
    train(alone, batches())
    difference = distance(model.module, alone)
    if rank == 0:
        print(f"{size} ranks: weights differ from one process by {difference:.1e}", flush=True)
    assert difference <= 1e-12
    dist.destroy_process_group()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)).double()


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return list(torch.randn(STEPS, GLOBAL_BATCH, 16, generator=generator, dtype=torch.float64))


def train(model: nn.Module, samples: list[torch.Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
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
