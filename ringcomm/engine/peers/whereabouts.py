"""Where this rank is, for ranks that wait for it."""

from __future__ import annotations

from ringcomm.engine.core.extensions import Extensions
from ringcomm.engine.core.pending import Pending
from ringcomm.engine.peers.groups import Groups
from ringcomm.transport.header import Header, Kind
from ringcomm.transport.watch import Watch


class Whereabouts:
    """Knows which operations this rank has entered, and answers who asks."""

    def __init__(
        self, watch: Watch, pending: Pending, extensions: Extensions, groups: Groups
    ) -> None:
        watch.listeners[Kind.ASK] = self._answer
        self._watch = watch
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

    def _answer(self, source: int, ask: Header, _: str) -> None:
        if self.has_entered(ask.key, ask.fingerprint, ask.value):
            self._watch.tell(source, Kind.HERE, key=ask.key)
        else:
            self._watch.tell(source, Kind.ELSEWHERE, self._pending.oldest(), key=ask.key)
