"""Answers to other ranks that ask whether this rank has entered an operation."""

from __future__ import annotations

from ringcomm.engine.core.context import EngineContext
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.layer_hooks import Extensions
from ringcomm.engine.core.ledger import Ticket
from ringcomm.engine.core.pending_operations import Pending
from ringcomm.engine.peers.groups import Groups
from ringcomm.engine.progress.task import Task
from ringcomm.transport.control_header import ControlHeader, ControlKind
from ringcomm.transport.control_messages import Watch


class Whereabouts:
    """Knows which operations this rank has entered, and answers questions about them."""

    def __init__(
        self, watch: Watch, pending: Pending, extensions: Extensions, groups: Groups
    ) -> None:
        watch.listeners[ControlKind.ASK] = self._answer
        watch.is_crossed = self._is_crossed
        self._watch = watch
        self._pending = pending
        self._extensions = extensions
        self._groups = groups

    def has_entered(self, key: int, base: int, number: int) -> bool:
        if key in self._pending or self._extensions.has_entered(base, number):
            return True
        return self._groups.has_entered(base, number)

    def is_crossed(self, task: Task) -> bool:
        """Return True if a rank waits, elsewhere, in an operation that this rank has not entered.

        It cannot enter this task's operation before this rank enters that one. The answers to
        deadlines.ask_around() tell where it is.
        """
        return self._is_crossed(task.key)

    def _is_crossed(self, key: int) -> bool:
        waits = self._watch.peers.waits_elsewhere(key)
        return any(
            not self.has_entered(Ticket(None, base, number).key, base, number)
            for base, number in waits
        )

    def have_others_begun(
        self, engine: EngineContext, name: str, group: Group, limit_s: float
    ) -> bool:
        """Return True if, within limit_s, another rank says that it has entered an operation.

        It is the next operation of this name in `group`, which this rank has not entered.
        """
        peers, ticket = self._watch.peers, group.ledger.next_ticket(name)
        key, others = (
            ticket.key,
            [r for r in group.ranks if r != peers.rank and r not in peers.gone],
        )
        for rank in others:
            self._watch.tell(
                rank, ControlKind.ASK, key=key, fingerprint=ticket.base, value=ticket.number
            )

        def is_answered() -> bool:
            n_missing = len(peers.missing(key, others))
            return n_missing < len(others) or n_missing == len(peers.whereabouts(key))

        engine.run_until(is_answered, is_done=is_answered, timeout_s=limit_s)
        has_begun = len(peers.missing(key, others)) < len(others)
        peers.forget(key)
        return has_begun

    def _answer(self, source: int, ask: ControlHeader, _: str) -> None:
        if self.has_entered(ask.key, ask.fingerprint, ask.value):
            self._watch.tell(source, ControlKind.HERE, key=ask.key)
        elif self._watch.has_left:
            self._watch.say_absent(ask.key)
        else:
            where = self._pending.oldest() or self._extensions.waits_in()
            fields: dict[str, int] = {}
            for task in [each.task for each in self._pending.operations()]:
                if task.waiters and source in task.members:
                    fields = {"fingerprint": task.base, "value": task.number, "flag": True}
            self._watch.tell(source, ControlKind.ELSEWHERE, where, key=ask.key, **fields)
