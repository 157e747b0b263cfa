"""Decides whether a job that has ended is started again, and on which hosts. Pure.

What counts is what the ranks have recorded, and which hosts answer. Open MPI 5's mpirun returns 0
when a host has crashed, and hangs when one has lost its power (measured).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from ringcomm.launch.job.hosts import Host, places_of
from ringcomm.launch.job.plan_types import Request
from ringcomm.launch.job.read_records import RankEnd
from ringcomm.launch.job.verdict import STOPPED_IN_ORDER

_AGENTS: Final = ("plm_ssh_agent", "plm_rsh_agent")
_SSH: Final = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A job that has ended.

    Attributes:
        request: what was asked for.
        hosts: the hosts on which it ran; (): this one alone.
        code: the exit code of `ringcomm run`.
        was_asked_to_stop: by a signal, or by `ringcomm ctl`.
        ends: what each rank recorded.
        silent: the hosts that do not answer.
        n_restarts: how often it was started again before.
        limit: how often it may be.
    """

    request: Request
    hosts: tuple[Host, ...]
    code: int
    was_asked_to_stop: bool
    ends: Mapping[int, RankEnd]
    silent: Collection[str]
    n_restarts: int
    limit: int


@dataclass(frozen=True)
class Decision:
    """The next job. request: how to start it; None: none. why: for the user; "": obvious."""

    request: Request | None
    why: str = ""


def decide(job: Ended) -> Decision:
    """Return what comes after the end of a job."""
    if job.request.elastic is None or job.code == 0 or job.was_asked_to_stop:
        return Decision(None)
    reason = _reason(job)
    if not reason:
        return Decision(None)
    if job.n_restarts >= job.limit:
        return Decision(None, f"{reason}; it is not started again: --restarts is {job.limit}")
    left = tuple(host for host in job.hosts if host.name not in job.silent)
    request = _on(left, job) if job.silent else job.request
    if request is None:
        low, _ = job.request.elastic
        return Decision(
            None,
            f"{reason}; it is not started again: the hosts that are left have {places_of(left)} "
            f"places, and --elastic wants {low} workers",
        )
    where = f" on {', '.join(map(str, left))}" if job.silent else ""
    return Decision(request, f"{reason}; it is started again{where}")


def _reason(job: Ended) -> str:
    """Return why a job may be started again; "": its program has failed."""
    if job.silent:
        hosts = ", ".join(sorted(job.silent))
        return f"the job has ended, and {hosts} do{'' if len(job.silent) > 1 else 'es'} not answer"
    if job.code == STOPPED_IN_ORDER:
        return "the job could not go on, and its ranks have ended in order"
    if job.ends and all(end.code is None and not end.has_left for end in job.ends.values()):
        return "all ranks were killed"
    return ""


def _on(hosts: tuple[Host, ...], job: Ended) -> Request | None:
    """Return the request with these hosts: workers first, then spares, then reserves."""
    request, places = job.request, places_of(hosts)
    assert request.elastic is not None
    low, high = request.elastic
    beside = request.servers + request.evaluators + request.worker_spares
    wanted = places_of(job.hosts) - beside if request.np is None else request.np
    room = places - beside
    if request.oversubscribes and hosts:
        room = max(room, wanted + request.spares + request.reserves + high)
    np = min(wanted, high, room)
    if not hosts or np < low:
        return None
    spares = min(request.spares, room - np)
    reserves = min(request.reserves, room - np - spares)
    high = min(high, room - spares - reserves)
    return replace(
        request, np=np, hosts=hosts, spares=spares, reserves=reserves, elastic=(low, high)
    )


def agent_of(request: Request) -> tuple[str, ...]:
    """Return the command that runs another command on a host, as mpirun would."""
    for name, value in pairwise(request.options):
        if name in _AGENTS:
            return (*value.split(), *request.ssh)
    return (*_SSH, *request.ssh)
