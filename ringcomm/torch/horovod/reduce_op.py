"""Reduction operators of Horovod's API: those of ringcomm, and Adasum."""

from __future__ import annotations

import warnings

from ringcomm.collectives.operators import AVERAGE, SUM, Op


class _Adasum:
    def __repr__(self) -> str:
        return "Adasum"


Adasum = _Adasum()
AnyOp = Op | _Adasum


def op_of(op: AnyOp | None, average: bool | None, *, stacklevel: int = 3) -> AnyOp:
    """Return the operator that the arguments `op` and `average` ask for.

    Raises:
        ValueError: both are given.
        TypeError: op is no operator.
    """
    if average is not None:
        if op is not None:
            raise ValueError("pass op, or its older form average; not both")
        warnings.warn(
            "average is Horovod's older way: pass op=hvd.Average or op=hvd.Sum",
            DeprecationWarning,
            stacklevel=stacklevel,
        )
        return AVERAGE if average else SUM
    if op is None:
        return AVERAGE
    if not isinstance(op, AnyOp):
        raise TypeError(
            f"op must be one of hvd.Average, Sum, Min, Max, Product, Adasum: not {op!r}"
        )
    return op
