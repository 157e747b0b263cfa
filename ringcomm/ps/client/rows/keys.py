"""Checks keys and rows of a hash table, and splits them by server. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ringcomm import _core
from ringcomm.integers import is_integer
from ringcomm.ps.client.arguments import array_of, is_16bit

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
    last_server = int(owners.max())
    if len(keys) and owners.min() == last_server and not {*also} - {last_server}:
        return [Portion(last_server, keys, None)]
    found = {share.server: Portion(*share[:3]) for share in shares([keys], [owners], last_server)}
    empty = np.empty(0, np.int64)
    asked = {server: Portion(server, keys[:0], empty) for server in also} | found
    if len(asked) > 1 == len(found):
        [(server, only)] = found.items()
        asked[server] = only._replace(order=np.arange(len(keys)))
    return [asked[server] for server in sorted(asked)]


class Share(NamedTuple):
    """The keys of several calls that one server owns, those of a call behind those of the last.

    Attributes:
        server: which.
        keys: as they come.
        order: which of its call's keys each is; None: all of all calls.
        counts: keys of each call.
    """

    server: int
    keys: Keys
    order: NDArray[np.int64] | None
    counts: list[int]


def shares(
    keys: Sequence[Keys], owners: Sequence[NDArray[np.uint32]], last_server: int
) -> list[Share]:
    """Return the keys of several calls by server.

    Args:
        keys: flat, of each call.
        owners: server of each partition, as each call has them.
        last_server: the highest number of a server.
    """
    n = sum(map(len, keys))
    dealt, order = np.empty(n, np.uint64), np.empty(n, np.int64)
    counts = np.empty((1 + last_server, len(keys)), np.int64)
    _core.deal_keys(list(zip(keys, owners, strict=True)), dealt, order, counts)
    found, end = [], 0
    for server, of_calls in enumerate(counts.tolist()):
        first, end = end, end + sum(of_calls)
        if end - first == n > 0:
            return [Share(server, dealt, None, of_calls)]
        if end > first:
            found.append(Share(server, dealt[first:end], order[first:end], of_calls))
    return found


def keys_of(label: str, keys: ArrayLike) -> tuple[Keys, tuple[int, ...]]:
    """Return keys as flat uint64, and the shape they came in.

    Raises:
        TypeError: they are no integers.
        ValueError: one is negative, or 2^64 or more.
    """
    given = np.asarray(keys)
    if given.dtype.kind not in "iu":
        if not isinstance(keys, list | tuple | int | float):
            raise TypeError(f"{label}: keys are {given.dtype}; they must be integers in [0, 2^64)")
        given = _of_python(label, keys)
    if given.dtype.kind == "i" and given.size and (least := given.min()) < 0:
        raise ValueError(_out_of_range(label, least, keys))
    flat = np.ascontiguousarray(given).reshape(-1)
    flat = flat.view(np.uint64) if flat.dtype == np.int64 else flat.astype(np.uint64, copy=False)
    return flat, given.shape


def _of_python(label: str, keys: Any) -> Keys:
    """Return Python's integers as keys: numpy makes floats of large ones beside others."""
    given = np.asarray(keys, object)
    each: Any
    for each in given.flat:
        if not is_integer(each):
            raise TypeError(
                f"{label}: key {each!r} is a {type(each).__name__}, not an integer in [0, 2^64)"
            )
        if not 0 <= each < 1 << 64:
            raise ValueError(_out_of_range(label, each, keys))
    return given.astype(np.uint64)


def _out_of_range(label: str, key: object, keys: Any) -> str:
    array = "keys"
    if not isinstance(keys, np.ndarray):
        array = "keys.numpy()" if hasattr(keys, "numpy") else "np.array(keys, np.int64)"
    return (
        f"{label}: key {key} is not in [0, 2^64). Pass hashes of 64 bits that are signed as "
        f"{array}.view(np.uint64)"
    )


def rows_of(label: str, rows: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return rows, contiguous, one per key.

    Raises:
        ValueError: their shape is not `shape`.
        TypeError: they are neither of `dtype` nor 16 bits wide.
    """
    if type(rows) is not np.ndarray:
        rows = array_of(label, "rows", rows)
    if rows.shape != shape:
        raise ValueError(
            f"{label}: rows have shape {rows.shape}, and the keys {shape[:-1]}: it must be {shape}"
        )
    if rows.dtype != dtype and not is_16bit(rows.dtype):
        raise TypeError(f"{label}: dtype {rows.dtype}, and the table has {dtype}. Convert it")
    return np.ascontiguousarray(rows).reshape(-1, shape[-1])


def last_of_each(keys: Keys, rows: Array) -> tuple[Keys, Array]:
    _, from_behind = np.unique(keys[::-1], return_index=True)
    if len(from_behind) == len(keys):
        return keys, rows
    places = np.sort(len(keys) - 1 - from_behind)
    return keys[places], rows[places]
