"""A server's part in checkpoints: it writes its partitions to files, and loads them.

Partitions are copied, and loaded, in the thread that drives; files are touched by threads that do
nothing else, and hand over what they have read or written: settle() takes it in the thread that
drives, and replies. Until a file is written, what it will hold is in memory twice.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from ringcomm.errors import RingcommError
from ringcomm.ps.checkpoint import files
from ringcomm.ps.checkpoint.files import Record
from ringcomm.ps.checkpoint.load_plan import LoadPlan, plan_load
from ringcomm.ps.moment_numbers import owner_of
from ringcomm.ps.optim import from_json
from ringcomm.ps.partition_state import PartitionState
from ringcomm.ps.protocol.frame_meta import COMMIT, LOOK, PREPARE, packed_json
from ringcomm.ps.protocol.frames import Status
from ringcomm.ps.protocol.remote_errors import error_text
from ringcomm.ps.server.dense.partition import DensePartition
from ringcomm.ps.server.rows.hash_shard import Shard
from ringcomm.ps.server.rows.row_partition import RowsPartition
from ringcomm.system_text import host_name

if TYPE_CHECKING:
    from ringcomm.ps.placement.partitions import Partition
    from ringcomm.ps.protocol.link import Delivery
    from ringcomm.ps.server.contents import Contents
    from ringcomm.ps.server.core.actions import Key
    from ringcomm.ps.server.core.core import Core
    from ringcomm.ps.server.replies import Replies
    from ringcomm.ps.table_spec import Spec

Part = DensePartition | RowsPartition
_SHOWN: Final = 20  # names in an error


class _Saved(NamedTuple):
    """The place of a partition that has not changed since the previous save."""

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
    state: PartitionState | None
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
    counts: dict[str, dict[int, int]]
    read: Callable[[Record], PartitionState]


@dataclass(eq=False)
class _FileWork:
    """A save that a thread writes, or a restore that it reads.

    Attributes:
        number: of the save or restore.
        is_save: it is no restore.
        is_given_up: set once nobody wants what the thread makes.
        is_over: set once the thread touches no file any more.
    """

    number: int
    is_save: bool
    is_given_up: threading.Event = field(default_factory=threading.Event)
    is_over: threading.Event = field(default_factory=threading.Event)


# What a thread hands over: what is to be done with its result, which returns the reply; or why
# there is none.
_Take = Callable[[], dict[str, Any]]


class _Finished(NamedTuple):
    request: Delivery
    work: _FileWork | None
    outcome: _Take | Exception


class Store:
    """Saves and restores the partitions of one server; all methods in the thread that drives.

    Args:
        index: of the server.
        core: decides; knows whose pushes are in a partition.
        contents: of the tables, by number.
        replies: sends answers.

    Attributes:
        is_copy: another server writes the files, which does the same otherwise.
        has_restored: the last request of a restore has replaced values.
    """

    def __init__(
        self, index: int, core: Core, contents: Mapping[int, Contents], replies: Replies
    ) -> None:
        self._index, self._core, self._contents, self._replies = index, core, contents, replies
        self.is_copy = self.has_restored = False
        self._taken: dict[int, list[_Item]] = {}
        self._roots: dict[int, Path] = {}
        # Of hash tables, with those of earlier jobs: "rounds", and changes "outside" them.
        self._counts: dict[int, dict[str, dict[int, int]]] = {}
        self._is_there: dict[Path, bool] = {}
        self._saved: dict[Partition, _Saved] = {}
        self._prepared: dict[int, list[tuple[_Wanted, PartitionState]]] = {}
        self._under_way: dict[int, _FileWork] = {}
        self._finished: deque[_Finished] = deque()  # threads append, settle() takes

    @property
    def is_quiet(self) -> bool:
        return not (self._taken or self._under_way or self._prepared)

    def settle(self) -> None:
        """Take what threads have finished, and reply; at each poll."""
        while self._finished:
            request, work, outcome = self._finished.popleft()
            if work is not None:
                del self._under_way[work.number]
            try:
                if isinstance(outcome, Exception):
                    raise outcome
                meta = packed_json(outcome())
            except Exception as error:  # noqa: BLE001 - the server lives on
                status = Status.FAILED if isinstance(error, OSError) else Status.REFUSED
                self._replies(request, status=status, meta=error_text(error))
            else:
                self._replies(request, meta=meta)

    # --- save -----------------------------------------------------------------------------------
    def begin(self, number: int, root: str) -> None:
        self._taken[number], self._roots[number] = [], Path(root)
        self._counts[number] = {"rounds": {}, "outside": {}}
        self._is_there.clear()

    def take(self, number: int, key: Key, part: DensePartition | Shard) -> None:
        """Copy what a unit has now, as far as it has changed since it was saved."""
        applied = self._core.unit_of(key).applied_without_pending()
        if isinstance(part, Shard):
            counts = self._counts[number]
            counts["outside"][key[0]] = part.n_outside
            if part.spec.mode.has_rounds and part.partitions:  # without, it may lack some
                counts["rounds"][key[0]] = part.rounds_before + part.version
            for each in part.partitions:
                rows = RowsPartition(part, each)
                if not rows.is_empty:
                    self._take(number, (key[0], each), rows, rows.applied(applied))
        else:
            self._take(number, key, part, sorted(applied.items()))

    def _take(
        self, number: int, partition: Partition, part: Part, applied: list[tuple[int, int]]
    ) -> None:
        before, stamp, items = self._saved.get(partition), part.stamp, self._taken[number]
        if before is not None and before.part == part and before.stamp == stamp:
            path, root = before.folder / before.record.file, self._roots[number]
            if path not in self._is_there:
                self._is_there[path] = path.parent.parent == root and path.exists()
            if self._is_there[path]:
                items.append(_Item(partition, part, stamp, None, before))
                return
        state = part.state()
        state.meta["applied"] = applied
        items.append(_Item(partition, part, stamp, state, None))

    def forget(self, table: int) -> None:
        self._saved = {part: each for part, each in self._saved.items() if part[0] != table}

    def drop(self, number: int) -> None:
        self._taken.pop(number, None)
        self._roots.pop(number, None)
        self._counts.pop(number, None)

    def clear(self) -> None:
        """Know nothing of tables that are gone; what is being written is written."""
        self._taken.clear()
        self._roots.clear()
        self._counts.clear()
        self._forget_restores()
        self._saved = {}

    def give_up(self, rank: int) -> None:
        """Write and read no more for a rank that died: nobody would complete what it began."""
        for number in [each for each in self._taken if owner_of(each) == rank]:
            self.drop(number)
        for number in [each for each in self._prepared if owner_of(each) == rank]:
            del self._prepared[number]
        for number, work in self._under_way.items():
            if owner_of(number) == rank:
                work.is_given_up.set()

    def on_save(self, request: Delivery) -> None:
        """Write what was taken, beside everything else; reply when it is on disk."""
        content = json.loads(request.meta)
        number = content["id"]
        items, counts = self._taken[number], self._counts[number]
        self.drop(number)
        if self.is_copy:  # what a client gets that asks again, once the other one is dead
            raise RingcommError(
                f"ps.save: server {self._index} died while it wrote this checkpoint, which is not "
                "complete; its copy has all values. Save again"
            )
        folder, work = Path(content["folder"]), _FileWork(number, is_save=True)
        before = [each for each in self._under_way.values() if each.is_save]

        def write() -> _Take:
            for each in before:
                each.is_over.wait()  # one that was given up soon ends
            entry, saved = self._write(work, folder, items)

            def take() -> dict[str, Any]:
                self._saved = saved
                return {**entry, **counts}

            return take

        self._beside(request, write, work)

    def _write(
        self, work: _FileWork, folder: Path, items: list[_Item]
    ) -> tuple[dict[str, Any], dict[Partition, _Saved]]:
        """Return the server's entry of the manifest, and what need not be written again."""
        if not folder.is_dir():
            raise FileNotFoundError(self._unseen(folder))
        writer = files.Writer(folder, self._index)
        written = {}
        try:
            for item in items:
                _require_owner(work)
                if item.state is None:
                    assert item.before is not None
                    record = item.before.record
                    writer.refer(item.before.folder, record)
                else:
                    record = writer.add(item.partition, item.state)
                    item.state = None  # its memory is free from here on
                written[item.partition] = _Saved(folder, record, item.part, item.stamp)
            entry = writer.finish()
        finally:
            writer.close()
        _require_owner(work)
        return entry, _worth_keeping(written)

    # --- restore --------------------------------------------------------------------------------
    def on_restore(self, request: Delivery) -> list[Key]:
        """Read and check what a checkpoint has for this server; load it once all have done so.

        Returns:
            The units whose values were replaced.
        """
        content = json.loads(request.meta)
        self.has_restored = False
        if content["do"] == PREPARE:
            self._prepare(request, content)
            return []
        if content["do"] == COMMIT:
            return self._commit(request, content)
        if content["do"] == LOOK:
            self._beside(request, lambda: partial(dict, newest=_newest_in(Path(content["folder"]))))
            return []
        self._forget_restore(content["id"])
        self._replies(request, meta=b"{}")
        return []

    def _prepare(self, request: Delivery, content: dict[str, Any]) -> None:
        specs = {number: contents.spec for number, contents in self._contents.items()}
        wanted = [
            _Wanted((number, part), values)
            for number, contents in self._contents.items()
            for part, values in _partitions_of(contents)
        ]
        self._forget_restores()  # of a client that has given up
        folder, work = Path(content["folder"]), _FileWork(content["id"], is_save=False)

        def read() -> _Take:
            if not folder.is_dir():
                raise RingcommError(self._unseen(folder))  # there is one, on another host
            manifest = files.read_manifest(folder)
            records = files.read_records(folder, manifest)
            saved = files.specs_of(manifest)
            source = _Source(folder, saved, records, {
                record.partition: record for each in records.values() for record in each
            }, files.counts_in(manifest), files.reading(folder))  # fmt: skip
            if content["values_only"]:
                plan = plan_load(saved, specs)
                require_values(plan, folder, is_strict=content["is_strict"])
                found = [
                    (each, _values_for(source, plan, each)) for each in _while_wanted(work, wanted)
                ]
                answer = {
                    "missing": plan.missing, "mismatched": plan.unlike, "unexpected": plan.unused
                }  # fmt: skip
            else:
                try:
                    origin = match(saved, specs)
                except ValueError as error:
                    raise ValueError(f"{error} (checkpoint {folder})") from error
                found = [
                    (each, _read(source, origin[each.partition[0]], each))
                    for each in _while_wanted(work, wanted)
                    if each.partition[0] in origin
                ]
                answer = {"missing": sorted(specs[n].name for n in specs.keys() - origin.keys())}
            prepared = [(each, state) for each, state in found if state is not None]

            def take() -> dict[str, Any]:
                _require_wanted(work)
                self._prepared[work.number] = prepared
                return answer

            return take

        self._beside(request, read, work)

    def _forget_restore(self, number: int) -> None:
        """Keep nothing of a restore; what is being read of it is dropped once it is read."""
        self._prepared.pop(number, None)
        work = self._under_way.get(number)
        if work is not None:
            work.is_given_up.set()

    def _forget_restores(self) -> None:
        self._prepared.clear()
        for work in self._under_way.values():
            if not work.is_save:
                work.is_given_up.set()

    def _commit(self, request: Delivery, content: dict[str, Any]) -> list[Key]:
        keys = {}
        for ((table, number), part), state in self._prepared.pop(content["id"]):
            keys[table, number if isinstance(part, DensePartition) else 0] = True
            if content["values_only"]:
                part.load_values(state)
                continue
            part.load(state)
            if not content["is_same_job"]:
                continue  # the same numbers are those of other pushes
            part.merge_applied(state.meta.get("applied", ()))  # none of an empty partition
        self.has_restored = True
        self._replies(request, meta=b"{}")
        return [*keys]

    # --- threads --------------------------------------------------------------------------------
    def _beside(
        self, request: Delivery, run: Callable[[], _Take], work: _FileWork | None = None
    ) -> None:
        """Run something that touches files in a thread of its own; settle() takes its result."""

        def finish() -> None:
            try:
                outcome: _Take | Exception = run()
            except Exception as error:  # noqa: BLE001 - settle() replies
                outcome = error
            if work is not None:
                work.is_over.set()
            self._finished.append(_Finished(request, work, outcome))

        if not self.is_copy:
            threading.Thread(target=finish, name="ringcomm-ps-files", daemon=True).start()
        if work is not None:
            self._under_way[work.number] = work
        if self.is_copy:  # the next request comes once the other server has done this one
            finish()
            self.settle()

    def _unseen(self, folder: Path) -> str:
        return (
            f"server {self._index} on {host_name()} sees no {folder}: checkpoints "
            "must lie on a file system that all ranks share"
        )


