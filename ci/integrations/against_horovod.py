"""Allreduce of torch tensors through Horovod's torch face, and through ours, in one job.

    mpirun -np 2 python ci/integrations/against_horovod.py

Both are called by the same code, with the same tensors, by turns: a block of calls of one, then one
of the other, and again. Rank 0 prints the time of the fastest call of a block, the median over all
blocks, and how many times as long Horovod takes. Horovod's thread looks for work every millisecond
all the while, which takes time from ours where ranks have no core to spare: "alone" is ours before
Horovod starts, in the same job.
"""

import statistics
import time

import horovod.torch as theirs
import torch

import ringcomm.torch as ours

SIZES = [1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26]  # bytes
BLOCKS, SECONDS_A_BLOCK = 11, 0.25
MOST_CALLS = 100


def block(library, x, n_calls):
    """Return seconds of the fastest and of the slowest call; all ranks begin together."""
    ours.barrier()
    times = []
    for _ in range(n_calls):
        start = time.perf_counter()
        library.allreduce_(x, op=library.Sum, name=f"{x.nbytes} bytes")
        times.append(time.perf_counter() - start)
    return min(times), max(times)


def compare(nbytes, libraries):
    """Return the seconds of a call of each library."""
    x = torch.zeros(nbytes // 4)
    for library in libraries:  # names are agreed on, memory is touched
        slowest = max(ours.allgather_object(block(library, x, 3)[1]))
    n_calls = max(3, min(MOST_CALLS, int(SECONDS_A_BLOCK / slowest)))
    times = {library: [] for library in libraries}
    for _ in range(BLOCKS):
        for library in libraries:
            times[library].append(block(library, x, n_calls)[0])
    return [statistics.median(found) for found in times.values()]


def require_right_sums(library):
    x = torch.full((5,), float(library.rank() + 1))
    library.allreduce_(x, op=library.Sum, name="sums")
    assert x.tolist() == [library.size() * (library.size() + 1) / 2] * 5


def main():
    torch.set_num_threads(1)
    ours.init()
    alone = [compare(nbytes, [ours])[0] for nbytes in SIZES]
    theirs.init()
    assert (theirs.rank(), theirs.size()) == (ours.rank(), ours.size())
    for library in (theirs, ours):
        require_right_sums(library)
    is_first = ours.rank() == 0
    if is_first:
        print(
            f"{ours.size()} ranks; us\n{'bytes':>9} {'Horovod':>9} {'ours':>9} {'alone':>9}  ratio"
        )
    for nbytes, apart in zip(SIZES, alone, strict=True):
        slow, fast = compare(nbytes, [theirs, ours])
        times = "".join(f" {each * 1e6:>9.1f}" for each in (slow, fast, apart))
        if is_first:
            print(f"{nbytes:>9}{times}  {slow / fast:.1f} ({slow / apart:.1f} alone)", flush=True)
    theirs.shutdown()
    ours.shutdown()


if __name__ == "__main__":
    main()
