"""Pushes to one hash table: split into requests to its servers, numbered by rounds."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from ringcomm.ps.client.first_of import request_entry
from ringcomm.ps.client.future import Future, Pushed
from ringcomm.ps.client.request import PushReplies, Request
from ringcomm.ps.client.rows.keys import Keys, Portion, portions
from ringcomm.ps.client.rows.requests import (
    keys_and_rows,
    may_place,
    regrouped,
    staged,
    without_keys,
)
from ringcomm.ps.client.rows.row_calls import KeyedRequest, RowCalls
from ringcomm.ps.protocol.frame_meta import (
    ASSIGN,
    HOLD,
    PLACED,
    RELEASE,
    SKIP,
    SPARSE,
    Owners,
    PushMeta,
)
from ringcomm.ps.protocol.frames import INLINE_MAX, FrameKind
from ringcomm.ps.protocol.row_compression import WireRows, not_finite

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.optim import Updater
    from ringcomm.ps.session import Session
    from ringcomm.ps.table_spec import Spec


class RowContribution(NamedTuple):
    """One call of HashTable.push().

    Attributes:
        keys: flat.
        rows: of the keys.
        weight: in the mean of a round.
        is_assign: the rows replace those at the servers, and are part of no round.
        is_held: the mean of the round becomes an update by release().
        is_strict: NaN and inf are an error.
        is_shared: the rows are in shared memory, and do not change before the push is done.
    """

    keys: Keys
    rows: WireRows
    weight: float
    is_assign: bool
    is_held: bool
    is_strict: bool
    is_shared: bool


class _PushPart(NamedTuple):
    """One server's part of a push: keys; rows in its body, or their place in shared memory."""

    portion: Portion
    body: Bytes
    flags: int = 0
    place: int = 0


class UsedKeys:
    """The keys that this process has written to, or pulled, since this was made.

    Args:
        most: keys that are kept; beyond that, all may have been used.
    """

    def __init__(self, most: int) -> None:
        self._keys: list[Keys] | None = []
        self._n_left = most

    def add(self, keys: Keys | None) -> None:
        """Note keys, which the caller may change later; None: perhaps all."""
        self._n_left -= 0 if keys is None else len(keys)
        if keys is None or self._n_left < 0:
            self._keys = None
        elif self._keys is not None:
            self._keys.append(keys.copy())

    def among(self, keys: Keys) -> NDArray[np.bool_] | None:
        if self._keys is None:
            return None
        return np.isin(keys, np.concatenate([*self._keys, np.empty(0, np.uint64)]))


