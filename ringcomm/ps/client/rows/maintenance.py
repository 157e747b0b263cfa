"""Counts, ages and removal of the rows of a hash table."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ringcomm.ps.client.request import Request
from ringcomm.ps.client.rows.keys import Keys, Portion, keys_of
from ringcomm.ps.client.rows.requests import regrouped, staged, without_keys
from ringcomm.ps.client.rows.row_calls import KeyedRequest, RowCalls
from ringcomm.ps.protocol.frame_meta import Owners
from ringcomm.ps.protocol.frames import CallOption, FrameKind
from ringcomm.ps.server.rows.hash_shard import METADATA_ITEM

if TYPE_CHECKING:
    from ringcomm.ps.client.future import Future
    from ringcomm.ps.protocol.link import Delivery
    from ringcomm.ps.session import Session


class Metadata(NamedTuple):
    """The statistics of rows; arrays with the shape of the keys.

    Attributes:
        pushes: that contained the key since it has a row; 0: it has none.
        steps: of them, those by the updater of the table.
        time: of the last push, in seconds since 1970 by the server's clock; NaN without a row.
    """

    pushes: NDArray[np.uint32]
    steps: NDArray[np.uint32]
    time: NDArray[np.float64]


class Maintenance:
    """Asks the servers of one hash table; see HashTable's methods of these names."""

    def __init__(self, session: Session, calls: RowCalls, name: str, number: int) -> None:
        self._session = session
        self._calls = calls
        self._name = name
        self._number = number

    def erase(self, keys: ArrayLike) -> Future[int]:
        """Remove the rows of keys; return how many there were."""
        flat, _ = keys_of(f"erase[{self._name}]", keys)
        counts: list[int] = []

        def take(_portion: Portion, reply: Delivery) -> None:
            counts.append(reply.header.clock)

        return self._about_keys("erase", flat, take, lambda: sum(counts))

    def metadata(self, keys: ArrayLike) -> Future[Metadata]:
        flat, shape = keys_of(f"metadata[{self._name}]", keys)
        items = np.empty(len(flat), METADATA_ITEM)

        def take(portion: Portion, reply: Delivery) -> None:
            order = portion.order
            items[slice(None) if order is None else order] = reply.body.view(METADATA_ITEM)

        def finish() -> Metadata:
            return Metadata(*(items[name].reshape(shape) for name in Metadata._fields))

        return self._about_keys("metadata", flat, take, finish)

    def _about_keys(
        self,
        what: Literal["erase", "metadata"],
        keys: Keys,
        take: Callable[[Portion, Delivery], None],
        finish: Callable[[], Any],
    ) -> Future[Any]:
        option = CallOption.ERASE if what == "erase" else CallOption.METADATA

        def request_for(portion: Portion) -> KeyedRequest:
            own, body, _ = staged(self._session, portion)
            request = Request(
                FrameKind.CALL, server=own.server, table=self._number, option=option, body=body,
                on_reply=lambda reply: take(own, reply),
            )  # fmt: skip
            return KeyedRequest(own, request)

        def split(owners: Owners, returned: list[KeyedRequest]) -> list[KeyedRequest]:
            return [request_for(portion) for portion in regrouped(keys, returned, owners)]

        return self._calls.begin(f"{what}[{self._name}]", split, finish)

    def evict(self) -> Future[int]:
        return self._total("evict", CallOption.EVICT)

    def n_rows(self) -> Future[int]:
        return self._total("n_rows", CallOption.COUNT)

    def _total(self, what: str, option: CallOption) -> Future[int]:
        """Return the sum over all servers; all are asked again if rows have moved meanwhile."""
        counts: list[list[int]] = []  # a list for each view in which the servers were asked

        def request(server: int, own: list[int]) -> Request:
            return Request(
                FrameKind.CALL, server=server, table=self._number, option=option,
                on_reply=lambda reply: own.append(reply.header.clock),
            )  # fmt: skip

        def split(_owners: Owners, _returned: list[KeyedRequest]) -> list[KeyedRequest]:
            counts.append([])
            return [
                without_keys(request(each, counts[-1])) for each in self._session.client.servers
            ]

        def finish() -> int:
            # A row may have moved to a server that had counted, or from one. And an answer of an
            # older view is taken after split(), if it is the last of its view.
            return sum(counts[-1] if option == CallOption.COUNT else map(sum, counts))

        return self._calls.begin(f"{what}[{self._name}]", split, finish)
