"""Keys of a hash table and what comes with them: checked, and split by server.

Decisions only: nothing here sends, locks or reads a clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ringcomm import _core

Array = NDArray[Any]
Keys = NDArray[np.uint64]


class Portion(NamedTuple):
    """The keys of a call that one server owns.

    Attributes:
        server: which.
        keys: as they come.
        order: which of the call's keys these are; None: all of them.
    """

    server: int
    keys: Keys
    order: NDArray[np.int64] | None


def portions(keys: Keys, owners: NDArray[np.uint32], also: Iterable[int] = ()) -> list[Portion]:
    """Return the keys by server, those of each as they come.

    Args:
        keys: flat.
        owners: server of each partition.
        also: servers that are asked though they own none of the keys.
    """
    asked = set(also)
    servers = sorted(asked.union(np.flatnonzero(np.bincount(owners)).tolist()))
    if len(servers) == 1:
        return [Portion(servers[0], keys, None)] if len(keys) or asked else []
    parts = np.empty(len(keys), np.uint32)
    _core.partition_of(keys, len(owners), parts)
    chosen = owners[parts].astype(np.uint16)  # numpy sorts these by radix
    order = np.argsort(chosen, kind="stable")
    bounds = np.searchsorted(chosen[order], [*servers, servers[-1] + 1])
    return [
        Portion(server, keys[order[first:last]], order[first:last])
        for server, first, last in zip(servers, bounds[:-1], bounds[1:], strict=True)
        if last > first or server in asked
    ]


def keys_of(label: str, keys: ArrayLike) -> tuple[Keys, tuple[int, ...]]:
    """Return keys as flat uint64, and the shape they came in.

    Raises:
        TypeError: they are no integers.
        ValueError: one is negative.
    """
    given = np.asarray(keys)
    if given.size == 0 and not isinstance(keys, np.ndarray):
        given = given.astype(np.uint64)
    if given.dtype.kind not in "iu":
        raise TypeError(f"{label}: keys are {given.dtype}; they must be integers in [0, 2^64)")
    if given.dtype.kind == "i" and given.size and (least := given.min()) < 0:
        raise ValueError(f"{label}: key {least} is negative; keys are integers in [0, 2^64)")
    flat = np.ascontiguousarray(given).reshape(-1)
    flat = flat.view(np.uint64) if flat.dtype == np.int64 else flat.astype(np.uint64, copy=False)
    return flat, given.shape


def rows_of(label: str, rows: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return rows, contiguous, one per key.

    Raises:
        ValueError: their shape is not `shape`.
        TypeError: they are neither of `dtype` nor 16 bits wide.
    """
    rows = np.asarray(rows)
    if rows.shape != shape:
        raise ValueError(
            f"{label}: rows have shape {rows.shape}, and the keys {shape[:-1]}: it must be {shape}"
        )
    if rows.dtype != dtype and not is_16bit(rows.dtype):
        raise TypeError(f"{label}: dtype {rows.dtype}, and the table has {dtype}. Convert it")
    return np.ascontiguousarray(rows).reshape(-1, shape[-1])


def is_16bit(dtype: np.dtype[Any]) -> bool:
    """Return True for float16 and bfloat16, of this machine's byte order."""
    return dtype == np.float16 or dtype.name == "bfloat16"


def last_of_each(keys: Keys, rows: Array) -> tuple[Keys, Array]:
    """Return keys and rows without those whose key comes again."""
    _, from_behind = np.unique(keys[::-1], return_index=True)
    if len(from_behind) == len(keys):
        return keys, rows
    places = np.sort(len(keys) - 1 - from_behind)
    return keys[places], rows[places]
