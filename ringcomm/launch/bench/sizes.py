"""Sizes of buffers as people write them. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_bytes(text: str) -> int:
    """Return the bytes that "8", "64K", "1MiB" or "2G" mean; K is 1024.

    Raises:
        ValueError: it means no positive number of bytes.
    """
    match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    nbytes = int(match[1]) * _UNITS[match[2].upper()] if match else 0
    if nbytes == 0:
        raise ValueError(f"{text!r} is no size: write 8, 64K, 1M or 2G")
    return nbytes


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return the sizes of "8:256M", "8:256M:4", "1K,64K,1M" or a mixture, rising, in bytes.

    A range goes from the first to the last by a factor, 2 if none is given.

    Raises:
        ValueError: a part is no size, or a range falls or stands still.
    """
    found = {size for part in text.split(",") for size in _range(part)}
    return tuple(sorted(found))


def cap(sizes: Sequence[int], limit: int) -> tuple[int, ...]:
    """Return the sizes up to `limit` bytes; the smallest stays in any case."""
    return tuple(size for size in sizes if size <= limit) or (min(sizes),)


def show_bytes(nbytes: int) -> str:
    """Return "64 KiB", "1.5 MiB" or "12 B"."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.4g} {unit}"
    return f"{nbytes} B"


def _range(part: str) -> list[int]:
    first, *rest = part.split(":")
    start = parse_bytes(first)
    if not rest:
        return [start]
    stop = parse_bytes(rest[0])
    factor = int(rest[1]) if len(rest) == 2 and rest[1].isdigit() else 2 * (len(rest) == 1)
    if stop < start or factor < 2:
        raise ValueError(f"{part!r} is no range of sizes: write FIRST:LAST or FIRST:LAST:FACTOR")
    sizes = [start]
    while sizes[-1] * factor <= stop:
        sizes.append(sizes[-1] * factor)
    return sizes
