"""What tables of both kinds have in common once they are opened."""

from __future__ import annotations

import json
import math
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ringcomm.ps.client import Ask
from ringcomm.ps.frames import Kind
from ringcomm.ps.future import Future
from ringcomm.ps.messages import packed_json
from ringcomm.ps.optim import SGD, Updater
from ringcomm.ps.serving import LEADER

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from ringcomm.ps.job import Session
    from ringcomm.ps.link import Delivery
    from ringcomm.ps.spec import Spec


class Opened:
    """A table that this rank has opened.

    Attributes:
        name: of the table.
        dtype: of its values.
        number: of the table in messages.
        client: of this rank.
    """

    def __init__(
        self, current: Session, spec: Spec, updater: Updater, told: dict[str, Any]
    ) -> None:
        self.name = spec.name
        self.dtype = np.dtype(spec.dtype)
        self.number: int = told["number"]
        self.client = current.client
        self._session = current
        self._spec = spec
        self._updater = updater
        self._lock = threading.Lock()  # of what counts this process's pushes

    def require_same(self, spec: Spec) -> None:
        """Raise MismatchError if this process opens it again with something else."""
        self._spec.require_same(spec, self._session.engine.job_rank)

    @property
    def updater(self) -> Updater:
        """What a push does, with the hyper-parameters that travel with it; set it to change them.

        Raises:
            ValueError: set to another class, or to one that needs state the table has not.
        """
        return self._updater

    @updater.setter
    def updater(self, updater: Updater) -> None:
        made_with, before = self._spec.updater["updater"], self._updater
        if type(updater).__name__ != made_with or updater.slot_names != before.slot_names:
            raise ValueError(
                f"{label_of(self._spec)}: it was made for {before!r}, got {updater!r}. Only the "
                "numbers may change: updater = updater.with_(lr=...)"
            )
        self._updater = updater


T = TypeVar("T", bound=Opened)


def opened_once(current: Session, spec: Spec, open_it: Callable[[], T]) -> T:
    """Return the table of this name as this process has opened it before, or open it.

    Two objects for one table would count its rounds each by itself.

    Raises:
        MismatchError: it was opened with something else.
    """
    with current.opening:
        known: T | None = current.tables.get(spec.name)
        if known is None:
            known = current.tables[spec.name] = open_it()
        else:
            known.require_same(spec)
    return known


def label_of_new(kind: str, name: object) -> str:
    """Return how errors name a table that is opened. Raises TypeError if the name is no text."""
    if not isinstance(name, str):
        raise TypeError(f"{kind}: name must be a str, not {name!r}")
    return f"{kind}[{name}]"


def dtype_of(label: str, dtype: DTypeLike) -> np.dtype[Any]:
    """Return what numpy calls a table's dtype. Raises TypeError, ValueError."""
    kind = np.dtype(dtype)
    if kind not in (np.float32, np.float64):
        raise ValueError(f"{label}: dtype is {kind}; it must be float32 or float64")
    return kind


def updater_of(label: str, updater: Updater | None) -> Updater:
    """Return what a push does; SGD(0.01) if not given. Raises TypeError if it is none."""
    if updater is not None and not isinstance(updater, Updater):
        raise TypeError(f"{label}: updater must be of ringcomm.ps.optim, not {updater!r}")
    return SGD(0.01) if updater is None else updater


def require_weight(label: str, weight: float, *, may_be_0: bool) -> None:
    """Raise ValueError if a contribution cannot count by this weight, NaN among others."""
    if not 0 <= weight <= sys.float_info.max or (weight == 0 and not may_be_0):
        least = "at least 0" if may_be_0 else "more than 0"
        raise ValueError(f"{label}: weight is {weight}; it must be {least}, and finite")


def factor_of(label: str, factor: float | None, *, may_be_nan: bool = False) -> float:
    """Return what the mean of a round is multiplied by; 0 for None.

    Raises ValueError, TypeError: it is no such number.
    """
    if factor is None:
        return 0.0
    # As torch's clipping makes it of a norm that is NaN.
    is_nan = may_be_nan and isinstance(factor, float) and math.isnan(factor)
    if not (is_nan or 0 <= factor <= sys.float_info.max):  # servers that fail end no round
        raise ValueError(f"{label}: factor is {factor!r}; it must be at least 0, and finite")
    return float(factor)


def require_array(label: str, out: object) -> None:
    """Raise TypeError if this is nothing that values can be written to."""
    if not isinstance(out, np.ndarray):
        raise TypeError(f"{label}: out must be a numpy array, not {out!r}")


def label_of(spec: Spec) -> str:
    """Return how errors name a table: table[w], hashtable[emb]."""
    return f"{'table' if spec.kind == 'dense' else 'hashtable'}[{spec.name}]"


def open_at_leader(current: Session, spec: Spec) -> dict[str, Any]:
    """Return what the leader says of a table: its number and who owns what.

    Raises:
        MismatchError: another rank opened it with something else.
        CommTimeoutError: it does not answer.
    """
    told: dict[str, Any] = {}

    def note(reply: Delivery) -> None:
        told.update(json.loads(reply.body.tobytes()))

    client = current.client
    future: Future[dict[str, Any]] = Future(
        client, f"table[{spec.name}]", 1, lambda: told, client.timestamp()
    )
    meta = packed_json(spec.to_json())
    client.ask([Ask(Kind.CREATE, server=LEADER, meta=meta, on_reply=note)], future)
    future.wait()
    if spec.kind == "dense":
        epochs = {int(part): epoch for part, epoch in told["epochs"].items()}
        client.know(told["number"], told["owners"], epochs)
    return told
