"""Compares collectives of ranks on one GPU with the CPU's kernels and numpy, bit by bit.

usage: mpirun -np N python -m gpu_suite.collectives TRANSPORT [small]
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import ml_dtypes
import numpy as np
from cupy.cuda import nccl
from gpu_suite.gpu_helpers import LIBRARIES, SHARES_FROM, Arrays, start, until
from gpu_suite.outcome_lines import detail, figure, skip
from gpu_suite.outcome_table import Matrix
from random_programs import make_program, run_program

import ringcomm as rc
from ringcomm import _core
from ringcomm.arrays import DTYPES
from ringcomm.nvidia.judge_software import version_text

TYPES = (np.float32, np.float16, ml_dtypes.bfloat16, np.int32, np.int64)
FLOAT_OPS = (rc.SUM, rc.AVERAGE, rc.MIN, rc.MAX, rc.PRODUCT)
OPS = {t: FLOAT_OPS if t in TYPES[:3] else (*FLOAT_OPS, rc.BAND, rc.BOR, rc.BXOR) for t in TYPES}
MIB = 1 << 20
PERIOD = 1_000_003  # a prime, so that elements in a wrong place have wrong values
PROGRAMS_S = 10


@dataclass(frozen=True)
class Case:
    """One allreduce."""

    library: Arrays
    dtype: type
    op: rc.Op
    count: int
    in_place: bool


def main() -> None:
    transport = sys.argv[1]
    is_small = sys.argv[2:] == ["small"]
    require_nccl(transport)
    start()
    matrix = Matrix()
    try:
        for case in small_cases() if is_small else cases(rc.size()):
            # By default, NCCL adds in an order of its own.
            error = check(case, deterministic=transport == "nccl")
            matrix.add(np.dtype(case.dtype).name, case.op.name, error)
        explained = str(rc.explain(4, device="cuda"))
        print(explained, flush=True)
        assert explained.startswith(f"arrays on GPUs: {transport}"), explained
        n_programs = 0 if is_small else run_programs(time.monotonic() + PROGRAMS_S)
    finally:  # an error of ringcomm or CUDA ends this stage: the ranks are not in step any more
        if rc.rank() == 0 or matrix.n_wrong:
            for line in matrix.lines():
                detail(f"rank {rc.rank()}  {line}")
    assert not matrix.n_wrong, f"{matrix.n_wrong} of {matrix.n_cases} allreduces gave wrong bits"
    if rc.rank() == 0:
        figure(f"{matrix.n_cases} allreduces, {n_programs} random programs: the same bits")


def require_nccl(transport: str) -> None:
    """Skip this stage if it needs NCCL, and this NCCL cannot run it."""
    if transport != "nccl":
        return
    if not nccl.available:
        skip("cupy finds no NCCL")
    version = nccl.get_version()
    if int(os.environ["OMPI_COMM_WORLD_SIZE"]) > 1 and version < SHARES_FROM:
        newer = version_text(SHARES_FROM)
        skip(f"this is NCCL {version_text(version)}, and ranks can share a GPU from {newer} on")


def small_cases() -> Iterator[Case]:
    """Yield one small allreduce of each kind of array, dtype and operator."""
    for dtype in TYPES:
        for op, library in itertools.product(OPS[dtype], LIBRARIES):
            yield Case(library, dtype, op, 1000, in_place=True)


def cases(size: int) -> Iterator[Case]:
    """Yield every kind of small allreduce, and some large ones of each dtype."""
    forms = list(itertools.product(LIBRARIES, (True, False)))
    for dtype in TYPES:
        for op, count in itertools.product(OPS[dtype], (0, 1, size - 1, size, 1000, 65_537)):
            for library, in_place in forms:
                yield Case(library, dtype, op, count, in_place)
    turns = itertools.cycle(forms)
    for dtype, nbytes in itertools.product(TYPES, (4 * MIB, 16 * MIB, 64 * MIB)):
        count = nbytes // np.dtype(dtype).itemsize + 3
        for library, in_place in itertools.islice(turns, 3):
            yield Case(library, dtype, rc.SUM, count, in_place)


def check(case: Case, *, deterministic: bool) -> str:
    """Carry out one allreduce, and compare every bit; return what is wrong."""
    mine = values(case.dtype, case.count, rc.rank())
    x = case.library.of(mine)
    call = rc.allreduce_ if case.in_place else rc.allreduce
    y = call(x, case.op, deterministic=deterministic)
    assert (y is x) == case.in_place, case
    want = expected(case.dtype, case.op, case.count, rc.size())
    error = difference(case.library.read(y), want)
    if not error and not case.in_place:
        changed = difference(case.library.read(x), mine)
        error = f"the argument has changed: {changed}" if changed else ""
    return f"{error} in {case}" if error else ""


def difference(found: np.ndarray, want: np.ndarray) -> str:
    """Return how two arrays differ; "": in no bit."""
    if (found.dtype, found.shape) != (want.dtype, want.shape):
        return f"{found.dtype} {found.shape} instead of {want.dtype} {want.shape}"
    is_wrong = raw(found) != raw(want)
    if not is_wrong.any():
        return ""
    at = int(is_wrong.argmax()) // want.itemsize
    return (
        f"{int(is_wrong.sum())} bytes are wrong, the first in element {at}: {found[at]} is not "
        f"{want[at]}"
    )


def values(dtype: type, count: int, rank: int) -> np.ndarray:
    """Return the argument of a rank."""
    return np.resize(_period(dtype, min(count, PERIOD), rank), count)


def expected(dtype: type, op: rc.Op, count: int, size: int) -> np.ndarray:
    """Return the result of the CPU's kernels, which combine in the order of ranks."""
    rows = [_period(dtype, min(count, PERIOD), rank) for rank in range(size)]
    out = np.empty_like(rows[0])
    name = np.dtype(dtype).name
    if count:
        _core.reduce_many(
            [raw(out)], [raw(x) for x in rows], DTYPES[name].kernel, op.kernel, op.divisor(size)
        )
    return np.resize(out, count)


@cache
def _period(dtype: type, count: int, rank: int) -> np.ndarray:
    rng = np.random.default_rng([count, rank])
    if np.dtype(dtype).kind in "iu":
        return rng.integers(0, 256, count * np.dtype(dtype).itemsize, np.uint8).view(dtype)
    return rng.standard_normal(count, np.float32).astype(dtype)


def raw(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def run_programs(deadline: float) -> int:
    """Run random programs of all collectives until the deadline; return their number."""
    for seed in itertools.count():
        if seed >= len(LIBRARIES) and not until(deadline):
            return seed
        program = make_program(1000 * rc.size() + seed, rc.size())
        run_program(program, rc.rank(), seed, LIBRARIES[seed % len(LIBRARIES)])
    raise AssertionError("it never ends by itself")


if __name__ == "__main__":
    main()
