#!/usr/bin/env python3
"""What commit() costs with shard_state=1, where it sends a copy of each rank's part of the state.

usage: mpirun -np 4 .venv/bin/python ci/commit_cost_of_share_copies.py [--million 4] [--times 20]

Prints the time of a step, of a step and a commit, and the bytes that are kept, with shard_state=0
and 1 in turn: the fastest of all rounds, and the ratio of step and commit to step in each.
"""

import argparse
import time

import numpy as np
import torch

import ringcomm.torch as hvd

torch.set_num_threads(1)


class Kind:
    """A model and its state, sharded or not."""

    def __init__(self, shard_state, million):
        torch.manual_seed(0)
        side = int((million * 1e6 / 4) ** 0.5)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(side, side) for _ in range(4)))
        adam = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        named = self.model.named_parameters()
        self.optimizer = hvd.DistributedOptimizer(adam, named, shard_state=shard_state)
        self.state = hvd.elastic.TorchState(self.model, self.optimizer)
        self.x = torch.ones(4, side)
        self.times = {"step": [], "commit": []}

    def train(self):
        began = time.perf_counter()
        self.optimizer.zero_grad()
        self.model(self.x).pow(2).mean().backward()
        self.optimizer.step()
        stepped = time.perf_counter()
        self.state.commit()
        self.times["step"].append(stepped - began)
        self.times["commit"].append(time.perf_counter() - stepped)

    def kept(self):
        """Return the bytes that the state keeps on this rank."""
        trees = [self.state._copies[name]["state"] for name in ("model", "optimizer")]
        n = sum(each.numel() * each.itemsize for tree in trees for each in tensors(tree))
        copies = self.optimizer._copies._whole if hasattr(self.optimizer, "_copies") else None
        return n + (0 if copies is None else copies.own.nbytes + copies.before.nbytes)


def tensors(tree):
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for each in tree.values():
            yield from tensors(each)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--million", type=float, default=4, help="parameters")
    parser.add_argument("--times", type=int, default=20)
    args = parser.parse_args()
    hvd.init()
    kinds = {0: Kind(0, args.million), 1: Kind(1, args.million)}
    for _ in range(args.times):
        for each in kinds.values():
            each.train()
    for shard_state, each in kinds.items():
        step, commit = (min(each.times[what][2:]) for what in ("step", "commit"))
        both = np.add(each.times["step"], each.times["commit"])[2:]
        ratio = np.median(both / np.array(each.times["step"][2:]))
        if hvd.rank() == 0:
            print(
                f"shard_state={shard_state}: step {1e3 * step:.1f} ms, commit {1e3 * commit:.1f} "
                f"ms, step and commit / step {ratio:.2f}, kept {each.kept() / 1e6:.1f} MB"
            )
    hvd.shutdown()


if __name__ == "__main__":
    main()
