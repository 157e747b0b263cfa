"""The base class of dense tables and hash tables on a client: opening, and the updater."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ringcomm.ps.client.json_requests import json_of
from ringcomm.ps.client.request import Request
from ringcomm.ps.protocol.frame_meta import packed_json
from ringcomm.ps.protocol.frames import Kind

if TYPE_CHECKING:
    from ringcomm.ps.optim import Updater
    from ringcomm.ps.session import Session
    from ringcomm.ps.table_spec import Spec


class TableBase:
    """A table that this rank has opened.

    Attributes:
        name: of the table.
        dtype: of its values.
        number: of the table in messages.
        client: of this rank.
    """

    def __init__(
        self, session: Session, spec: Spec, updater: Updater, created: dict[str, Any]
    ) -> None:
        self.name = spec.name
        self.dtype = np.dtype(spec.dtype)
        self.number: int = created["number"]
        self.client = session.client
        self._session = session
        self._spec = spec
        self._updater = updater

    def require_same(self, spec: Spec) -> None:
        """Raise MismatchError if this process opens it again with something else."""
        self._spec.require_same(spec, self.client.rank)

    def __reduce_ex__(self, protocol: Any) -> Any:
        kind = "table" if self._spec.kind == "dense" else "hashtable"
        raise TypeError(
            f"{kind}[{self.name}]: it cannot be copied or pickled, because its values are on the "
            "servers: pull() fetches them, and ps.save() saves them"
        )

    def note_replaced(self) -> None:
        """Take note that a checkpoint may have replaced all values."""

    @property
    def updater(self) -> Updater:
        """The updater, whose hyper-parameters travel with every push; set it to change them.

        Raises:
            ValueError: set to another class, or to one that needs state the table has not.
        """
        return self._updater

    @updater.setter
    def updater(self, updater: Updater) -> None:
        made_with, before = self._spec.updater["updater"], self._updater
        if type(updater).__name__ != made_with or updater.slot_names != before.slot_names:
            kind = "table" if self._spec.kind == "dense" else "hashtable"
            raise ValueError(
                f"{kind}[{self.name}]: it was made for {before!r}, got {updater!r}. Only the "
                "numbers may change: updater = updater.with_(lr=...)"
            )
        self._updater = updater


T = TypeVar("T", bound=TableBase)


def open_once(session: Session, spec: Spec, make: Callable[[dict[str, Any]], T]) -> T:
    """Return the table of this name that this process has opened before, or open it.

    Two objects for one table would each count its rounds.

    Args:
        session: of this rank.
        spec: of the table.
        make: makes the table of what the leader answers: its "number", "owners" by partition, and
            "epochs" of those that have moved.

    Raises:
        MismatchError: this rank or another opened it with something else.
        CommTimeoutError: the leader does not answer.
    """
    with session.opening:
        known: T | None = session.tables.get(spec.name)
        if known is not None:
            known.require_same(spec)
            return known
        client, meta = session.client, packed_json(spec.to_json())
        request = Request(Kind.CREATE, server=client.leader, meta=meta)
        created = client.call_one(f"table[{spec.name}]", request, json_of).wait()
        table = session.tables[spec.name] = make(created)
        return table
