"""States of whole parameters, made of what each rank holds of its part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ringcomm.engine.api import collectives
from ringcomm.engine.api.world import engine
from ringcomm.engine.core.group import Group
from ringcomm.engine.operations.into import plan_allgather_into
from ringcomm.errors import RingcommError
from ringcomm.torch.zero.parameter_state import ParameterState

_Layout = tuple[
    dict[str, str], dict[str, Any]
]  # dtypes of a ParameterState's lines, and what is alike


def gather_states(
    mine: Mapping[int, ParameterState],
    shares: Mapping[int, Sequence[int]],
    names: Sequence[str],
    group: Group,
    suffix: str,
) -> Iterator[tuple[int, ParameterState]]:
    """Yield parameters, and what all ranks together hold of each; nothing of those without a state.

    Collective: every rank goes through all of them, one parameter's lines at a time.

    Args:
        mine: by the index of the parameter, what this rank holds of its part.
        shares: the parameters in question, and how many elements of each are whose, in rank order.
        names: of all parameters, for messages.
        group: whose ranks they are.
        suffix: of the names of messages.
    """
    mine = {index: mine[index] for index in shares if mine.get(index)}
    layouts: list[dict[int, _Layout]] = collectives.allgather_object(
        {index: _layout(state) for index, state in mine.items()},
        name=f"layout of the state{suffix}",
        group=group,
    )
    for index, counts in shares.items():
        owners = [theirs.get(index) for theirs, n in zip(layouts, counts, strict=True) if n]
        layout = _agreed(owners, names[index])
        if layout is None:
            continue
        dtypes, alike = layout
        lines = {}
        for key, dtype in dtypes.items():
            own = mine[index].by_element[key] if index in mine else None
            name = f"{key} of {names[index]}{suffix}"
            lines[key] = _gather(own, getattr(torch, dtype), counts, name, group)
        yield index, ParameterState(lines, alike)


def _layout(state: ParameterState) -> _Layout:
    dtypes = {key: str(line.dtype).removeprefix("torch.") for key, line in state.by_element.items()}
    return dtypes, state.common


def _agreed(layouts: Sequence[_Layout | None], name: str) -> _Layout | None:
    """Return what all owners have said; None if none has a state, or there is no element."""
    if not any(layouts):
        return None
    first = layouts[0]
    for other in layouts[1:]:
        if first is None or other is None or not _is_same(first, other):
            raise RingcommError(
                f"DistributedOptimizer: ranks hold different states of their parts of {name}: "
                f"{first} and {other}. Its class does not go by element (use shard_state=0), or "
                "some ranks alone have set .grad to None"
            )
    return first


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[k], other[k]) for k in one)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return bool(one == other)


def _gather(
    own: torch.Tensor | None, dtype: torch.dtype, counts: Sequence[int], name: str, group: Group
) -> torch.Tensor:
    whole = torch.empty(sum(counts), dtype=dtype)
    mine = torch.empty(0, dtype=dtype) if own is None else own.cpu().contiguous()
    handle = engine().start(
        "allgather_into", name, lambda g: plan_allgather_into(g, name, whole, mine, counts), group
    )
    return handle.wait()
