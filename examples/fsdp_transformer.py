"""Train a small transformer with FSDP2 (this is ZeRO-3), save it, and go on with other shards.

    mpirun -np 4 python examples/fsdp_transformer.py

Each rank holds its share of every parameter, gradient and optimizer state. Halfway, every rank
writes its part of a checkpoint. A new model with other shards (replicas of sharded groups, if the
number of ranks allows it) reads it and goes on. The final weights are compared with those of one
process that never stopped.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import ringcomm.torch

TOKENS, WIDTH, LENGTH = 50, 32, 12
GLOBAL_BATCH, STEPS = 12, 6


def main() -> None:
    ringcomm.torch.init_process_group()
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = [batch.chunk(size)[rank] for batch in batches()]

    model, optimizer = new(init_device_mesh("cpu", (size,)))
    train(model, optimizer, mine[: STEPS // 2])
    with shared_folder() as folder:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)

        model, optimizer = new(other_mesh(size))
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    train(model, optimizer, mine[STEPS // 2 :])

    alone, plain = new(None)
    train(alone, plain, batches())
    difference = distance(model, alone)
    held = sum(p.to_local().numel() for p in model.parameters())
    whole = sum(p.numel() for p in alone.parameters())
    if rank == 0:
        print(
            f"{size} ranks hold {held / whole:.0%} of the parameters each; weights differ from one "
            f"process by {difference:.1e}",
            flush=True,
        )
    assert difference <= 1e-10
    dist.destroy_process_group()


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.flatten(0, 1))


def new(mesh: DeviceMesh | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model of the same weights each time, sharded over a mesh, and its optimizer."""
    torch.manual_seed(0)
    model = Transformer().double()
    if mesh is not None:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def other_mesh(size: int) -> DeviceMesh:
    """Return replicas of sharded groups, or shards alone where there are too few ranks for both."""
    if size % 2 or size < 4:
        return init_device_mesh("cpu", (size,))
    return init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return list(torch.randint(TOKENS, (STEPS, GLOBAL_BATCH, LENGTH + 1), generator=generator))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, samples: list[torch.Tensor]) -> None:
    for tokens in samples:
        optimizer.zero_grad()
        scores = model(tokens[:, :-1])
        nn.functional.cross_entropy(scores, tokens[:, 1:].flatten()).backward()
        optimizer.step()


@contextlib.contextmanager
def shared_folder() -> Iterator[str]:
    """Yield a folder that all ranks see and remove it; on several hosts use one they all mount."""
    name = [tempfile.mkdtemp(prefix="dcp") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(name)
    try:
        yield name[0]
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(name[0])


def distance(model: nn.Module, other: nn.Module) -> float:
    """Return the largest difference of weights, relative to the largest weight of its tensor."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(((p.full_tensor() - q).abs().max() / q.abs().max()).item() for p, q in pairs)


if __name__ == "__main__":
    main()
