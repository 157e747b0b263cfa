"""Reads the arguments of c10d's methods: options objects, short forms, tensors and lists."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch

from ringcomm.collectives.operators import AVERAGE, BAND, BOR, BXOR, MAX, MIN, PRODUCT, SUM, Op
from ringcomm.integers import is_integer
from ringcomm.torch.distributed.compat import c10d

_Kind = c10d.ReduceOp.RedOpType
_OPS: Final[dict[Any, Op]] = {
    _Kind.SUM: SUM, _Kind.AVG: AVERAGE, _Kind.PRODUCT: PRODUCT, _Kind.MIN: MIN, _Kind.MAX: MAX,
    _Kind.BAND: BAND, _Kind.BOR: BOR, _Kind.BXOR: BXOR, _Kind.PREMUL_SUM: SUM,
}  # fmt: skip
_ZERO = timedelta(0)


class ReadReduction(NamedTuple):
    """Operator of a reduction, and this rank's factor of a PREMUL_SUM."""

    op: Op
    factor: float | torch.Tensor | None = None


class CallOptions(NamedTuple):
    """Options of one call. `root` is a rank of the group; timeout_s None: the group's timeout."""

    reduction: ReadReduction
    root: int
    timeout_s: float | None
    is_async: bool


def call_options(opts: Any, *more: Any, **named: Any) -> CallOptions:
    """Read an options object, or the short form's arguments (op, root, timeout) in any order."""
    if hasattr(opts, "timeout"):
        return _of_options(opts)
    call = CallOptions(ReadReduction(SUM), root=0, timeout_s=None, is_async=True)
    for value in (*reversed(named.values()), *more[::-1], opts):  # so that the first value counts
        if hasattr(value, "timeout"):
            return _of_options(value)
        if isinstance(value, c10d.ReduceOp | _Kind):
            call = call._replace(reduction=_reduction(value))
        elif isinstance(value, timedelta):
            call = call._replace(timeout_s=_seconds(value))
        elif isinstance(value, bool) or is_integer(value):
            call = call._replace(root=int(value))
    return call


def _of_options(opts: Any) -> CallOptions:
    return CallOptions(
        _reduction(opts.reduceOp) if hasattr(opts, "reduceOp") else ReadReduction(SUM),
        getattr(opts, "rootRank", 0),
        _seconds(opts.timeout),
        getattr(opts, "asyncOp", True),
    )


def _reduction(op: Any) -> ReadReduction:
    kind = op if isinstance(op, _Kind) else op.op
    if kind not in _OPS:
        raise ValueError(f"ringcomm has no {kind}; it has {', '.join(each.name for each in _OPS)}")
    if kind == _Kind.PREMUL_SUM:
        return ReadReduction(SUM, _factor(op))
    return ReadReduction(_OPS[kind])


def _factor(op: Any) -> float | torch.Tensor:
    """Return the factor of a PREMUL_SUM, which torch before 2.13 shows only to pickle."""
    factor: float | torch.Tensor = op.factor if hasattr(op, "factor") else op.__getstate__()[1]
    return factor


def _seconds(timeout: timedelta) -> float | None:
    """Return a timeout in seconds; None if it is 0 or less, which means not set in c10d."""
    return timeout.total_seconds() if timeout > _ZERO else None


# --- tensors --------------------------------------------------------------------------------------
def one_tensor(tensors: Any) -> list[torch.Tensor]:
    """Return a list of one tensor, which the caller passed bare or in a list."""
    listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if len(listed) != 1:
        raise ValueError(
            f"a process group of ringcomm takes one tensor per rank, not {len(listed)}"
        )
    return listed


def one_list(tensors: Any) -> list[torch.Tensor]:
    listed = list(tensors)
    if listed and not isinstance(listed[0], torch.Tensor):
        if len(listed) != 1:
            raise ValueError(
                f"a process group of ringcomm takes one list of tensors per rank, not {len(listed)}"
            )
        listed = list(listed[0])
    return listed
