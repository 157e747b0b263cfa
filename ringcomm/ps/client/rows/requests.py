"""Builds requests to the servers of a hash table: keys, and memory for bodies and replies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from ringcomm.ps.client.request import Request
from ringcomm.ps.client.rows.keys import Keys, Portion, portions
from ringcomm.ps.client.rows.row_calls import KeyedRequest
from ringcomm.ps.protocol.frame_meta import ENCODED, Owners, PushMeta
from ringcomm.ps.protocol.row_compression import WireRows, decoded_rows

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.session import Session
    from ringcomm.ps.table_spec import Spec

Array = NDArray[Any]
_KEY: Final = 8  # bytes
_NO_KEYS: Final = np.empty(0, np.uint64)


def staged(session: Session, portion: Portion, nbytes: int = 0) -> tuple[Portion, Bytes, Bytes]:
    """Return a portion with keys of its own, the body that has them, and `nbytes` behind them."""
    n = _KEY * len(portion.keys)
    body = session.memory_for(portion.server, n + nbytes)
    keys = body[:n].view(np.uint64)
    keys[:] = portion.keys
    return portion._replace(keys=keys), body, body[n:]


def may_place(session: Session, server: int) -> bool:
    """Return True if a request may say where its rows are in this rank's memory, or shall be.

    Else they are in the request, or the reply: it may be asked again, of a copy on another host.
    """
    client, layout = session.client, session.layout
    copies = layout.servers if layout.replication > 1 else ()
    return client.shares_memory(server) and all(map(client.link.shares_memory, copies))


def without_keys(request: Request) -> KeyedRequest:
    return KeyedRequest(Portion(request.server, _NO_KEYS, None), request)


def keys_and_rows(returned: list[KeyedRequest], spec: Spec) -> tuple[Keys, WireRows]:
    """Return the keys and rows in the bodies of pushes; those that are encoded, decoded."""
    keys = np.concatenate([each.portion.keys for each in returned])
    name = PushMeta.of(returned[0].request.meta).dtype
    bodies = [(each.request.body, len(each.portion.keys)) for each in returned]
    if name == ENCODED:
        found, name = [decoded_rows(body, n, spec)[1] for body, n in bodies], spec.dtype
    else:
        kind = np.dtype(np.uint16 if name == "bfloat16" else name)
        found = [body[_KEY * n :].view(kind) for body, n in bodies]
    rows = np.concatenate([each.reshape(-1) for each in found])
    return keys, WireRows(rows.reshape(-1, spec.count), name)


def regrouped(
    keys: Keys, returned: list[KeyedRequest], owners: Owners, also: Iterable[int] = ()
) -> list[Portion]:
    """Return the keys of a call by server; if some requests were returned, the keys of these.

    `also`: see portions().
    """
    if not returned:
        return portions(keys, owners, also)
    keys = np.concatenate([each.portion.keys for each in returned])
    orders = [each.portion.order for each in returned]
    if len(returned) == 1 and orders[0] is None:
        return portions(keys, owners, also)
    places = np.concatenate([order for order in orders if order is not None])
    return [
        each._replace(order=places if each.order is None else places[each.order])
        for each in portions(keys, owners, also)
    ]
