"""Decides what is shown of the files in which hosts have written how ranks used them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from ringcomm.foreign_text import is_number, parsed_json

MOST: Final = 1000  # columns
_ONE_S: Final = 0.75  # lines of several hosts within it are one column


def columns_of(files: Iterable[Iterable[bytes]], most: int = MOST) -> list[dict[str, Any]]:
    """Return columns of a history, evenly thinned, the oldest first.

    Args:
        files: the lines of each host's file.
        most: so many columns are left, or fewer.

    Returns:
        {"time": seconds since 1970, "ranks": {rank: [wait, cores, memory, payload per second]}}.
    """
    lines = [each for file in files for each in _thinned([*map(_column, file)], 2 * most)]
    found: list[dict[str, Any]] = []
    for column in sorted(lines, key=lambda each: each["time"]):
        last = found[-1] if found else None
        if (
            last is not None
            and column["time"] - last["time"] < _ONE_S
            and not last["ranks"].keys() & column["ranks"].keys()
        ):
            last["ranks"] |= column["ranks"]
        else:
            found.append(column)
    return _thinned([*found], most)


def _thinned(columns: list[Any], most: int) -> list[dict[str, Any]]:
    whole = [each for each in columns if each is not None]
    stride = -(-len(whole) // most)
    return whole[(len(whole) - 1) % stride :: stride] if whole else []


def _column(line: bytes) -> dict[str, Any] | None:
    try:
        said = parsed_json(line)
        ranks = {int(rank): use for rank, use in said["ranks"].items() if _is_use(use)}
        time = said["time"]
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    return {"time": time, "ranks": ranks} if is_number(time) else None


def _is_use(use: Any) -> bool:
    return isinstance(use, list) and len(use) == 4 and all(map(is_number, use))
