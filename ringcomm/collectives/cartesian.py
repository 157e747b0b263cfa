"""Ranks as the points of a Cartesian grid: C order, so the last coordinate changes first. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence


def balanced_dims(size: int, n: int) -> tuple[int, ...]:
    """Return n lengths whose product is `size`, as close to each other as possible; longest first.

    Of all ways, that with the least longest length, then the least second one, and so on. These are
    the lengths of MPI_Dims_create wherever that finds them: of 72 in two dimensions, Open MPI makes
    12 x 6, not 9 x 8.
    """
    return _balanced(size, n, size)


def _balanced(size: int, n: int, most: int) -> tuple[int, ...]:
    """Return () if no length may be larger than `most`, and there is no such way."""
    if n == 1:
        return (size,) if size <= most else ()
    first = next((d for d in range(1, most + 1) if size % d == 0 and d**n >= size), None)
    while first is not None:
        rest = _balanced(size // first, n - 1, first)
        if rest:
            return (first, *rest)
        first = next((d for d in range(first + 1, most + 1) if size % d == 0), None)
    return ()


def coords_of(rank: int, dims: Sequence[int]) -> tuple[int, ...]:
    coords = []
    for length in reversed(dims):
        rank, coord = divmod(rank, length)
        coords.append(coord)
    return tuple(reversed(coords))


def rank_of(coords: Sequence[int], dims: Sequence[int], periodic: Sequence[bool]) -> int | None:
    """Return the rank at the coordinates, None if they are beyond a border.

    Coordinates of a periodic dimension are taken modulo its length.
    """
    rank = 0
    for coord, length, is_periodic in zip(coords, dims, periodic, strict=True):
        if not is_periodic and not 0 <= coord < length:
            return None
        rank = rank * length + coord % length
    return rank


def completed(size: int, dims: Sequence[int]) -> tuple[int, ...]:
    """Return dims with each 0 replaced, so that their product is `size`.

    Raises:
        ValueError: there are no such lengths.
    """
    known = math.prod(length for length in dims if length)
    n_free = dims.count(0)
    if size % known or (not n_free and known != size):
        text = ", ".join("*" if not length else str(length) for length in dims)
        raise ValueError(
            f"dims are ({text}), so the number of ranks must be {'a multiple of ' * bool(n_free)}"
            f"{known}, but there are {size} ranks. Pass 0 for a length that is to be chosen"
        )
    chosen = iter(balanced_dims(size // known, n_free) if n_free else ())
    return tuple(length or next(chosen) for length in dims)
