"""Collectives of Python objects, which are pickled on the way."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringcomm.arrays.base import Bytes
from ringcomm.collectives.message_patterns import from_own
from ringcomm.engine.core.agreement import (
    broadcast_bytes,
    gather_bytes,
    gather_bytes_at,
    scatter_bytes,
)
from ringcomm.engine.core.call import Call
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.plan import Plan
from ringcomm.engine.operations.base import rank_of
from ringcomm.transport.channel import Channel
from ringcomm.transport.node.steps import NodeExchange, Pulls, ShownByAll


def plan_broadcast_object(group: Group, name: str | None, obj: Any, root: int) -> Plan[bytes]:
    """Plan the copy of root's object to all; the result is its pickle."""
    root = rank_of("root", root, group)
    is_root = group.rank == root
    packed: Any = pickled("broadcast_object", obj) if is_root else b""
    received = packed

    def pulls_from(shown: ShownByAll) -> Pulls:
        nonlocal received
        out = np.empty(shown[root][1], np.uint8)
        received = out.data
        return [(root, 0, out)]

    async def run(t: Channel) -> bytes:
        return await broadcast_bytes(packed, root, t)

    step = NodeExchange(_bytes_of(packed), b"", None if is_root else pulls_from)
    call = Call("broadcast_object", name, root=root)
    return Plan(call, len(packed), run, step, lambda _: received)


def plan_allgather_object(group: Group, name: str | None, obj: Any) -> Plan[list[bytes]]:
    """Plan the exchange of one object per rank; the result is their pickles."""
    packed = pickled("allgather_object", obj)
    call = Call("allgather_object", name)
    received: list[Any] = []

    def pulls_from(shown: ShownByAll) -> Pulls:
        outs = [np.empty(nbytes, np.uint8) for _, nbytes in shown]
        received[:] = [out.data for out in outs]
        return [(r, 0, outs[r]) for r in from_own(group.index, group.size)]

    step = NodeExchange(_bytes_of(packed), b"", pulls_from)
    return Plan(call, len(packed), lambda t: gather_bytes(packed, t), step, lambda _: received)


def plan_gather_object(group: Group, name: str | None, obj: Any, root: int) -> Plan[list[bytes]]:
    """Plan the way of each rank's object to root; the result is their pickles there, else []."""
    root = rank_of("root", root, group)
    packed = pickled("gather_object", obj)
    call = Call("gather_object", name, root=root)
    return Plan(call, len(packed), lambda t: gather_bytes_at(packed, root, t))


def plan_scatter_object(
    group: Group, name: str | None, objs: Sequence[Any] | None, root: int
) -> Plan[bytes]:
    """Plan the way of each of root's objects to its rank; the result is the pickle of this one's.

    The other ranks pass None.
    """
    root = rank_of("root", root, group)
    packed: list[bytes] = []
    if group.rank == root:
        if not isinstance(objs, list | tuple):
            kind = type(objs).__name__
            raise TypeError(f"scatter_object: objs must be a list or tuple on root, not {kind}")
        if len(objs) != group.size:
            raise ValueError(
                f"scatter_object: root has {len(objs)} objects for {group.size} ranks; pass one "
                "for each"
            )
        packed = [pickled("scatter_object", obj) for obj in objs]
    call = Call("scatter_object", name, root=root)
    return Plan(call, sum(map(len, packed)), lambda t: scatter_bytes(packed, root, t))


def pickled(kind: str, obj: Any) -> bytes:
    try:
        return pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(f"{kind}: obj cannot be pickled: {error}") from error


def _bytes_of(packed: bytes) -> Bytes:
    return np.frombuffer(packed, np.uint8)
