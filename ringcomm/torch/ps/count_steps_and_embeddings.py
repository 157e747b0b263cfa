"""Counts this worker's steps, and its embeddings on the servers."""

from __future__ import annotations

import weakref
from typing import Final
from weakref import WeakKeyDictionary

from ringcomm.ps.session import Session, session

_counting: Final[WeakKeyDictionary[Session, weakref.ref[object]]] = WeakKeyDictionary()
_embeddings: Final[WeakKeyDictionary[Session, int]] = WeakKeyDictionary()


def count_step(session: Session, optimizer: object) -> None:
    """Count a step of this worker, if `optimizer` is the oldest of the worker's optimizers."""
    known = _counting.get(session)
    counting = None if known is None else known()
    if counting is None:
        _counting[session] = weakref.ref(optimizer)
    if counting is None or counting is optimizer:
        session.tick()


def enrol_embedding() -> None:
    """Note that this worker has an embedding whose rows the servers own and update."""
    current = session()
    _embeddings[current] = _embeddings.get(current, 0) + 1


def require_something_served() -> None:
    """Raise ValueError if hybrid="ring" would leave nothing to the servers."""
    if not _embeddings.get(session()):
        raise ValueError(
            "ps.DistributedOptimizer: hybrid='ring' reduces all of the optimizer's parameters by "
            "the ring, and there is no embedding on the servers: nothing is left for them. Use "
            "ringcomm.torch.DistributedOptimizer without servers, or leave hybrid= out"
        )
