"""Pauses all moves, and makes all servers hold the values of one moment; a client's side."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from ringcomm.errors import RingcommError
from ringcomm.ps.client.json_requests import ask_json
from ringcomm.ps.protocol.frames import FrameKind, Pausing
from ringcomm.ps.snapshot_numbers_and_phases import HOLD, PAUSE, RELEASE, STOP, moment_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ringcomm.ps.client.client import Client
    from ringcomm.ps.client.future import Future

_TRIES = 10  # of a snapshot: rounds of a table that is new are over before all servers know it
_PATIENCE = 1 / 4  # of its deadline, for which a pause lets moves go first
_PATIENCE_MAX_S = 15.0
_ids = itertools.count(1)


class Moment(NamedTuple):
    """The job when partitions ceased to move.

    Attributes:
        job: a name of this job alone.
        tables: number -> Spec.to_json(), of tables that all servers knew.
        rounds: number -> rounds so far, of tables with rounds, by the server that had the most.
    """

    job: str
    tables: dict[str, Any]
    rounds: dict[str, int]


def new_id(client: Client) -> int:
    return moment_number(client.rank, next(_ids))


def pause(client: Client, number: int) -> Moment:
    """Keep partitions from moving until `number` is released."""
    patience_s = min(client.deadline_s * _PATIENCE, _PATIENCE_MAX_S)
    question = {"do": PAUSE, "id": number, "patience_s": patience_s}
    answer = _ask(client, question, [client.leader]).wait()[0]
    return Moment(answer["job"], answer["tables"], {})


def hold(client: Client, number: int, *, save_to: str | None = None) -> Moment:
    """Make all servers hold what they have, until `number` is released.

    Args:
        client: of this rank.
        number: of the moment.
        save_to: folder of the checkpoint that it is for; None: it is for pulls.

    Raises:
        RingcommError: rounds of new tables were over too soon, each time.
    """
    moment = pause(client, number)
    for _ in range(_TRIES):
        rounds: Counter[str] = Counter()
        for versions in _ask_all(client, do=STOP, id=number).wait():
            for table, version in versions.items():
                rounds[table] = max(rounds[table], version)
        answers = _ask_all(client, do=HOLD, id=number, rounds=rounds, save_to=save_to).wait()
        if all(answer["is_whole"] for answer in answers):
            return moment._replace(rounds=dict(rounds))
        _ask_all(client, do=RELEASE, id=number, moves=False).wait()
    raise RingcommError(
        f"ps.snapshot: in {_TRIES} attempts there were new tables, of which a round was over "
        "before all servers knew them. Take it once all tables are there"
    )


def release(client: Client, number: int, *, is_taken: bool = False) -> None:
    """End a moment, and let partitions move again.

    Args:
        client: of this rank.
        number: of the moment.
        is_taken: what was held for a checkpoint is still to be written.
    """
    what = {"do": RELEASE, "id": number, "is_taken": is_taken}
    try:
        _ask_all(client, **what, moves=False).wait()  # what moves then has no round that is stopped
    finally:
        _ask(client, {**what, "moves": True}, [client.leader]).wait()


def _ask_all(client: Client, **question: Any) -> Future[list[Any]]:
    return _ask(client, question, client.servers)


def _ask(client: Client, question: dict[str, Any], servers: Sequence[int]) -> Future[list[Any]]:
    option = Pausing.ENDS if question["do"] == RELEASE else Pausing.BEGINS
    return ask_json(client, FrameKind.SNAPSHOT, question, servers, option=option)
