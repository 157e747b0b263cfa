"""Compares what ranks pass to dist.new_group(), before torch makes anything."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence

from ringcomm.engine.core.agreement import gather_bytes
from ringcomm.engine.core.call import Call, explain_mismatch
from ringcomm.engine.core.execution import Plan
from ringcomm.errors import MismatchError
from ringcomm.transport.channel import Channel

_SHOWN = 16  # ranks that a message names


def compare(mine: Sequence[int], callers: Sequence[int], number: int) -> Plan[None]:
    """Compare the groups that `callers` are about to make: all members of one must make it.

    Ranks may be about to make different groups: new_subgroups(group=...) has each rank make the
    parts of its own group. `number` is that of the operation, for the message.
    """

    async def run(t: Channel) -> None:
        passed = [tuple(json.loads(each)) for each in await gather_bytes(packed, t)]
        if not are_consistent(dict(zip(callers, passed, strict=True))):
            calls = [Call(f"new_group({_listed(each)})") for each in passed]
            raise MismatchError(explain_mismatch(calls, number, callers))

    packed = json.dumps(list(mine)).encode()
    return Plan(Call("new_group"), len(packed), run)


def are_consistent(passed: dict[int, tuple[int, ...]]) -> bool:
    """Return True if whoever is in a list has passed that list; by rank, who was asked."""
    return all(passed.get(rank, each) == each for each in set(passed.values()) for rank in each)


def _listed(ranks: Sequence[int]) -> str:
    """Return the ranks; of many the first, and what tells them from others."""
    if len(ranks) <= _SHOWN:
        return str(list(ranks))
    digest = zlib.crc32(repr(list(ranks)).encode())
    return f"[{', '.join(map(str, ranks[:_SHOWN]))}, ...: {len(ranks)} ranks, crc {digest:08x}]"
