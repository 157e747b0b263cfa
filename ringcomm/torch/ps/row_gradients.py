"""Gradients of embedding rows that wait for step(), to be clipped, unscaled and weighed there.

An optimizer with max_grad_norm= or scaler= needs all gradients before it can use one. While a
worker has such an optimizer, gradients of rows wait for its next step(). Otherwise they are pushed
while backward() runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
from numpy.typing import NDArray

from ringcomm.ps.checkpoint.auto_recovery import push_unless_lost, pushes_nothing
from ringcomm.ps.client.future import Future, Pushed
from ringcomm.ps.client.rows.hash_table import HashTable
from ringcomm.ps.session import Session, session
from ringcomm.ps.update_modes import Mode
from ringcomm.torch.backward.optimizer_numbers import weight_of_step
from ringcomm.torch.ps.clipping import squares_of

Array = NDArray[Any]
Note = Callable[[Future[Pushed]], object]


class Deferring(Protocol):
    """An optimizer that may need all gradients before it can use one."""

    @property
    def is_deferred(self) -> bool:
        """True if step() pushes, and the gradients of rows wait for it."""


@dataclass(eq=False)
class TableGradient:
    """The gradients of one table's rows in a step.

    Attributes:
        samples: weight in the mean of a round; None: that of the step.
        pieces: (keys, rows) of each backward pass; in each the keys are distinct.
        notes: functions to call with the future of the push.
    """

    table: HashTable
    samples: float | None
    pieces: list[tuple[Array, Array]] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    push: Future[Pushed] | None = None

    def whole(self) -> tuple[Array, Array]:
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
        """Push the gradients times a factor, unless that has been done."""
        if self.push is None:
            weight = weight if self.samples is None else self.samples
            push = push_rows(self.table, *self.whole(), weight, factor=factor, hold=hold)
            if push is not None:
                self.push = push
                for note in self.notes:
                    note(push)


class RowGradients:
    """The gradients of all rows that belong to one step of an optimizer.

    A call that raised may be repeated: nothing is sent twice.
    """

    def __init__(self, found: Iterable[TableGradient] = ()) -> None:
        found = list(found)
        self._alone = [each for each in found if not each.table.mode.has_rounds]
        self._in_rounds = [each for each in found if each.table.mode.has_rounds]

    def __bool__(self) -> bool:
        return bool(self._alone or self._in_rounds)

    def require_fit(self, who: str, mode: Mode, *, has_norm: bool) -> None:
        """Raise ValueError if there is no common norm or scale of rows and parameters."""
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
        for each in (*self._alone, *self._in_rounds):
            each.table.require_finite(each.whole()[1])

    def own_squares(self) -> tuple[float, bool]:
        """Return the sum of squares in tables without rounds, and whether all values are finite."""
        return squares_of(torch.from_numpy(each.whole()[1]) for each in self._alone)

    def hold(self, grad_scale: float, weight: float) -> None:
        """Push to tables with rounds, unscaled; mean_squares() and release() come next."""
        for each in self._in_rounds:
            each.send(1 / grad_scale, weight, hold=True)

    def mean_squares(self) -> tuple[float, bool]:
        """Return the sum of squares of the held means, and whether all values are finite."""
        means = [each.push.wait() for each in self._in_rounds if each.push is not None]
        return sum(mean.squares for mean in means), all(mean.is_finite for mean in means)

    def release(self, factor: float | None) -> None:
        """Update the rows by the held means times a factor; None: drop the means."""
        asked = [each.table.release(factor) for each in self._in_rounds]
        for each in asked:
            each.wait()

    def push(self, factor: float, weight: float) -> None:
        """Push to tables without rounds, times a factor."""
        for each in self._alone:
            each.send(factor, weight)

    def push_as_they_are(self, weight: float) -> None:
        for each in (*self._alone, *self._in_rounds):
            each.send(1.0, weight)


NO_ROWS: Final = RowGradients()


@dataclass(eq=False)
class _WaitingRows:
    """The gradients that wait on one worker, and the optimizers whose step() they wait for."""

    optimizers: WeakSet[Deferring] = field(default_factory=WeakSet)
    found: dict[HashTable, TableGradient] = field(default_factory=dict)


_waiting: Final[WeakKeyDictionary[Session, _WaitingRows]] = WeakKeyDictionary()


def let_rows_wait(optimizer: Deferring, current: Session) -> None:
    """Hold gradients of rows for step() of an optimizer, while it lives and needs them."""
    _waiting.setdefault(current, _WaitingRows()).optimizers.add(optimizer)


def submit(table: HashTable, keys: Array, rows: Array, samples: float | None, note: Note) -> None:
    """Push gradients of rows, now or in step(), and call note() with the future of the push.

    The keys are distinct. `samples` is the weight in the mean of a round; None: the value of the
    optimizer's set_samples().
    """
    current = session()
    if pushes_nothing(current):
        return  # rows that wait for step() count for nothing, too
    waiting = _waiting.get(current)
    if waiting is not None and any(each.is_deferred for each in waiting.optimizers):
        found = waiting.found.setdefault(table, TableGradient(table, samples))
        found.pieces.append((keys, rows))
        found.notes.append(note)
        return
    weight = weight_of_step(current.engine) if samples is None else samples

    def push() -> None:
        pushed = push_rows(table, keys, rows, weight)
        if pushed is not None:
            note(pushed)

    push_unless_lost(current, push)


def take(current: Session) -> RowGradients:
    waiting = _waiting.get(current)
    if waiting is None or not waiting.found:
        return NO_ROWS
    found, waiting.found = waiting.found, {}
    return RowGradients(found.values())


def push_rows(
    table: HashTable, keys: Array, rows: Array, weight: float, *, factor: float = 1.0,
    hold: bool = False,
) -> Future[Pushed] | None:  # fmt: skip
    """Push a gradient times a factor; return None if its weight is 0 in a table without rounds."""
    if weight == 0 and not table.mode.has_rounds:
        return None
    if factor != 1.0:
        with np.errstate(over="ignore", invalid="ignore"):
            rows = rows * rows.dtype.type(factor)
    return table.push(keys, rows, weight=weight, hold=hold)
