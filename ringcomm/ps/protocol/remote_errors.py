"""Errors that a server sends to the client whose request failed."""

from __future__ import annotations

import json
from typing import Final

from ringcomm.errors import MismatchError, RingcommError
from ringcomm.regular_files import BrokenFileError

_NO_MEMORY: Final = MemoryError.__name__
_ERRORS: Final[dict[str, type[Exception]]] = {
    each.__name__: each
    for each in (
        ValueError, TypeError, KeyError, OSError, FileNotFoundError, BrokenFileError, MismatchError,
        RingcommError,
    )
}  # fmt: skip


def error_text(error: Exception) -> bytes:
    kind = _NO_MEMORY if isinstance(error, MemoryError) else type(error).__name__
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    if kind not in _ERRORS and kind != _NO_MEMORY:
        kind, text = "RingcommError", f"{kind}: {text}"
    return json.dumps([kind, text[:8000]]).encode()


def error_of(meta: bytes, label: str, server: str) -> Exception:
    kind, text = json.loads(meta)
    if kind == _NO_MEMORY:  # in the words of an allocator, which names neither
        return RingcommError(
            f"{label}: the server at {server} has no memory for it ({kind}: {text}), and goes on "
            "with all that was acknowledged. This request has changed nothing there. Use more "
            "servers on other machines, or ps.Evict(max_rows=)"
        )
    return _ERRORS[kind](text)
