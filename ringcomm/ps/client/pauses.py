"""Pauses all moves, and makes all servers hold the values of one moment; a client's side."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

from ringcomm.ps.client.json_requests import ask_leader
from ringcomm.ps.moment_numbers import moment_number

if TYPE_CHECKING:
    from ringcomm.ps.client.client import Client

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
    return _begin(client, "pause", number)


def hold(client: Client, number: int, *, save_to: str | None = None) -> Moment:
    """Make all servers hold what they have, until `number` is released.

    Args:
        client: of this rank.
        number: of the moment.
        save_to: folder of the checkpoint that it is for; None: it is for pulls.

    Raises:
        RingcommError: rounds of new tables were over too soon, each time; or a server has no room.
    """
    return _begin(client, "snapshot", number, save_to=save_to)


def release(client: Client, number: int, *, is_taken: bool = False) -> None:
    """End a moment, and let partitions move again.

    Args:
        client: of this rank.
        number: of the moment.
        is_taken: what was held for a checkpoint is still to be written.
    """
    ask_leader(client, "snapshot", "end", number=number, is_taken=is_taken).wait()


def _begin(client: Client, command: str, number: int, **more: Any) -> Moment:
    patience_s = min(client.deadline_s * _PATIENCE, _PATIENCE_MAX_S)
    asked = {"number": number, "patience_s": patience_s, **more}
    answer = ask_leader(client, "snapshot", command, needs_tables=True, **asked).wait()
    return Moment(**answer)
