"""The cost of an all_reduce of torch.distributed in Python: a call, without the communication."""

import functools
import statistics

import torch
from bench.mpi_and_torch import start_torch

import ringcomm as rc
from ringcomm.launch.bench.runner import take_turns


class NoOperation:
    """Stands for the engine: the way to it is left."""

    def run(self, *_, **named):
        return None


def main(argv):
    found = costs_us()
    if rc.rank() == 0:
        print(*(f"{name}: {us:.1f} us" for name, us in found.items()), sep="\n", flush=True)
    rc.shutdown()
    return 0


def costs_us():
    """Return the median of the slowest rank's means, over ringcomm and over gloo."""
    dist, x = start_torch(), torch.zeros(16)
    ours = dist.new_group()
    ours.group.short_calls = NoOperation()
    alone = [dist.new_group([r], backend="gloo") for r in range(rc.size())][rc.rank()]
    groups = {"ringcomm": ours, "gloo, one rank": alone}
    calls = [functools.partial(dist.all_reduce, x, group=group) for group in groups.values()]
    times_s = take_turns(calls, 1.0)
    means_us = [statistics.median(each.mean(axis=2).max(axis=0)) * 1e6 for each in times_s]
    return dict(zip(groups, means_us, strict=True))
