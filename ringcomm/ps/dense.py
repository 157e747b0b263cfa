"""What a server does with one slice of a dense table: a partition, and a block."""

from __future__ import annotations

import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ringcomm import _core, codec
from ringcomm.arrays.base import Bytes
from ringcomm.arrays.dtypes import DTYPES
from ringcomm.ps.compression import pull_codec
from ringcomm.ps.messages import (
    ABSENT,
    ASSIGN,
    ENCODED,
    HOLD,
    INITIAL,
    RELEASE,
    SKIP,
    SQUARES,
    PushMeta,
)
from ringcomm.ps.optim import Updater, from_json
from ringcomm.ps.rounds import Rounds
from ringcomm.ps.segments import Mask, Segments, taken
from ringcomm.ps.spec import Spec
from ringcomm.ps.state import State

if TYPE_CHECKING:
    from ringcomm.ps.frames import Header

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
        grad: the gradient; memory of who pushed, or of this server. None: it has none. Bytes, if
            it is encoded: it stays so until its round, for that may be much less memory.
        is_held: the mean is to wait for its release.
        answer: called with what became of it.
        mask: which segments of the table have a gradient; empty: all.
    """

    weight: float
    hyper: NDArray[np.float64]
    grad: Array | None
    is_held: bool
    answer: Answer
    mask: bytes = b""


class Held(NamedTuple):
    """The mean of a round that is not an update yet.

    Attributes:
        mean: None: nobody had a gradient.
        workers: whose gradients it is of.
        present: which of the block's segments have one; None: it has no segments.
    """

    mean: Array | None
    workers: frozenset[int]
    present: Mask | None = None


class Release(NamedTuple):
    """A request to end the round whose mean is held, or is going to be.

    Attributes:
        number: of the round.
        meta: explains it.
        answer: called once the round is over.
    """

    number: int
    meta: PushMeta
    answer: Answer


@dataclass
class Traffic:
    """What a partition has done.

    Attributes:
        pushes: that were applied, or waited for their round.
        pulls: that were answered.
        nbytes: of both.
        calls: of functions.
        late: pushes whose round was over.
        apply_s: time spent on updates and functions.
        staleness: of async pushes: how many had missed so many updates.
    """

    pushes: int = 0
    pulls: int = 0
    nbytes: int = 0
    calls: int = 0
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
        held: the mean of a round that is not an update yet.
        releases: requests to end rounds that are not over.
        segments: parts of it that have a gradient, or none, by themselves; None: it is one.
        life: no other block has this number, in any job, nor this one where it was before.
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
        self._slots: list[Array] = []
        self.slots = self.updater.new_slots((count,), self.dtype)
        self.segments: Segments | None = None
        if spec.segments:
            scalars = self.slots[self.updater.n_full_slots :]
            self.segments = Segments(spec.segments, start, stop, scalars)
        self.life = secrets.randbits(63)
        self.held: Held | None = None
        self.releases: deque[Release] = deque()
        self._traffic = Traffic()
        self.rounds: Rounds[Contribution] | None = None
        if spec.mode.has_rounds:
            k = spec.mode.bound if spec.mode.name == "first_of" else None
            self.rounds = Rounds(workers, k)
        self._at_version: dict[int, list[Callable[[], None]]] = {}
        self._pull_codec = pull_codec(spec.compression)
        self._encoded: tuple[int, Bytes] | None = None
        self._is_ready: bool = spec.initial != "chief"
        self._is_kept = False
        if self._is_ready:
            self._block.write(np.full(count, spec.initial, self.dtype))

    @property
    def version(self) -> int:
        """Updates so far, or rounds, some of which may have changed nothing."""
        return self._block.clock

    @version.setter
    def version(self, version: int) -> None:
        self._block.clock = version

    @property
    def steps(self) -> int:
        """Updates that the updater has made."""
        return self._block.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._block.steps = steps

    @property
    def slots(self) -> list[Array]:
        """What the updater keeps beside the values."""
        return self._slots

    @slots.setter
    def slots(self, slots: list[Array]) -> None:
        self._block.attach(self.updater.code, self.updater.hyper, slots)
        self._slots = slots

    @property
    def is_ready(self) -> bool:
        """It has values."""
        return self._is_ready

    @is_ready.setter
    def is_ready(self, is_ready: bool) -> None:
        self._is_ready = is_ready
        self._block.is_open = is_ready and self.is_kept

    @property
    def is_kept(self) -> bool:
        """This server has it, and answers for it: whoever maps its values may read them there."""
        return self._is_kept

    @is_kept.setter
    def is_kept(self, is_kept: bool) -> None:
        self._is_kept = is_kept
        self._block.is_open = is_kept and self._is_ready

    @property
    def counter(self) -> _core.Counter:
        """What carries out pushes without Python."""
        return self._block.counter

    def last_of(self, rank: int) -> tuple[int, int]:
        """Return the last push of a rank that was carried out: incarnation, sequence."""
        return self._block.last(rank) or (-1, 0)

    def note_last(self, rank: int, incarnation: int, sequence: int) -> None:
        """Take note of one; -1, 0: of none."""
        if incarnation < 0:
            self._block.forget(rank)
        else:
            self._block.note_last(rank, incarnation, sequence)

    def is_new(self, header: Header) -> bool:
        """Return False if a request that changes the partition has been carried out before."""
        incarnation, last = self.last_of(header.origin)
        return header.incarnation != incarnation or header.sequence > last

    def all_last(self) -> dict[int, tuple[int, int]]:
        """Return the last push of each rank."""
        return {rank: (life, sequence) for rank, life, sequence in self._block.applied()}

    @property
    def traffic(self) -> Traffic:
        """What it has done so far."""
        pushes, nbytes, pulls, seconds, staleness = self._block.take_traffic()
        traffic = self._traffic
        traffic.pushes += pushes
        traffic.pulls += pulls
        traffic.nbytes += nbytes + pulls * self.count * self.dtype.itemsize
        traffic.apply_s += seconds
        for missed, n in staleness.items():
            traffic.staleness[missed] = traffic.staleness.get(missed, 0) + n
        return traffic

    @traffic.setter
    def traffic(self, traffic: Traffic) -> None:
        self._traffic = traffic

    @property
    def count(self) -> int:
        """Elements."""
        return self.stop - self.start

    @property
    def stamp(self) -> int:
        """Changes whenever values or slots do."""
        return self._block.version

    def encoded(self) -> Bytes | None:
        """Return the values as pulls get them where those are compressed, else None.

        All who pull this version get the same bytes, which are never written again.
        """
        if self._pull_codec is None:
            return None
        if self._encoded is None or self._encoded[0] != self.stamp:
            draw = codec.draw_number("pull", self.spec.name, self.start, self.version)
            self._encoded = (self.stamp, self._pull_codec.encode(self.values, draw=draw))
        return self._encoded[1]

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
            if self.rounds is None:
                raise ValueError(f"release[{self.spec.name}]: its mode has no rounds")
            if not meta.flags & SKIP:
                self._require_updater(meta)
            self.releases.append(Release(clock, meta, answer))
            self.advance()
            return
        grad = self._gradient(meta, body)
        if not meta.flags & (INITIAL | ASSIGN | ABSENT):
            self._require_updater(meta)
        self.traffic.pushes += 1
        self.traffic.nbytes += body.nbytes
        if meta.flags & (INITIAL | ASSIGN):
            if not (meta.flags & INITIAL and self.is_ready):  # what was trained is not begun anew
                self._assign(meta, grad)
            self.is_ready = True
            answer(True, self.version)
        elif self.rounds is None:
            self._note_staleness(clock)
            self._update(meta.hyper, meta, _bits(_opened(grad)))
            answer(True, self.version)
        else:
            is_absent = meta.flags & ABSENT or self._is_masked(meta.mask)
            whole = None if is_absent else self._whole(meta, grad)
            is_held = bool(meta.flags & HOLD)
            contribution = Contribution(meta.weight, meta.hyper, whole, is_held, answer, meta.mask)
            if self.rounds.add(worker, clock, contribution):
                self.advance()
            else:
                self._refuse_late(answer)

    def decide(self, worker: int, number: int, *, is_in: bool) -> None:
        """Let a worker's contribution count in a round of ps.FirstOf(k), or drop it as late.

        Raises:
            ValueError: the mode is another one; nothing is changed.
        """
        if self.rounds is None or self.spec.mode.name != "first_of":
            raise ValueError(f"[{self.spec.name}]: nobody enters rounds of mode {self.spec.mode}")
        if is_in:
            self.rounds.enter(worker, number)
            self.advance()
        elif (dropped := self.rounds.drop(worker, number)) is not None:
            self._refuse_late(dropped.answer)

    def _refuse_late(self, answer: Answer) -> None:
        self.traffic.late += 1
        answer(False, self.version, b"late")

    def leave(self, worker: int) -> None:
        """Wait no more for a worker."""
        if self.rounds is not None:
            self.rounds.leave(worker)
            self.advance()

    def advance(self) -> None:
        """Carry out the rounds that are complete, and may end."""
        assert self.rounds is not None
        self._carry_out_releases()
        while self.held is None and (came := self.rounds.take()) is not None:
            self._complete(came)
            self._carry_out_releases()

    def _complete(self, came: list[tuple[int, Contribution]]) -> None:
        """Make an update of the contributions to a round, by worker, or hold their mean."""
        parts = [part for _, part in came]
        mean = shares_of(parts)
        present = None if mean is None else self._present_in(parts)
        if any(part.is_held for part in parts):
            workers = frozenset(worker for worker, _ in came)
            self.held = Held(None if mean is None else mean.mean(self.dtype), workers, present)
            squares = packed_squares(self.held.mean)
            for part in parts:
                part.answer(True, self.version, squares)
            return
        self._end_round(parts[0].hyper, mean, present)
        for part in parts:
            part.answer(mean is not None, self.version, b"empty" if mean is None else b"")

    def _carry_out_releases(self) -> None:
        """End the round whose mean is held, if that is asked for, and it may end.

        One that came before the mean waits for it; one of a round that is over is answered. A mean
        that nobody is left to ask for is dropped.
        """
        assert self.rounds is not None
        releases, self.releases = self.releases, deque()
        for release in releases:
            if release.number >= self.version:
                is_due = self.held is not None and release.number == self.version
                if not (is_due and self.rounds.may_end(self.version + 1)):
                    self.releases.append(release)
                    continue
                self._release(release.meta)
            release.answer(True, self.version)
        if self.held is not None and self.rounds.have_left(self.held.workers):
            is_asked = any(release.number == self.version for release in self.releases)
            if not is_asked and self.rounds.may_end(self.version + 1):
                self._release(PushMeta(0.0, 0, 0, "", RELEASE | SKIP, self.updater.hyper))

    def _release(self, meta: PushMeta) -> None:
        """Make the mean that is held an update; the first of its workers that asks does."""
        assert self.held is not None
        (mean, _, present), self.held = self.held, None
        if meta.flags & SKIP:
            mean = None
        if mean is not None:
            _scale(mean, meta.weight)
        self._end_round(meta.hyper, mean, present)

    def _present_in(self, parts: list[Contribution]) -> Mask | None:
        """Return the segments for which some contribution that counts has a gradient."""
        if self.segments is None:
            return None
        present = np.zeros(len(self.segments.ids), np.bool_)
        for part in parts:
            if part.grad is not None and part.weight:
                present |= self.segments.present(part.mask)
        return present

    def _is_masked(self, mask: bytes) -> bool:
        return self.segments is not None and not self.segments.present(mask).any()

    def _end_round(
        self, hyper: NDArray[np.float64], mean: Array | Shares | None, present: Mask | None
    ) -> None:
        version = self.version + 1
        if mean is not None:
            self._apply(hyper, mean, present, version)
        self.version = version
        for callback in self._at_version.pop(self.version, ()):
            callback()

    def at_version(self, version: int, callback: Callable[[], None]) -> None:
        """Let `callback` be called right after the update that makes it so many."""
        self._at_version.setdefault(version, []).append(callback)

    def _gradient(self, meta: PushMeta, body: Bytes) -> Array:
        if not 0 <= meta.start <= meta.start + meta.n <= self.count:
            raise ValueError(
                f"push[{self.spec.name}]: elements {meta.start} to {meta.start + meta.n} of a slice"
                f" of {self.count}"
            )
        if meta.dtype == ENCODED:
            codec.check(body, meta.n, self.dtype)
            return body
        if meta.dtype not in DTYPES:
            raise ValueError(f"push[{self.spec.name}]: no dtype {meta.dtype!r}")
        kind = numpy_dtype(meta.dtype)
        if body.nbytes != meta.n * kind.itemsize:
            raise ValueError(
                f"push[{self.spec.name}]: {body.nbytes} bytes came for {meta.n} of {meta.dtype}"
            )
        return body.view(kind)

    def _require_updater(self, meta: PushMeta) -> None:
        """Refuse at once what the updater could not do when the round is over."""
        wanted = len(self.updater.hyper)
        if len(meta.hyper) != wanted:
            raise ValueError(
                f"push[{self.spec.name}]: {len(meta.hyper)} hyper-parameters came, and "
                f"{type(self.updater).__name__} has {wanted}"
            )

    def _whole(self, meta: PushMeta, grad: Array) -> Array:
        """Return the gradient of the whole slice; what was not pushed is 0."""
        if meta.n == self.count:
            return grad
        grad = _opened(grad)
        whole = np.zeros(self.count, grad.dtype)
        whole[meta.start : meta.start + meta.n] = grad
        return whole

    def _assign(self, meta: PushMeta, values: Array) -> None:
        whole = self.values.copy()
        whole[meta.start : meta.start + meta.n] = values
        self._block.write(whole)

    def _update(self, hyper: NDArray[np.float64], meta: PushMeta, grad: Array) -> None:
        version, part = self.version + 1, slice(meta.start, meta.start + meta.n)
        if self.segments is not None:
            present = self.segments.present(meta.mask) & self.segments.touched(part)
            self._apply(hyper, grad, present, version, part)
            return
        if meta.n == self.count:
            self._apply(hyper, grad, None, version)
            return
        began_at = time.perf_counter()
        whole, values = self.values.copy(), self.values[part]
        slots = [slot[part] if len(slot) == self.count else slot for slot in self.slots]
        code = self.updater.code
        _core.apply_update(code, hyper, self.steps + 1, values, whole[part], slots, grad)
        self._block.write(whole, version)
        self.steps += 1
        self.traffic.apply_s += time.perf_counter() - began_at

    def _apply(
        self, hyper: NDArray[np.float64], grad: Array | Shares, present: Mask | None, version: int,
        within: slice | None = None,
    ) -> None:  # fmt: skip
        """Make an update, and it the values of a version; see _apply_to()."""
        began_at = time.perf_counter()
        code, step = self.updater.code, self.steps + 1
        has_full_slots_alone = len(self.slots) == self.updater.n_full_slots
        if self.segments is not None and present is not None:
            grad = grad.mean(self.dtype) if isinstance(grad, Shares) else grad
            self._apply_to(self.segments, hyper, grad, present, within or slice(0, self.count))
            self.version = version
        elif isinstance(grad, Shares) and has_full_slots_alone:  # a mean that is never in memory
            grads = [_bits(each) for each in grad.grads]
            weights, divisor = grad.weights, grad.divisor
            self._block.apply_mean(code, hyper, step, self.slots, grads, weights, divisor, version)
            self.steps = step
        else:
            grad = grad.mean(self.dtype) if isinstance(grad, Shares) else grad
            self._block.apply(code, hyper, step, self.slots, grad, version)
            self.steps = step
        self.traffic.apply_s += time.perf_counter() - began_at

    def _apply_to(
        self, segments: Segments, hyper: NDArray[np.float64], grad: Array, present: Mask,
        within: slice,
    ) -> None:  # fmt: skip
        """Update the segments that have a gradient, each by its own count of steps.

        Args:
            segments: of this block.
            hyper: hyper-parameters that came with the gradient.
            grad: of the elements `within`.
            present: the segments that have a gradient.
            within: the elements that change.
        """
        code, full = self.updater.code, self.slots[: self.updater.n_full_slots]
        runs = list(segments.runs(present))
        is_all = len(runs) == 1 and runs[0].elements == within == slice(0, self.count)
        whole = None if is_all else self.values.copy()
        for run in runs:
            part, scalars = _overlap(run.elements, within), segments.scalars_of(run)
            step = int(segments.steps[run.segments.start]) + 1
            slots = [*(slot[part] for slot in full), *scalars]
            if whole is None:
                self._block.apply(code, hyper, step, slots, grad)
            else:
                old = self.values[part]
                own = grad[part.start - within.start : part.stop - within.start]
                _core.apply_update(code, hyper, step, old, whole[part], slots, own)
            segments.note(run, scalars)
        if whole is not None and runs:
            self._block.write(whole)
        self._take_oldest(segments)

    def _take_oldest(self, segments: Segments) -> None:
        """Let what the block has once be that of the segment with the most steps."""
        oldest = int(np.argmax(segments.steps))
        self.steps = int(segments.steps[oldest])
        for slot, value in zip(
            self.slots[self.updater.n_full_slots :], segments.scalars[oldest], strict=True
        ):
            slot[:] = value

    def replace(self, values: Array) -> None:
        """Have other values: an update, but no round."""
        self._block.write(values, self.version + (self.rounds is None))

    def _note_staleness(self, clock: int) -> None:
        missed = max(0, self.version - clock)
        seen = self.traffic.staleness
        seen[missed] = seen.get(missed, 0) + 1

    def told(self) -> dict[str, Any]:
        """Return what ps.stats() tells of it."""
        return {**asdict(self.traffic), "elements": self.count}

    # --- as data --------------------------------------------------------------------------------
    def state(self) -> State:
        """Return a copy of all there is to it, but for contributions to rounds."""
        slots = {f"slot{k}": slot.copy() for k, slot in enumerate(self.slots)}
        more = {} if self.segments is None else self.segments.arrays()
        meta = {"start": self.start, "stop": self.stop, "steps": self.steps}
        return State(meta, {"values": self.values.copy(), **slots, **more})

    def load(self, state: State) -> None:
        """Become what another slice of these bounds was; rounds stay."""
        arrays = state.arrays
        self._block.write(np.ascontiguousarray(arrays["values"], self.dtype))
        slots = range(len(self.slots))
        self.slots = [np.array(arrays[f"slot{k}"], self.dtype) for k in slots]
        self.steps = int(state.meta["steps"])
        if self.segments is not None:
            scalars = self.slots[self.updater.n_full_slots :]
            self.segments.load(taken(arrays), self.steps, scalars)
        self.is_ready = True

    def load_values(self, state: State) -> None:
        """Take values alone, as a table begins with them; slots and steps stay."""
        self._block.write(np.ascontiguousarray(state.arrays["values"], self.dtype))
        self.is_ready = True


class Shares(NamedTuple):
    """What the mean of a round is made of.

    Attributes:
        grads: in the order in which they are summed.
        weights: of each; empty: all 1.
        divisor: of the sum.
    """

    grads: list[Array]
    weights: list[float]
    divisor: float

    @_QUIET
    def mean(self, dtype: np.dtype[Any]) -> Array:
        """Return the mean in a dtype, summed in it too."""
        weights = map(dtype.type, self.weights)
        shares = [g.astype(dtype, copy=False) for g in self.grads]
        shares = [g * w for g, w in zip(shares, weights, strict=True)] if self.weights else shares
        out: Array = shares[0] + shares[1] if shares[1:] else shares[0].copy()
        for share in shares[2:]:
            out += share
        out /= dtype.type(self.divisor)
        return out


def shares_of(parts: list[Contribution]) -> Shares | None:
    """Return what the mean of contributions by their weights is made of, in the order given.

    Who has no gradient counts as zeros. None if nobody has one, or the sum of weights is 0.
    """
    # The mean over an empty batch is NaN, which a weight of 0 would not cancel.
    present = [
        (part.weight, _opened(part.grad)) for part in parts if part.grad is not None and part.weight
    ]
    if not present:
        return None
    grads = [grad for _, grad in present]
    if all(part.weight == parts[0].weight for part in parts):
        return Shares(grads, [], len(parts))
    # By a power of two, which changes no digit: so that no weight leaves the range of float32.
    scale = -math.frexp(max(part.weight for part in parts))[1]
    weights = [math.ldexp(weight, scale) for weight, _ in present]
    return Shares(grads, weights, sum(math.ldexp(part.weight, scale) for part in parts))


def _overlap(a: slice, b: slice) -> slice:
    return slice(max(a.start, b.start), min(a.stop, b.stop))


def _bits(grad: Array) -> Array:
    """Return a gradient as C++ takes it, which knows bfloat16 by its bits."""
    return grad.view(np.uint16) if grad.dtype.name == "bfloat16" else grad


def _opened(grad: Array) -> Array:
    """Return a gradient as floats; bytes are what a codec wrote."""
    return codec.decoded(grad) if grad.dtype == np.uint8 else grad


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


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of a gradient by its name."""
    if name == "bfloat16":
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return found
    return np.dtype(name)
