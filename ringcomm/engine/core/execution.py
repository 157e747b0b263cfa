"""A collective that a rank is ready to carry out, and results that come later."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ringcomm.engine.core.call import Call
from ringcomm.transport.channel import Channel
from ringcomm.transport.node.steps import NodeCopy, NodeReduction

R = TypeVar("R")


class Deferred:
    """A result that is there for a caller once it has asked for it: what comes later on its stream.

    An operation whose result this is counts as over. Each result is asked whether it is one, so
    this is no ABC, which would take its time to answer.

    Attributes:
        take: returns the result.
    """

    take: Callable[[], Any]


class AllDeferred(Deferred):
    """Several results as one list; some of them may be there."""

    def __init__(self, results: Sequence[Any]) -> None:
        self._results = results

    def take(self) -> list[Any]:
        """Return the results."""
        return [each.take() if isinstance(each, Deferred) else each for each in self._results]


@dataclass(slots=True, eq=False)
class Plan(Generic[R]):
    """A collective that this rank is ready to carry out."""

    call: Call  # on which all ranks must agree
    nbytes: int  # of the payload, for reports
    run: Callable[[Channel], Coroutine[Any, Any, R]]  # moves the payload
    step: NodeReduction | NodeCopy | None = None  # all of it, in shared memory
    finish: Callable[[Channel | None], R] | None = None  # returns the result of step
    agrees_first: bool = False  # even on what all ranks agreed on before
