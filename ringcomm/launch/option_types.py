"""Types of options of `ringcomm`, for argparse; each raises ArgumentTypeError for other texts."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from typing import Final

_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def seconds(text: str) -> float:
    """Return a finite number of seconds, 0 or more."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds >= 0")
    return number


def port(text: str) -> int:
    """Return the number of a TCP port; 0 means a free one."""
    if not (text.isdecimal() and int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: a number from 0 to 65535")
    return int(text)


def new_file(text: str) -> Path:
    """Return a path whose folder exists: a typo must not cost minutes of work."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder: name a file in it")
    return path


def sizes(text: str) -> tuple[int, ...]:
    """Return the bytes of "64K", "8:256M", "8:256M:4", "1K,64K,1M" or a mixture, ascending.

    K is 1024. FIRST:LAST:FACTOR is a geometric range, whose factor is 2 by default.
    """
    return tuple(sorted({size for part in text.split(",") for size in _range(part)}))


def _range(part: str) -> list[int]:
    first, *rest = part.split(":")
    start = _nbytes(first)
    stop = _nbytes(rest[0]) if rest else start
    factor = int(rest[1]) if len(rest) == 2 and rest[1].isdigit() else 2 * (len(rest) <= 1)
    if stop < start or factor < 2:
        raise argparse.ArgumentTypeError(
            f"{part!r} is no range of sizes: write FIRST:LAST or FIRST:LAST:FACTOR"
        )
    found = [start]
    while found[-1] * factor <= stop:
        found.append(found[-1] * factor)
    return found


def _nbytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    nbytes = int(match[1]) * _UNITS[match[2].upper()] if match else 0
    if nbytes == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 8, 64K, 1M or 2G")
    return nbytes
