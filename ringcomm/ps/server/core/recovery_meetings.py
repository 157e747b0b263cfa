"""Decides when a job whose server died begins anew, and when it goes on. Pure; the leader.

| event | what follows |
|---|---|
| Met, BEGIN | it waits until all live workers have met here: then Reopen, which answers them |
| Met, DONE | it waits likewise; then replies, with what the lowest of them has to say |
| Met, FOLLOW | it waits until a recovery is done; then Describe. Nobody waits for it |
| a worker leaves, or dies | nobody waits for it |
| no worker is left | replies that are late |

A meeting counts only if all of its ranks know the same servers as this server does: the others are
about to hear of a death, and meet again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, NamedTuple

from ringcomm.ps.placement.replacement_workers import WorkerMembers
from ringcomm.ps.protocol.frames import RECOVERING, MeetingOption
from ringcomm.ps.server.core import events as on
from ringcomm.ps.server.core.actions import Action, CoreRequest, Describe, Reopen, Reply

_OF_WORKERS: Final = (MeetingOption.BEGIN, MeetingOption.DONE)


class _Met(NamedTuple):
    request: CoreRequest
    servers: tuple[int, ...]
    content: Any


class Recovery:
    """The meetings of workers at one server.

    Args:
        members: returns who takes part.
        left: ranks that ask nothing more.

    Attributes:
        n_waiting: requests that wait.
    """

    def __init__(self, members: Callable[[], WorkerMembers], left: Collection[int]) -> None:
        self._members, self._left = members, left
        self._met: dict[int, dict[int, _Met]] = {each: {} for each in MeetingOption}
        self.n_waiting = 0
        self._recovered: tuple[int, ...] = ()  # the servers with which the last one was done
        self._said: Any = None  # by the chief of that one

    def go_on(self, left: Collection[int]) -> None:
        self._left = left

    @property
    def following(self) -> set[int]:
        """The ranks that wait for others to recover; a newcomer that has not begun does."""
        return {*self._met[MeetingOption.FOLLOW]}

    def state(self) -> tuple[tuple[int, ...], Any]:
        """Return what the last recovery was, as load() takes it; no request waits."""
        return self._recovered, self._said

    def load(self, state: tuple[Sequence[int], Any]) -> None:
        self._recovered, self._said = tuple(state[0]), state[1]

    def on_met(self, event: on.Met, _: float) -> list[Action]:
        """A rank has come; due() follows. A request that comes again replaces the one before."""
        met = _Met(event.request, tuple(event.servers), event.content)
        self._met[event.meeting][event.request.source] = met
        self.n_waiting += 1  # due() counts
        return []

    def missing(self, rank: int) -> list[tuple[str, str, list[int]]]:
        """Return for what the requests of a rank wait: what, of which table, and which workers."""
        waits = any(rank in met for met in self._met.values())
        return [(RECOVERING, "", sorted(self._absent()))] if waits else []

    def due(self) -> list[Action]:
        """Return the actions that are due; after each event, while requests wait."""
        actions = self._due()
        self.n_waiting = sum(map(len, self._met.values()))
        return actions

    def _due(self) -> list[Action]:
        for met in self._met.values():
            for rank in [rank for rank in met if rank in self._left]:
                del met[rank]
        workers = self._workers()
        if not workers:
            waiting = [each.request for met in self._met.values() for each in met.values()]
            for met in self._met.values():
                met.clear()
            return [Reply(request, is_late=True) for request in waiting]
        actions: list[Action] = []
        for meeting in _OF_WORKERS:
            met = self._met[meeting]
            if workers <= met.keys() and all(self._agrees(met[rank]) for rank in workers):
                actions += self._end(meeting, met)
        if self._recovered == tuple(self._members().server_numbers):
            following = self._met[MeetingOption.FOLLOW]
            actions += [
                Describe(each.request, each.content, self._said) for each in following.values()
            ]
            following.clear()
        return actions

    def _end(self, meeting: MeetingOption, met: dict[int, _Met]) -> list[Action]:
        came = [met[rank] for rank in sorted(met)]
        met.clear()
        if meeting == MeetingOption.BEGIN:
            self._recovered = ()
            requests = [each.request for each in came]
            if not came[0].content["found"]:
                return [Reply(request, content={"tables": None}) for request in requests]
            return [Reopen(requests, [each.content["tables"] for each in came])]
        content = came[0].content
        if content is not None and "manifest" in content:  # else nothing is restored yet
            self._recovered, self._said = came[0].servers, content
        answer = {"said": content, "restores": came[0].request.source}
        return [Reply(each.request, content=answer) for each in came]

    def _agrees(self, met: _Met) -> bool:
        return met.servers == tuple(self._members().server_numbers)

    def _workers(self) -> set[int]:
        return {*self._members().workers} - {*self._left} - self.following

    def _absent(self) -> set[int]:
        here = {rank for each in _OF_WORKERS for rank in self._met[each]}
        return self._workers() - here
