"""Starts Horovod's operations in the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringcomm.engine.api.world import engine
from ringcomm.engine.core.execution import Plan
from ringcomm.engine.core.group import Group
from ringcomm.torch.horovod.handles import Handle
from ringcomm.torch.horovod.process_sets import ProcessSet


def begin(
    kind: str,
    name: str | None,
    process_set: ProcessSet,
    lane: str,
    plan: Callable[..., Plan[Any]],
    *args: Any,
    is_awaited: bool = False,
    **options: Any,
) -> Handle[Any]:
    """Begin what plan(group, name, *args, **options) plans, and return its handle.

    Args:
        kind: for a rank whose plan() fails; see Engine.execute().
        name: the user's; None: matched by order in the lane.
        process_set: whose ranks take part.
        lane: see ProcessSet.lane().
        plan: one of ringcomm.engine.operations.plans.
        args: passed on.
        is_awaited: return when it is over, which takes the engine's shorter way there.
        options: passed on.
    """
    ProcessSet.require(process_set)
    group: Group = process_set.group if name is not None else process_set.lane(lane)

    def make(g: Group) -> Plan[Any]:
        return plan(g, name, *args, **options)

    if is_awaited:
        result = engine().execute(kind, name, make, group)
        return Handle((), lambda: result)
    return Handle((engine().start(kind, name, make, group),), lambda result: result)
