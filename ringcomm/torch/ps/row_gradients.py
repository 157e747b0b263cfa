"""Gradients of rows that go with a step: clipped, unscaled and weighed as those of parameters are.

An optimizer with max_grad_norm= or scaler= must see all gradients before one of them counts. So
while a worker has such a one, the rows of its embeddings wait for the next step() of it; else they
leave while backward() runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
from numpy.typing import NDArray

from ringcomm.ps.future import Future, Pushed
from ringcomm.ps.hashtable import HashTable
from ringcomm.ps.job import Session, session
from ringcomm.ps.rounds import Mode
from ringcomm.torch.backward.registry import weight_of_step

Array = NDArray[Any]
Note = Callable[[Future[Pushed]], object]


class Deferring(Protocol):
    """An optimizer that may have to see all gradients before one of them counts."""

    @property
    def is_deferred(self) -> bool:
        """True if step() pushes, and rows wait for it."""
        ...


@dataclass(eq=False)
class TableGradient:
    """The gradient of one table's rows in a step: keys and rows of each backward pass, keys once.

    samples is its weight in the mean of a round, None: that of the step. `notes` are called with
    the future of the push.
    """

    table: HashTable
    samples: float | None
    pieces: list[tuple[Array, Array]] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    push: Future[Pushed] | None = None

    @property
    def has_rounds(self) -> bool:
        """True if an update is the mean over several workers."""
        return self.table.mode.has_rounds

    def whole(self) -> tuple[Array, Array]:
        """Return keys, each once, and their rows, summed over the passes."""
        if len(self.pieces) > 1:
            keys = np.concatenate([keys for keys, _ in self.pieces])
            rows = np.concatenate([rows for _, rows in self.pieces])
            order = np.argsort(keys, kind="stable")
            keys = keys[order]
            firsts = np.flatnonzero(np.diff(keys, prepend=-1))
            rows = np.add.reduceat(rows[order], firsts, axis=0) if len(keys) else rows
            self.pieces = [(keys[firsts], rows)]
        return self.pieces[0]

    def send(self, factor: float, weight: float, *, hold: bool = False) -> None:
        """Push it, times a factor; nothing if that has been done."""
        if self.push is None:
            weight = weight if self.samples is None else self.samples
            push = push_rows(self.table, *self.whole(), weight, factor=factor, hold=hold)
            if push is not None:
                self.push = push
                for note in self.notes:
                    note(push)


class RowGradients:
    """The gradients of all rows that go with one step of an optimizer.

    Each call may be repeated after it raised: what has been sent is not sent again.
    """

    def __init__(self, found: Iterable[TableGradient] = ()) -> None:
        found = list(found)
        self._alone = [each for each in found if not each.has_rounds]
        self._in_rounds = [each for each in found if each.has_rounds]

    def __bool__(self) -> bool:
        return bool(self._alone or self._in_rounds)

    def require_fit(self, who: str, mode: Mode, *, has_norm: bool) -> None:
        """Raise ValueError if rows and parameters have no norm, or no scale, in common."""
        n_workers = len(session().layout.workers)
        if mode.name == "first_of" and mode.bound < n_workers and self._in_rounds:
            name = self._in_rounds[0].table.name
            raise ValueError(
                f"{who}: its mode is {mode}, and embedding[{name}] has rounds of its own, of other "
                "workers: there is no mean of both for max_grad_norm= or scaler= to look at. Give "
                "the optimizer mode='sync', or leave both arguments out"
            )
        unlike = self._in_rounds if not mode.has_rounds else self._alone if has_norm else []
        for each in unlike:
            raise ValueError(
                f"{who}: its mode is {mode}, and that of embedding[{each.table.name}] "
                f"{each.table.mode}: one has rounds, so that max_grad_norm= or scaler= would mean "
                "the mean over workers here and a worker's own gradient there. Give both "
                "mode='sync', or neither a mode with rounds"
            )

    def require_finite(self) -> None:
        """Raise ValueError if a row has NaN or inf, of tables that do not allow it."""
        for each in (*self._alone, *self._in_rounds):
            each.table.require_finite(each.whole()[1])

    def own_squares(self) -> tuple[float, bool]:
        """Return the sum of squares of this worker's own, and if all is finite: without rounds."""
        squares, is_finite = 0.0, True
        for each in self._alone:
            rows = each.whole()[1]
            with np.errstate(over="ignore", invalid="ignore"):
                total = float(np.square(rows, dtype=np.float64).sum())
            squares += total
            is_finite &= math.isfinite(total) or bool(np.isfinite(rows).all())
        return squares, is_finite

    def hold(self, grad_scale: float, weight: float) -> None:
        """Push those of tables with rounds, unscaled; mean_squares() and release() follow."""
        for each in self._in_rounds:
            each.send(1 / grad_scale, weight, hold=True)

    def mean_squares(self) -> tuple[float, bool]:
        """Return the sum of squares of the means that are held, and whether all is finite."""
        asked = [each.table.measure() for each in self._in_rounds]
        means = [each.wait() for each in asked]
        return sum(mean.squares for mean in means), all(mean.is_finite for mean in means)

    def release(self, factor: float | None) -> None:
        """Make updates of the means, times a factor; None: drop them."""
        asked = [each.table.release(factor) for each in self._in_rounds]
        for each in asked:
            each.wait()

    def push(self, factor: float, weight: float) -> None:
        """Push those without rounds, times a factor."""
        for each in self._alone:
            each.send(factor, weight)