def _require_owner(work: _FileWork) -> None:
    if work.is_given_up.is_set():
        raise RingcommError(f"ps.save: rank {owner_of(work.number)}, whose save this is, died")


def _require_wanted(work: _FileWork) -> None:
    if work.is_given_up.is_set():
        raise RingcommError(
            f"ps.restore: rank {owner_of(work.number)} has given up this restore while its files "
            "were read. Nothing was changed"
        )


def _while_wanted(work: _FileWork, wanted: Iterable[_Wanted]) -> Iterator[_Wanted]:
    for each in wanted:
        _require_wanted(work)
        yield each


def _newest_in(root: Path) -> str:
    return next((folder.name for folder in files.complete(root)), "")


def match(saved: dict[int, Spec], opened: dict[int, Spec]) -> dict[int, int]:
    """Return which saved table ps.restore() takes for which open one, by number.

    Raises:
        ValueError: a table is not open, or is another one; with both values.
    """
    numbers = {spec.name: number for number, spec in opened.items()}
    out = {}
    for number, spec in saved.items():
        mine = opened.get(numbers.get(spec.name, -1))
        if mine is None:
            raise ValueError(
                f"table {spec.name!r} of the checkpoint is not open; open are "
                f"{sorted(numbers) or 'none'}. Open it first: ps.table({spec.name!r}, ...). Of "
                "another model, ps.load(strict=False) takes the values that have the same names"
            )
        for what, there, here in _aspects(spec, mine):
            if there != here:
                raise ValueError(
                    f"table[{spec.name}]: {what} is {there} in the checkpoint, and {here} where "
                    "it is open. Nothing was changed"
                )
        out[numbers[spec.name]] = number
    return out


