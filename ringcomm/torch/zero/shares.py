"""The part of each parameter that each rank updates. Pure: the same on every rank.

A bucket holds the elements of its parameters one after another. It is cut into one chunk per rank;
a cut may be within a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ringcomm.collectives.message_patterns import chunks, consecutive, within

Plan = Sequence[tuple[int, int]]  # (index, number of elements) of a bucket's parameters


def shares_of(plans: Iterable[Plan], size: int) -> dict[int, list[int]]:
    """Return, for each parameter's index, how many of its elements each of `size` ranks updates."""
    shares = {}
    for plan in plans:
        places = consecutive([count for _, count in plan])
        cut = chunks(places[-1].stop, size)
        for (index, _), place in zip(plan, places, strict=True):
            parts = [within(place, chunk) for chunk in cut]
            shares[index] = [part.stop - part.start for part in parts]
    return shares
