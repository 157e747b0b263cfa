"""Decides whether a job that has ended is started again, and on which hosts. Pure.

What counts is what the ranks have recorded, and which hosts answer. Open MPI 5's mpirun returns 0
when a host has crashed, and hangs when one has lost its power (measured).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from ringcomm.launch.job.hosts import Host, places_of
from ringcomm.launch.job.plan_types import RunRequest
from ringcomm.launch.job.verdict import Cause, Verdict

_AGENTS: Final = ("plm_ssh_agent", "plm_rsh_agent")
_FROM_OUTSIDE: Final = (Cause.LOST, Cause.TOO_FEW)
_SSH: Final = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A job that has ended.

    Attributes:
        request: what was asked for.
        hosts: the hosts on which it ran; (): this one alone.
        verdict: how it ended.
        was_asked_to_stop: by a signal, or by `ringcomm ctl`.
        silent: the hosts that do not answer.
        n_restarts: how often it was started again before.
        limit: how often it may be.
    """

    request: RunRequest
    hosts: tuple[Host, ...]
    verdict: Verdict
    was_asked_to_stop: bool
    silent: Collection[str]
    n_restarts: int
    limit: int


@dataclass(frozen=True)
class Decision:
    """The next job. request: how to start it; None: none. why: for the user; "": obvious."""

    request: RunRequest | None
    why: str = ""


def decide(job: Ended) -> Decision:
    """Return what comes after the end of a job."""
    if job.request.elastic is None or job.verdict.code == 0 or job.was_asked_to_stop:
        return Decision(None)
    reason, cause = _reason(job), job.verdict.cause
    if not job.silent and cause not in _FROM_OUTSIDE:
        return Decision(None, f"{reason}, so the job is not started again" if job.limit else "")
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
    if job.silent:
        hosts = ", ".join(sorted(job.silent))
        return f"the job has ended, and {hosts} do{'' if len(job.silent) > 1 else 'es'} not answer"
    assert job.verdict.cause is not None  # it is elastic, and its code is not 0
    return job.verdict.cause


def _on(hosts: tuple[Host, ...], job: Ended) -> RunRequest | None:
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


def agent_of(request: RunRequest) -> tuple[str, ...]:
    """Return the command that runs another command on a host, as mpirun would."""
    for name, value in pairwise(request.options):
        if name in _AGENTS:
            return (*value.split(), *request.ssh)
    return (*_SSH, *request.ssh)
