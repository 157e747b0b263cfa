"""Shares of the parameters that each rank updates. Pure: alike on every rank.

A bucket holds the elements of its parameters one after another, and is cut into one chunk per rank,
wherever that cuts a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ringcomm.collectives.schedule import chunks, consecutive, within

Plan = Sequence[tuple[int, int]]  # (index of the parameter, its elements) of a bucket, in order


def shares_of(plans: Iterable[Plan], size: int) -> dict[int, list[int]]:
    """Return how many elements of each parameter are each of `size` ranks', in rank order."""
    shares = {}
    for plan in plans:
        places = consecutive([count for _, count in plan])
        cut = chunks(places[-1].stop, size)
        for (index, _), place in zip(plan, places, strict=True):
            parts = [within(place, chunk) for chunk in cut]
            shares[index] = [part.stop - part.start for part in parts]
    return shares
