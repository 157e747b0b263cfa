"""The files of checkpoints in a folder: written, read and removed without asking any rank.

    path/save-00000012/            a checkpoint; whole once it has a manifest.json
        manifest.json              step, tables, the checksums of the lists, its own; written last
        server-0.json              list of what server 0 has written: partition -> file and place
        server-0.data-12-0         partitions, one behind the other; see ringcomm.ps.partition_state

A partition that has not changed stands in a file of an earlier checkpoint, hard-linked into this
folder: each folder is complete by itself, and any may be removed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np

from ringcomm.atomic_files import crc_of, paths_in, replacing, sync_folder
from ringcomm.integers import is_integer
from ringcomm.ps.partition_state import PartitionState, recut
from ringcomm.ps.placement.partitions import Partition
from ringcomm.ps.table_spec import Spec
from ringcomm.regular_files import BrokenFileError, open_regular, read_regular

if TYPE_CHECKING:
    from numpy.typing import NDArray

FILE_NBYTES: Final = 64 << 20  # a file of partitions is ended behind the one that reaches it
MANIFEST: Final = "manifest.json"
_FORMAT: Final = 2
_WITHOUT_CHECKSUM: Final = 1  # format of version 0.1.0 before manifests had one
_CHECKSUM: Final = b',\n "crc": '  # ends a manifest, with the CRC-32 of all before it
_FOLDER: Final = re.compile(r"save-(\d{8,})")
_LIST_NBYTES: Final = 1 << 30  # that a list may have; a partition takes about 150
_LIST: Final = re.compile(r"server-\d+\.json")
_WITHOUT_LINKS: Final = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
T = TypeVar("T")
_log = logging.getLogger("ringcomm")


class Record(NamedTuple):
    """The place of a partition in the files of a checkpoint.

    Attributes:
        partition: number of the table in that job, and which part of it.
        file: name of it, in the folder of the checkpoint.
        offset: of its first byte.
        nbytes: of it.
        crc: its CRC-32.
        start: of a dense slice; 0 for another partition.
        stop: likewise.
    """

    partition: Partition
    file: str
    offset: int
    nbytes: int
    crc: int
    start: int = 0
    stop: int = 0


class SavedCheckpoint(NamedTuple):
    """A checkpoint, as its lists describe it.

    Attributes:
        folder: of its files.
        manifest: see write_manifest().
        records: what stands where, by table.
    """

    folder: Path
    manifest: dict[str, Any]
    records: dict[int, list[Record]]


# --- folders ------------------------------------------------------------------------------------
def new_folder(root: Path, last: Path | None = None) -> Path:
    """Make the folder of the next checkpoint; first remove what saves that were killed have left.

    To be called while nobody writes.

    Args:
        root: where it lies.
        last: the checkpoint that this job has saved before; a newer one is another job's.
    """
    root.mkdir(parents=True, exist_ok=True)
    if last is not None and last.parent == root:
        for newest in complete(root)[:1]:
            if newest.name > last.name:
                _log.warning(
                    "ps.save: another job saves in this folder, too: %s is none of this job. "
                    "ps.recover() and ps.restore() take the newest, so give each its own", newest,
                )  # fmt: skip
    folders = list(_folders(root))
    for _, folder in folders:
        discard(folder)
    numbers = [number for number, _ in folders]
    folder = root / f"save-{max(numbers, default=0) + 1:08d}"
    folder.mkdir()
    return folder


def complete(root: Path) -> list[Path]:
    """Return the folders of complete checkpoints, the newest first."""
    found = [folder for _, folder in sorted(_folders(root), reverse=True)]
    return [folder for folder in found if (folder / MANIFEST).is_file()]


def tidy(root: Path, keep: int | None) -> None:
    """Remove all but the last `keep` checkpoints, as far as that goes. While nobody writes."""
    kept = complete(root)[:keep]
    for _, folder in _folders(root):
        if folder in kept:
            continue
        try:
            (folder / MANIFEST).unlink(missing_ok=True)  # first: what has none is no checkpoint
            shutil.rmtree(folder)
        except OSError as error:  # the new checkpoint is complete, whatever an old one is
            _log.warning("ps.save: an older checkpoint could not be removed: %s", error)


def discard(folder: Path) -> None:
    """Remove a folder that has not become a checkpoint, as far as that goes; any other stays."""
    if not (folder / MANIFEST).is_file():
        shutil.rmtree(folder, ignore_errors=True)


def _folders(root: Path) -> Iterator[tuple[int, Path]]:
    for path in paths_in(root):
        match = _FOLDER.fullmatch(path.name)
        if match and path.is_dir():
            yield int(match[1]), path


# --- write --------------------------------------------------------------------------------------
class Writer:
    """Writes what one server has into the folder of a checkpoint.

    Args:
        folder: of the checkpoint.
        server: number of the server.
    """

    def __init__(self, folder: Path, server: int) -> None:
        self._folder = folder
        self._server = server
        self._records: list[Record] = []
        self._names = (self._name(k) for k in itertools.count())
        self._linked: set[str] = set()
        self._file: IO[bytes] | None = None

    def add(self, partition: Partition, state: PartitionState) -> Record:
        """Write a partition; return where it stands."""
        if self._file is None:
            self._file = (self._folder / next(self._names)).open("xb")
        pieces = state.packed()
        offset = self._file.tell()
        for piece in pieces:
            self._file.write(piece.data)
        nbytes = sum(piece.nbytes for piece in pieces)
        start, stop = (int(state.meta.get(key, 0)) for key in ("start", "stop"))
        name = Path(self._file.name).name
        record = Record(partition, name, offset, nbytes, crc_of(*pieces), start, stop)
        self._records.append(record)
        if self._file.tell() >= FILE_NBYTES:
            self._end_file()
        return record

    def refer(self, folder: Path, record: Record) -> None:
        if record.file not in self._linked:
            _link(folder / record.file, self._folder / record.file)
            self._linked.add(record.file)
        self._records.append(record)

    def finish(self) -> dict[str, Any]:
        """Write the list of what was added; return its name and checksum, for the manifest.

        Once this returns, everything is on disk.
        """
        self._end_file()
        name = f"server-{self._server}.json"
        text = json.dumps([record._asdict() for record in self._records]).encode()
        with replacing(self._folder / name) as file:
            file.write(text)
        return {"list": name, "crc": crc_of(text), "partitions": len(self._records)}

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _name(self, k: int) -> str:
        number = self._folder.name.partition("-")[2].lstrip("0")
        return f"server-{self._server}.data-{number}-{k}"

    def _end_file(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self.close()


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Make a checkpoint complete."""
    text = json.dumps({"format": _FORMAT, **manifest}, indent=1).encode().removesuffix(b"\n}")
    with replacing(folder / MANIFEST) as file:
        file.write(text + _checksum_of(text))
    sync_folder(folder.parent)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _WITHOUT_LINKS:
            raise
        _say_once(source.parent.parent)
        shutil.copyfile(source, target)
        with target.open("rb") as file:
            os.fsync(file.fileno())


