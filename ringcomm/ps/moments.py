"""One moment on all servers, a client's side: nothing moves, and each holds what it has."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any, NamedTuple

from ringcomm.errors import RingcommError
from ringcomm.ps.client import Ask
from ringcomm.ps.frames import Kind
from ringcomm.ps.future import Future
from ringcomm.ps.job import Session
from ringcomm.ps.link import Delivery
from ringcomm.ps.messages import packed_json
from ringcomm.ps.pauses import pause_number
from ringcomm.ps.serving import LEADER
from ringcomm.ps.snapshots import HOLD, PAUSE, RELEASE, STOP

_TRIES = 10  # of a snapshot: rounds of a table that is new are over before all servers know it
_PATIENCE = 1 / 4  # of its deadline, for which a pause lets moves go first
_ids = itertools.count(1)


class Moment(NamedTuple):
    """What was when partitions ceased to move.

    Attributes:
        job: a name of this job alone.
        tables: number -> Spec.to_json(), of tables that all servers knew.
        rounds: number -> rounds so far, of tables with rounds, by the server that had the most.
    """

    job: str
    tables: dict[str, Any]
    rounds: dict[str, int]


def new_id(current: Session) -> int:
    """Return a number that no other moment of this job has."""
    return pause_number(current.engine.job_rank, next(_ids))


def pause(current: Session, number: int) -> Moment:
    """Let no partition move until `number` is released."""
    patience_s = current.client.deadline_s * _PATIENCE
    what = {"do": PAUSE, "id": number, "patience_s": patience_s}
    told = asking(current, Kind.SNAPSHOT, what, [LEADER]).wait()[0]
    return Moment(told["job"], told["tables"], {})


def hold(current: Session, number: int, *, save_to: str | None = None) -> Moment:
    """Let all servers hold what they have, until `number` is released.

    Args:
        current: of this rank.
        number: of the moment.
        save_to: for a checkpoint in this folder; None: for pulls.

    Raises:
        RingcommError: rounds of new tables were over too soon, each time.
    """
    moment = pause(current, number)
    for _ in range(_TRIES):
        rounds: Counter[str] = Counter()
        for told in ask_all(current, Kind.SNAPSHOT, {"do": STOP, "id": number}):
            for table, version in told.items():
                rounds[table] = max(rounds[table], version)
        what = {"do": HOLD, "id": number, "rounds": rounds, "save_to": save_to}
        replies = ask_all(current, Kind.SNAPSHOT, what)
        if all(told["is_whole"] for told in replies):
            return moment._replace(rounds=dict(rounds))
        ask_all(current, Kind.SNAPSHOT, {"do": RELEASE, "id": number, "moves": False})
    raise RingcommError(
        f"ps.snapshot: in {_TRIES} attempts there were new tables, of which a round was over "
        "before all servers knew them. Take it once all tables are there"
    )


def release(current: Session, number: int, *, is_taken: bool = False) -> None:
    """Hold no more what was held, and let partitions move again.

    Args:
        current: of this rank.
        number: of the moment.
        is_taken: what was held for a checkpoint is still to be written.
    """
    what = {"do": RELEASE, "id": number, "moves": False, "is_taken": is_taken}
    try:
        ask_all(current, Kind.SNAPSHOT, what)  # what moves then has no round that is stopped
    finally:
        asking(current, Kind.SNAPSHOT, what | {"moves": True}, [LEADER]).wait()


def ask_all(current: Session, kind: Kind, what: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what each server answers, by server."""
    return asking(current, kind, what).wait()


def asking(
    current: Session, kind: Kind, what: dict[str, Any], servers: list[int] | None = None
) -> Future[list[dict[str, Any]]]:
    """Ask servers, all of them by default; return a future of what they answer, in their order."""
    client = current.client
    asked = list(range(client.n_servers)) if servers is None else servers
    told: dict[int, dict[str, Any]] = {}
    meta = packed_json(what)

    def ask(server: int) -> Ask:
        def note(reply: Delivery) -> None:
            text = reply.body.tobytes() if reply.body.nbytes else reply.meta
            told[server] = json.loads(text)

        return Ask(kind, server=server, meta=meta, on_reply=note)

    future = Future(
        client,
        kind.name.lower(),
        len(asked),
        lambda: [told[server] for server in asked],
        client.timestamp(),
    )
    client.ask([ask(server) for server in asked], future)
    return future
