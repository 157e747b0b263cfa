"""Checks init_process_group("ringcomm") with tensors on GPUs: c10d, DDP, and a captured graph.

usage: mpirun -np 2 python -m gpu_suite.process_group [cpu]
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist
from gpu_suite.outcome_lines import detail, figure
from gpu_suite.training import METHODS, data, distance, fit, model
from torch.nn.parallel import DistributedDataParallel

import ringcomm.torch as hvd

COUNT = 1 << 18


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    dist.init_process_group("ringcomm")
    if device == "cuda":
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
        torch.backends.cuda.matmul.allow_tf32 = False
    checks: list[Callable[[str], None]] = [collectives, futures, train]
    checks += [on_another_stream, beside_a_capture] if device == "cuda" else []
    for check in checks:
        check(device)
        if dist.get_rank() == 0:
            detail(f"{check.__name__.replace('_', ' ')}: ok")
    if dist.get_rank() == 0:
        figure(f"{len(checks)} checks of c10d on {device}")
    dist.destroy_process_group()


def collectives(device: str) -> None:
    """Each result is read at once, on the stream that called."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = mine(device)
    dist.all_reduce(x)
    require(x, total(device))
    x = mine(device)
    dist.broadcast(x, 1)
    require(x, of(1, device))
    whole = torch.empty(size * COUNT, device=device)
    dist.all_gather_into_tensor(whole, mine(device))
    require(whole, torch.cat([of(r, device) for r in range(size)]))
    part = torch.empty(COUNT // size, device=device)
    dist.reduce_scatter_tensor(part, mine(device))
    require(part, total(device).chunk(size)[rank])
    swapped = torch.empty(COUNT, device=device)
    dist.all_to_all_single(swapped, mine(device))
    require(swapped, torch.cat([of(r, device).chunk(size)[rank] for r in range(size)]))


def futures(device: str) -> None:
    """What follows a Future reads the result."""
    doubled = dist.all_reduce(mine(device), async_op=True).get_future()
    require(doubled.then(lambda done: done.value()[0] * 2).wait(), 2 * total(device))


def train(device: str) -> None:
    """DDP gives the weights of one process."""
    method, dtype = METHODS["SGD, momentum"], torch.float64
    x, y = data(dtype, device)
    alone = model(dtype, device)
    fit(alone, method.make(list(alone.parameters())), x, y)
    ours = DistributedDataParallel(model(dtype, device))
    rank, size = dist.get_rank(), dist.get_world_size()
    optimizer = method.make(list(ours.parameters()))
    fit(ours, optimizer, *(each.chunk(size, 1)[rank] for each in (x, y)))
    gap = distance(alone, ours.module)
    assert gap <= method.tolerance[dtype], f"the weights differ by {gap}"


def on_another_stream(device: str) -> None:
    """wait() makes the stream wait that is current then."""
    first, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        x = mine(device)
        work = dist.all_reduce(x, async_op=True)
    with torch.cuda.stream(other):
        work.wait()
        y = x * 1
    other.synchronize()
    require(y, total(device))


def beside_a_capture(device: str) -> None:
    """An operation of another thread leaves a graph whole that this thread captures meanwhile."""
    x, z = mine(device), mine(device)
    dist.all_reduce(z.clone())  # what it needs is allocated and loaded
    torch.cuda.synchronize()
    works: list[dist.Work] = []

    def reduce() -> None:
        torch.cuda.set_device(x.device)
        works.append(dist.all_reduce(z, async_op=True))

    graph, thread = torch.cuda.CUDAGraph(), threading.Thread(target=reduce)
    with torch.cuda.graph(graph):
        thread.start()
        y = x * 2
        thread.join()
    works[0].wait()
    graph.replay()
    require(y, 2 * of(dist.get_rank(), device))
    require(z, total(device))


def of(rank: int, device: str) -> torch.Tensor:
    """Return what a rank has: whole numbers, whose sums are exact."""
    return (torch.arange(COUNT, device=device) * 7 + rank * 61) % 8191 * 1.0


def mine(device: str) -> torch.Tensor:
    return of(dist.get_rank(), device)


def total(device: str) -> torch.Tensor:
    return torch.stack([of(r, device) for r in range(dist.get_world_size())]).sum(0)


def require(found: torch.Tensor, expected: torch.Tensor) -> None:
    wrong = int((found != expected).sum())
    assert wrong == 0, f"rank {dist.get_rank()}: {wrong} of {found.numel()} elements are wrong"


if __name__ == "__main__":
    main()
