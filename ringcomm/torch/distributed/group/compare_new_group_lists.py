"""Compares the lists that ranks pass to dist.new_group(), before torch makes the group."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence

from ringcomm.engine.core.agreement import gather_bytes
from ringcomm.engine.core.call import Call, explain_mismatch
from ringcomm.engine.core.plan import Plan
from ringcomm.engine.operations.base import int_of
from ringcomm.errors import MismatchError
from ringcomm.transport.channel import Channel

_SHOWN = 16  # ranks that an error text lists


def compare(mine: Sequence[int], callers: Sequence[int], number: int) -> Plan[None]:
    """Plan to check that all members of each new group pass the same list of ranks.

    `mine` is the list that this rank passes. The `callers` may pass lists of several groups, as in
    new_subgroups(group=...). `number` is the operation's number, for the error text.
    """

    async def run(t: Channel) -> None:
        passed = [tuple(json.loads(each)) for each in await gather_bytes(packed, t)]
        if not are_consistent(dict(zip(callers, passed, strict=True))):
            calls = [Call(f"new_group({_listed(each)})") for each in passed]
            raise MismatchError(explain_mismatch(calls, number, callers))

    packed = json.dumps([int_of("new_group: a rank", rank) for rank in mine]).encode()
    return Plan(Call("new_group"), len(packed), run)


def are_consistent(passed: dict[int, tuple[int, ...]]) -> bool:
    """Return True if all ranks in a list have passed this list; `passed` has the lists by rank."""
    return all(passed.get(rank, each) == each for each in set(passed.values()) for rank in each)


def _listed(ranks: Sequence[int]) -> str:
    if len(ranks) <= _SHOWN:
        return str(list(ranks))
    digest = zlib.crc32(repr(list(ranks)).encode())
    return f"[{', '.join(map(str, ranks[:_SHOWN]))}, ...: {len(ranks)} ranks, crc {digest:08x}]"
