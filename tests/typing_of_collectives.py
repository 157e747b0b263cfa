"""What type checkers know of the forms of a collective; ci/test has mypy read it."""

from typing import assert_type

import numpy as np
from numpy.typing import NDArray

import ringcomm as rc

Vector = NDArray[np.float32]


def use(x: Vector, xs: list[Vector]) -> None:
    assert_type(rc.allreduce(x), Vector)
    assert_type(rc.allreduce_(x, rc.MAX, name="n"), Vector)
    assert_type(rc.allreduce_async(x), rc.Handle[Vector])
    assert_type(rc.allreduce_async_(x, deterministic=True).wait(), Vector)
    assert_type(rc.reduce(x, root=1), Vector | None)
    assert_type(rc.reduce_(x), Vector)
    assert_type(rc.gather_async(x), rc.Handle[Vector | None])
    assert_type(rc.grouped_allreduce(xs), list[Vector])
    rc.broadcast_(x, nmae="n")  # type: ignore[call-arg]
    rc.allgather_async(x, group=3)  # type: ignore[arg-type]
