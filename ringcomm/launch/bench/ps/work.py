"""One client's pushes and pulls, timed one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ringcomm.launch.bench.ps.cases import OPS, PULL, PUSH, Case, count_wrong, gradient, key_sets

# Does one operation with a set of keys, by number, and returns when it is over; pulls: the values.
Call = Callable[[int], Any]


class Store(Protocol):
    """A parameter server, as a client sees it."""

    def bind(
        self, case: Case, x: NDArray[np.float32], keys: list[NDArray[np.uint64]]
    ) -> tuple[Call, Call]:
        """Return push and pull of a table of zeros that is new on the server. Collective.

        Args:
            case: what it is.
            x: what each push sends.
            keys: the sets of keys.
        """


class Turn(NamedTuple):
    """What some calls, back to back, took one client.

    Attributes:
        times_s: of each call.
        cpu_s: of the client's process, all its threads, for all calls together.
    """

    times_s: list[float]
    cpu_s: float


class Work:
    """What one client does of a case."""

    def __init__(self, store: Store, case: Case) -> None:
        self._case = case
        self._calls = dict(zip(OPS, store.bind(case, gradient(case), key_sets(case)), strict=True))
        self.n_pushes = [0] * case.n_sets  # by this client, to each set of keys

    def run(self, op: str, n: int) -> Turn:
        """Do an operation n times, each when the one before is over."""
        call, clock, n_sets = self._calls[op], time.perf_counter, self._case.n_sets
        cpu_s = time.process_time()
        stamps = [clock()]
        for number in range(n):
            call(number % n_sets)
            stamps.append(clock())
        cpu_s = time.process_time() - cpu_s
        if op == PUSH:
            for number in range(n):
                self.n_pushes[number % n_sets] += 1
        return Turn(np.diff(stamps).tolist(), cpu_s)

    def count_wrong(self, n_pushes: list[int]) -> int:
        """Return how many elements are not the sum of all clients' pushes, by set of keys."""
        pull = self._calls[PULL]
        return sum(
            count_wrong(self._case, np.asarray(pull(number)), n)
            for number, n in enumerate(n_pushes)
        )


def cpu_s_of(pid: int) -> float:
    """Return the CPU time of a process of this host: all its threads, in user space and kernel.

    Its clock has the number that clock_getcpuclockid(3) makes of the pid on Linux.
    """
    return time.clock_gettime_ns(~pid << 3 | 2) / 1e9
