"""Barrier: no rank goes on before all ranks have entered."""

from __future__ import annotations

from ringcomm.engine.core.call import Call
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.plan import Plan
from ringcomm.transport.channel import Channel
from ringcomm.transport.node.steps import MEET


def plan_barrier(group: Group, name: str | None) -> Plan[None]:
    """Plan to move nothing: the agreement is the barrier."""
    del group

    async def run(_: Channel) -> None:
        return None

    return Plan(Call("barrier", name), 0, run, MEET, lambda _: None)
