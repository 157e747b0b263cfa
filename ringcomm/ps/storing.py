"""Checkpoints, a server's side: what it has goes to files, and comes from them.

Partitions are copied, and loaded, in the thread that drives; files are touched by threads that do
nothing else. Until a file is written, what it will hold is in memory twice.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ringcomm.ps import checkpoint_files as files
from ringcomm.ps.checkpoint_files import Record
from ringcomm.ps.client import error_text
from ringcomm.ps.dense import DensePartition
from ringcomm.ps.frames import Status
from ringcomm.ps.hashed import Shard
from ringcomm.ps.messages import packed_json
from ringcomm.ps.moving import applied_of, merge_applied
from ringcomm.ps.optim import from_json
from ringcomm.ps.row_states import RowsPartition
from ringcomm.ps.snapshots import Moment
from ringcomm.ps.state import State

if TYPE_CHECKING:
    from ringcomm.ps.link import Delivery
    from ringcomm.ps.opening import Table
    from ringcomm.ps.placement import Partition
    from ringcomm.ps.serving import Server
    from ringcomm.ps.spec import Spec

Part = DensePartition | RowsPartition
PREPARE, COMMIT, FORGET = "prepare", "commit", "forget"  # what a restore asks for


class _Saved(NamedTuple):
    """Where a partition stands since the save before, as it was then."""

    folder: Path
    record: Record
    part: Part
    stamp: int


@dataclass
class _Item:
    """A partition of a save; without a state it has not changed since it was saved."""

    partition: Partition
    part: Part
    stamp: int
    state: State | None
    before: _Saved | None


class _Wanted(NamedTuple):
    """A partition that a restore is to fill."""

    partition: Partition
    part: Part


class _Source(NamedTuple):
    """A checkpoint; partitions of hash tables that were empty have no record in it."""

    folder: Path
    specs: dict[int, Spec]
    records: dict[int, list[Record]]
    by_partition: dict[Partition, Record]


class Store:
    """What one server does for checkpoints.

    Args:
        server: whose partitions they are.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._taken: dict[int, list[_Item]] = {}
        self._saved: dict[Partition, _Saved] = {}
        self._prepared: dict[int, list[tuple[_Wanted, State]]] = {}
        self._commands: Final = {PREPARE: self._prepare, COMMIT: self._commit, FORGET: self._forget}

    # --- save -----------------------------------------------------------------------------------
    def take(
        self, number: int, root: str, rounds: dict[int, int], done: Callable[[bool], None]
    ) -> Moment:
        """Copy all partitions, of tables with rounds right after so many; see snapshots.Held."""
        items = self._taken[number] = []
        is_there: dict[Path, bool] = {}

        def keep(partition: Partition, part: DensePartition | Shard) -> None:
            if isinstance(part, Shard):
                for each in part.partitions:
                    rows = RowsPartition(part, each)
                    if not rows.is_empty:
                        keep_one((partition[0], each), rows)
            else:
                keep_one(partition, part)

        def keep_one(partition: Partition, part: Part) -> None:
            before, stamp = self._saved.get(partition), part.stamp
            if before is not None and before.part == part and before.stamp == stamp:
                path = before.folder / before.record.file
                if path not in is_there:
                    is_there[path] = path.parent.parent == Path(root) and path.exists()
                if is_there[path]:
                    items.append(_Item(partition, part, stamp, None, before))
                    return
            state = part.state()
            if isinstance(part, DensePartition):
                state.meta["applied"] = applied_of(part)
            else:
                state.meta["applied"] = part.applied()
            items.append(_Item(partition, part, stamp, state, None))

        return Moment(self._server.tables, rounds, keep, done)

    def drop(self, number: int) -> None:
        """Forget what was taken and has not been written."""
        self._taken.pop(number, None)

    def on_save(self, request: Delivery) -> None:
        """Write what was taken, beside everything else; reply when it is on disk."""
        said = json.loads(request.meta)
        items = self._taken.pop(said["id"])
        folder = Path(said["folder"])
        self._beside(request, lambda: self._write(folder, items))

    def _write(self, folder: Path, items: list[_Item]) -> dict[str, Any]:
        if not folder.is_dir():
            raise FileNotFoundError(self._unseen(folder))
        writer = files.Writer(folder, self._server.index)
        written = {}
        try:
            for item in items:
                if item.state is None:
                    assert item.before is not None
                    record = item.before.record
                    writer.refer(item.before.folder, record)
                else:
                    record = writer.add(item.partition, item.state)
                    item.state = None  # its memory is free from here on
                written[item.partition] = _Saved(folder, record, item.part, item.stamp)
            told = writer.finish()
        finally:
            writer.close()
        self._saved = _worth_keeping(written)
        return told

    # --- restore --------------------------------------------------------------------------------
    def on_restore(self, request: Delivery) -> None:
        """Read and check what a checkpoint has for this server; load it once all have done so."""
        said = json.loads(request.meta)
        self._commands[said["do"]](request, said)

    def _prepare(self, request: Delivery, said: dict[str, Any]) -> None:
        specs = {table.number: table.spec for table in self._server.tables.values()}
        wanted = [
            _Wanted((table.number, number), part)
            for table in self._server.tables.values()
            for number, part in _partitions_of(table)
        ]
        self._prepared.clear()  # of a restore that was given up
        folder, is_lax = Path(said["folder"]), bool(said["values_only"])

        def read() -> dict[str, Any]:
            if not folder.is_dir():
                raise FileNotFoundError(self._unseen(folder))
            manifest = files.read_manifest(folder)
            records = files.read_records(folder, manifest)
            saved = files.specs_of(manifest)
            origin = match(saved, specs, values_only=is_lax)
            source = _Source(folder, saved, records, {
                record.partition: record for each in records.values() for record in each
            })  # fmt: skip
            self._prepared[said["id"]] = [
                (each, _read(source, origin[each.partition[0]], each))
                for each in wanted
                if each.partition[0] in origin
            ]
            return {"fresh": sorted(specs[n].name for n in specs.keys() - origin.keys())}

        self._beside(request, read)

    def _commit(self, request: Delivery, said: dict[str, Any]) -> None:
        for (_, part), state in self._prepared.pop(said["id"]):
            if said["values_only"]:
                part.load_values(state)
                continue
            part.load(state)
            if not said["is_same_job"]:
                continue  # the same numbers are those of other pushes
            if isinstance(part, DensePartition):
                merge_applied(part, state.meta["applied"])
            else:
                part.merge_applied(state.meta.get("applied", ()))  # none of an empty partition
        self._server.reply(request, meta=b"{}")
        self._server.waiters.look_at_all()

    def _forget(self, request: Delivery, said: dict[str, Any]) -> None:
        self._prepared.pop(said["id"], None)
        self._server.reply(request, meta=b"{}")

    # --- threads --------------------------------------------------------------------------------
    def _beside(self, request: Delivery, work: Callable[[], dict[str, Any]]) -> None:
        def run() -> None:
            try:
                meta = packed_json(work())
            except Exception as error:  # noqa: BLE001 - the server lives on
                status = Status.FAILED if isinstance(error, OSError) else Status.REFUSED
                self._server.reply(request, status=status, meta=error_text(error))
            else:
                self._server.reply(request, meta=meta)

        threading.Thread(target=run, name="ringcomm-ps-files", daemon=True).start()

    def _unseen(self, folder: Path) -> str:
        return (
            f"server {self._server.index} on {os.uname().nodename} sees no {folder}: checkpoints "
            "must lie on a file system that all ranks share"
        )


