"""Compares training with a parameter server, on 2 GPUs or one, with training on one process.

usage: mpirun -np 3 python -m gpu_suite.parameter_server [cpu]
"""

from __future__ import annotations

import itertools
import sys

import torch
from gpu_suite.outcome_lines import detail, figure
from gpu_suite.training import METHODS, data, distance, fit, model

import ringcomm.torch as hvd
from ringcomm.torch import ps

DTYPES = (torch.float64, torch.float32)


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    ps.init(servers=1)
    if device == "cuda":
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
        torch.backends.cuda.matmul.allow_tf32 = False
    worst = 0.0
    for (name, method), dtype in itertools.product(METHODS.items(), DTYPES):
        x, y = data(dtype, device)
        alone = model(dtype, device)
        fit(alone, method.make(list(alone.parameters())), x, y)
        ours = model(dtype, device, is_equal=hvd.rank() == 0)
        optimizer = ps.DistributedOptimizer(
            method.make(list(ours.parameters())),
            [(f"{name}, {dtype}, {each}", p) for each, p in ours.named_parameters()],
            mode="sync",
        )
        fit(ours, optimizer, *(part.chunk(hvd.size(), 1)[hvd.rank()] for part in (x, y)))
        gap, limit = distance(alone, ours), method.tolerance[dtype]
        worst = max(worst, gap / limit)
        if hvd.rank() == 0:
            detail(f"{name:<14} {str(dtype)[6:]:<8} largest difference {gap:.1e} of {limit:.0e}")
        assert gap <= limit, f"{name}, {dtype}: {gap} > {limit}"
    if hvd.rank() == 0:
        figure(f"on {device}, at most {worst:.2g} of the allowed difference")


if __name__ == "__main__":
    main()