class RowPushes:
    """Sends the pushes of this process to one table, and counts its rounds.

    Attributes:
        n_rounds: see TableBase.
        n_missed: see TableBase.
    """

    def __init__(self, session: Session, spec: Spec, number: int, calls: RowCalls) -> None:
        self._session, self._client, self._spec = session, session.client, spec
        self._table, self._calls = number, calls
        self._label = f"push[{spec.name}]"
        self._versions: defaultdict[int, int] = defaultdict(int)  # by server
        self.n_rounds = session.begins.get(number, 0) if spec.mode.has_rounds else 0
        self.n_missed = 0
        self._watching: WeakSet[UsedKeys] = WeakSet()
        self._held = -1  # number of the round that was pushed last with hold=True
        self._lock = threading.Lock()  # of versions and numbers

    def push(self, push: RowContribution, updater: Updater) -> Future[Pushed]:
        has_rounds = self._spec.mode.has_rounds and not push.is_assign
        if not has_rounds:
            self.note_used(push.keys)
        everyone = self._client.servers if has_rounds else ()
        flags = SPARSE | (ASSIGN if push.is_assign else 0) | (HOLD if push.is_held else 0)
        hyper, number, late_at = updater.hyper, -1, None
        replies, places = PushReplies(is_held=push.is_held, is_sparse=True), itertools.count()
        first = [(push.keys, push.rows)]
        if push.is_shared and push.is_strict and not push.rows.is_finite:
            raise not_finite(self._spec.name, push.rows.n)

        def split(owners: Owners, returned: list[KeyedRequest]) -> list[KeyedRequest]:
            nonlocal number, late_at
            if push.is_shared:
                rows, chosen = push.rows, regrouped(push.keys, returned, owners, everyone)
            else:
                keys, rows = keys_and_rows(returned, self._spec) if returned else first.pop()
                chosen = portions(keys, owners, everyone)
            parts = [self._part(each, rows, push) for each in chosen]
            if number < 0:  # nothing can go wrong any more
                number, late_at = self._draw(is_assign=push.is_assign)
                if late_at is not None:
                    return []
            return [request(each, rows.dtype) for each in parts]

        def request(part: _PushPart, dtype: str) -> KeyedRequest:
            own = part.portion
            clock = number if has_rounds else self._versions[own.server]
            meta = PushMeta(
                push.weight, part.place, len(own.keys), dtype, flags | part.flags, hyper
            ).packed()
            return KeyedRequest(own, Request(
                FrameKind.PUSH, server=own.server, table=self._table, clock=clock, meta=meta,
                body=part.body, on_reply=replies.taking(next(places)),
            ))  # fmt: skip

        future = self._calls.begin(
            self._label,
            split,
            lambda: replies.outcome() if late_at is None else Pushed(False, "late", late_at),
            lambda: self._give_back(number, is_assign=push.is_assign),
            needs_credit=not push.is_held,
        )
        if push.is_held:
            self._held = number
        return future

    def _part(self, portion: Portion, rows: WireRows, push: RowContribution) -> _PushPart:
        n, order = len(portion.keys), portion.order
        is_near = push.is_shared and may_place(self._session, portion.server)
        if is_near and rows.nbytes(n) > INLINE_MAX and (memory := rows.plain) is not None:
            own, body, rest = staged(self._session, portion, 0 if order is None else 4 * n)
            if order is not None:
                rest.view(np.uint32)[:] = order
            return _PushPart(own, body, PLACED, self._client.link.place_of(memory))
        own, body, rest = staged(self._session, portion, rows.nbytes(n))
        if not rows.write(order, rest) and push.is_strict:
            raise not_finite(self._spec.name, rows.n)
        return _PushPart(own, body)

    def release(self, factor: float, *, is_skip: bool, updater: Updater) -> Future[Pushed]:
        number, replies = self._held, PushReplies(is_sparse=True)
        flags = SPARSE | RELEASE | (SKIP if is_skip else 0)
        meta = PushMeta(factor, 0, 0, "", flags, updater.hyper).packed()

        def request(server: int) -> Request:
            return Request(
                FrameKind.PUSH, server=server, table=self._table, clock=number, meta=meta,
                on_reply=replies.taking(server),
            )  # fmt: skip

        def split(_owners: Owners, _returned: list[KeyedRequest]) -> list[KeyedRequest]:
            replies.clear()  # if rows have moved meanwhile, all servers are asked again
            return [without_keys(request(server)) for server in self._client.servers]

        return self._calls.begin(f"release[{self._spec.name}]", split, replies.outcome)

    # --- rounds ---------------------------------------------------------------------------------
    def _draw(self, *, is_assign: bool) -> tuple[int, int | None]:
        """Return the number of a push; and after how many rounds it comes, if it is late."""
        with self._lock:
            number, self.n_rounds = self.n_rounds, self.n_rounds + (not is_assign)
        if is_assign or self._spec.mode.name != "first_of":
            return number, None
        try:
            entry = request_entry(self._client, self._label, self._table, number).wait()
        except BaseException:
            self._give_back(number, is_assign=is_assign)
            raise
        if entry.is_in:
            return number, None
        with self._lock:
            self.n_missed += 1
        return number, entry.rounds

    def _give_back(self, number: int, *, is_assign: bool) -> None:
        """Use the number of a push again, of which nothing was sent."""
        with self._lock:
            if not is_assign and self.n_rounds == number + 1:
                self.n_rounds = number

    def clock_of_pull(self, ahead: int = 0) -> int:
        """Return how much rows must have that this process pulls: rounds, or steps with SSP.

        Args:
            ahead: rounds, or steps, that will be over by then.
        """
        mode = self._spec.mode
        if mode.name == "ssp":
            return max(0, self._session.clock + ahead - mode.bound)
        return self.n_rounds + ahead if mode.has_rounds else 0

    def watched(self, most: int) -> UsedKeys:
        """Return the keys used from now on, without those that the clock of a pull counts."""
        used = UsedKeys(most)
        self._watching.add(used)
        return used

    def note_used(self, keys: Keys | None) -> None:
        """Note that keys are written to, or pulled; None: perhaps all are."""
        if len(self._watching):
            for each in tuple(self._watching):
                each.add(keys)

    def note_pulled(self, server: int, version: int) -> None:
        if version == self._versions.get(server):
            return
        with self._lock:
            self._versions[server] = max(self._versions[server], version)
            if self._spec.mode.has_rounds:
                n_more = max(0, version - self.n_rounds)
                self.n_rounds += n_more
                self.n_missed += n_more
