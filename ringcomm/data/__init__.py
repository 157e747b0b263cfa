"""Deals out samples to the ranks of a job, and loads batches ahead of time.

    import ringcomm as rc
    sampler = rc.data.ShardedSampler(len(x), remainder="uneven")
    for images, labels in rc.data.Loader((x, y), 32, sampler=sampler, optimizer=optimizer):
        ...

Needs no torch. A ShardedSampler works with torch's DataLoader, too.
"""

from ringcomm.data.loader import Loader
from ringcomm.data.sampler import Batches, ShardedSampler
from ringcomm.data.work_queue import WorkQueue

__all__ = ["Batches", "Loader", "ShardedSampler", "WorkQueue"]
