"""Where this rank is, for ranks that wait for it."""

from __future__ import annotations

from ringcomm.engine.core.extensions import Extensions
from ringcomm.engine.core.pending import Pending
from ringcomm.engine.peers.groups import Groups


class Whereabouts:
    """Knows which operations this rank has entered; see ringcomm.transport.watch."""

    def __init__(self, pending: Pending, extensions: Extensions, groups: Groups) -> None:
        self._pending = pending
        self._extensions = extensions
        self._groups = groups

    def has_entered(self, key: int, base: int, number: int) -> bool:
        """Return True if this rank is, or was, in that operation: the number-th of `base`."""
        if key in self._pending:
            return True
        if self._extensions.has_entered(base, number):
            return True
        return self._groups.has_entered(base, number)

    def is_in(self) -> str:
        """Return the label of the oldest operation that is pending, "" if there is none."""
        return self._pending.oldest()
