"""What has changed since a client looked last, a server's side.

A stamp counts the changes of one life of a block, or of a server's part of a hash table. A life
ends when it is made anew: in another job, at another server. Stamps of another life say nothing:
then all there is comes.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringcomm.ps.messages import UNCHANGED
from ringcomm.ps.state import State

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.hashed import Keys, Shard
    from ringcomm.ps.link import Delivery
    from ringcomm.ps.serving import Server

STAMP: Final = struct.Struct("<qQ")  # stamp, life: meta of a dense block's request and reply
PAGE_NBYTES: Final = 1 << 20  # of rows in one reply, or one row


class Place(NamedTuple):
    """Where a scan of a hash table goes on.

    Attributes:
        partition: the first that is not done.
        cursor: within it.
        is_whole: all of its rows are told, whenever they changed.
    """

    partition: int = 0
    cursor: int = 0
    is_whole: bool = False


class Changes:
    """What one server tells those who ask for changes.

    Args:
        server: whose blocks and rows they are.
    """

    def __init__(self, server: Server) -> None:
        self._server = server

    def of_block(self, request: Delivery) -> None:
        """Send a block's values if they have changed since the stamp that the request brings."""
        part = self._server.part_of(request)
        if part is None:
            return

        def answer() -> None:
            stamp, life = STAMP.unpack(request.meta)
            meta = STAMP.pack(part.stamp, part.life)
            if (stamp, life) == (part.stamp, part.life):
                self._server.reply(request, meta=meta, clock=part.version, option=UNCHANGED)
            else:
                self._server.send_values(request, part, meta)

        self._server.wait(request, part, answer)

    def of_rows(self, request: Delivery, shard: Shard) -> None:
        """Send a page of the rows that have changed since the stamp that the request brings."""
        said = json.loads(request.meta)

        def answer() -> None:
            until = shard.stamp if said["until"] is None else said["until"]
            page = _Page(shard, since=said["stamp"] if said["life"] == shard.life else None)
            page.fill(Place(*said["place"]))
            self._server.reply(request, body=page.packed(until), clock=shard.version)

        self._server.wait(request, shard, answer, goes_along=False)


class _Page:
    """Some of the rows that have changed.

    Args:
        shard: whose rows they are.
        since: stamp after which they did; None: all rows.
    """

    def __init__(self, shard: Shard, since: int | None) -> None:
        self._shard, self._since = shard, since
        self._room = max(1, PAGE_NBYTES // shard.row_nbytes())
        self._keys: list[Keys] = [np.empty(0, np.uint64)]
        self._rows: list[NDArray[Any]] = [np.empty((0, shard.dim), shard.dtype)]
        self._erased: list[Keys] = [np.empty(0, np.uint64)]
        self._renewed: list[int] = []
        self._next: Place | None = None

    def fill(self, place: Place) -> None:
        """Take rows from a place on, as many as there is room for."""
        for number in sorted(self._shard.partitions):
            if number < place.partition:
                continue
            at: Place | None = place if number == place.partition else Place(number)
            while at is not None:
                if self._room <= 0:
                    self._next = at
                    return
                at = self._take(at)

    def _take(self, at: Place) -> Place | None:
        """Take rows of one partition; return where it goes on."""
        shard, (number, cursor, is_whole) = self._shard, at
        rows, since = shard.rows.find(number), self._since
        if not cursor:
            is_whole = since is None or shard.renewed.get(number, 0) > since
        if rows is not None and not is_whole:
            assert since is not None
            following, arrays, erased, is_complete = rows.changed_since(since, cursor, self._room)
            if cursor or is_complete:
                self._note(arrays, erased)
                return None if following < 0 else Place(number, following)
            is_whole = True  # it does not know any more what was erased
        if is_whole and not cursor:
            self._renewed.append(number)
        if rows is None:
            return None
        following, arrays = rows.export(cursor, self._room)
        self._note(arrays, self._erased[0])
        return None if following < 0 else Place(number, following, is_whole=True)

    def _note(self, arrays: Any, erased: Keys) -> None:
        keys, values = arrays[:2]
        self._keys.append(keys)
        self._rows.append(values.reshape(-1, self._shard.dim))
        self._erased.append(erased)
        self._room -= len(keys)

    def packed(self, until: int) -> Bytes:
        """Return it as the body of a reply."""
        arrays = {
            "keys": np.concatenate(self._keys),
            "rows": np.concatenate(self._rows),
            "erased": np.concatenate(self._erased),
            "renewed": np.array(self._renewed, np.uint32),
        }
        meta = {"stamp": until, "life": self._shard.life, "next": self._next}
        return np.concatenate(State(meta, arrays).packed())
