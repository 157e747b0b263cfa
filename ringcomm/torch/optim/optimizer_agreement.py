"""The agreement of all ranks on an optimizer's parameters, settings and first weights."""

from __future__ import annotations

from ringcomm.engine.core.group import Group
from ringcomm.torch.backward.consistency_check import ConsistencyCheck, OptimizerSummary
from ringcomm.torch.backward.interleave_collectives import CollectiveTask
from ringcomm.torch.optim.equalize_weights import FirstWeights, Named


class Agreement:
    """Compares an optimizer with those of the other ranks, in the first backward().

    That one sends no gradient before its end: how many are sent before the ranks agree would depend
    on how fast they are, and a backward() that fails on all ranks would leave unlike buckets.

    Attributes:
        check: the comparison, in progress or over; None: begin() starts the next one.
        is_reached: True if the ranks are known to agree.
    """

    def __init__(self, weights: FirstWeights) -> None:
        self.weights = weights
        self.forget()

    def forget(self) -> None:
        self.check: ConsistencyCheck | None = None
        self.is_reached = False

    def begin(self, mine: OptimizerSummary, named: Named, name: str, group: Group) -> None:
        """Begin to compare, without waiting. Collective."""
        self.check = ConsistencyCheck(mine, name, group, self.weights.digest(named))

    def reach(self) -> CollectiveTask[None]:
        """Wait for the agreement. Raises MismatchError if the ranks differ."""
        if self.is_reached:
            return
        check = self.check
        assert check is not None
        yield check.handle
        self.check = None  # if they differ, the next backward() compares again
        self.weights.note(check.wait())
        self.check, self.is_reached = check, True
