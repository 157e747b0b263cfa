"""Ranks as text, for messages and for news of failures: "0-15, 17". Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

_LISTED_MAX = 16  # ranks in a text; if there are more, the text has ranges


def runs(ranks: Iterable[int]) -> list[range]:
    """Return the ranks as ascending ranges, as few as possible."""
    found: list[range] = []
    for rank in sorted(ranks):
        if found and found[-1].stop == rank:
            found[-1] = range(found[-1].start, rank + 1)
        elif not (found and rank in found[-1]):
            found.append(range(rank, rank + 1))
    return found


def ranges_of(ranks: Iterable[int]) -> str:
    """Return the ranks as text, such as "0-15,17"."""
    return ",".join(map(_range_text, runs(ranks)))


def parts(ranges: str, nbytes: int) -> Iterator[str]:
    """Yield a result of ranges_of() in parts of at most `nbytes`, each valid for ranks_in()."""
    while len(ranges) > nbytes:
        end = ranges.rindex(",", 0, nbytes)
        yield ranges[:end]
        ranges = ranges[end + 1 :]
    yield ranges


def ranks_in(ranges: str) -> list[int]:
    bounds = [each.partition("-") for each in ranges.split(",") if each]
    return [rank for a, _, b in bounds for rank in range(int(a), int(b or a) + 1)]


def ranks_text(ranks: Collection[int]) -> str:
    if len(ranks) <= _LISTED_MAX:
        return ", ".join(map(str, ranks))
    shown = list(map(_range_text, runs(ranks)))
    more = f", ... ({len(ranks)} in all)" if len(shown) > _LISTED_MAX else ""
    return ", ".join(shown[:_LISTED_MAX]) + more


def _range_text(run: range) -> str:
    return f"{run.start}-{run[-1]}" if len(run) > 1 else str(run.start)
