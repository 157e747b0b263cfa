"""The pushes and pulls of ci/bench ps, the same of every library; a client times its own."""

import time
from dataclasses import dataclass

import numpy as np

PUSH, PULL = OPS = ("push", "pull")


@dataclass(frozen=True)
class Case:
    """A table of float32, and what one push or pull of it touches.

    shape: of what is pushed: (elements,), or (keys, columns) of rows.
    n_sets: sets of keys, without a key in common, that take turns; 1: the table is dense.
    """

    name: str
    title: str
    shape: tuple
    n_sets: int = 1

    @property
    def is_sparse(self):
        return len(self.shape) == 2

    @property
    def n_rows(self):
        return self.n_sets * self.shape[0]


CASES = {
    case.name: case
    for case in (
        Case("1K", "1 KB", (256,)),
        Case("64K", "64 KB", (16 << 10,)),
        Case("4M", "4 MB", (1 << 20,)),
        Case("sparse", "10k x 64", (10_000, 64), n_sets=10),
    )
}


def gradient(case):
    """Return what every push sends: 1, 2, 3 ..., so that sums of millions of them are exact."""
    n = int(np.prod(case.shape))
    return (np.arange(n) % 3 + 1).astype(np.float32).reshape(case.shape)


def key_sets(case):
    """Return the sets of keys, each in random order, the same in every process; of rows alone."""
    if not case.is_sparse:
        return []
    keys = np.random.default_rng(7).permutation(case.n_rows).astype(np.uint64)
    return np.split(keys, case.n_sets)


class Work:
    """The part of a case that one client does.

    store.bind(case, gradient, key sets) returns push and pull of a new table of zeros: each does
    one operation with a set of keys, by number, and a pull returns the values.
    """

    def __init__(self, store, case):
        self.case = case
        self.calls = dict(zip(OPS, store.bind(case, gradient(case), key_sets(case)), strict=True))
        self.n_pushes = [0] * case.n_sets  # by this client, to each set of keys

    def run(self, op, n):
        """Do an operation n times, one by one; return their times and the process's CPU time."""
        call, clock, n_sets = self.calls[op], time.perf_counter, self.case.n_sets
        cpu_s = time.process_time()
        stamps = [clock()]
        for number in range(n):
            call(number % n_sets)
            stamps.append(clock())
        cpu_s = time.process_time() - cpu_s
        for number in range(n if op == PUSH else 0):
            self.n_pushes[number % n_sets] += 1
        return np.diff(stamps).tolist(), cpu_s

    def count_wrong(self, n_pushes):
        """Return how many elements are not the sum of all clients' pushes to each set of keys."""
        pulled = [np.array(self.calls[PULL](number)) for number in range(len(n_pushes))]
        right = gradient(self.case)
        return sum(
            int(np.count_nonzero(x != right * np.float32(n))) if x.shape == right.shape else x.size
            for x, n in zip(pulled, n_pushes, strict=True)
        )


def cpu_s_of(pid):
    """Return the CPU time of a process of this host: all its threads, in user space and kernel.

    Its clock has the number that clock_getcpuclockid(3) makes of the pid on Linux.
    """
    return time.clock_gettime_ns(~pid << 3 | 2) / 1e9
