"""Texts of the system: of /proc and /sys, host names, what other programs wrote.

They are bytes of an unknown encoding. Here they are UTF-8, with surrogates for the rest, whatever
the locale of this process is; ranks of one job may have several.
"""

from __future__ import annotations

import os

_CODE = "utf-8", "surrogateescape"


def text_of(data: bytes) -> str:
    """Return bytes as a text; bytes_of() undoes it."""
    return data.decode(*_CODE)


def bytes_of(text: str) -> bytes:
    return text.encode(*_CODE)


def read_text(path: str | os.PathLike[str]) -> str:
    with open(path, "rb") as file:
        return text_of(file.read())


def host_name() -> str:
    return text_of(os.fsencode(os.uname().nodename))  # the locale of this process is undone
