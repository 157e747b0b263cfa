"""The agreement of all ranks on what an optimizer wraps, and with which weights it begins."""

from __future__ import annotations

from typing import Any

from ringcomm.engine.core.group import Group
from ringcomm.engine.core.handle import Handle
from ringcomm.torch.backward.consistency_check import ConsistencyCheck, OptimizerSummary
from ringcomm.torch.optim.first_weights import FirstWeights, Named


class Agreement:
    """The comparison of parameters and weights in the first backward(); anew after forget()."""

    def __init__(self, *, is_wanted: bool, known: Named) -> None:
        self.weights = FirstWeights(is_wanted=is_wanted, known=known)
        self._check: ConsistencyCheck | None = None
        self._is_reached = False

    def forget(self) -> None:
        """Compare what is wrapped again."""
        self._check, self._is_reached = None, False

    @property
    def is_begun(self) -> bool:
        """True once begin() was called."""
        return self._check is not None

    def begin(self, mine: OptimizerSummary, named: Named, name: str, group: Group) -> None:
        """Start to compare; waits for nobody. Collective."""
        self._check = ConsistencyCheck(mine, name, group, self.weights.digest(named))

    @property
    def handle(self) -> Handle[Any]:
        """The comparison under way, or over."""
        assert self._check is not None
        return self._check.handle

    def is_reached(self) -> bool:
        """Return True if all ranks are known to have wrapped the same; MismatchError if not."""
        if not self._is_reached:
            check = self._check
            assert check is not None
            if not check.handle.done():
                return False
            self._check = None  # for the case that they have not
            check.require_alike()
            self.weights.note(check.combined_weights())
            self._check, self._is_reached = check, True
        return True
