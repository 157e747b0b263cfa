"""Whose step() is a step of this worker, where there are several optimizers."""

from __future__ import annotations

import weakref
from typing import Final

from ringcomm.ps.job import Session

_tickers: Final[weakref.WeakKeyDictionary[Session, weakref.ref[object]]] = (
    weakref.WeakKeyDictionary()
)


def tick(session: Session, optimizer: object) -> None:
    """Count a step of this worker; of several optimizers, the first one that lives counts."""
    known = _tickers.get(session)
    ticker = None if known is None else known()
    if ticker is None:
        _tickers[session] = weakref.ref(optimizer)
    if ticker is None or ticker is optimizer:
        session.tick()
