"""Compiled kernels in the user's cache, so that the next process need not compile them again."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from ringcomm.atomic_files import replacing

_DIGEST_NBYTES: Final = 32


def compiled_once(folder: Path | None, key: Sequence[str], compile_: Callable[[], bytes]) -> bytes:
    """Return what compile_() returns, or what it has returned to another process for this key.

    A folder that cannot be read or written is no error, and a damaged file is written anew.

    Args:
        folder: folder of the files; None: nothing is kept.
        key: all on which the result depends.
        compile_: function that compiles a kernel.
    """
    if folder is None:
        return compile_()
    path = folder / f"{_digest(*(each.encode() for each in key)).hex()}.bin"
    with contextlib.suppress(OSError):
        kept = path.read_bytes()
        digest, code = kept[:_DIGEST_NBYTES], kept[_DIGEST_NBYTES:]
        if digest == _digest(code):
            return code
    code = compile_()
    with contextlib.suppress(OSError), replacing(path) as file:
        file.write(_digest(code) + code)
    return code


def _digest(*parts: bytes) -> bytes:
    made = hashlib.sha256()
    for part in parts:
        made.update(len(part).to_bytes(8, "little") + part)
    return made.digest()
