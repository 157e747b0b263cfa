"""Feeding the ranks of a job: which samples are whose, and batches that are there in time.

    import ringcomm as rc
    sampler = rc.data.ShardedSampler(len(x), remainder="uneven")
    for images, labels in rc.data.Loader((x, y), 32, sampler=sampler, optimizer=optimizer):
        ...

Needs no torch; works with torch's DataLoader as well as without it.
"""

from ringcomm.data.idx import mnist, read_idx
from ringcomm.data.loader import Loader
from ringcomm.data.sampler import Batches, ShardedSampler

__all__ = ["Batches", "Loader", "ShardedSampler", "mnist", "read_idx"]
