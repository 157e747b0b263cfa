"""Barrier: every rank has come."""

from __future__ import annotations

from ringcomm.engine.core.call import Call
from ringcomm.engine.core.execution import Plan
from ringcomm.engine.core.group import Group
from ringcomm.transport.channel import Channel
from ringcomm.transport.node.steps import MEET


def plan_barrier(group: Group, name: str | None) -> Plan[None]:
    """Plan nothing: the agreement is the barrier."""
    del group

    async def run(_: Channel) -> None:
        return None

    return Plan(Call("barrier", name), 0, run, MEET, lambda _: None)


def stand_in(group: Group, call: Call) -> Plan[None]:
    """Plan the part of a rank that has joined: to come."""
    return plan_barrier(group, call.name)