NO_ROWS: Final = RowGradients()


@dataclass(eq=False)
class _Waiting:
    """The gradients that wait on one worker, and the optimizers that they wait for."""

    optimizers: WeakSet[Deferring] = field(default_factory=WeakSet)
    found: dict[HashTable, TableGradient] = field(default_factory=dict)


_waiting: Final[WeakKeyDictionary[Session, _Waiting]] = WeakKeyDictionary()


def let_rows_wait(optimizer: Deferring, current: Session) -> None:
    """Hold gradients of rows for an optimizer's step(), while it lives and must see them."""
    _waiting.setdefault(current, _Waiting()).optimizers.add(optimizer)


def submit(table: HashTable, keys: Array, rows: Array, samples: float | None, note: Note) -> None:
    """Push a gradient of rows, or keep it for step(); note() is called with the future of the push.

    Args:
        table: of the rows.
        keys: each stands in it once.
        rows: their gradients.
        samples: weight in the mean of a round; None: as set_samples() of the optimizer says.
        note: called now or by step().
    """
    current = session()
    waiting = _waiting.get(current)
    if waiting is not None and any(each.is_deferred for each in waiting.optimizers):
        found = waiting.found.setdefault(table, TableGradient(table, samples))
        found.pieces.append((keys, rows))
        found.notes.append(note)
        return
    weight = weight_of_step(current.engine) if samples is None else samples
    push = push_rows(table, keys, rows, weight)
    if push is not None:
        note(push)


def take(current: Session) -> RowGradients:
    """Return what waits for a step; it waits no more."""
    waiting = _waiting.get(current)
    if waiting is None or not waiting.found:
        return NO_ROWS
    found, waiting.found = waiting.found, {}
    return RowGradients(found.values())


def push_rows(
    table: HashTable, keys: Array, rows: Array, weight: float, *, factor: float = 1.0,
    hold: bool = False,
) -> Future[Pushed] | None:  # fmt: skip
    """Push a gradient, times a factor; None where it counts for nothing."""
    if weight == 0 and not table.mode.has_rounds:
        return None
    if factor != 1.0:
        with np.errstate(over="ignore", invalid="ignore"):
            rows = rows * rows.dtype.type(factor)
    return table.push(keys, rows, weight=weight, hold=hold)
