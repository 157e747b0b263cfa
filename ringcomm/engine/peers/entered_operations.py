"""Answers to other ranks that ask whether this rank has entered an operation."""

from __future__ import annotations

from ringcomm.engine.core.layer_hooks import Extensions
from ringcomm.engine.core.pending_operations import Pending
from ringcomm.engine.peers.groups import Groups
from ringcomm.transport.control_header import Header, Kind
from ringcomm.transport.control_messages import Watch


class Whereabouts:
    """Knows which operations this rank has entered, and answers questions about them."""

    def __init__(
        self, watch: Watch, pending: Pending, extensions: Extensions, groups: Groups
    ) -> None:
        watch.listeners[Kind.ASK] = self._answer
        self._watch = watch
        self._pending = pending
        self._extensions = extensions
        self._groups = groups

    def has_entered(self, key: int, base: int, number: int) -> bool:
        """Return True if this rank has entered the operation; for the arguments see Ticket."""
        if key in self._pending or self._extensions.has_entered(base, number):
            return True
        return self._groups.has_entered(base, number)

    def _answer(self, source: int, ask: Header, _: str) -> None:
        if self.has_entered(ask.key, ask.fingerprint, ask.value):
            self._watch.tell(source, Kind.HERE, key=ask.key)
        else:
            where = self._pending.oldest() or self._extensions.waits_in()
            self._watch.tell(source, Kind.ELSEWHERE, where, key=ask.key)