def _aspects(saved: Spec, mine: Spec) -> list[tuple[str, object, object]]:
    always: list[tuple[str, object, object]] = [
        ("kind", saved.kind, mine.kind),
        ("shape", saved.shape, mine.shape),
        ("its content", saved.parts, mine.parts),
    ]
    if saved.kind == "hash":  # keys go to partitions by their number
        always.append(("number of partitions", saved.partitions, mine.partitions))
    a, b = from_json(saved.updater), from_json(mine.updater)
    return [
        *always,
        ("dtype", saved.dtype, mine.dtype),
        ("updater", type(a).__name__, type(b).__name__),  # its numbers travel with every push
        ("state of the updater", a.slot_names, b.slot_names),
        *([("init", saved.initial, mine.initial)] if saved.kind == "hash" else []),
    ]


def require_values(plan: LoadPlan, folder: Path, *, is_strict: bool) -> None:
    problems = [f"it has no {name}" for name in plan.missing] + plan.unlike
    if not (plan.pieces or plan.rows):
        raise ValueError(
            f"ps.load: nothing that is open is in {folder}: {_some(problems)}. It has "
            f"{_some(plan.unused) or 'nothing'}"
        )
    if is_strict and problems:
        raise ValueError(
            f"ps.load: {folder} does not fit: {_some(problems)}. Nothing was changed; strict=False "
            "takes what is there, and leaves the rest as it is"
        )


