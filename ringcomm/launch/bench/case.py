"""What all engines do at one size. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ringcomm.launch.bench.bandwidth import COLLECTIVES, total_count


@dataclass(frozen=True)
class Case:
    """One collective on one size of buffer.

    Attributes:
        collective: a name of COLLECTIVES; root is rank 0.
        op: name of an rc.Op; "" where nothing is reduced.
        dtype: of the elements.
        count: elements of the whole buffer.
        size: ranks.
    """

    collective: str
    op: str
    dtype: np.dtype[Any]
    count: int
    size: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffer."""
        return self.count * self.dtype.itemsize

    @property
    def part(self) -> int:
        """Elements of a rank's part."""
        return self.count // self.size


def make_case(collective: str, op: str, dtype: np.dtype[Any], nbytes: int, size: int) -> Case:
    """Return the case of about `nbytes` for `size` ranks; op is dropped where it has no place."""
    which = COLLECTIVES[collective]
    count = total_count(which, nbytes, dtype.itemsize, size)
    return Case(collective, op if which.is_reduction else "", dtype, count, size)