_said: set[Path] = set()
_said_lock = threading.Lock()


def _say_once(root: Path) -> None:
    with _said_lock:
        if root in _said:
            return
        _said.add(root)
    _log.warning("ps.save: %s knows no hard links: unchanged partitions are copied there", root)


# --- read ---------------------------------------------------------------------------------------
def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint.

    Raises:
        BrokenFileError: it is not there, or is no such file.
    """
    path = folder / MANIFEST
    try:
        data = read_regular(path)
    except (OSError, BrokenFileError) as error:
        raise BrokenFileError(f"{path}: {error}") from error
    text, mark, _ = data.rpartition(_CHECKSUM)
    if mark and data != text + _checksum_of(text):
        raise BrokenFileError(f"{path}: has changed since it was written")
    with _broken_if_wrong(path):
        manifest: dict[str, Any] = json.loads(data)
        written_as = manifest["format"]
        if written_as not in (_FORMAT, _WITHOUT_CHECKSUM):
            raise ValueError(f"is no manifest of format {_FORMAT}, or of {_WITHOUT_CHECKSUM}")
        if written_as == _FORMAT and not manifest.pop("crc", None):
            raise ValueError("its checksum is missing")
        if written_as == _WITHOUT_CHECKSUM:
            _require_parts(manifest)
    return manifest


def _checksum_of(text: bytes) -> bytes:
    """Return the end of a manifest that begins with `text`."""
    return _CHECKSUM + b"%d\n}" % crc_of(text)


def _require_parts(manifest: dict[str, Any]) -> None:
    """Raise an error of _broken_if_wrong() unless all is there that is used of a manifest."""
    counts_in(manifest)
    for spec in specs_of(manifest).values():
        if spec.kind not in ("dense", "hash") or np.dtype(spec.dtype).kind != "f":
            raise ValueError(f"{spec.name} is a {spec.kind} table of {spec.dtype}")
        if not all(is_integer(n) for n in (*spec.shape, spec.block, spec.partitions)):
            raise ValueError(f"{spec.name} has the shape {spec.shape}")
    for entry in manifest["servers"]:
        if not _LIST.fullmatch(entry["list"]) or not is_integer(entry["crc"]):
            raise ValueError(f"{entry['list']} is no list of a server")
    for name in ("step", "clock"):
        if manifest[name] is not None and not is_integer(manifest[name]):
            raise ValueError(f"its {name} is {manifest[name]!r}")
    if not isinstance(manifest["job"], str):
        raise ValueError(f"its job is {manifest['job']!r}")


@contextlib.contextmanager
def _broken_if_wrong(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        what = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise BrokenFileError(f"{path}: {what}") from error


def counts_in(manifest: dict[str, Any]) -> dict[str, dict[int, int]]:
    """Return how many "rounds", and changes "outside" them, tables have had.

    They are those of all jobs that led to a checkpoint; rounds of an old one are of its own job.
    """
    rounds = {int(table): n for table, n in manifest.get("rounds", {}).items()}
    outside: dict[int, int] = {}
    for entry in manifest["servers"]:  # which all say the same of rounds, if anything
        rounds |= {int(table): n for table, n in entry.get("rounds", {}).items()}
        for table, n in entry.get("outside", {}).items():
            outside[int(table)] = max(n, outside.get(int(table), 0))
    return {"rounds": rounds, "outside": outside}


def specs_of(manifest: dict[str, Any]) -> dict[int, Spec]:
    return {int(number): Spec.of_json(spec) for number, spec in manifest["tables"].items()}


def read_records(folder: Path, manifest: dict[str, Any]) -> dict[int, list[Record]]:
    """Return the records of a checkpoint, by table.

    Raises:
        BrokenFileError: a file is missing or has changed.
    """
    by_table: dict[int, list[Record]] = {int(number): [] for number in manifest["tables"]}
    for entry in manifest["servers"]:
        path = folder / entry["list"]
        try:
            text = read_regular(path, _LIST_NBYTES)
        except (OSError, BrokenFileError) as error:
            raise BrokenFileError(f"{path}: {error}") from error
        if crc_of(text) != entry["crc"]:
            raise BrokenFileError(f"{path}: has changed since it was written")
        with _broken_if_wrong(path):
            for each in json.loads(text):
                record = Record(**{**each, "partition": tuple(each["partition"])})
                if record.partition[0] in by_table:  # else opened while the others were saved
                    by_table[record.partition[0]].append(record)
    return by_table


def _require_files(folder: Path, records: dict[int, list[Record]]) -> None:
    """Raise BrokenFileError if a file is missing or cut short; it is not read."""
    ends: dict[str, int] = {}
    for record in itertools.chain.from_iterable(records.values()):
        ends[record.file] = max(ends.get(record.file, 0), record.offset + record.nbytes)
    for name, end in ends.items():
        path = folder / name
        try:
            length = path.stat().st_size
        except OSError as error:
            raise BrokenFileError(f"{path}: {error}") from error
        if length < end:
            raise BrokenFileError(f"{path}: has {length} bytes, and {end} were written")


def read_state(folder: Path, record: Record) -> PartitionState:
    """Return a partition.

    Raises:
        BrokenFileError: it has changed since it was written.
    """
    path = folder / record.file
    try:
        with open_regular(path) as file:
            data: NDArray[np.uint8] = np.empty(record.nbytes, np.uint8)
            n = _read_into(file, record.offset, data)
    except (OSError, BrokenFileError) as error:
        raise BrokenFileError(f"{path}: {error}") from error
    if n != record.nbytes or crc_of(data) != record.crc:
        raise BrokenFileError(f"{path}: bytes {record.offset} to {record.offset + record.nbytes} "
                              "have changed since they were written")  # fmt: skip
    try:
        return PartitionState.unpacked(data)
    except ValueError as error:
        raise BrokenFileError(f"{path}: {error}") from error


def _read_into(file: IO[bytes], offset: int, data: NDArray[np.uint8]) -> int:
    """Fill an array with what a file has at an offset; return how many bytes that are."""
    n = 0
    while piece := os.preadv(file.fileno(), [data.data[n:]], offset + n):  # of 2 GiB at most
        n += piece
    return n


def cut(
    folder: Path, spec: Spec, records: Iterable[Record], start: int, stop: int
) -> PartitionState:
    """Return elements [start, stop) of a dense table.

    Raises:
        BrokenFileError: a file has changed, or has not all of them.
    """
    wanted = [
        each
        for each in records
        if max(each.start, start) < min(each.stop, stop) or each.start == each.stop or start == stop
    ]
    pieces = [read_state(folder, record) for record in wanted]
    try:
        return recut(spec, start, stop, pieces)
    except ValueError as error:
        raise BrokenFileError(f"{folder}: {error}") from error


def reading(folder: Path) -> Callable[[Record], PartitionState]:
    """Return read_state() that has the last partitions at hand: many parameters share one."""
    return functools.lru_cache(maxsize=2)(functools.partial(read_state, folder))


def cut_values(
    read: Callable[[Record], PartitionState],
    spec: Spec,
    records: Iterable[Record],
    start: int,
    stop: int,
) -> NDArray[Any]:
    """Return the values alone of elements [start, stop) of a dense table; see reading() for read.

    Raises:
        BrokenFileError: a file has changed, or has not all of them.
    """
    values: NDArray[Any] = np.empty(stop - start, spec.dtype)
    n = 0
    for record in records:
        first, last = max(record.start, start), min(record.stop, stop)
        if first < last:
            found = read(record).arrays["values"]
            values[first - start : last - start] = found[first - record.start : last - record.start]
            n += last - first
    if n != stop - start:
        raise BrokenFileError(f"table[{spec.name}]: {n} of elements {start} to {stop} are there")
    return values


def first_usable(root: Path, label: str, attempt: Callable[[SavedCheckpoint], T]) -> T | None:
    """Return attempt(checkpoint) of the newest checkpoint of which no file is broken.

    Args:
        root: as given to ps.save().
        label: who asks, for texts.
        attempt: raises BrokenFileError if the checkpoint cannot be used.

    Returns:
        None if there is no checkpoint.

    Raises:
        BrokenFileError: there are some, and none can be used; it names the files.
    """
    problems: list[str] = []
    for folder in complete(root):
        try:
            manifest = read_manifest(folder)
            records = read_records(folder, manifest)
            _require_files(folder, records)
            return attempt(SavedCheckpoint(folder, manifest, records))
        except BrokenFileError as error:
            _log.warning("%s: %s. The checkpoint before it is used, if there is one", label, error)
            problems.append(str(error))
    if problems:
        raise BrokenFileError(f"{label}: no checkpoint can be used: {'; '.join(problems)}")
    return None
