"""Segments of a dense table: parts that each have a gradient or none in a push.

Parameters that share a table are its segments. Torch leaves a parameter without a gradient alone:
its values, what its optimizer keeps, and its count of steps. So does a block, segment by segment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Mask = NDArray[np.bool_]
MOST: Final = 4096  # of a table: the meta of a push names each of them
IDS, STEPS, SCALARS = "segment_ids", "segment_steps", "segment_scalars"  # names in a State


class Run(NamedTuple):
    """Neighbouring segments that are updated as one: they have made the same steps.

    Attributes:
        segments: which of the block's.
        elements: of the block.
    """

    segments: slice
    elements: slice


class Segments:
    """The segments of one block.

    Args:
        starts: first elements of the table's segments, ascending from 0.
        start: first element of the block.
        stop: behind its last.
        scalars: what the updater keeps once per block, as it begins; each segment has its own.

    Attributes:
        ids: numbers in the table.
        steps: updates that the updater has made of each.
        scalars: shape (segments, numbers of each).
    """

    def __init__(self, starts: Sequence[int], start: int, stop: int, scalars: list[Array]) -> None:
        self.ids = ids_in(starts, start, stop)
        firsts = [max(0, starts[k] - start) for k in self.ids]
        self._bounds = np.array([*firsts, stop - start])
        n = len(self.ids)
        self.steps = np.zeros(n, np.int64)
        fill = np.concatenate(scalars) if scalars else np.empty(0)
        self.scalars = np.tile(fill, (n, 1))

    def present(self, mask: bytes) -> Mask:
        """Return which have a gradient, by the mask of a push to the whole table; b"": all."""
        if not mask:
            return np.ones(len(self.ids), np.bool_)
        bits = np.unpackbits(np.frombuffer(mask, np.uint8)).astype(np.bool_)
        return bits[self.ids.start : self.ids.stop]

    def touched(self, within: slice) -> Mask:
        firsts, lasts = self._bounds[:-1], self._bounds[1:]
        touched: Mask = (firsts < within.stop) & (lasts > within.start)
        return touched

    def runs(self, present: Mask) -> Iterator[Run]:
        """Yield those that have a gradient, as few runs as their steps allow."""
        n, first = len(present), 0
        while first < n:
            last = first + 1
            if present[first]:
                while last < n and present[last] and self._are_alike(first, last):
                    last += 1
                elements = slice(int(self._bounds[first]), int(self._bounds[last]))
                yield Run(slice(first, last), elements)
            first = last

    def _are_alike(self, a: int, b: int) -> bool:
        is_alike = self.steps[a] == self.steps[b]
        return bool(is_alike and np.array_equal(self.scalars[a], self.scalars[b]))

    def scalars_of(self, run: Run) -> list[Array]:
        """Return the state that an updater reads and writes for a run; note() keeps it."""
        return [each.reshape(1).copy() for each in self.scalars[run.segments.start]]

    def note(self, run: Run, scalars: list[Array]) -> None:
        self.steps[run.segments] += 1
        if scalars:
            self.scalars[run.segments] = np.concatenate(scalars)

    # --- as data --------------------------------------------------------------------------------
    def arrays(self) -> dict[str, Array]:
        ids = np.array(self.ids, np.int64)
        return {IDS: ids, STEPS: self.steps.copy(), SCALARS: self.scalars.copy()}

    def load(self, arrays: dict[str, Array], steps: int, scalars: list[Array]) -> None:
        """Load the result of arrays(), perhaps of other blocks; the others get these values."""
        self.steps[:] = steps
        if scalars:
            self.scalars[:] = np.concatenate(scalars)
        if not arrays:
            return
        ids = arrays[IDS] - self.ids.start
        is_here = (ids >= 0) & (ids < len(self.ids))
        self.steps[ids[is_here]] = arrays[STEPS][is_here]
        self.scalars[ids[is_here]] = arrays[SCALARS][is_here]


def ids_in(starts: Sequence[int], start: int, stop: int) -> range:
    """Return the numbers of the segments that lie in elements [start, stop), in part or whole."""
    first = int(np.searchsorted(starts, start, side="right")) - 1
    last = int(np.searchsorted(starts, stop, side="left"))
    return range(max(first, 0), max(last, first + 1))


def elements_in(
    starts: Sequence[int], count: int, absent: Sequence[int], start: int, stop: int
) -> list[slice]:
    """Return where segments of a table lie in its elements [start, stop), counted from there.

    Args:
        starts: first elements of all segments of the table.
        count: elements of the table.
        absent: numbers of the segments.
        start: of the part.
        stop: behind its last element.
    """
    bounds = [*starts, count]
    found = [(max(bounds[k], start), min(bounds[k + 1], stop)) for k in absent]
    return [slice(first - start, last - start) for first, last in found if first < last]


def packed_mask(n: int, absent: Sequence[int]) -> bytes:
    """Return the mask that present() reads: which of n segments have a gradient; b"": all."""
    if not absent:
        return b""
    mask = np.ones(n, np.bool_)
    mask[list(absent)] = False
    return np.packbits(mask).tobytes()


def taken(arrays: dict[str, Array]) -> dict[str, Array]:
    """Return the arrays of a State that are of segments; none if it has none."""
    names = (IDS, STEPS, SCALARS)
    return {name: arrays[name] for name in names} if IDS in arrays else {}


def merged(pieces: Sequence[dict[str, Array]]) -> dict[str, Array]:
    """Return the segments of several blocks; of one that was cut, where it has made most steps."""
    found = [taken(piece) for piece in pieces]
    found = [piece for piece in found if piece]
    if not found:
        return {}
    whole = {name: np.concatenate([piece[name] for piece in found]) for name in found[0]}
    order = np.lexsort((whole[STEPS], whole[IDS]))
    is_last = np.append(np.diff(whole[IDS][order]) != 0, True)
    return {name: array[order[is_last]] for name, array in whole.items()}
