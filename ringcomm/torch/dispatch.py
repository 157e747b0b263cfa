"""Hands an operation of this face to the engine: which group, which name, which plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringcomm.engine.execution import Plan
from ringcomm.engine.group import Group
from ringcomm.engine.world import engine
from ringcomm.torch.handles import Handle
from ringcomm.torch.process_sets import ProcessSet


def start(
    kind: str,
    name: str | None,
    process_set: ProcessSet,
    lane: str,
    plan: Callable[..., Plan[Any]],
    *args: Any,
    **options: Any,
) -> Handle[Any]:
    """Start what plan(group, name, *args, **options) plans, and return its handle.

    Args:
        kind: for a rank whose plan() fails; see Engine.execute().
        name: the user's; None: matched by order in the lane.
        process_set: whose ranks take part.
        lane: see ProcessSet.lane().
        plan: one of ringcomm.engine.plans.
        args: passed on.
        options: passed on.
    """
    group: Group = process_set.group if name is not None else process_set.lane(lane)
    handle = engine().start(kind, name, lambda g: plan(g, name, *args, **options), group)
    return Handle([handle], lambda result: result)
