"""A checksum of the values of a state. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

ArrayOf = Callable[[Any], "np.ndarray[Any, Any] | None"]


def checksum_of(value: Any, before: int = 0, *, array_of: ArrayOf = lambda _: None) -> int:
    """Return a CRC-32 of numbers, texts and arrays, in dicts, lists and tuples.

    Other objects count as the array that array_of() makes of them, or by their type alone. `before`
    is the checksum of what comes before.
    """
    if isinstance(value, Mapping):
        for key in value:
            before = zlib.crc32(repr(key).encode(), before)
            before = checksum_of(value[key], before, array_of=array_of)
        return before
    if isinstance(value, list | tuple):
        for each in value:
            before = checksum_of(each, before, array_of=array_of)
        return zlib.crc32(b"%d" % len(value), before)
    if value is None or isinstance(value, str | bytes | int | float | complex | np.generic):
        return zlib.crc32(f"{type(value).__name__} {value!r}".encode(), before)
    array = value if isinstance(value, np.ndarray) else array_of(value)
    if array is None or array.dtype.hasobject:
        return zlib.crc32(type(value).__name__.encode(), before)
    head = f"{array.shape} {array.dtype}".encode()
    flat = np.ascontiguousarray(array).reshape(-1)
    return zlib.crc32(flat.view(np.uint8).data, zlib.crc32(head, before))
