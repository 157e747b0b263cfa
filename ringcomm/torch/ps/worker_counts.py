"""Counts this worker's steps, and its embeddings and optimizers on the servers."""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from collections.abc import Iterator
from typing import Final, NamedTuple, Protocol, runtime_checkable
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from ringcomm.collectives.operators import MAX
from ringcomm.engine.api import collectives
from ringcomm.ps.members import let_in as members
from ringcomm.ps.session import Session, is_chief, session
from ringcomm.torch.backward.optimizer_numbers import (
    go_on_from_number,
    last_number,
)

_counting: Final[WeakKeyDictionary[Session, weakref.ref[object]]] = WeakKeyDictionary()
_embeddings: Final[WeakKeyDictionary[Session, int]] = WeakKeyDictionary()
_log: Final = logging.getLogger("ringcomm")


@runtime_checkable
class Yielding(Protocol):
    """An optimizer whose step() pushes if the worker has another one."""

    def note_others(self) -> bool:
        """Note that there is another; return True if backward() has pushed until now."""


_optimizers: Final[WeakKeyDictionary[Session, WeakSet[object]]] = WeakKeyDictionary()
_told: Final[WeakSet[Session]] = WeakSet()  # that its optimizers push in step()


class _EmbeddingCall(NamedTuple):
    """A call of an evaluator's function."""

    snapshot: int  # which no other call has
    number: int  # the last one that was drawn before it


_calls: Final[WeakKeyDictionary[Session, _EmbeddingCall]] = (
    WeakKeyDictionary()
)  # the last that has wrapped


def count_step(session: Session, optimizer: object) -> None:
    """Count a step of this worker, if `optimizer` is the oldest of the worker's optimizers."""
    known = _counting.get(session)
    counting = None if known is None else known()
    if counting is None:
        _counting[session] = weakref.ref(optimizer)
    if counting is None or counting is optimizer:
        session.tick()


def end_step(session: Session, number: int) -> None:
    """Do what is due between two steps, after the step of the optimizer that was wrapped last."""
    if _is_last(session, number):
        members.end_step(session)


def let_in(session: Session, number: int) -> None:
    if _is_last(session, number):
        members.let_in(session)


def _is_last(session: Session, number: int) -> bool:
    return number == max((each.number for each in session.recovering), default=number)


def catch_up(session: Session, name: str) -> None:
    """Count as many steps as the worker that has made most. Collective; `name` is of the message.

    Workers may have made unequal numbers of steps with earlier optimizers. If one waited for
    another's steps within a collective call, it would wait for ever.
    """
    mine = np.array([session.clock])
    if session.takes_what_servers_have:
        return
    most = int(collectives.allreduce(mine, MAX, name=name, group=session.group)[0])
    if most > session.clock:
        session.tick(most)


def enrol_optimizer(optimizer: object, current: Session, name: str) -> None:
    """Let all optimizers of the worker know if there are several. Collective; `name`: see catch_up.

    The workers agree on it: one of them may not have collected an optimizer that is gone, and
    optimizers that push in other orders could wait for each other for ever.
    """
    living = _optimizers.setdefault(current, WeakSet())
    living.add(optimizer)
    if len(living) > 1:
        gc.collect()  # optimizers are parts of cycles
    several = np.array([len(living) > 1])
    if not current.takes_what_servers_have:
        several = collectives.allreduce(several, MAX, name=name, group=current.group)
    if not several[0]:
        return
    have_yielded = [each.note_others() for each in [*living] if isinstance(each, Yielding)]
    if any(have_yielded) and current not in _told and is_chief():
        _told.add(current)
        _log.warning(
            "ps.DistributedOptimizer: there are several, so their step() pushes gradients, not "
            "backward(): that of one loss may fill gradients of another optimizer, too, which "
            "zero_grad() drops. If step() of all optimizers whose gradients a backward() fills "
            "follows it, overlap=True pushes during backward()"
        )


def enrol_embedding() -> None:
    current = session()
    _embeddings[current] = _embeddings.get(current, 0) + 1


def require_something_served() -> None:
    if not _embeddings.get(session()):
        raise ValueError(
            "ps.DistributedOptimizer: hybrid='ring' reduces all of the optimizer's parameters by "
            "the ring, and there is no embedding on the servers: nothing is left for them. Use "
            "ringcomm.torch.DistributedOptimizer without servers, or leave hybrid= out"
        )


@contextlib.contextmanager
def same_number_if_called_again(current: Session) -> Iterator[None]:
    """Let a rank that wraps by itself, and does so again after a recovery, find the same tables.

    Args:
        current: the session. If the block raises, it draws the numbers of the block again.
    """
    if not current.takes_what_servers_have:
        yield
        return
    group = current.group
    if current.is_evaluator:
        _begin(current)
    before = last_number(group)
    try:
        yield
    except BaseException:
        go_on_from_number(group, before)
        raise


def _begin(current: Session) -> None:
    """Give back numbers that were drawn in a call that a loss has ended, and that nobody has.

    An evaluator's function may wrap several optimizers. If it fails behind the first, it may have
    kept that, or wraps it again, too.
    """
    group, last = current.group, _calls.get(current)
    if last is not None and last.snapshot in current.lost_in:
        gc.collect()  # optimizers are parts of cycles
        kept = max((each.number for each in current.recovering), default=0)
        go_on_from_number(group, max(last.number, kept))
        last = None
    if last is None or last.snapshot != current.snapshot:
        number = last_number(group)
        _calls[current] = _EmbeddingCall(current.snapshot, number)
