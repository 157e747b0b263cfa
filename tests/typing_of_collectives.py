"""What type checkers know of the forms of a collective; ci/test has mypy read it."""

from typing import Any, assert_type

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
    assert_type(rc.allreduce(0.5), float)
    assert_type(rc.broadcast(np.int16(1)), np.int16)
    assert_type(rc.reduce(3), int | None)
    assert_type(rc.scan(x, rc.MAX), Vector)
    assert_type(rc.exscan_async(0.5, name="n"), rc.Handle[float])
    assert_type(rc.allgather(x), Vector)
    assert_type(rc.gather_async(np.float32(1)), rc.Handle[NDArray[Any] | None])
    assert_type(rc.grouped_allreduce(xs), list[Vector])
    assert_type(rc.split(None, key=3), rc.Group | None)
    assert_type(rc.isend(x, 1, tag=3), rc.Handle[None])
    assert_type(rc.irecv(x), rc.Handle[int])
    assert_type(rc.wait_all([rc.irecv(x), rc.irecv(x, 1)]), list[int])
    assert_type(rc.wait_all([rc.isend(x, 1), rc.irecv(x)]), list[int | None])
    assert_type(rc.gather_object(x), list[Any] | None)
    assert_type(rc.recv_object(1, tag=2), tuple[Any, int])
    assert_type(rc.PROC_NULL, int)
    rc.wait_all(rc.isend(x, 1))  # type: ignore[arg-type]
    grid = rc.Grid((2, None), periodic=[True, False])
    assert_type(grid.shift(0), tuple[int, int])
    assert_type(rc.allreduce(x, group=grid), Vector)
    rc.broadcast_(x, nmae="n")  # type: ignore[call-arg]
    rc.allgather_async(x, group=3)  # type: ignore[arg-type]
