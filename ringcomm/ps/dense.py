"""What a server does with one slice of a dense table: a partition, and a block."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringcomm import _core
from ringcomm.arrays.base import Bytes
from ringcomm.arrays.dtypes import DTYPES
from ringcomm.ps.messages import ASSIGN, INITIAL, PushMeta
from ringcomm.ps.optim import Updater, from_json
from ringcomm.ps.rounds import Rounds
from ringcomm.ps.spec import Spec

Array = NDArray[Any]


class Contribution(NamedTuple):
    """A push that waits for its round.

    Attributes:
        weight: of it in the mean.
        hyper: hyper-parameters that came with it.
        grad: the gradient; memory of who pushed, or of this server.
        answer: called with whether it was applied, and the version.
    """

    weight: float
    hyper: NDArray[np.float64]
    grad: Array
    answer: Callable[[bool, int], None]


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
        self.steps = 0
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
    def version(self) -> int:
        """Updates so far."""
        return self.steps

    @property
    def values(self) -> Array:
        """The values where they stand, until the next update but one."""
        nbytes = self.count * self.dtype.itemsize
        return self.memory[self._block.offset :][:nbytes].view(self.dtype)

    def push(
        self, worker: int, clock: int, meta: PushMeta, body: Bytes,
        answer: Callable[[bool, int], None],
    ) -> None:  # fmt: skip
        """Carry out a push, or keep it for its round.

        Raises:
            ValueError: it does not fit the slice; nothing is changed.
        """
        grad = self._gradient(meta, body)
        self.traffic.pushes += 1
        self.traffic.nbytes += body.nbytes
        if meta.flags & (INITIAL | ASSIGN):
            self._assign(meta, grad)
            self.is_ready = True
            answer(True, self.steps)
        elif self.rounds is None:
            self._note_staleness(clock)
            self._update(meta.hyper, meta, grad)
            answer(True, self.steps)
        else:
            whole = self._whole(meta, grad)
            contribution = Contribution(meta.weight, meta.hyper, whole, answer)
            if self.rounds.add(worker, clock, contribution):
                self.advance()
            else:
                self.traffic.late += 1
                answer(False, self.steps)

    def leave(self, worker: int) -> None:
        """Wait no more for a worker."""
        if self.rounds is not None:
            self.rounds.leave(worker)
            self.advance()

    def advance(self) -> None:
        """Carry out the rounds that are complete."""
        assert self.rounds is not None
        while (came := self.rounds.take()) is not None:
            parts = [part for _, part in came]
            self._apply(parts[0].hyper, mean_of(parts))
            for part in parts:
                part.answer(True, self.steps)
            for callback in self._at_version.pop(self.steps, ()):
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
        missed = max(0, self.steps - clock)
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


def mean_of(parts: list[Contribution]) -> Array:
    """Return the mean of contributions by their weights, summed in the order given."""
    total = sum(part.weight for part in parts)
    kind = parts[0].grad.dtype
    wide = kind if kind in (np.float32, np.float64) else np.dtype(np.float32)
    if len(parts) == 1:
        return parts[0].grad
    out = np.zeros(parts[0].grad.shape, wide)
    is_plain = all(part.weight == parts[0].weight for part in parts)
    for index, part in enumerate(parts):
        share = part.grad if is_plain else part.grad * wide.type(part.weight)
        if index == 0:
            out[:] = share
        else:
            out += share
    out /= wide.type(len(parts) if is_plain else total)
    return out


def _numpy(name: str) -> np.dtype[Any]:
    if name == "bfloat16":
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return found
    return np.dtype(name)
