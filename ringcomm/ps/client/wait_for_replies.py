"""Waits until replies are there, a deadline has passed, or a rank has died."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringcomm.engine.progress.deadlines import refuse_hopeless
from ringcomm.errors import CommTimeoutError, RingcommError

if TYPE_CHECKING:
    from ringcomm.engine.core.engine import Engine
    from ringcomm.ps.roles import Layout


_LOOKS = 16  # at a condition, between two looks for ranks that died


@dataclass
class Wait:
    """A wait as refuse_hopeless() takes it: any death ends it."""

    label: str
    members: tuple[int, ...]
    key: int = 0
    base: int = 0
    number: int = 0
    timeout_s: float | None = None
    awaited: tuple[int, ...] = ()
    late: tuple[int, ...] = ()


def drive_until(engine: Engine, is_over: Callable[[], bool], label: str, timeout_s: float) -> bool:
    """Drive the loop; return True once is_over(), False if that takes longer than timeout_s.

    Raises:
        PeerFailedError: a rank died.
    """
    wait, looks = Wait(label, tuple(range(engine.job_size))), itertools.count(1)
    hopeless: list[RingcommError] = []

    def is_enough() -> bool:
        if is_over():
            return True
        if next(looks) % _LOOKS:
            return False
        try:
            refuse_hopeless(wait, engine.watch)
        except RingcommError as error:  # raised in the waiting thread, not in the driving one
            hopeless.append(error)
        return bool(hopeless)

    engine.run_until(is_enough, is_done=is_over, timeout_s=timeout_s)
    if is_over():
        return True
    if hopeless:
        raise hopeless[0]
    return False


def timeout_error(
    engine: Engine, layout: Layout, label: str, servers: Iterable[int], limit_s: float
) -> CommTimeoutError:
    """Return the error of a wait for servers, which it names."""
    missing = {server: layout.rank_of(server) for server in sorted(servers)}
    ranks = ", ".join(
        f"server {server} ({engine.transport.label(rank)})" for server, rank in missing.items()
    )
    return CommTimeoutError(
        f"{label}: no answer within {limit_s:g} s from {ranks or 'the servers'}. It is busy, or "
        "waits for other workers; wait again, or raise the limit with ps.init(deadline_s=)",
        missing=[*missing.values()],
    )
