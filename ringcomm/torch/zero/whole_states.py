"""Gathers the states of whole parameters from the parts that the ranks hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ringcomm.engine.api import collectives
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.api.require_nobody_in_join import require_nobody_in_join
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.handle import Handle
from ringcomm.engine.operations.into_array import plan_allgather_into
from ringcomm.errors import RingcommError
from ringcomm.torch.zero.parameter_state import ParameterState

_Layout = tuple[dict[str, str], dict[str, Any]]  # dtypes of ParameterState.by_element, and .common


def gather_states(
    mine: Mapping[int, ParameterState],
    shares: Mapping[int, Sequence[int]],
    names: Sequence[str],
    group: Group,
    suffix: str,
) -> Iterator[tuple[int, ParameterState]]:
    """Yield (index, whole state) of the parameters in `shares` that have a state.

    Collective: every rank must iterate to the end.

    Args:
        mine: this rank's part of the state, by the parameter's index.
        shares: for each parameter, the number of elements of each rank's part.
        names: names of all parameters.
        group: the ranks that hold the parts.
        suffix: end of the messages' names.
    """
    mine = {index: mine[index] for index in shares if mine.get(index)}
    layouts: list[dict[int, _Layout]] = collectives.allgather_object(
        {index: _layout(state) for index, state in mine.items()},
        name=f"layout of the state{suffix}",
        group=group,
    )
    require_nobody_in_join("state_dict() of a sharded optimizer", layouts, group.ranks)
    for index, counts in shares.items():
        owners = [theirs.get(index) for theirs, n in zip(layouts, counts, strict=True) if n]
        layout = _agreed(owners, names[index])
        if layout is None:
            continue
        dtypes, common = layout
        lines = {}
        for key, dtype in dtypes.items():
            own = mine[index].by_element[key] if index in mine else None
            name = f"{key} of {names[index]}{suffix}"
            whole = torch.empty(sum(counts), dtype=getattr(torch, dtype))
            part = whole[:0] if own is None else own.cpu().contiguous()
            lines[key] = start_allgather_into(whole, part, counts, name, group).wait()
        yield index, ParameterState(lines, common)


def start_allgather_into(
    whole: torch.Tensor, mine: torch.Tensor, counts: Sequence[int], name: str, group: Group
) -> Handle[torch.Tensor]:
    """Start to gather counts[r] elements from each rank r into `whole`. Collective."""
    return engine().start(
        "allgather_into", name, lambda g: plan_allgather_into(g, name, whole, mine, counts), group
    )


def _layout(state: ParameterState) -> _Layout:
    dtypes = {key: str(line.dtype).removeprefix("torch.") for key, line in state.by_element.items()}
    return dtypes, state.common


def _agreed(layouts: Sequence[_Layout | None], name: str) -> _Layout | None:
    """Return the layout of all owners; None if they have no state, or there are no owners."""
    if not any(layouts):
        return None
    first = layouts[0]
    for other in layouts[1:]:
        if first is None or other is None or not _is_same(first, other):
            raise RingcommError(
                f"DistributedOptimizer: ranks hold different states of their parts of {name}: "
                f"{first} and {other}. Either its class does not update each element by itself "
                "(use shard_state=0), or only some ranks have set .grad to None"
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
