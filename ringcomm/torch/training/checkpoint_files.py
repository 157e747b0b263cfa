"""The files of checkpoints in a folder, each of them written whole or not at all. Local."""

from __future__ import annotations

import io
import re
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from ringcomm.atomic_files import BrokenFileError, replacing

_MAIN: Final = re.compile(r"step-(\d+)\.pt")
_SHARD: Final = re.compile(r"step-(\d+)\.rank-\d+-of-\d+\.pt")
_TEMPORARY: Final = re.compile(r"\.step-.*\.tmp")


def main_path(folder: Path, step: int) -> Path:
    """Return the path of a checkpoint."""
    return folder / f"step-{step}.pt"


def shard_path(folder: Path, step: int, rank: int, size: int) -> Path:
    """Return the path of one rank's shard."""
    return folder / f"step-{step}.rank-{rank}-of-{size}.pt"


def steps_in(folder: Path) -> list[int]:
    """Return the steps that have a checkpoint, in order."""
    if not folder.is_dir():
        return []
    matches = (_MAIN.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in matches if match)


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file for torch.load(weights_only=True); replace an older file in one step.

    Raises TypeError if torch.load() would refuse the class of an object in it.
    """
    with replacing(path, lambda written: _require_loadable(written, content)) as file:
        torch.save(dict(content), file)


def read(path: Path) -> dict[str, Any]:
    """Return the content of a file. Raises BrokenFileError if it is damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise BrokenFileError(f"{path}: its part {damaged} has changed since it was written")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except BrokenFileError:
        raise
    except (OSError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise BrokenFileError(f"{path}: {error}") from error
    except Exception as error:
        raise BrokenFileError(f"{path}: {type(error).__name__}: {_first_line(error)}") from error
    if not isinstance(content, dict):
        raise BrokenFileError(f"{path}: holds a {type(content).__name__}, not a checkpoint")
    return content


def tidy(folder: Path, keep: int | None) -> None:
    """Remove all but the last `keep` checkpoints, and files that interrupted saves have left."""
    steps = steps_in(folder)
    for step in steps[:-keep] if keep is not None else []:
        main_path(folder, step).unlink(missing_ok=True)  # before the shards that it refers to
    kept = {str(step) for step in steps_in(folder)}
    for path in folder.iterdir():
        shard = _SHARD.fullmatch(path.name)
        if _TEMPORARY.fullmatch(path.name) or (shard and shard[1] not in kept):
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
    try:
        is_path = isinstance(file, Path)
        torch.load(file, map_location="meta", weights_only=True, mmap=True if is_path else None)
    except Exception as error:  # noqa: BLE001 - a restore would fail with the same error
        return error
    return None


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
