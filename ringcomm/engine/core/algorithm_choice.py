"""The choice of algorithms: forced by the user, measured by `ringcomm tune`, or estimated."""

from __future__ import annotations

import logging
from typing import Any, Final

from ringcomm.arrays.base import Flat
from ringcomm.collectives.algorithms import circulant, direct, hierarchical, node, ring, segmented
from ringcomm.collectives.measured_times import TimeTable
from ringcomm.collectives.operators import ReductionOptions
from ringcomm.collectives.select_algorithm import Case, Choice, choose
from ringcomm.config import Settings
from ringcomm.transport.channel import Channel

_NONE: Final = ReductionOptions()
_log = logging.getLogger("ringcomm")

MODULES: Final[dict[str, Any]] = {
    "node": node,
    "ring": ring,
    "segmented": segmented,
    "direct": direct,
    "circulant": circulant,
    "hierarchical": hierarchical,
}


class Selection:
    """Chooses by facts that are the same on all ranks; see collectives/select_algorithm.py."""

    def __init__(self, settings: Settings) -> None:
        self.forced = settings.forced  # the user's choices: algorithm by collective
        # Ranks that share memory may be forced to use messages.
        self.leaves_memory = any(algorithm != "node" for algorithm in self.forced.values())
        self.table: TimeTable | None = None  # measured on this topology, the same on all ranks
        self._announced: set[tuple[str, str, str]] = set()

    def choice(self, case: Case) -> Choice:
        return choose(case, self.forced.get(case.collective), self.table)

    def algorithm(
        self, collective: str, x: Flat, t: Channel, options: ReductionOptions = _NONE
    ) -> Any:
        """Return the module of the algorithm for a collective on `x` among the ranks of t.

        `options` are those of a reduction.
        """
        if t.meeting is not None and collective not in self.forced:
            return node
        case = Case(
            collective,
            x.bytes.nbytes,
            x.dtype,
            t.nodes,
            options.deterministic,
            t.meeting is not None,
            options.op,
        )
        choice = self.choice(case)
        if choice.overruled and t.rank == 0:
            refusal = collective, choice.overruled, choice.unfit[choice.overruled]
            if refusal not in self._announced:
                self._announced.add(refusal)
                text = "RINGCOMM_ALGORITHM: %s cannot use %s, because %s; it uses %s."
                _log.warning(text, *refusal, choice.algorithm)
        return MODULES[choice.algorithm]
