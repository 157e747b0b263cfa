"""Rounds of rows whose mean is measured before it becomes an update; a server's side.

Pushes with HOLD stay contributions to their round, which does not end by itself. Once it is
complete, whoever asks with MEASURE is told how large the mean is; the first RELEASE ends the round.
A slower worker asks after that: what was told is remembered. Nothing but requests waits here, so
that rows may move meanwhile: the requests come back then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ringcomm.ps.messages import MEASURED, SKIP, PushMeta

if TYPE_CHECKING:
    from ringcomm.ps.hashed import Answer, Contribution
    from ringcomm.ps.link import Delivery

Array = NDArray[Any]
_REMEMBERED: Final = 1024  # rounds: who is further behind is told that its round is over


class MeasureAnswer(Protocol):
    """Tells who asked how large a mean is.

    Attributes:
        request: the question.
    """

    request: Delivery

    def __call__(self, meta: bytes | None, /) -> None:
        """Say what MEASURED packs; None: the round was over long ago, or was not held."""
        ...


class _Measure(NamedTuple):
    number: int
    answer: MeasureAnswer


class _Release(NamedTuple):
    number: int
    factor: float | None
    answer: Answer


class _Known(NamedTuple):
    """How large the mean of a round is, and of whose contributions."""

    squares: float
    is_finite: bool
    workers: frozenset[int]


class RowHolds:
    """The requests about rounds of one shard that are held, or are going to be."""

    def __init__(self) -> None:
        self._measures: list[_Measure] = []
        self._releases: list[_Release] = []
        self._known: dict[int, _Known] = {}  # by round, in order

    def measure(self, number: int, answer: MeasureAnswer) -> None:
        """Take note of who wants to know how large the mean of a round is."""
        self._measures.append(_Measure(number, answer))

    def release(self, number: int, meta: PushMeta, answer: Answer) -> None:
        """Take note of who lets a round end."""
        factor = None if meta.flags & SKIP else meta.weight
        self._releases.append(_Release(number, factor, answer))

    def on_complete(self, number: int, parts: Sequence[tuple[int, Contribution]], dim: int) -> bool:
        """Tell how large the mean of a round is; return True if it may end.

        Args:
            number: of the round.
            parts: what it consists of, by worker.
            dim: columns of a row.
        """
        if not any(part.is_held for _, part in parts):
            return True
        if number not in self._known:
            squares = squares_of_mean([part for _, part in parts], dim)
            self._known[number] = _Known(*squares, frozenset(worker for worker, _ in parts))
            if len(self._known) > _REMEMBERED:
                del self._known[next(iter(self._known))]
            self._tell()
        return any(each.number == number for each in self._releases)

    def _tell(self) -> None:
        measures = self._measures
        self._measures = [each for each in measures if each.number not in self._known]
        for number, answer in measures:
            if number in self._known:
                squares, is_finite, workers = self._known[number]
                is_in = answer.request.header.origin in workers
                answer(MEASURED.pack(squares, is_finite, is_in))

    def factor_of(self, number: int) -> float | None:
        """Return what the mean of a round is multiplied by, 1 if nobody says; None: it is dropped.

        What the first says counts.
        """
        factors = [each.factor for each in self._releases if each.number == number]
        return factors[0] if factors else 1.0

    def on_over(self, current: int) -> None:
        """Answer all that is about rounds before the current one."""
        if not (self._measures or self._releases):
            return
        self._tell()
        measures, releases = self._measures, self._releases
        self._measures = [each for each in measures if each.number >= current]
        self._releases = [each for each in releases if each.number >= current]
        for measure in measures:
            if measure.number < current:
                measure.answer(None)
        for release in releases:
            if release.number < current:
                release.answer(True, current, 0)

    def take(self, current: int) -> list[Delivery]:
        """Return the requests that wait, which are forgotten here, as is the current round."""
        self._known.pop(current, None)
        waiting = [each.answer.request for each in self._measures]
        waiting += [each.answer.request for each in self._releases]
        self._measures, self._releases = [], []
        return waiting


def squares_of_mean(parts: Sequence[Contribution], dim: int) -> tuple[float, bool]:
    """Return the sum of squares of the mean of contributions, and whether it is finite."""
    present = [part for part in parts if part.weight and len(part.keys)]
    if not present:
        return 0.0, True
    keys = np.concatenate([part.keys for part in present])
    rows = np.concatenate([_floats(part.rows, dim) * part.weight for part in present])
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    firsts = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
    with np.errstate(over="ignore", invalid="ignore"):  # inf and NaN are what is looked for
        sums = np.add.reduceat(rows[order], firsts, axis=0)
        sums /= sum(part.weight for part in parts)
        squares = float(np.square(sums).sum())
    return squares, math.isfinite(squares) or bool(np.isfinite(sums).all())


def _floats(rows: Array, dim: int) -> NDArray[np.float64]:
    """Return rows in float64; of 16 bits, uint16 stands for bfloat16."""
    if rows.dtype == np.uint16:
        rows = (rows.astype(np.uint32) << 16).view(np.float32)
    return rows.reshape(-1, dim).astype(np.float64)
