"""Multi-task learning: all ranks train the trunk of a model, the ranks of a task train its head.

    mpirun -np 4 python examples/multi_task.py

Half of the ranks learn a number, the others a class. So there are two optimizers: that of the trunk
averages gradients over all ranks, that of the head over the ranks of its task, a process set. One
backward() fills the gradients of both, and sends them while it runs.

Number and class follow from the same feature of the inputs. The classes tell so little of it that
their samples alone are too few to find it.
"""

import torch
from torch import nn

import ringcomm as rc
import ringcomm.torch as hvd

TASKS = "number", "class"
INPUTS, SAMPLES, STEPS, NOISE = 40, 200, 300, 0.3  # samples of a task, shared out to its ranks


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    if hvd.size() < len(TASKS):
        raise SystemExit(f"{len(TASKS)} tasks need {len(TASKS)} ranks or more, not {hvd.size()}")
    teams = [
        hvd.add_process_set(range(first, hvd.size(), len(TASKS)))  # every rank adds every set
        for first in range(len(TASKS))
    ]
    task, team = TASKS[hvd.rank() % len(TASKS)], teams[hvd.rank() % len(TASKS)]

    torch.manual_seed(1)  # all ranks begin with the same weights
    trunk = nn.Linear(INPUTS, 1)
    head = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    sgd = [torch.optim.SGD(part.parameters(), lr=0.05, momentum=0.9) for part in (trunk, head)]
    optimizers = [
        hvd.DistributedOptimizer(sgd[0], trunk.named_parameters()),
        hvd.DistributedOptimizer(sgd[1], head.named_parameters(), process_set=team),
    ]
    x, y = samples(task, SAMPLES // team.size(), seed=hvd.rank())
    for step in range(STEPS):
        loss = loss_of(task, head(trunk(x)), y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 100 == 99 and team.rank() == 0:
            print(f"step {step + 1}: {task}, loss {loss:.3f} on rank {hvd.rank()}", flush=True)

    x, y = samples(task, 10_000, seed=-1)
    with torch.no_grad():
        found = task, loss_of(task, head(trunk(x)), y).item(), bits(trunk), bits(head)
    tasks, losses, trunks, heads = zip(*rc.allgather_object(found), strict=True)
    loss = dict(zip(tasks, losses, strict=True))
    if hvd.rank() == 0:
        told = ", ".join(f"{name} {loss[name]:.3f}" for name in TASKS)
        print(f"{hvd.size()} ranks, loss on other samples: {told}", flush=True)
    assert len(set(trunks)) == 1, "the trunks of ranks differ"
    heads_by_task = set(zip(tasks, heads, strict=True))
    assert len(heads_by_task) == len(set(heads)) == len(TASKS), "heads are not one for each task"
    # It cannot be below 0.09 and 0.36. Without the other task, the loss of the classes is 1.0.
    assert loss["number"] < 0.2, loss
    assert loss["class"] < 0.7, loss


def loss_of(task: str, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if task == "number":
        return nn.functional.mse_loss(out, y)
    return nn.functional.binary_cross_entropy_with_logits(out, y)


def bits(model: nn.Module) -> bytes:
    return b"".join(p.detach().numpy().tobytes() for p in model.parameters())


def samples(task: str, n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs, of which one direction counts, and the numbers or classes that follow."""
    direction = torch.randn(INPUTS, 1, generator=torch.Generator().manual_seed(7))
    own = torch.Generator().manual_seed(100 + seed)
    x = torch.randn(n, INPUTS, generator=own)
    feature = x @ direction / direction.norm()
    if task == "number":
        return x, torch.sin(1.5 * feature) + NOISE * torch.randn(n, 1, generator=own)
    return x, torch.bernoulli(torch.sigmoid(3 * feature), generator=own)


if __name__ == "__main__":
    main()
