"""Broadcast and allgather of Python objects, which are pickled on the way."""

from __future__ import annotations

import pickle
from typing import Any

from ringcomm.engine.core.agreement import broadcast_bytes, gather_bytes
from ringcomm.engine.core.call import Call
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.plan import Plan
from ringcomm.engine.operations.base import rank_of
from ringcomm.transport.channel import Channel


def plan_broadcast_object(group: Group, name: str | None, obj: Any, root: int) -> Plan[bytes]:
    """Plan the copy of root's object to all; the result is its pickle."""
    root = rank_of("root", root, group)
    packed = _pickled("broadcast_object", obj) if group.rank == root else b""

    async def run(t: Channel) -> bytes:
        return await broadcast_bytes(packed, root, t)

    return Plan(Call("broadcast_object", name, root=root), len(packed), run)


def plan_allgather_object(group: Group, name: str | None, obj: Any) -> Plan[list[bytes]]:
    """Plan the exchange of one object per rank; the result is their pickles."""
    del group
    packed = _pickled("allgather_object", obj)
    call = Call("allgather_object", name)
    return Plan(call, len(packed), lambda t: gather_bytes(packed, t))


def _pickled(kind: str, obj: Any) -> bytes:
    try:
        return pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(f"{kind}: obj cannot be pickled: {error}") from error
