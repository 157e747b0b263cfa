"""A training step by the parameter server and by the ring, for `ringcomm bench ps --step`."""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from torch import nn

from ringcomm.engine.api.collectives import allgather_object
from ringcomm.engine.api.world import rank
from ringcomm.torch import ps
from ringcomm.torch.bench import TOLERANCE, Variant, seeded, sgd, times_s
from ringcomm.torch.models import WORKLOADS
from ringcomm.torch.optimizer import DistributedOptimizer

_SERVER, _RING = "server", "ring"
_WARMUP = 5
_EPSILON = torch.finfo(torch.float32).eps


def measure_step(steps: int) -> dict[str, Any]:
    """Return how long a step takes, of copies of one model that take turns. Collective.

    After ps.init(), over the workers; each has torch work on one thread.

    Returns:
        "ps_ms", "ring_ms": medians of the slowest worker's step; "ratio": median over rounds of
        one / the other; "parameters"; "is_equal": weights are the same after one step.
    """
    torch.set_num_threads(1)
    workload = WORKLOADS["mlp"]
    torch.manual_seed(1 + rank())
    batch = workload.batch(workload.samples)
    served, ringed = seeded(workload), seeded(workload)
    of_server = ps.DistributedOptimizer(sgd(served), served.named_parameters(), mode="sync")
    of_ring = DistributedOptimizer(sgd(ringed), ringed.named_parameters())
    variants = [Variant(_SERVER, served, of_server), Variant(_RING, ringed, of_ring)]
    for variant in variants:
        variant.step(workload.loss, batch)
    is_equal = all(allgather_object(_are_equal(served, ringed)))
    effort = argparse.Namespace(warmup=min(_WARMUP, steps), steps=steps)
    times = times_s(variants, workload, batch, effort)
    rounds = zip(times[_SERVER], times[_RING], strict=True)
    return {
        "parameters": sum(p.numel() for p in served.parameters()),
        "ps_ms": statistics.median(times[_SERVER]) * 1e3,
        "ring_ms": statistics.median(times[_RING]) * 1e3,
        "ratio": statistics.median(a / b for a, b in rounds),
        "is_equal": is_equal,
    }


def _are_equal(served: nn.Module, ringed: nn.Module) -> bool:
    """Return True if weights differ by rounding alone: their own, and that of a step."""
    step = 0.0  # the largest
    for p in ringed.parameters():
        assert p.grad is not None
        step = max(step, p.grad.abs().max().item())
    lr = sgd(ringed).defaults["lr"]
    pairs = zip(served.parameters(), ringed.parameters(), strict=True)
    return all(
        torch.allclose(p, q, rtol=2 * _EPSILON, atol=TOLERANCE * lr * step) for p, q in pairs
    )