def match(saved: dict[int, Spec], opened: dict[int, Spec], *, values_only: bool) -> dict[int, int]:
    """Return which saved table fills which open one: number of the open -> of the saved.

    Args:
        saved: tables of a checkpoint, by number.
        opened: those that are open.
        values_only: only names and shapes need agree, and saved tables may be left over.

    Raises:
        ValueError: a table is not open, or is another one; with both values.
    """
    numbers = {spec.name: number for number, spec in opened.items()}
    out = {}
    for number, spec in saved.items():
        mine = opened.get(numbers.get(spec.name, -1))
        if mine is None:
            if values_only:
                continue
            raise ValueError(
                f"table {spec.name!r} of the checkpoint is not open; open are "
                f"{sorted(numbers) or 'none'}. Open it first: ps.table({spec.name!r}, ...)"
            )
        for what, there, here in _aspects(spec, mine, values_only=values_only):
            if there != here:
                raise ValueError(
                    f"table[{spec.name}]: {what} is {there} in the checkpoint, and {here} where "
                    "it is open. Nothing was changed"
                )
        out[numbers[spec.name]] = number
    if not out and values_only:
        raise ValueError(
            f"no open table is in the checkpoint: open are {sorted(numbers)}, saved are "
            f"{sorted(spec.name for spec in saved.values())}"
        )
    return out


def _aspects(saved: Spec, mine: Spec, *, values_only: bool) -> list[tuple[str, object, object]]:
    always: list[tuple[str, object, object]] = [
        ("kind", saved.kind, mine.kind),
        ("shape", saved.shape, mine.shape),
    ]
    if saved.kind == "hash":  # keys go to partitions by their number
        always.append(("number of partitions", saved.partitions, mine.partitions))
    if values_only:
        return always
    a, b = from_json(saved.updater), from_json(mine.updater)
    return [
        *always,
        ("dtype", saved.dtype, mine.dtype),
        ("updater", type(a).__name__, type(b).__name__),  # its numbers travel with every push
        ("state of the updater", a.slot_names, b.slot_names),
        *([("init", saved.initial, mine.initial)] if saved.kind == "hash" else []),
    ]


def _partitions_of(table: Table) -> list[tuple[int, Part]]:
    if table.shard is None:
        return list(table.parts.items())
    return [(number, RowsPartition(table.shard, number)) for number in table.shard.partitions]


def _read(source: _Source, number: int, wanted: _Wanted) -> State:
    spec, part = source.specs[number], wanted.part
    if isinstance(part, DensePartition):
        return files.cut(source.folder, spec, source.records[number], part.start, part.stop)
    record = source.by_partition.get((number, wanted.partition[1]))
    return State({}) if record is None else files.read_state(source.folder, record)


def _worth_keeping(written: dict[Partition, _Saved]) -> dict[Partition, _Saved]:
    """Return the partitions that need not be written again while they do not change.

    Those in a file of which less than half is still of use are: it could be removed then.
    """
    used: dict[Path, int] = {}
    for folder, record, _, _ in written.values():
        path = folder / record.file
        used[path] = used.get(path, 0) + record.nbytes
    sparse = {path for path, nbytes in used.items() if nbytes < path.stat().st_size / 2}
    return {
        partition: saved
        for partition, saved in written.items()
        if saved.folder / saved.record.file not in sparse
    }
