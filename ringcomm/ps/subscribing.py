"""ps.subscribe(): what changes in tables, told to evaluators and exporters while it happens."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from ringcomm.errors import RingcommError
from ringcomm.ps.client import Ask
from ringcomm.ps.deltas import Delta, RowDelta, Stamp, pull_delta, pull_row_delta
from ringcomm.ps.frames import Kind
from ringcomm.ps.future import Future
from ringcomm.ps.job import Session, session
from ringcomm.ps.opening import LIST
from ringcomm.ps.optim import from_json
from ringcomm.ps.serving import LEADER
from ringcomm.ps.spec import Spec
from ringcomm.ps.table import Table

if TYPE_CHECKING:
    from ringcomm.ps.hashtable import HashTable
    from ringcomm.ps.link import Delivery

_AFTER_ALL: Final = 1 << 62  # steps that nobody reaches


class News(NamedTuple):
    """What has changed since the last news.

    Attributes:
        tables: name -> the blocks that have changed, of dense tables.
        hashtables: name -> the rows that have changed, of hash tables.
        specs: name -> what the table is: shape, dtype and so on; of all that there are.
        asked_at: when this rank began to ask, in seconds of time.monotonic(): all that servers had
            carried out by then is in this news, or was in one before.
    """

    tables: dict[str, Delta]
    hashtables: dict[str, RowDelta]
    specs: dict[str, Spec]
    asked_at: float


def subscribe(*tables: str | Table | HashTable, every: float = 1.0) -> Subscription:
    """Return an iterator over what changes, as a context manager.

        with ps.subscribe(every=0.5) as subscription:
            for news in subscription:
                for name, delta in news.tables.items():
                    for where, values in delta.blocks: ...

    The first news is all there is, each later one what has changed since the one before; if nothing
    has, the iterator goes on waiting. An update that a server has carried out is told no later than
    `every` seconds and the time of one pull after it, to who asks for the next news by then: news
    are not queued, and who is slow gets the newest. Each block, and each row, is whole; together
    they are of no one moment: for that there is ps.snapshot(). It waits for no round.

    The iterator ends, after the last news, once all workers have left; on a worker, when it leaves.

    Args:
        tables: by name, or opened; all that there are by default, also those that are made later.
        every: seconds from the beginning of one pull to that of the next.

    Raises:
        ValueError: `every` is negative, or not finite.
        RingcommError: this rank is within ps.snapshot().

    The iterator raises CommTimeoutError where a server does not answer within
    ps.init(deadline_s=), and PeerFailedError.
    """
    current = session()
    if not 0 <= every < math.inf:
        raise ValueError(f"ps.subscribe: every is {every} s; it must be 0 or more")
    names = {each if isinstance(each, str) else each.name for each in tables}
    return Subscription(current, names, every)


class Subscription:
    """An iterator over News; see subscribe().

    Args:
        current: of this rank.
        names: of tables; all if empty.
        every: seconds.
    """

    def __init__(self, current: Session, names: set[str], every: float) -> None:
        self._session = current
        self._client = current.client
        self._names = names
        self._every = every
        self._due = -math.inf
        self._is_closed = False
        self._tables: dict[int, _Followed] = {}
        self._end = self._ask_for_end()
        current.engine.extensions.before_leaving(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the iterator, also one that another thread waits for; again: nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._session.engine.nudge()

    def __iter__(self) -> Iterator[News]:
        return self

    def __next__(self) -> News:
        while not self._is_closed:
            news = self._pull_when_due()
            if news is not None and (news.tables or news.hashtables):
                return news
        raise StopIteration

    def _pull_when_due(self) -> News | None:
        """Return the next news; None: it was closed meanwhile."""
        if self._session.snapshot:
            raise RingcommError("ps.subscribe: not within ps.snapshot()")
        left = max(0.0, self._due - time.monotonic())
        is_last = self._client.drive_until(self._has_ended, "ps.subscribe", left)
        if self._is_closed:
            return None
        news = self._pull()
        self._is_closed |= is_last  # what was pushed to the end is in it
        return news

    def _has_ended(self) -> bool:
        return self._is_closed or self._end.done()

    def _ask_for_end(self) -> Future[None]:
        """Return what is done once all workers have left; on a worker that is too late."""
        client = self._client
        future: Future[None] = Future(client, "ps.subscribe", 1, lambda: None, client.timestamp())
        if self._session.engine.job_rank not in self._session.layout.workers:
            ask = Ask(Kind.TICK, server=LEADER, clock=_AFTER_ALL, option=1)
            client.ask([ask], future)
        return future

    def _pull(self) -> News:
        asked_at = time.monotonic()
        self._due = asked_at + self._every
        self._find_tables()
        followed = list(self._tables.values())
        pulls = [each.pull() for each in followed]
        tables, hashtables = {}, {}
        for each, pull in zip(followed, pulls, strict=True):
            delta = pull.wait()
            each.since = delta.stamp
            if isinstance(delta, Delta):
                if delta.blocks:
                    tables[each.spec.name] = delta
            elif len(delta.keys) or len(delta.erased) or len(delta.renewed):
                hashtables[each.spec.name] = delta
        return News(tables, hashtables, {each.spec.name: each.spec for each in followed}, asked_at)

    def _find_tables(self) -> None:
        """Follow the tables that have been made meanwhile."""
        told: list[dict[str, Any]] = []

        def note(reply: Delivery) -> None:
            told.extend(json.loads(reply.body.tobytes()))

        client = self._client
        future: Future[None] = Future(client, "ps.subscribe", 1, lambda: None, client.timestamp())
        client.ask([Ask(Kind.CREATE, server=LEADER, option=LIST, on_reply=note)], future)
        future.wait()
        for each in told:
            spec = Spec.of_json(each["spec"])
            is_wanted = not self._names or spec.name in self._names
            if is_wanted and each["number"] not in self._tables:
                self._tables[each["number"]] = _Followed(self._session, spec, each)


class _Followed:
    """A table, and when this rank has looked at it last.

    Args:
        current: of this rank.
        spec: of the table.
        told: what the leader says of it.
    """

    def __init__(self, current: Session, spec: Spec, told: dict[str, Any]) -> None:
        self.spec = spec
        self.since: Stamp | int = 0
        self._client = current.client
        self._number = told["number"]
        self._table: Table | None = None
        if spec.kind == "dense":
            epochs = {int(part): epoch for part, epoch in told["epochs"].items()}
            current.client.know(self._number, told["owners"], epochs)
            self._table = Table(current, spec, from_json(spec.updater), told)

    def pull(self) -> Future[Delta] | Future[RowDelta]:
        """Ask for what has changed, whatever the rounds."""
        if self._table is not None:
            return pull_delta(self._table, self.since, None, waits=False)
        return pull_row_delta(
            self._client,
            self.spec.name,
            self.since,
            number=self._number,
            clock=0,
            n_partitions=self.spec.partitions,
        )
