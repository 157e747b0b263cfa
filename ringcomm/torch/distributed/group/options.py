"""Options of a call, from c10d's option objects and the short forms of its methods."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch

from ringcomm.collectives.op import AVERAGE, BAND, BOR, BXOR, MAX, MIN, PRODUCT, SUM, Op
from ringcomm.torch.distributed.compat import c10d

_Kind = c10d.ReduceOp.RedOpType
_OPS: Final[dict[Any, Op]] = {
    _Kind.SUM: SUM,
    _Kind.AVG: AVERAGE,
    _Kind.PRODUCT: PRODUCT,
    _Kind.MIN: MIN,
    _Kind.MAX: MAX,
    _Kind.BAND: BAND,
    _Kind.BOR: BOR,
    _Kind.BXOR: BXOR,
    _Kind.PREMUL_SUM: SUM,
}
_ZERO = timedelta(0)


class Reduction(NamedTuple):
    """Operator of a reduction, and the factor of a PREMUL_SUM, each rank's own."""

    op: Op
    factor: float | torch.Tensor | None = None


class CallOptions(NamedTuple):
    """Options of one call; root is a rank within the group, no timeout means the group's."""

    reduction: Reduction
    root: int
    timeout_s: float | None
    is_async: bool


def call_options(opts: Any, *more: Any, **named: Any) -> CallOptions:
    """Read an options object, or the short form's arguments (op, root, timeout) in any order."""
    if hasattr(opts, "timeout"):
        return _of_options(opts)
    values = [opts, *more, *named.values()]
    roots = [each for each in values if isinstance(each, int)]
    timeouts = [each for each in values if isinstance(each, timedelta)]
    kinds = [each for each in values if isinstance(each, c10d.ReduceOp | _Kind)]
    nested = [each for each in values if hasattr(each, "timeout")]
    if nested:
        return _of_options(nested[0])
    return CallOptions(
        _reduction(kinds[0]) if kinds else Reduction(SUM),
        roots[0] if roots else 0,
        _seconds(timeouts[0]) if timeouts else None,
        True,
    )


def _of_options(opts: Any) -> CallOptions:
    return CallOptions(
        _reduction(opts.reduceOp) if hasattr(opts, "reduceOp") else Reduction(SUM),
        getattr(opts, "rootRank", 0),
        _seconds(opts.timeout),
        getattr(opts, "asyncOp", True),
    )


def _reduction(op: Any) -> Reduction:
    kind = op if isinstance(op, _Kind) else op.op
    if kind not in _OPS:
        raise ValueError(f"ringcomm has no {kind}; it has {', '.join(each.name for each in _OPS)}")
    if kind == _Kind.PREMUL_SUM:
        return Reduction(SUM, _factor(op))
    return Reduction(_OPS[kind])


def _factor(op: Any) -> float | torch.Tensor:
    """Return the factor of a PREMUL_SUM; before torch 2.13 only pickling shows it."""
    factor: float | torch.Tensor = op.factor if hasattr(op, "factor") else op.__getstate__()[1]
    return factor


def _seconds(timeout: timedelta) -> float | None:
    """Return a timeout that was set in seconds; c10d's mark of one that was not is negative."""
    return timeout.total_seconds() if timeout > _ZERO else None


# --- tensors --------------------------------------------------------------------------------------
def one_tensor(tensors: Any) -> list[torch.Tensor]:
    """Return one tensor, passed as it is or in a list, in a list."""
    listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if len(listed) != 1:
        raise ValueError(
            f"a process group of ringcomm takes one tensor per rank, not {len(listed)}"
        )
    return listed


def one_list(tensors: Any) -> list[torch.Tensor]:
    """Return one list of tensors, passed as it is or in a list."""
    listed = list(tensors)
    if listed and not isinstance(listed[0], torch.Tensor):
        if len(listed) != 1:
            raise ValueError(
                f"a process group of ringcomm takes one list of tensors per rank, not {len(listed)}"
            )
        listed = list(listed[0])
    return listed


def are_local(tensors: Sequence[torch.Tensor]) -> bool:
    """Return True if all are in host memory."""
    return all(x.is_cpu for x in tensors)


def or_default(opts: Any, kind: Any) -> Any:
    """Return the options object, one of this kind if there is none."""
    return kind() if opts is None else opts