def _some(texts: list[str]) -> str:
    more = f", and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return "; ".join(texts[:_SHOWN]) + more


def _partitions_of(contents: Contents) -> list[tuple[int, Part]]:
    shard = contents.shard
    if shard is None:
        return list(contents.parts.items())
    return [(number, RowsPartition(shard, number)) for number in shard.partitions]


def _read(source: _Source, number: int, wanted: _Wanted) -> PartitionState:
    spec, part = source.specs[number], wanted.part
    if isinstance(part, DensePartition):
        return files.cut(source.folder, spec, source.records[number], part.start, part.stop)
    record = source.by_partition.get((number, wanted.partition[1]))
    state = PartitionState({}) if record is None else files.read_state(source.folder, record)
    state.meta.update((name, of[number]) for name, of in source.counts.items() if number in of)
    return state


def _values_for(source: _Source, plan: LoadPlan, wanted: _Wanted) -> PartitionState | None:
    """Return what ps.load() takes for a partition; None: nothing."""
    number, part = wanted.partition[0], wanted.part
    if not isinstance(part, DensePartition):
        return _read(source, plan.rows[number], wanted) if number in plan.rows else None
    values, filled = np.empty(part.count, part.dtype), []
    for piece in plan.pieces.get(number, ()):
        first, last = max(piece.start, part.start), min(piece.stop, part.stop)
        if first < last:
            spec, records = source.specs[piece.table], source.records[piece.table]
            shift = piece.source - piece.start
            values[first - part.start : last - part.start] = files.cut_values(
                source.read, spec, records, first + shift, last + shift
            )
            filled.append((first - part.start, last - part.start))
    return PartitionState({"filled": filled}, {"values": values}) if filled else None


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
