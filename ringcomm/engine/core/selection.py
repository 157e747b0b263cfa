"""The choice of algorithms of one rank, the same on all: what is forced, measured and announced."""

from __future__ import annotations

import logging
from typing import Any, Final

from ringcomm.arrays.base import Flat
from ringcomm.collectives.algorithms import circulant, direct, hierarchical, node, ring, segmented
from ringcomm.collectives.select import Case, Choice, choose
from ringcomm.collectives.table import Table
from ringcomm.config import Settings
from ringcomm.transport.channel import Channel

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
    """Chooses by what is the same on all ranks; see ringcomm.collectives.select."""

    def __init__(self, settings: Settings) -> None:
        self.forced = settings.forced  # what the user wants, by collective
        # Ranks that share memory may be forced to use messages.
        self.leaves_memory = any(algorithm != "node" for algorithm in self.forced.values())
        self.table: Table | None = None  # measured on this topology, the same on all ranks
        self._announced: set[tuple[str, str, str]] = set()

    def choice(self, case: Case) -> Choice:
        """Return the algorithm for `case`, and why."""
        return choose(case, self.forced.get(case.collective), self.table)

    def algorithm(
        self, collective: str, x: Flat, t: Channel, *, is_deterministic: bool = False
    ) -> Any:
        """Return the module whose functions carry out a collective on `x` among the ranks of t."""
        if t.meeting is not None and collective not in self.forced:
            return node
        case = Case(
            collective, x.bytes.nbytes, x.dtype, t.nodes, is_deterministic, t.meeting is not None
        )
        choice = self.choice(case)
        if choice.overruled and t.rank == 0:
            self._announce(case, choice)
        return MODULES[choice.algorithm]

    def _announce(self, case: Case, choice: Choice) -> None:
        reason = choice.unfit[choice.overruled]
        text = (case.collective, choice.overruled, reason)
        if text in self._announced:
            return
        self._announced.add(text)
        _log.warning(
            "RINGCOMM_ALGORITHM: %s does not go by %s, for %s; it goes by %s.",
            *text,
            choice.algorithm,
        )
