"""Ranks take work from a queue, part by part, so that fast ranks take more.

    mpirun -np 4 python examples/work_queue.py

Rank 0 keeps the queue. Beside parameter servers a server does, and any other rank may die.
"""

import time

import numpy as np

import ringcomm as rc


def main():
    rc.init()
    queue = rc.data.WorkQueue(2_000, 50, seed=1)
    total, n_parts = np.zeros(1), 0
    for _ in range(2):  # epochs
        for indices in queue:
            total += indices.sum()
            n_parts += 1
            time.sleep(0.001 * (1 + rc.rank()))  # some ranks are slower
    total = rc.allreduce(total)
    assert total == 2 * sum(range(2_000)), total
    parts = rc.allgather_object(n_parts)
    assert sum(parts) == 2 * 40, parts
    if rc.rank() == 0:
        print(f"each sample was seen twice; parts by rank: {parts}")


if __name__ == "__main__":
    main()
