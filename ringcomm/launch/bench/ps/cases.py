"""What is pushed and pulled: the same numbers for everybody. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

PUSH, PULL = "push", "pull"
OPS: Final = (PUSH, PULL)
_SEED = 7


@dataclass(frozen=True)
class Case:
    """A table of float32, and what one push or pull of it touches.

    Attributes:
        name: on the command line.
        title: in the table.
        shape: of what is pushed: (elements,), or (keys, columns) of rows.
        n_sets: sets of keys, without a key in common, that take turns; 1: the table is dense.
    """

    name: str
    title: str
    shape: tuple[int, ...]
    n_sets: int = 1

    @property
    def is_sparse(self) -> bool:
        """True if rows are named by keys."""
        return len(self.shape) == 2

    @property
    def n_rows(self) -> int:
        """Rows of the table; of a dense one: its elements."""
        return self.n_sets * self.shape[0]


CASES: Final = {
    case.name: case
    for case in (
        Case("1K", "1 KB", (256,)),
        Case("64K", "64 KB", (16 << 10,)),
        Case("4M", "4 MB", (1 << 20,)),
        Case("sparse", "10k x 64", (10_000, 64), n_sets=10),
    )
}


def gradient(case: Case) -> NDArray[np.float32]:
    """Return what every push sends: 1, 2, 3 ..., so that sums of millions of them are exact."""
    count = int(np.prod(case.shape))
    return (np.arange(count) % 3 + 1).astype(np.float32).reshape(case.shape)


def key_sets(case: Case) -> list[NDArray[np.uint64]]:
    """Return the sets of keys, each in random order, the same in every process; of rows alone."""
    if not case.is_sparse:
        return []
    keys = np.random.default_rng(_SEED).permutation(case.n_rows).astype(np.uint64)
    return np.split(keys, case.n_sets)


def count_wrong(case: Case, values: NDArray[Any], n_pushes: int) -> int:
    """Return how many elements are not what `n_pushes` pushes to a table of zeros add up to."""
    if values.shape != case.shape:
        return int(np.prod(case.shape))
    return int(np.count_nonzero(values != gradient(case) * np.float32(n_pushes)))
