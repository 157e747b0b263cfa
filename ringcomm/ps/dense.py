"""What a server does with one slice of a dense table: a partition, and a block."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ringcomm import _core
from ringcomm.arrays.base import Bytes
from ringcomm.arrays.dtypes import DTYPES
from ringcomm.ps.messages import (
    ABSENT,
    ASSIGN,
    HOLD,
    INITIAL,
    RELEASE,
    SKIP,
    SQUARES,
    PushMeta,
)
from ringcomm.ps.optim import Updater, from_json
from ringcomm.ps.rounds import Rounds
from ringcomm.ps.spec import Spec

Array = NDArray[Any]
_QUIET: Final = np.errstate(over="ignore", invalid="ignore")  # inf and NaN are no news here


class Answer(Protocol):
    """Tells who pushed what became of it."""

    def __call__(self, is_applied: bool, version: int, meta: bytes = b"", /) -> None:
        """Say whether it was applied, the version, and what explains it."""
        ...


class Contribution(NamedTuple):
    """A push that waits for its round.

    Attributes:
        weight: of it in the mean.
        hyper: hyper-parameters that came with it.
        grad: the gradient; memory of who pushed, or of this server. None: it has none.
        is_held: the mean is to wait for its release.
        answer: called with what became of it.
    """

    weight: float
    hyper: NDArray[np.float64]
    grad: Array | None
    is_held: bool
    answer: Answer


class Held(NamedTuple):
    """The mean of a round that is not an update yet; None: nobody had a gradient."""

    mean: Array | None


@dataclass
class Traffic:
    """What a partition has done.

    Attributes:
        pushes: that were applied, or waited for their round.
        pulls: that were answered.
        nbytes: of both.
        late: pushes whose round was over.
        apply_s: time spent on updates.
        staleness: of async pushes: how many had missed so many updates.
    """

    pushes: int = 0
    pulls: int = 0
    nbytes: int = 0
    late: int = 0
    apply_s: float = 0.0
    staleness: dict[int, int] = field(default_factory=dict)


class DensePartition:
    """One slice of a dense table: values, the updater's state, and who pushed what.

    Args:
        spec: of the table.
        start: its first element.
        stop: behind its last.
        memory: returns memory for its values, which clients on this node map.
        workers: who contributes to rounds.

    Attributes:
        version: updates so far, or rounds, some of which may have changed nothing.
        steps: updates that the updater has made.
    """

    def __init__(
        self,
        spec: Spec,
        start: int,
        stop: int,
        memory: Callable[[int], Bytes],
        workers: Iterable[int],
    ) -> None:
        self.spec = spec
        self.start, self.stop = start, stop
        self.dtype = np.dtype(spec.dtype)
        self.updater: Updater = from_json(spec.updater)
        count = stop - start
        self.memory = memory(_core.block_nbytes(count * self.dtype.itemsize))
        self._block = _core.DenseBlock(self.memory, count, DTYPES[spec.dtype].kernel, 0)
        self.slots = self.updater.new_slots((count,), self.dtype)
        self.steps = self.version = 0
        self._held: Held | None = None
        self.traffic = Traffic()
        self.rounds: Rounds[Contribution] | None = None
        if spec.mode.has_rounds:
            k = spec.mode.bound if spec.mode.name == "first_of" else None
            self.rounds = Rounds(workers, k)
        self._at_version: dict[int, list[Callable[[], None]]] = {}
        self.is_ready = spec.initial != "chief"
        if self.is_ready:
            self._block.write(np.full(count, spec.initial, self.dtype))

    @property
    def count(self) -> int:
        """Elements."""
        return self.stop - self.start

    @property
    def values(self) -> Array:
        """The values where they stand, until the next update but one."""
        nbytes = self.count * self.dtype.itemsize
        return self.memory[self._block.offset :][:nbytes].view(self.dtype)

    def push(self, worker: int, clock: int, meta: PushMeta, body: Bytes, answer: Answer) -> None:
        """Carry out a push, or keep it for its round.

        Raises:
            ValueError: it does not fit the slice; nothing is changed.
        """
        if meta.flags & RELEASE:
            self._release(clock, meta)
            answer(True, self.version)
            return
        grad = self._gradient(meta, body)
        self.traffic.pushes += 1
        self.traffic.nbytes += body.nbytes
        if meta.flags & (INITIAL | ASSIGN):
            self._assign(meta, grad)
            self.is_ready = True
            answer(True, self.version)
        elif self.rounds is None:
            self._note_staleness(clock)
            self._update(meta.hyper, meta, grad)
            answer(True, self.version)
        else:
            whole = None if meta.flags & ABSENT else self._whole(meta, grad)
            is_held = bool(meta.flags & HOLD)
            contribution = Contribution(meta.weight, meta.hyper, whole, is_held, answer)
            if self.rounds.add(worker, clock, contribution):
                self.advance()
            else:
                self.traffic.late += 1
                answer(False, self.version, b"late")

    def leave(self, worker: int) -> None:
        """Wait no more for a worker."""
        if self.rounds is not None:
            self.rounds.leave(worker)
            self.advance()

    def advance(self) -> None:
        """Carry out the rounds that are complete."""
        assert self.rounds is not None
        while self._held is None and (came := self.rounds.take()) is not None:
            parts = [part for _, part in came]
            mean = mean_of(parts)
            if any(part.is_held for part in parts):
                self._held = Held(None if mean is None else np.array(mean, self.dtype))
                squares = packed_squares(self._held.mean)
                for part in parts:
                    part.answer(True, self.version, squares)
                return
            self._end_round(parts[0].hyper, mean)
            for part in parts:
                part.answer(mean is not None, self.version, b"empty" if mean is None else b"")

    def _release(self, clock: int, meta: PushMeta) -> None:
        """Make the mean of round `clock` an update; the first of its workers that asks does."""
        if self._held is None or clock != self.version:
            return
        (mean,), self._held = self._held, None
        if meta.flags & SKIP:
            mean = None
        if mean is not None:
            _scale(mean, meta.weight)
        self._end_round(meta.hyper, mean)
        self.advance()

    def _end_round(self, hyper: NDArray[np.float64], mean: Array | None) -> None:
        if mean is not None:
            self._apply(hyper, mean)
        self.version += 1
        for callback in self._at_version.pop(self.version, ()):
            callback()

    def at_version(self, version: int, callback: Callable[[], None]) -> None:
        """Let `callback` be called right after the update that makes it so many."""
        self._at_version.setdefault(version, []).append(callback)

    def _gradient(self, meta: PushMeta, body: Bytes) -> Array:
        if meta.dtype not in DTYPES:
            raise ValueError(f"push[{self.spec.name}]: no dtype {meta.dtype!r}")
        kind = _numpy(meta.dtype)
        if body.nbytes != meta.n * kind.itemsize:
            raise ValueError(
                f"push[{self.spec.name}]: {body.nbytes} bytes came for {meta.n} of {meta.dtype}"
            )
        if not 0 <= meta.start <= meta.start + meta.n <= self.count:
            raise ValueError(
                f"push[{self.spec.name}]: elements {meta.start} to {meta.start + meta.n} of a slice"
                f" of {self.count}"
            )
        return body.view(kind)

    def _whole(self, meta: PushMeta, grad: Array) -> Array:
        """Return the gradient of the whole slice; what was not pushed is 0."""
        if meta.n == self.count:
            return grad
        whole = np.zeros(self.count, grad.dtype)
        whole[meta.start : meta.start + meta.n] = grad
        return whole

    def _assign(self, meta: PushMeta, values: Array) -> None:
        whole = self.values.copy()
        whole[meta.start : meta.start + meta.n] = values
        self._block.write(whole)

    def _update(self, hyper: NDArray[np.float64], meta: PushMeta, grad: Array) -> None:
        self.version += 1
        if meta.n == self.count:
            self._apply(hyper, grad)
            return
        part = slice(meta.start, meta.start + meta.n)
        whole, values = self.values.copy(), self.values[part]
        slots = [slot[part] if len(slot) == self.count else slot for slot in self.slots]
        code = self.updater.code
        _core.apply_update(code, hyper, self.steps + 1, values, whole[part], slots, grad)
        self._block.write(whole)
        self.steps += 1

    def _apply(self, hyper: NDArray[np.float64], grad: Array) -> None:
        self.steps += 1
        self._block.apply(self.updater.code, hyper, self.steps, self.slots, grad)

    def _note_staleness(self, clock: int) -> None:
        missed = max(0, self.version - clock)
        seen = self.traffic.staleness
        seen[missed] = seen.get(missed, 0) + 1

    # --- as data --------------------------------------------------------------------------------
    def state(self) -> tuple[bytes, list[Array]]:
        """Return what load() takes: a text, and arrays."""
        text = json.dumps({"steps": self.steps, "start": self.start, "stop": self.stop})
        return text.encode(), [self.values.copy(), *[slot.copy() for slot in self.slots]]

    def load(self, steps: int, values: Array, slots: list[Array]) -> None:
        """Become what another partition was."""
        self._block.write(np.ascontiguousarray(values, self.dtype))
        self.slots = [np.array(slot, self.dtype) for slot in slots]
        self.steps = steps
        self.is_ready = True


@_QUIET
def mean_of(parts: list[Contribution]) -> Array | None:
    """Return the mean of contributions by their weights, summed in the order given.

    Who has no gradient counts as zeros. None if nobody has one, or the sum of weights is 0.
    """
    total = sum(part.weight for part in parts)
    # The mean over an empty batch is NaN, which a weight of 0 would not cancel.
    present = [(part.weight, part.grad) for part in parts if part.grad is not None and part.weight]
    if not present:
        return None
    kind = present[0][1].dtype
    wide = kind if kind in (np.float32, np.float64) else np.dtype(np.float32)
    if len(parts) == 1:
        return present[0][1]
    is_plain = all(part.weight == parts[0].weight for part in parts)
    shares = [grad if is_plain else grad * wide.type(weight) for weight, grad in present]
    out = np.add(shares[0], shares[1], dtype=wide) if shares[1:] else np.array(shares[0], wide)
    for share in shares[2:]:
        out += share
    out /= wide.type(len(parts) if is_plain else total)
    return out


@_QUIET
def _scale(mean: Array, factor: float) -> None:
    mean *= mean.dtype.type(factor)


@_QUIET
def packed_squares(mean: Array | None) -> bytes:
    """Return the sum of squares and whether all is finite, as the meta of an answer."""
    if mean is None:
        return SQUARES.pack(0.0, True)
    total = float(np.square(mean, dtype=np.float64).sum())
    return SQUARES.pack(total, math.isfinite(total) or bool(np.isfinite(mean).all()))


def _numpy(name: str) -> np.dtype[Any]:
    if name == "bfloat16":
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return found
    return np.dtype(name)
