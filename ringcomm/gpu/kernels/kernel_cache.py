"""Compiled kernels in the user's cache, so that the next process need not compile them again."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from ringcomm.atomic_files import replacing
from ringcomm.regular_files import BrokenFileError
from ringcomm.trusted_files import read_trusted

_DIGEST_NBYTES: Final = 32
_UNUSED_S: Final = 30 * 86400.0  # after that a file is removed


def compiled_once(folder: Path | None, key: Sequence[str], compile_: Callable[[], bytes]) -> bytes:
    """Return what compile_() returns, or what it has returned to another process for this key.

    A folder that cannot be read or written is no error. A file that is damaged, or that others can
    have written, is written anew. Who writes a file removes those that no process has used for 30
    days.

    Args:
        folder: folder of the files; None: nothing is kept.
        key: all on which the result depends.
        compile_: function that compiles a kernel.
    """
    if folder is None:
        return compile_()
    path = folder / f"{_digest(*(each.encode() for each in key)).hex()}.bin"
    with contextlib.suppress(OSError, BrokenFileError):
        kept = read_trusted(path)
        digest, code = kept[:_DIGEST_NBYTES], kept[_DIGEST_NBYTES:]
        if digest == _digest(code):
            with contextlib.suppress(OSError):  # of root
                os.utime(path)  # it is in use
            return code
    code = compile_()
    with contextlib.suppress(OSError):
        with replacing(path, mode=0o600) as file:
            file.write(_digest(code) + code)
        _remove_unused(folder)
    return code


def _remove_unused(folder: Path) -> None:
    """Remove old files, also those that a killed process has left half written.

    Another process may be about to use one, or to remove it: it then compiles that kernel.
    """
    oldest = time.time() - _UNUSED_S
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            if path.suffix in (".bin", ".tmp") and path.stat().st_mtime < oldest:
                path.unlink()


def _digest(*parts: bytes) -> bytes:
    made = hashlib.sha256()
    for part in parts:
        made.update(len(part).to_bytes(8, "little") + part)
    return made.digest()
