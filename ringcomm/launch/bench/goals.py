"""What the bench is to show (docs/benchmarks.md), as numbers. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_K, _M = 1 << 10, 1 << 20
# Allreduce in place, float32, sum: times faster than the fastest MPI, (registered, private).
_NODE: Final[dict[int, dict[int, tuple[float, float]]]] = {
    2: {
        64 * _K: (5, 1.2),
        1 * _M: (5, 1.4),
        4 * _M: (3, 1.3),
        16 * _M: (3, 1.4),
        64 * _M: (4.5, 2.2),
    },
    4: {
        64 * _K: (5, 1.5),
        1 * _M: (5, 1.8),
        4 * _M: (5, 2),
        16 * _M: (5, 2),
        64 * _M: (5, 2.5),
    },
}
_MEMORY_LIMIT_FROM: Final = {2: 4 * _M, 4: 16 * _M}
_OVERSUBSCRIBED: Final = (8, 16)


@dataclass(frozen=True)
class Goal:
    """What one line is to reach; None: nothing is asked.

    Attributes:
        speedup_mpi: at least so many times faster than the fastest MPI.
        speedup_gloo: the same of gloo.
        over_us: at most so many us slower than the fastest MPI.
        memcpy: at most so many times a simultaneous memcpy.
        wire: at least this share of the measured link.
        p99: at most so many times the median of single calls.
    """

    speedup_mpi: float | None = None
    speedup_gloo: float | None = None
    over_us: float | None = None
    memcpy: float | None = None
    wire: float | None = None
    p99: float | None = None


def goal(nbytes: int, *, size: int, hosts: int, is_registered: bool) -> Goal:
    """Return the goal of an allreduce in place of float32, by SUM."""
    if hosts == 1:
        return _in_the_node(nbytes, size, is_registered=is_registered)
    if hosts == 3 and size == 3 and nbytes == 8 * _M:
        return Goal(speedup_mpi=2, wire=0.8)
    if hosts == 3 and size == 6 and 4 * _M <= nbytes <= 16 * _M:
        return Goal(speedup_mpi=2, speedup_gloo=1.3)
    return Goal()


def _in_the_node(nbytes: int, size: int, *, is_registered: bool) -> Goal:
    if size in _OVERSUBSCRIBED:
        is_meant = is_registered and 64 * _K <= nbytes <= 16 * _M
        return Goal(speedup_mpi=1, speedup_gloo=1, p99=5) if is_meant else Goal()
    if size not in _NODE or nbytes > 64 * _M:
        return Goal()
    if nbytes == 1 * _K:
        return Goal(over_us=2)
    speedups = _NODE[size].get(nbytes)
    at_least = 1.0 if nbytes >= 64 * _K else None  # never slower, also between the sizes above
    is_limit = is_registered and nbytes >= _MEMORY_LIMIT_FROM[size]
    return Goal(
        speedup_mpi=at_least if speedups is None else speedups[not is_registered],
        memcpy=0.65 if is_limit else None,
    )
