"""What rc.log() has written to the files of a run, read by blocks, and no more than is shown."""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from ringcomm.regular_files import BrokenFileError, open_regular

BLOCK: Final = 1 << 20  # bytes
POINTS: Final = 4000  # of a line of a file that is read from its begin: as many as the page shows
_NO_VALUES: Final = ("time", "step")
T = TypeVar("T")
_Point = tuple[int, object, object]  # its number, step and value


@dataclass
class _Place:
    """How far a file is read. counts: name -> values until there."""

    at: int = 0
    is_behind: bool = False
    counts: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))


class MetricReader:
    """One viewer's place in the files of a run.

    Attributes:
        is_behind: there is more to be read.
    """

    def __init__(self) -> None:
        self.is_behind = False
        self._places: defaultdict[str, _Place] = defaultdict(_Place)

    def read(self, files: Iterable[tuple[Path, int]], seconds: float) -> list[dict[str, Any]]:
        """Return what is new in the files (path, rank), as far as there is time.

        Returns:
            For each file and name: {"rank", "name", "points": [step, value] of each}. A value that
            is no finite number is None. Of large files, points are left out evenly.
        """
        deadline = time.monotonic() + seconds
        found = []
        self.is_behind = False
        for path, rank in files:
            place = self._places[path.name]
            place.is_behind = True
            while place.is_behind:
                lines, n_blocks = _next_block(path, place)
                for name, points in _points(lines, place.counts).items():
                    shown = map(_numbers, thinned(points, max(1, POINTS // n_blocks)))
                    found.append({"rank": rank, "name": name, "points": list(shown)})
                if place.is_behind and time.monotonic() > deadline:
                    self.is_behind = True
                    return found
        return found


def thinned(points: list[T], most: int) -> list[T]:
    """Return at most so many of the points, evenly, and the last one."""
    stride = -(-len(points) // most)
    return points[(len(points) - 1) % stride :: stride] if points else []


def _next_block(path: Path, place: _Place) -> tuple[list[str], int]:
    """Return the lines of a block after the place, which goes on, and the file's size in blocks."""
    place.is_behind = False
    try:
        with open_regular(path) as file:
            nbytes = file.seek(0, 2)
            file.seek(place.at)
            data = file.read(BLOCK)
    except (FileNotFoundError, BrokenFileError):  # the run was removed meanwhile; or it is a pipe
        return [], 1
    whole = data[: data.rfind(b"\n") + 1]
    if len(data) == BLOCK and not whole:  # a line of such a length is none of rc.log()
        whole = data
    place.at += len(whole)
    place.is_behind = len(data) == BLOCK
    return whole.decode(errors="replace").split("\n"), max(1, -(-nbytes // BLOCK))


def _points(lines: Iterable[str], counts: defaultdict[str, int]) -> dict[str, list[_Point]]:
    """Return the points by name; count them."""
    found: defaultdict[str, list[_Point]] = defaultdict(list)
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(record, dict):
            continue
        step = record.get("step")
        for name, value in record.items():
            if name not in _NO_VALUES:
                found[name].append((counts[name], step, value))
                counts[name] += 1
    return found


def _numbers(point: _Point) -> tuple[float, float | None]:
    """Return step and value; the point's number if it has no step."""
    number, step, value = point
    found = _number(step)
    return (number if found is None else found), _number(value)


def _number(value: object) -> float | None:
    is_number = isinstance(value, float | int) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None  # type: ignore[arg-type, return-value]  # see is_number
