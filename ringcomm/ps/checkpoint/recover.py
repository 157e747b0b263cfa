"""ps.recover(): after the death of a server, all go back to the newest checkpoint, and go on.

    workers -> leader     Recover: once all have come who live, all tables are opened anew, under
                          new numbers, on the servers that live: a spare in the place of each that
                          was lost, if there are enough of them
    chief -> servers      restore; if it has left or dies, the lowest worker that has come does so
    workers -> leader     GoOn: all have come again

See ringcomm.ps.control.commands.

What is under way for the old numbers is refused. If another server dies meanwhile, all begin again.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Final, NamedTuple

from ringcomm.data.work_queue import keep_queues_at
from ringcomm.errors import CommTimeoutError, RingcommError, ServerLostError
from ringcomm.ps.checkpoint import files
from ringcomm.ps.checkpoint.arguments import folder_of
from ringcomm.ps.checkpoint.client import limit_of, restore_tables
from ringcomm.ps.client.json_requests import json_of, request_command
from ringcomm.ps.members.let_in import meet
from ringcomm.ps.protocol.frames import FrameKind
from ringcomm.ps.server.replies import as_body
from ringcomm.ps.session import Session, is_chief, session

_LABEL: Final = "ps.recover"
_log: Final = logging.getLogger("ringcomm")


class Recovered(NamedTuple):
    """The point from which a job continues after a server has died.

    Attributes:
        manifest: of the checkpoint; see ps.restore().
        lost_steps: that this worker has completed since, and completes again.
    """

    manifest: dict[str, Any]
    lost_steps: int


def recover(path: str | Path, *, timeout_s: float | None = None) -> Recovered:
    """Go back to the newest checkpoint after the death of a server, and go on with the others.

    Collective over the workers that live: call it where a call has raised ServerLostError. All
    tables are opened anew on the servers that live, and have the values of the checkpoint, and the
    updaters' state. Tables, hash tables, embeddings and ps.DistributedOptimizers of this process go
    on with them. Steps are counted on from those of the checkpoint, also for ps.SSP and evaluators;
    what was pushed since, and futures of it, are lost. An evaluator may call it, too: it waits for
    the workers.

    Args:
        path: as given to ps.save().
        timeout_s: of the wait for the other workers, and for disks, in seconds; None:
            RINGCOMM_TIMEOUT_S.

    Raises:
        FileNotFoundError: there is no checkpoint; nothing was changed.
        TypeError, ValueError: path names no folder; likewise.
        RingcommError: no server was lost; or this is within ps.snapshot(); or a table was opened
            since the checkpoint, whose first values are the chief's.
        ValueError, BrokenFileError: see ps.restore().
        CommTimeoutError: other workers have not called it, or a disk takes longer.
        PeerFailedError: the last server died.
    """
    current, root = session(), folder_of(_LABEL, path)
    if current.snapshot:
        raise RingcommError(f"{_LABEL}: not within ps.snapshot(), which holds what is gone")
    limit_s = limit_of(current, timeout_s)
    _await_loss(current)
    if current.layout.role_of(current.engine.job_rank) != "worker":
        manifest = follow(current)
        if manifest is None:
            raise RingcommError(f"{_LABEL}: no worker is left, so nobody recovers")
        return Recovered(manifest, 0)
    for each in [*current.recovering]:
        each.require_recoverable()
    while True:
        lost = {*current.layout.lost}
        try:
            return _recover(current, root, limit_s)
        except ServerLostError:
            if lost == current.layout.lost:
                raise


def follow(current: Session) -> dict[str, Any] | None:
    """Go on with the tables once the workers have recovered; on an evaluator.

    Returns:
        The manifest of the checkpoint; None: no worker is left.
    """
    while True:
        try:
            answer = _ask(
                current, float("inf"), "follow", tables=[*current.tables],
                keeps_place=current.is_newcomer,
            )  # fmt: skip
        except ServerLostError:
            continue  # another one
        if answer["tables"] is None:
            return None
        _reopen(current, answer["tables"])
        manifest: dict[str, Any] = answer["said"]["manifest"]
        return manifest


def _await_loss(current: Session) -> None:
    """Return once this rank has heard of a death; other workers may have heard of it before."""
    client = current.client
    if not client.drive_until(lambda: client.loss is not None, _LABEL, None):
        raise RingcommError(
            f"{_LABEL}: no server was lost within {client.deadline_s:g} s: of each, a copy lives. "
            "ps.restore() goes back to a checkpoint without that"
        )


def _recover(current: Session, root: Path, limit_s: float) -> Recovered:
    before, client = current.clock, current.client
    client.wait_until(lambda: not _has_ticks(current), _LABEL, lambda: client.servers)
    tables = {name: table.described() for name, table in current.tables.items()}
    found = bool(files.complete(root))
    answer = _ask(current, limit_s, "recover", tables=tables, has_checkpoint=found)
    if answer["tables"] is None:
        raise FileNotFoundError(f"{_LABEL}: no complete checkpoint in {root}")
    _reopen(current, answer["tables"])
    manifest = _restored(current, root, limit_s)
    _require_values(current, manifest)
    count_from(current, manifest)
    for each in [*current.recovering]:
        each.on_recovered()
    lost = max(0, before - current.clock)
    if is_chief():
        servers = ", ".join(map(str, sorted(current.layout.lost)))
        _log.warning(
            "ps: without server %s, all tables are as in the checkpoint of step %s in %s; %d steps "
            "are lost", servers, manifest["step"], root, lost, extra={"event": "recovery"},
        )  # fmt: skip
    return Recovered(manifest, lost)


def count_from(current: Session, manifest: dict[str, Any]) -> None:
    """Count steps on from those of a checkpoint; on a worker."""
    step = manifest.get("clock")
    current.clock = step if step is not None else manifest["step"] or 0
    current.begins = {}
    current.tick(current.clock)


def _has_ticks(current: Session) -> bool:
    """Return True if a server may hear of a step of this worker later: it would count then."""
    client = current.client
    with client.lock:
        return any(request.kind == FrameKind.TICK for request in client.requests.values())


def _ask(current: Session, limit_s: float, command: str, **more: Any) -> dict[str, Any]:
    """Ask for a command, and return the leader's answer."""
    client, layout = current.client, current.layout

    def take(reply: Any) -> dict[str, Any]:
        answer: dict[str, Any] = json_of(reply)
        if answer.get("tables") is not None:  # deaths of which the leader has heard before
            layout.know(answer["servers"])
            meet(current, answer["taken"])
            client.loss = None
        return answer

    body = as_body({"command": command, "servers": client.servers, **more})
    request = request_command(client, needs_tables=False, body=body)
    return client.call_one(_LABEL, request, take).wait(limit_s)


