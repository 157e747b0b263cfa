"""Checks of the states of a ShardedSampler. Pure."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ringcomm.integers import is_integer

State = dict[str, Any]
_KEYS: Final = ("epoch", "phases", "taken", "rank", "size", "samples", "shuffle", "seed")


def whole_state(state: Any) -> State:
    """Return a state with its numbers as ints; raise if it is not from state_dict()."""
    if not isinstance(state, Mapping):
        raise TypeError(
            f"ShardedSampler: load_state_dict() takes what state_dict() returned, or a list of "
            f"such dicts, not a {type(state).__name__}"
        )
    missing = [key for key in _KEYS if key not in state]
    if missing:
        raise ValueError(
            f"ShardedSampler: the state has no {', '.join(missing)}; it has "
            f"{', '.join(map(str, state)) or 'nothing'}. Pass what state_dict() returned"
        )
    phases = state["phases"]
    is_dealt = isinstance(phases, list | tuple) and all(
        isinstance(counts, list | tuple) and counts and all(map(is_integer, counts))
        for counts in phases
    )
    if not is_dealt:
        raise ValueError(
            f"ShardedSampler: the state has phases={phases!r}; they must be lists of numbers of "
            "samples, by rank"
        )
    numbers = ("epoch", "taken", "rank", "size")
    return {**state, **{what: natural(f"state's {what}", state[what]) for what in numbers}}


def require_complete(states: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if these are not the states of all ranks of one job at one moment."""
    ranks = [each["rank"] for each in states]
    size = states[0]["size"] if states else 1
    if ranks != list(range(size)):
        raise ValueError(
            f"ShardedSampler: the list has states of ranks {ranks}, of a job of {size}: pass those "
            "of all ranks in order, or one alone"
        )
    first = states[0]
    base = min(each["epoch"] for each in states)
    for each in states:
        is_through = each["epoch"] == base + 1 and not each["taken"]
        if each["epoch"] != base and not is_through:
            raise ValueError(
                f"ShardedSampler: rank {first['rank']} is in epoch {first['epoch']}, rank "
                f"{each['rank']} in {each['epoch']}: the states are not of one moment"
            )
        for what in ("size", "samples", "shuffle", "seed"):
            if each[what] != first[what]:
                raise ValueError(
                    f"ShardedSampler: rank {first['rank']} has {what}={first[what]}, rank "
                    f"{each['rank']} {each[what]}: the states are not of one job"
                )


def natural(what: str, value: int) -> int:
    """Return an argument of a ShardedSampler as int; raise unless it is at least 0."""
    try:
        value = operator.index(value)
    except TypeError as error:
        raise TypeError(f"ShardedSampler: the {what} is an int, not {value!r}") from error
    if value < 0:
        raise ValueError(f"ShardedSampler: the {what} is at least 0, not {value}")
    return value
