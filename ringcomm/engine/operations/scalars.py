"""Numbers of Python and numpy in collectives: each travels as an array of one element.

This is the one place where a number becomes an array, and the result a number again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from ringcomm.engine.core.plan import Plan
from ringcomm.transport.channel import Channel

F = TypeVar("F", bound=Callable[..., Plan[Any]])
_KINDS: Final = (np.generic, bool, int, float, complex)  # numpy's float64 is a float, too
_INT64: Final = np.iinfo(np.int64)
_LONG_BITS: Final = 256  # longer ints are not printed

# The shape in which a number travels. The collectives that are not here take no numbers.
SHAPES: Final[dict[str, tuple[int, ...]]] = {
    "allreduce": (), "reduce": (), "scan": (), "exscan": (), "broadcast": (), "gather": (1,),
}  # fmt: skip


def is_scalar(x: Any) -> bool:
    return isinstance(x, _KINDS)


def array_of(x: Any, kind: str) -> NDArray[Any]:
    """Return the array as which a number travels: int64 for an int, float64 for a float.

    Raises:
        TypeError: the collective `kind` works in place.
        ValueError: x is an int that int64 does not have.
    """
    if kind.endswith("_"):
        raise TypeError(
            f"{kind}: x is the number {_text(x)}, which cannot be overwritten. Use "
            f"{kind.rstrip('_')}(), which returns the result, or pass an array"
        )
    if isinstance(x, int) and not _INT64.min <= x <= _INT64.max:
        raise ValueError(
            f"{kind}: x is {_text(x)}; an int must fit in int64, {_INT64.min} to {_INT64.max}. "
            "Pass a float, or numpy.uint64(x)"
        )
    is_int = isinstance(x, int) and not isinstance(x, bool)
    array: NDArray[Any] = np.array(x, np.int64 if is_int else None)
    return array.reshape(SHAPES[kind])


def number_from(result: Any, x: Any) -> Any:
    """Return a result, an array of no dimension or None, as a number like x."""
    if result is None:
        return None
    return result[()] if isinstance(x, np.generic) else result.item()


def takes_scalars(kind: str) -> Callable[[F], F]:
    """Decorate a function that plans a collective of an array: it then takes numbers, too."""

    def decorate(plan: F) -> F:
        @functools.wraps(plan)
        def plan_of_any(group: Any, name: str | None, x: Any, *args: Any, **form: Any) -> Plan[Any]:
            if type(x) is np.ndarray or not is_scalar(x):
                return plan(group, name, x, *args, **form)
            array = array_of(x, f"{kind}_" if form.get("in_place") else kind)
            made = plan(group, name, array, *args, **form)
            if array.ndim == 0:
                _return_number(made, x)
            return made

        return cast("F", plan_of_any)

    return decorate


def _return_number(plan: Plan[Any], x: Any) -> None:
    run, finish = plan.run, plan.finish
    assert finish is not None

    async def run_for_number(t: Channel) -> Any:
        return number_from(await run(t), x)

    plan.run = run_for_number
    plan.finish = lambda t: number_from(finish(t), x)


def _text(x: Any) -> str:
    if isinstance(x, int) and x.bit_length() > _LONG_BITS:
        return f"an int of {x.bit_length()} bits"
    return repr(x)
