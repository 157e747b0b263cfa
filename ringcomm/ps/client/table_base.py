"""The base class of dense tables and hash tables on a client: opening, and the updater."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import numpy as np

from ringcomm.errors import MismatchError, RingcommError
from ringcomm.ps.client.future import Future, require_timeout
from ringcomm.ps.client.json_requests import ask_leader, json_of, request_command
from ringcomm.ps.protocol.frame_meta import packed_json

if TYPE_CHECKING:
    from ringcomm.ps.client.first_of import FirstOfRounds
    from ringcomm.ps.optim import Updater
    from ringcomm.ps.protocol.lost_server import Loss
    from ringcomm.ps.session import Session
    from ringcomm.ps.table_spec import Spec


class Pushes(Protocol):
    @property
    def n_rounds(self) -> int: ...

    @property
    def n_missed(self) -> int: ...


class TableBase(ABC):
    """A table that this rank has opened.

    Attributes:
        name: of the table.
        dtype: of its values.
        number: of the table in messages.
        client: of this rank.
        asking: names of the attributes that send requests.
    """

    asking: ClassVar[tuple[str, ...]] = ()
    _pushes: Pushes

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
        self._closed: Future[None] | None = None

    def require_same(self, spec: Spec) -> None:
        """Raise MismatchError if this process opens it again with something else."""
        self._spec.require_same(spec, self.client.rank)

    # --- the end --------------------------------------------------------------------------------
    def close(self, timeout_s: float | None = None) -> None:
        """Give the table back: its values are gone, and the servers' memory is free for others.

        Collective over the ranks that have opened it: it waits until all have closed it, or have
        left. Before, it waits for this rank's requests. Then the name may be opened anew, with
        another shape. What else this process does with the table is an error. A second call waits
        for the same.

        Args:
            timeout_s: how long it may take, in seconds; None: ps.init(deadline_s=).

        Raises:
            CommTimeoutError: others have not closed it by then, and it names them; or this rank's
                requests are not answered.
            PeerFailedError: a rank died.
        """
        require_timeout("close", timeout_s)
        client, label = self.client, f"close[{self.name}]"
        if self._closed is None:
            is_idle = lambda: not client.has_requests_of(self.number)  # noqa: E731
            client.wait_until(is_idle, label, lambda: client.servers, timeout_s)
            with self._session.opening:
                begin_close(self)
        assert self._closed is not None
        self._closed.wait(timeout_s)

    def __reduce_ex__(self, protocol: Any) -> Any:
        kind = "table" if self._spec.kind == "dense" else "hashtable"
        raise TypeError(
            f"{kind}[{self.name}]: it cannot be copied or pickled, because its values are on the "
            "servers: pull() fetches them, and ps.save() saves them"
        )

    def begin(self) -> None:
        """Send the first values, which the chief sends; on its heir."""
        return  # not abstract

    def note_replaced(self) -> None:
        """Take note that a checkpoint may have replaced all values."""
        return  # not abstract

    @property
    def needs_values(self) -> bool:
        """True if it begins with values of the chief."""
        return bool(self._spec.initial == "chief")

    def described(self) -> tuple[int, dict[str, Any]]:
        """Return its number and spec, for servers that do not know it."""
        return self.number, self._spec.to_json()

    @property
    def n_rounds(self) -> int:
        """Rounds that this worker has contributed to, or that went by without it."""
        return self._pushes.n_rounds

    @property
    def n_missed(self) -> int:
        """Those of them that went by without this worker, which was late."""
        return self._pushes.n_missed

    @property
    def first_of(self) -> FirstOfRounds | None:
        """The rounds of ps.FirstOf(k) of this worker, which other tables may share."""
        return None

    @abstractmethod
    def reopen(self, created: dict[str, Any]) -> None:
        """Go on with the table under another number, after ps.recover(); see open_once()."""

    @abstractmethod
    def is_on(self, server: int) -> bool:
        """Return True if a server has a part of the table."""

    def lose(self, loss: Loss) -> None:
        """Refuse all calls from now on: a server died, which had a part of some table."""
        for part in self.asking:
            setattr(self, part, _Refusing(partial(loss.error, f"table[{self.name}]")))

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


class _Refusing:
    """Stands for the parts of a table that send requests, if it was closed or lost."""

    def __init__(self, error: Callable[[], Exception]) -> None:
        self._error = error

    def __getattr__(self, attribute: str) -> Any:
        raise self._error()


def _closed(name: str) -> Exception:
    return RingcommError(
        f"table[{name}]: it was closed, and its values are gone. Open it again, or close it later"
    )


def begin_close(table: TableBase) -> None:
    """Report that this rank uses a table no more; with Session.opening, once nothing is asked."""
    if table._closed is not None:
        return
    client, session = table.client, table._session
    table._closed = ask_leader(
        client, f"close[{table.name}]", "close", needs_tables=True, table=table.number
    )
    client.forget_table(table.number)
    del session.tables[table.name]
    for part in table.asking:
        setattr(table, part, _Refusing(partial(_closed, table.name)))


def close_abandoned(session: Session) -> None:
    """Close the tables of optimizers and models that are gone, if nothing is asked of them."""
    for _ in range(len(session.abandoned)):
        table, parameters = session.abandoned.popleft()
        is_needed = any(each() is not None for each in parameters)
        if is_needed or table.client.has_requests_of(table.number):
            session.abandoned.append((table, parameters))
            continue
        with session.opening:
            begin_close(table)


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
        MismatchError: this rank or another opened it with something else. If it ends a worker that
            was there from the start, the job ends: nobody knows which of them is right.
        CommTimeoutError: the leader does not answer.
    """
    with session.opening:
        known: T | None = session.tables.get(spec.name)
        if known is not None:
            known.require_same(spec)
            return known
        client, label = session.client, f"table[{spec.name}]"
        meta = packed_json({"command": "open", "spec": spec.to_json()})
        request = request_command(client, needs_tables=True, meta=meta)
        try:
            created = client.call_one(label, request, json_of).wait()
        except MismatchError:
            layout, me = session.layout, session.engine.job_rank
            if me in layout.workers and me not in layout.joined:  # a newcomer ends alone
                session.refuse_for_all(label)
            raise
        table = session.tables[spec.name] = make(created)
        return table
