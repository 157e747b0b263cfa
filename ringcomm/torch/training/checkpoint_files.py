"""The files of checkpoints in a folder, each of them written whole or not at all. Local."""

from __future__ import annotations

import io
import itertools
import os
import re
import zipfile
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, cast

import torch

from ringcomm.atomic_files import paths_in, replacing
from ringcomm.progress_bar import ProgressBar, progress_bar
from ringcomm.regular_files import BrokenFileError, open_regular

_PIECE: Final = 16 << 20
_MAIN: Final = re.compile(r"step-(\d+)\.pt")
_SHARD: Final = re.compile(r"step-(\d+)\.rank-\d+-of-\d+(\.again-\d+)?\.pt")
_TEMPORARY: Final = re.compile(r"\.step-.*\.tmp")


def main_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step}.pt"


def new_shard_path(folder: Path, step: int, rank: int, size: int) -> Path:
    """Return a path for one rank's shard that no file has.

    The main file says which one counts. So if a step is saved again, the checkpoint that is there
    stays whole until the new main file replaces it.
    """
    stem = f"step-{step}.rank-{rank}-of-{size}"
    suffixes = itertools.chain([""], (f".again-{n}" for n in itertools.count(1)))
    paths = (folder / f"{stem}{suffix}.pt" for suffix in suffixes)
    return next(path for path in paths if not path.exists())


def is_shard(written: object) -> bool:
    """Return True for the name, length and checksum of a shard, which lies beside the main file."""
    if not isinstance(written, list) or [type(each) for each in written] != [str, int, int]:
        return False
    return _SHARD.fullmatch(written[0]) is not None


def steps_in(folder: Path) -> list[int]:
    matches = (_MAIN.fullmatch(path.name) for path in paths_in(folder))
    return sorted(int(match[1]) for match in matches if match)


def write(path: Path, content: Mapping[str, Any], *, shows_bar: bool = False) -> None:
    """Write a file for torch.load(weights_only=True); replace an older file in one step.

    One rank shows a bar on the terminal, not all.

    Raises TypeError if torch.load() would refuse the class of an object in it.
    """
    with (
        replacing(path, lambda written: _require_loadable(written, content)) as file,
        progress_bar(f"save {path.name}", _nbytes(content), shows=shows_bar) as bar,
    ):
        torch.save(dict(content), cast(IO[bytes], _Counting(file, bar)))


def read(path: Path, *, shows_bar: bool = False) -> dict[str, Any]:
    """Return the content of a file; one rank shows a bar, not all.

    Raises BrokenFileError if it is damaged.
    """
    try:
        with (
            open_regular(path) as file,
            zipfile.ZipFile(file) as archive,
            progress_bar(f"read {path.name}", path.stat().st_size, shows=shows_bar) as bar,
        ):
            _require_plain(path, archive.infolist(), os.fstat(file.fileno()).st_size)
            for part in archive.infolist():
                _require_intact(path, archive, part, bar)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, BrokenFileError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise BrokenFileError(f"{path}: {error}") from error
    except Exception as error:
        raise BrokenFileError(f"{path}: {type(error).__name__}: {_first_line(error)}") from error
    if not isinstance(content, dict):
        raise BrokenFileError(f"{path}: holds a {type(content).__name__}, not a checkpoint")
    return content


def _require_plain(path: Path, parts: Sequence[zipfile.ZipInfo], nbytes: int) -> None:
    """Raise BrokenFileError if a file has more in it than its bytes, as torch.save() packs none."""
    unpacked = sum(part.file_size for part in parts)
    if unpacked > nbytes or any(part.compress_type != zipfile.ZIP_STORED for part in parts):
        raise BrokenFileError(
            f"{path}: has {nbytes} bytes for {unpacked}, and ringcomm's Checkpoint packs nothing"
        )


def _require_intact(
    path: Path, archive: zipfile.ZipFile, part: zipfile.ZipInfo, bar: ProgressBar
) -> None:
    try:
        with archive.open(part) as file:
            while piece := file.read(_PIECE):
                bar.advance(len(piece))
    except zipfile.BadZipFile as error:
        text = f"{path}: its part {part.filename} has changed since it was written"
        raise BrokenFileError(text) from error


def _nbytes(content: object) -> int:
    """Return about how many bytes a file with this content has: those of its tensors."""
    if isinstance(content, torch.Tensor):
        return content.numel() * content.itemsize if content.layout is torch.strided else 0
    if isinstance(content, Mapping):
        content = list(content.values())
    return sum(map(_nbytes, content)) if isinstance(content, list | tuple) else 0


class _Counting(io.RawIOBase):
    """Passes on what is written, and says how much."""

    def __init__(self, file: IO[bytes], bar: ProgressBar) -> None:
        self._file, self._bar = file, bar

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, view.nbytes, _PIECE):
            self._bar.advance(self._file.write(view[start : start + _PIECE]))
        return view.nbytes


def tidy(
    folder: Path, keep: int | None, saved: int | None = None, shards: Collection[str] = ()
) -> None:
    """Remove all but the last `keep` checkpoints, and files that interrupted saves have left.

    That of step `saved` stays, too: it is not the last if a job went on from an earlier one. It has
    the files `shards`, and no others.
    """
    steps = steps_in(folder)
    for step in steps[:-keep] if keep is not None else []:
        if step != saved:
            main_path(folder, step).unlink(missing_ok=True)  # before the shards that it refers to
    kept = {str(step) for step in steps_in(folder)}
    for path in folder.iterdir():
        shard = _SHARD.fullmatch(path.name)
        is_of_none = shard and shard[1] not in kept
        is_replaced = shard and shard[1] == str(saved) and path.name not in shards
        if _TEMPORARY.fullmatch(path.name) or is_of_none or is_replaced:
            path.unlink(missing_ok=True)


def _require_loadable(path: Path, content: Mapping[str, Any]) -> None:
    if _load_error(path) is None:
        return
    for name, part in content.items():
        buffer = io.BytesIO()
        torch.save(part, buffer)
        buffer.seek(0)
        error = _load_error(buffer)
        if error is not None:
            found = re.search(r"GLOBAL (\S+)", str(error))
            what = f"has a {found[1]}" if found else f"({_first_line(error)})"
            raise TypeError(
                f"{name} {what}, which torch.load(weights_only=True) refuses: save plain numbers, "
                "texts, lists, dicts and tensors"
            ) from error


def _load_error(file: Path | io.BytesIO) -> Exception | None:
    is_path = isinstance(file, Path)
    # Nothing is loaded here, so no invariants of sparse tensors can be looked at.
    checked: Any = torch.sparse.check_sparse_tensor_invariants
    try:
        with checked(enable=False):
            torch.load(file, map_location="meta", weights_only=True, mmap=True if is_path else None)
    except Exception as error:  # noqa: BLE001 - a restore would fail with the same error
        return error
    return None


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
