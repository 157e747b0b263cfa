"""What rc.log() has written to the files of a run, read by blocks, and no more than is shown."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from io import FileIO
from typing import Any, Final, TypeVar

from ringcomm.foreign_text import is_number, parsed_json

BLOCK: Final = 1 << 20  # bytes
POINTS: Final = 4000  # of a line of a file that is read from its begin: as many as the page shows
_NO_VALUES: Final = ("time", "step", "of")
_NO_NUMBERS: Final = ("nan", "inf", "-inf")  # see json_number()
T = TypeVar("T")
_Point = tuple[int, object, object]  # its number, step and value


@dataclass
class _Place:
    """How far a file is read. counts: name -> values until there; n_broken: lines."""

    at: int = 0
    is_behind: bool = False
    n_broken: int = 0
    counts: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))


class MetricReader:
    """One viewer's place in the files of a run.

    Attributes:
        is_behind: there is more to be read.
        problems: what in files does not count, by their names.
    """

    def __init__(self) -> None:
        self.is_behind = False
        self.problems: dict[str, str] = {}
        self._places: defaultdict[str, _Place] = defaultdict(_Place)

    def read(
        self,
        files: Iterable[tuple[str, int]],
        open_file: Callable[[str], FileIO | None],
        seconds: float,
    ) -> list[dict[str, Any]]:
        """Return what is new in the files (name, rank), as far as there is time.

        Args:
            files: names and ranks.
            open_file: returns a file for reading without a buffer; None if it does not count.
            seconds: after which no further block is read.

        Returns:
            For each file and name: {"rank", "name", "points": [step, value] of each}. A value that
            is no finite number is None. Of large files, points are left out evenly.
        """
        deadline = time.monotonic() + seconds
        found = []
        self.is_behind = False
        for file_name, rank in files:
            place = self._places[file_name]
            place.is_behind = True
            while place.is_behind:
                lines, n_blocks = _next_block(open_file(file_name), place)
                for name, points in _points(lines, place).items():
                    shown = map(_numbers, thinned(points, max(1, POINTS // n_blocks)))
                    found.append({"rank": rank, "name": name, "points": list(shown)})
                if place.n_broken:
                    self.problems[file_name] = (
                        f"has {place.n_broken} line{'s' * (place.n_broken > 1)} that rc.log() has "
                        "not written so"
                    )
                if place.is_behind and time.monotonic() > deadline:
                    self.is_behind = True
                    return found
        return found


def thinned(points: list[T], most: int) -> list[T]:
    """Return at most so many of the points, evenly, and the last one."""
    stride = -(-len(points) // most)
    return points[(len(points) - 1) % stride :: stride] if points else []


def _next_block(file: FileIO | None, place: _Place) -> tuple[list[bytes], int]:
    """Return the lines of a block after the place, which goes on, and the file's size in blocks."""
    place.is_behind = False
    if file is None:
        return [], 1
    with file:
        nbytes = file.seek(0, 2)
        file.seek(place.at)
        data = file.read(BLOCK) or b""
    whole = data[: data.rfind(b"\n") + 1]
    if len(data) == BLOCK and not whole:  # a line of such a length is none of rc.log()
        whole = data
    place.at += len(whole)
    place.is_behind = len(data) == BLOCK
    return whole.split(b"\n"), max(1, -(-nbytes // BLOCK))


def _points(lines: Iterable[bytes], place: _Place) -> dict[str, list[_Point]]:
    """Return the points by name; count them."""
    found: defaultdict[str, list[_Point]] = defaultdict(list)
    for line in lines:
        if not line:
            continue
        record = _record(line)
        place.n_broken += record is None or not all(map(_is_ours, record.values()))
        if record is None:
            continue
        step = record.get("step")
        for name, value in record.items():
            if name not in _NO_VALUES:
                found[name].append((place.counts[name], step, value))
                place.counts[name] += 1
    return found


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = parsed_json(line.decode(), has_nan=True)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _is_ours(value: object) -> bool:
    return is_number(value) or value in _NO_NUMBERS


def _numbers(point: _Point) -> tuple[float, float | None]:
    """Return step and value; the point's number if it has no step."""
    number, step, value = point
    found = _number(step)
    return (number if found is None else found), _number(value)


def _number(value: Any) -> float | None:
    return value if is_number(value) else None
