"""Pulls of several hash tables at once: one request to each server, and one reply.

The request has the keys of all tables. What need not wait is in the reply. A server answers what
must wait, what has moved, and what it refuses, each by a reply of its own: to the client these are
replies to pulls of one table, so that nothing waits for rows of another table.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ringcomm.errors import ServerLostError
from ringcomm.ps.client.future import Future, FutureOfAll
from ringcomm.ps.client.request import Request
from ringcomm.ps.client.rows.hash_table import HashTable
from ringcomm.ps.client.rows.keys import Portion, Share, shares
from ringcomm.ps.client.rows.requests import may_place
from ringcomm.ps.client.rows.row_calls import JoinedRows, RowCalls
from ringcomm.ps.protocol.frame_meta import Answered, KeyedPull, packed_numbers
from ringcomm.ps.protocol.frames import FrameKind, Status
from ringcomm.ps.protocol.remote_errors import error_of
from ringcomm.ps.session import Session, session

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.client.rows.pulls import RowPull
    from ringcomm.ps.protocol.link import Delivery

Array = NDArray[Any]
_ALIGNED: Final = 64  # bytes


def pull_many(
    pulls: Iterable[tuple[HashTable, ArrayLike]], *, outs: Sequence[Array | None] | None = None
) -> Future[list[Array]]:
    """Fetch rows of several hash tables with one request to each server.

    The results are those of table.pull(keys) of each. Of 26 tables this takes less than a third of
    the time of one pull after the other; `ci/bench pull_many` measures that.

    Args:
        pulls: pairs of a table and its keys; see HashTable. A table may occur more than once.
        outs: for each pair an array that is filled and returned, or None; see HashTable.pull().

    Returns:
        A future of the arrays of rows, in the order of the pairs: shape of the keys, then dim. It
        is done once all are there. Its wait() raises the first error among them. The arrays may
        share memory that lives as long as one of them.

    Raises:
        TypeError, ValueError: a pair is none, or its table is no hash table of this session; keys
            or outs do not fit; nothing was sent.
        CommTimeoutError: the servers are so far behind that no more may be sent.
    """
    current = session()
    prepared = _prepared(_pairs(current, pulls), outs)
    parts = pull_together(current, prepared)
    return FutureOfAll(current.client, _label(prepared), parts)


def pull_together(current: Session, pulls: list[RowPull]) -> list[Future[Array]]:
    return _PullBatch(current, pulls).begin()


def _label(pulls: Sequence[RowPull]) -> str:
    return f"pull_many[{len(pulls)} tables]"


def _pairs(
    current: Session, pulls: Iterable[tuple[HashTable, ArrayLike]]
) -> list[tuple[HashTable, ArrayLike]]:
    found = []
    for k, pair in enumerate(pulls):  # which may be endless: the first that is wrong ends it
        if not (isinstance(pair, tuple | list) and len(pair) == 2):
            raise TypeError(f"pull_many: pulls[{k}] is {pair!r}; it must be a pair (table, keys)")
        table, keys = pair
        if not isinstance(table, HashTable):
            raise TypeError(f"pull_many: pulls[{k}] has {table!r}; it must be of ps.hashtable()")
        if table.client is not current.client:
            raise ValueError(
                f"pull_many: pulls[{k}] has {table!r}, which was opened before this ps.init(). "
                "Open it again"
            )
        found.append((table, keys))
    return found


def _prepared(
    pairs: list[tuple[HashTable, ArrayLike]], outs: Iterable[Array | None] | None
) -> list[RowPull]:
    n = len(pairs)
    outs = [None] * n if outs is None else list(itertools.islice(outs, n + 1))
    if len(outs) != n:
        got = f"more than {n}" if len(outs) > n else len(outs)
        raise ValueError(f"pull_many: got {got} outs for {n} pairs (table, keys)")
    zipped = zip(pairs, outs, strict=True)
    prepared = [table.prepared_pull(keys, out) for (table, keys), out in zipped]
    _require_apart(outs)
    return prepared


def _require_apart(outs: Sequence[Array | None]) -> None:
    given = [(x.ctypes.data, x.nbytes, k) for k, x in enumerate(outs) if x is not None and x.nbytes]
    for (first, nbytes, k), (second, _, m) in itertools.pairwise(sorted(given)):
        if second < first + nbytes:
            raise ValueError(
                f"pull_many: outs[{min(k, m)}] and outs[{max(k, m)}] overlap in memory; each needs "
                "memory of its own"
            )


class _PullPart(NamedTuple):
    """A pull that goes with the others."""

    pull: RowPull
    joined: JoinedRows
    future: Future[Array]
    at: int  # of its rows in the memory of all


class _PullBatch:
    """The pulls of one call. Those whose rows move are made one by one."""

    def __init__(self, current: Session, pulls: list[RowPull]) -> None:
        self._session, self._client = current, current.client
        self._label = _label(pulls)
        self._pulls = pulls
        self._parts: list[_PullPart] = []
        self._joining: list[tuple[RowCalls, Future[Array]]] = []
        self._nbytes = 0
        self._memory: Bytes | None = None

    def begin(self) -> list[Future[Array]]:
        """Send all; return the future of each."""
        futures: list[Future[Array] | None] = []
        try:
            for pull in self._pulls:
                futures.append(self._join(pull))
            requests = self._requests() if self._parts else []
        except BaseException:  # also an interrupt: nothing has been sent
            for calls, future in self._joining:
                calls.leave(future)
            raise
        if requests:
            self._client.submit(requests)
            self._client.flush(always=True)
        both = zip(self._pulls, futures, strict=True)
        return [pull.begin() if future is None else future for pull, future in both]

    def _join(self, pull: RowPull) -> Future[Array] | None:
        """Add a pull to the joint request; return None if it has no keys, or its rows move."""
        if not len(pull.keys):
            return None
        future = Future(self._client, pull.label, 1, pull.finish)
        self._joining.append((pull.calls, future))
        joined = pull.calls.join(pull.split, future)
        if joined is None:
            return None
        self._parts.append(_PullPart(pull, joined, future, self._nbytes))
        self._nbytes += 0 if pull.has_shared_out else pull.nbytes + -pull.nbytes % _ALIGNED
        return future

    def _requests(self) -> list[Request]:
        """Return a request to each server, with its credit."""
        parts = self._parts
        keys, owners = zip(*((each.pull.keys, each.joined.owners) for each in parts), strict=True)
        split = shares(keys, owners, max(self._client.servers))
        near = {share.server for share in split if may_place(self._session, share.server)}
        self._memory = memory = self._session.memory(self._nbytes) if near else None
        for part in parts:
            end = part.at + part.pull.nbytes
            part.pull.use_memory(None if memory is None else memory[part.at : end])
        requests = [self._request(share, is_near=share.server in near) for share in split]
        replied: Future[None] = Future(self._client, self._label, len(requests), lambda: None)
        self._client.reserve(requests, replied, needs_credit=True)
        replied.then(self._pass_on_loss)
        for k, part in enumerate(parts):
            servers = {share.server for share in split if share.counts[k]}
            part.joined.call.n_out = len(servers)
            part.future.expect(len(servers) - 1)
            part.future.carried_by = replied, servers
        return requests

    def _pass_on_loss(self, replied: Future[None]) -> None:
        """Fail all parts if a server died before it had answered; called in the loop."""
        try:
            replied.wait()
        except ServerLostError as error:
            for part in self._parts:
                part.future.fail(error)
        except Exception:  # noqa: BLE001 - _take() has failed the parts that it concerns
            return

    def _request(self, share: Share, *, is_near: bool) -> Request:
        """Return the request to a server: records, keys, and perhaps places of rows."""
        link, asked = self._client.link, []
        base = link.place_of(self._memory) if is_near and self._memory is not None else -1
        for part, first, last in self._cuts(share):
            pull, n_out, place = part.pull, 0, 0
            if base >= 0 and not pull.is_encoded:
                n_out, place = len(pull.keys), base + part.at
                place = link.place_of(pull.memory) if pull.has_shared_out else place
            asked.append(
                KeyedPull(
                    pull.calls.table, part.joined.epoch, self._client.timestamp(), pull.clock,
                    last - first, n_out, place,
                )
            )  # fmt: skip
        pieces = [packed_numbers(asked), share.keys.view(np.uint8)]
        if share.order is not None and is_near:
            pieces.append(share.order.astype(np.uint32).view(np.uint8))
        body = self._session.memory_for(share.server, sum(each.nbytes for each in pieces))
        np.concatenate(pieces, out=body)
        sequences = [each.sequence for each in asked]
        return Request(
            FrameKind.PULLS, server=share.server, option=len(asked), clock=self._session.snapshot,
            body=body, on_end=partial(self._take, share, sequences),
        )  # fmt: skip

    def _cuts(self, share: Share) -> Iterator[tuple[_PullPart, int, int]]:
        last = 0
        for part, n in zip(self._parts, share.counts, strict=True):
            first, last = last, last + n
            if n:
                yield part, first, last

    def _take(self, share: Share, sequences: list[int], reply: Delivery) -> None:
        """Take the reply of a server; called in the loop."""
        if reply.header.status != Status.OK:
            server = self._session.engine.transport.label(reply.source)
            for part, _, _ in self._cuts(share):
                part.future.fail(error_of(reply.meta, part.future.label, server))
                part.pull.calls.ended(part.joined)
            return
        answers = np.frombuffer(reply.meta, "<i8").reshape(len(sequences), -1).tolist()
        both, at = zip(sequences, map(Answered._make, answers), strict=True), 0
        for (part, first, last), (sequence, answer) in zip(self._cuts(share), both, strict=True):
            order = None if share.order is None else share.order[first:last]
            pull = part.pull
            if answer.version < 0:
                portion = Portion(share.server, share.keys[first:last], order)
                pull.calls.expect(part.joined, pull.request(portion), sequence)
                continue
            rows = reply.body[at : at + answer.nbytes]
            at += answer.nbytes
            pull.take(share.server, answer.version, rows, order, answer.option)
            pull.calls.ended(part.joined)
            part.future.replied()
