"""Errors that a server sends to the client whose request failed."""

from __future__ import annotations

import json
from typing import Final

from ringcomm.atomic_files import BrokenFileError
from ringcomm.errors import MismatchError, RingcommError

_ERRORS: Final[dict[str, type[Exception]]] = {
    each.__name__: each
    for each in (
        ValueError, TypeError, KeyError, OSError, FileNotFoundError, BrokenFileError, MismatchError,
        RingcommError,
    )
}  # fmt: skip


def error_text(error: Exception) -> bytes:
    """Return an error as the meta of a reply."""
    kind = type(error).__name__
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    if kind not in _ERRORS:
        kind, text = "RingcommError", f"{kind}: {text}"
    return json.dumps([kind, text[:8000]]).encode()


def error_of(meta: bytes) -> Exception:
    """Read what error_text() wrote."""
    kind, text = json.loads(meta)
    return _ERRORS[kind](text)
