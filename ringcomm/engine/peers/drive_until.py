"""A wait for other ranks that is no operation."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ringcomm.engine.core.context import EngineContext
from ringcomm.engine.progress.deadlines import refuse_hopeless
from ringcomm.errors import RingcommError

_LOOKS: Final = 16  # at a condition, between two looks for ranks that died


@dataclass
class DrivenWait:
    """A wait as refuse_hopeless() takes it: a death ends it."""

    label: str
    members: tuple[int, ...]
    key: int = 0
    base: int = 0
    number: int = 0
    timeout_s: float | None = None
    awaited: tuple[int, ...] = ()
    late: tuple[int, ...] = ()
    ends_alone: bool = False
    helps_if_data_are_unequal: str = "end all workers together, or this one with rc.shutdown()"

    @staticmethod
    def what_came_instead() -> str:
        return ""


class WaitInJob:
    """A wait that ends with each death that the job does not survive; which these are may change.

    Args:
        label: of what waits.
        engine: of this rank.
    """

    def __init__(self, label: str, engine: EngineContext) -> None:
        self._label, self._engine = label, engine
        self._survivable: frozenset[int] | None = None

    @property
    def now(self) -> DrivenWait:
        survivable = self._engine.watch.peers.survivable
        if survivable is not self._survivable:
            needed = tuple(r for r in range(self._engine.job_size) if r not in survivable)
            self._wait, self._survivable = DrivenWait(self._label, needed), survivable
        return self._wait


def drive_until(
    engine: EngineContext, is_over: Callable[[], bool], label: str, timeout_s: float
) -> bool:
    """Drive the loop; return True once is_over(), False if that takes longer than timeout_s.

    Raises:
        PeerFailedError: a rank died without which the job cannot go on.
    """
    wait, looks = WaitInJob(label, engine), itertools.count(1)
    hopeless: list[RingcommError] = []

    def is_enough() -> bool:
        if is_over():
            return True
        if next(looks) % _LOOKS:
            return False
        try:
            refuse_hopeless(wait.now, engine.watch)
        except RingcommError as error:  # raised in the waiting thread, not in the driving one
            hopeless.append(error)
        return bool(hopeless)

    engine.run_until(is_enough, is_done=is_over, timeout_s=timeout_s)
    if is_over():
        return True
    if hopeless:
        raise hopeless[0]
    return False