def _reopen(current: Session, tables: list[dict[str, Any]]) -> None:
    """Go on with the tables under their new numbers, and with queues where the leader is now."""
    current.n_recovered += 1
    keep_queues_at(current.engine, current.layout.rank_of(current.layout.leader))
    current.training.restart()
    created = {each["spec"]["name"]: each for each in tables}
    with current.opening:
        mine = [*current.tables.values()]
        rounds = {id(table.first_of): table.first_of for table in mine if table.first_of}
        for each in rounds.values():
            each.restart()
        for table in mine:
            if table.name not in created:
                raise RingcommError(
                    f"{_LABEL}: table[{table.name}]: the servers that live do not know it. Open it "
                    "once the job has begun anew"
                )
            table.reopen(created[table.name])


def _restored(current: Session, root: Path, limit_s: float) -> dict[str, Any]:
    """Return the manifest of the checkpoint, once the chief has restored it, or another worker."""
    restores = current.layout.chief
    while True:
        said: dict[str, Any] | None = None
        problem: Exception | None = None
        if current.engine.job_rank == restores:
            try:
                manifest = restore_tables(current, root, limit_s)
                said = {"manifest": manifest}
            except (ServerLostError, CommTimeoutError):
                raise
            except Exception as error:  # noqa: BLE001 - the others get it, too
                problem = error
                said = {"problem": f"{type(error).__name__}: {error}"}
        answer = _ask(current, limit_s, "recovered", said=said)
        if problem is not None:
            raise problem
        if answer["said"] is None:
            restores = answer["restores"]
            continue
        if "problem" in answer["said"]:
            why, who = answer["said"]["problem"], current.engine.transport.label(restores)
            raise RingcommError(f"{_LABEL}: {who} could not restore the tables: {why}")
        found: dict[str, Any] = answer["said"]["manifest"]
        return found


def _require_values(current: Session, manifest: dict[str, Any]) -> None:
    saved = {spec["name"] for spec in manifest["tables"].values()}
    for name, table in current.tables.items():
        if name not in saved and table.needs_values:
            raise RingcommError(
                f"{_LABEL}: table[{name}] was opened since the checkpoint was saved, and the "
                "values that it began with are gone. Save once all tables are open"
            )
