"""Compares, once per sampler, how the ranks that share data divide it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ringcomm.engine.api import collectives
from ringcomm.engine.api.world import engine, is_initialized
from ringcomm.errors import MismatchError

_NAME = "arguments of ShardedSampler"
_SHOWN = 60  # characters of a value


def require_alike(mine: Mapping[str, Any], rank: int, size: int) -> None:
    """Compare this rank's arguments with the others'. Collective if these are all ranks of the job.

    Others, which a sampler may be given, are not known to the engine as a group. Raises
    MismatchError, on every rank, if they differ.
    """
    if not is_initialized():
        return
    current = engine()
    if size == 1 or (rank, size) != (current.rank, current.size):
        return
    problem = difference(collectives.allgather_object(dict(mine), name=_NAME))
    if problem:
        raise MismatchError(problem)


def difference(given: Sequence[Mapping[str, Any] | None]) -> str:
    """Return in what the ranks' arguments differ, or ""; None: of one in join(). Pure."""
    known = [(rank, each) for rank, each in enumerate(given) if each is not None]
    first, theirs = known[0]
    for what, value in theirs.items():
        for other, others in known:
            if others[what] != value:
                return (
                    f"ShardedSampler: rank {first} has {_shown(what, value)}, rank {other} "
                    f"{_shown(what, others[what])}: samples would be seen twice, or by nobody. "
                    "Pass the same on every rank; to deal to other ranks than all of the job's, "
                    "pass rank= and size="
                )
    return ""


def _shown(what: str, value: Any) -> str:
    text = f"{what}={value}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
