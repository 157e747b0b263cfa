"""What pushes and pulls are to take (docs/benchmarks.md), as numbers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ringcomm.launch.bench.figure import Figure
from ringcomm.launch.bench.ps.cases import CASES, OPS, PULL, PUSH
from ringcomm.launch.bench.ps.report import Row, Step

# CPU time of client and server, us per call, of one worker on a quiet machine.
_CPU_US: Final = {
    (PUSH, "1K"): 30,
    (PULL, "1K"): 31,
    (PUSH, "64K"): 40,
    (PULL, "64K"): 42,
    (PUSH, "4M"): 763,
    (PULL, "4M"): 554,
    (PUSH, "sparse"): 536,
    (PULL, "sparse"): 980,
}
_PEER: Final = "torch-rpc"
_CPU_OF_PEER: Final = {"1K": 1 / 10, "64K": 1 / 10, "4M": 1 / 2}
_TIMES_FASTER: Final = {"1K": 5, "64K": 5}
_OF_MEMCPY: Final = 1.5
_OF_RING: Final = 1.5
_WORKERS_OF_RING: Final = 2


def judge(rows: Sequence[Row], step: Step | None, *, workers: int) -> list[Figure]:
    """Return what can be held against a goal, and what is told of another library.

    Args:
        rows: of a run.
        step: of the same run.
        workers: how many there were. CPU times and memcpy have goals for one worker, the training
            step for two, the rest for any number.
    """
    return [
        *(_alone(rows) if workers == 1 else []),
        *_beside_peer(rows),
        *_of_step(step, workers),
    ]


def _alone(rows: Sequence[Row]) -> Iterator[Figure]:
    for op, case in _in_order():
        ours = _find(rows, op, case, "ringcomm")
        if ours is None:
            continue
        yield Figure(_name(op, case, "CPU, us"), ours.sum_us, at_most=_CPU_US[op, case])
        memcpy = _find(rows, op, case, "memcpy")
        if memcpy is not None:
            ratio = ours.p50_us / memcpy.p50_us
            yield Figure(_name(op, case, "time / memcpy"), ratio, at_most=_OF_MEMCPY)


def _beside_peer(rows: Sequence[Row]) -> Iterator[Figure]:
    for op, case in _in_order():
        ours, peer = (_find(rows, op, case, engine) for engine in ("ringcomm", _PEER))
        if ours is None or peer is None:
            continue
        ratio, faster = ours.sum_us / peer.sum_us, peer.p50_us / ours.p50_us
        yield Figure(_name(op, case, "CPU / torch-rpc"), ratio, at_most=_CPU_OF_PEER.get(case))
        yield Figure(_name(op, case, "times faster"), faster, at_least=_TIMES_FASTER.get(case))


def _of_step(step: Step | None, workers: int) -> Iterator[Figure]:
    if step is not None:
        goal = _OF_RING if workers == _WORKERS_OF_RING else None
        yield Figure("training step, / the ring's", step.ratio, at_most=goal)


def _in_order() -> list[tuple[str, str]]:
    return [(op, case) for case in CASES for op in OPS]


def _find(rows: Sequence[Row], op: str, case: str, engine: str) -> Row | None:
    wanted = (op, case, engine)
    return next((row for row in rows if (row.op, row.case, row.engine) == wanted), None)


def _name(op: str, case: str, what: str) -> str:
    return f"{op} {CASES[case].title}: {what}"
