"""Refuses a process that comes into the job with a state that is not the job's.

It runs another program, or with other arguments. In sync() its calls would not match those of the
ranks, which would all end with an error. So all compare what the states have, and only the newcomer
ends; the ranks go on without it, as after a loss.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ringcomm.elastic.commit_file import KeptFile
from ringcomm.elastic.state import ArrayState, State
from ringcomm.engine.api import collectives
from ringcomm.engine.api.begin_next_view import elastic_world, withdraw
from ringcomm.engine.api.init_rank_size import rank
from ringcomm.errors import RingcommError

_log = logging.getLogger("ringcomm")
_SHOWN = 3  # differences in an error
_LACKING = "nothing"
_Outline = dict[str, str]


def refuse_newcomers(state: State, *, is_newcomer: bool) -> None:
    """Return once it is known that all newcomers to the view have the outline of the job's state.

    Collective over the view.

    Raises:
        RingcommError: on a newcomer whose state has another outline.
        PeerFailedError: on the ranks, which go on without it.
    """
    outline = outline_of(state)
    mine = np.array([[is_newcomer, zlib.crc32(repr(sorted(outline.items())).encode())]], np.int64)
    ranks = collectives.allgather(mine, name="elastic newcomers").tolist()
    members = [r for r, (is_new, _) in enumerate(ranks) if not is_new]
    if not members or all(each == ranks[members[0]][1] for is_new, each in ranks if is_new):
        return
    wanted = collectives.broadcast_object(outline, members[0], name="elastic outline")
    problem = differences(outline, wanted) if is_newcomer else ""
    problems = collectives.allgather_object(problem, name="elastic refusals")
    refused = [r for r, each in enumerate(problems) if each]
    world, _ = elastic_world()
    if problem:
        withdraw(world)  # nobody waits for the end of this process
        raise RingcommError(
            f"elastic.run: {world.transport.label(rank())} gets no place, for its state is not "
            f"that of the job: {problem}. Start all processes with the same program and arguments"
        )
    if not refused:
        return
    if rank() == members[0]:
        for each in refused:
            _log.warning(
                "elastic.run: %s gets no place, for its state is not that of the job: %s. The job "
                "goes on without it",
                world.transport.label(each),
                problems[each],
            )
    collectives.barrier(name="elastic: who was refused is lost")


def outline_of(state: State) -> _Outline:
    """Return what must be the same of the states of all processes: names, shapes and the like.

    Of the values that a commit keeps; a program may set other attributes.
    """
    found = {"its class": type(state).__qualname__}
    file = next((each for each in vars(state).values() if isinstance(each, KeptFile)), None)
    found["the path of keep_in()"] = "none" if file is None else file.given
    if state.COPIES and not state.has_commit:
        state.save()
    for name in (name for copies in state.COPIES for name in getattr(state, copies)):
        value = getattr(state, name, None)
        found.update(_outlines(name, value, has_arrays=isinstance(state, ArrayState)))
    return found


def _outlines(name: str, value: Any, *, has_arrays: bool) -> Iterable[tuple[str, str]]:
    if has_arrays and isinstance(value, np.ndarray):
        yield name, f"{value.dtype} {value.shape}"
    elif hasattr(value, "named_parameters") and hasattr(value, "named_buffers"):  # torch.nn.Module
        yield name, "a model"
        for inner, tensor in [*value.named_parameters(), *value.named_buffers()]:
            yield f"{name}.{inner}", f"{tensor.dtype} {tuple(tensor.shape)}"
    elif hasattr(value, "param_groups"):
        yield name, type(value).__qualname__  # which sends more in sync() if it shards its state
    else:
        yield name, "a value"


def differences(mine: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    """Return what differs of two outlines, with both values; "" if nothing does."""
    texts = []
    for name in {**wanted, **mine}:
        here, there = mine.get(name, _LACKING), wanted.get(name, _LACKING)
        if here != there:
            texts.append(f"{name} is {here} here, and {there} in the job")
    more = f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return "; ".join(texts[:_SHOWN]) + more
