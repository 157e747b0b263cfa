"""ringcomm's parameter server, and the yardstick."""

from __future__ import annotations

import contextlib

import numpy as np
from numpy.typing import NDArray

from ringcomm import ps
from ringcomm.launch.bench.ps.cases import Case
from ringcomm.launch.bench.ps.work import Call, Turn, Work, cpu_s_of


class RingcommStore:
    """Tables of ringcomm.ps; after ps.init()."""

    def bind(
        self, case: Case, x: NDArray[np.float32], keys: list[NDArray[np.uint64]]
    ) -> tuple[Call, Call]:
        """Return push and pull of a new table."""
        name, updater = f"bench {case.name}", ps.optim.Add()
        if case.is_sparse:
            rows = ps.hashtable(name, case.shape[1], updater=updater)
            return (
                lambda number: rows.push(keys[number], x).wait(),
                lambda number: rows.pull(keys[number]).wait(),
            )
        table, out = ps.table(name, case.shape, updater=updater), np.zeros_like(x)
        return lambda _: table.push(x).wait(), lambda _: table.pull(out=out).wait()


class Ours:
    """The worker that this process is.

    Args:
        server_pid: of the server, on this host.
    """

    name = "ringcomm"

    def __init__(self, server_pid: int) -> None:
        self._server_pid = server_pid
        self._work: Work | None = None

    def awake(self) -> contextlib.AbstractContextManager[None]:
        """It always is; it takes nothing while it waits."""
        return contextlib.nullcontext()

    def prepare(self, case: Case) -> None:
        """Make a table of zeros. Collective."""
        self._work = Work(RingcommStore(), case)

    def run(self, op: str, n: int) -> Turn:
        """Do an operation n times."""
        assert self._work is not None
        return self._work.run(op, n)

    def n_pushes(self) -> list[int]:
        """Return how often this worker has pushed to each set of keys."""
        assert self._work is not None
        return self._work.n_pushes

    def count_wrong(self, n_pushes: list[int]) -> int:
        """Return how many elements are not the sum of all workers' pushes."""
        assert self._work is not None
        return self._work.count_wrong(n_pushes)

    def server_cpu_s(self) -> float:
        """Return the CPU time of the server so far."""
        return cpu_s_of(self._server_pid)

    def close(self) -> None:
        """Leave the server to rc.shutdown()."""


class Memcpy:
    """The yardstick: every worker copies as many bytes, in memory of its own."""

    name = "memcpy"

    def __init__(self) -> None:
        self._work: Work | None = None

    def awake(self) -> contextlib.AbstractContextManager[None]:
        """It always is."""
        return contextlib.nullcontext()

    def prepare(self, case: Case) -> None:
        """Take memory."""
        self._work = Work(_Copies(), case)

    def run(self, op: str, n: int) -> Turn:
        """Copy n times."""
        assert self._work is not None
        return self._work.run(op, n)

    def n_pushes(self) -> list[int]:
        """Return nothing: it has no table."""
        return []

    def count_wrong(self, n_pushes: list[int]) -> int:
        """Return 0: numpy copies right."""
        return 0

    def server_cpu_s(self) -> float:
        """Return 0: there is no server."""
        return 0.0

    def close(self) -> None:
        """Nothing to do."""


class _Copies:
    def bind(
        self, case: Case, x: NDArray[np.float32], keys: list[NDArray[np.uint64]]
    ) -> tuple[Call, Call]:
        out = np.zeros_like(x)
        return lambda _: np.copyto(out, x), lambda _: np.copyto(out, x)
