"""One partition of a dense table on its server: applies pushes, ends rounds, serves values."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringcomm import _core, codec
from ringcomm.arrays.base import Bytes
from ringcomm.arrays.dtypes import DTYPES
from ringcomm.ps.compression import pull_codec
from ringcomm.ps.optim import from_json
from ringcomm.ps.partition_state import PartitionState, slots_by_element
from ringcomm.ps.protocol.frame_meta import ABSENT, ASSIGN, ENCODED, INITIAL, SKIP, PushMeta
from ringcomm.ps.segments import Mask, Segments, taken
from ringcomm.ps.server.dense.block import Block
from ringcomm.ps.server.dense.round_mean import (
    Gradient,
    Shares,
    bits,
    opened,
    packed_squares,
    scale,
    shares_of,
)
from ringcomm.ps.table_spec import Spec

if TYPE_CHECKING:
    from ringcomm.ps.protocol.frames import FrameHeader

Array = NDArray[Any]


class Factor(NamedTuple):
    """The content of a release: the mean is multiplied by `weight`, and applied with `hyper`."""

    weight: float
    hyper: NDArray[np.float64]


class Mean(NamedTuple):
    """The mean of a round that is held; present: which of the block's segments have one."""

    values: Array | None  # None: no worker had a gradient
    present: Mask | None


class DensePartition(Block):
    """One slice of a dense table: a block, whose updates its core decides.

    Args:
        spec: of the table.
        start: its first element.
        stop: behind its last.
        memory: returns memory for its values, which clients on this node map.

    Attributes:
        spec, start, stop: see above.
        held: the mean of a round that is not an update yet.
        lets_in, unchanged: see ringcomm.ps.server.values.Values.
        segments: parts of it that have a gradient, or none, by themselves; None: it is one.
    """

    lets_in: ClassVar[bool] = False
    unchanged: ClassVar[bytes] = b""

    def __init__(self, spec: Spec, start: int, stop: int, memory: Callable[[int], Bytes]) -> None:
        super().__init__(stop - start, np.dtype(spec.dtype), from_json(spec.updater), memory)
        self.spec, self.start, self.stop = spec, start, stop
        self._n_by_element = len(slots_by_element(self.updater))  # these are the first slots
        self.segments: Segments | None = None
        if spec.segments:
            scalars = self.slots[self._n_by_element :]
            self.segments = Segments(spec.segments, start, stop, scalars)
        self.held: Mean | None = None
        self._pull_codec = pull_codec(spec.compression)
        self._encoded: tuple[tuple[int, int], Bytes] | None = None
        if spec.initial != "chief":
            self.is_ready = True
            self._block.write(np.full(self.count, spec.initial, self.dtype))

    def encoded(self) -> Bytes | None:
        """Return the values as pulls get them where those are compressed, else None.

        All who pull this version get the same bytes, which are never written again.
        """
        if self._pull_codec is None:
            return None
        now = self.stamp, self.version  # a round that is empty changes no value
        if self._encoded is None or self._encoded[0] != now:
            draw = codec.draw_number("pull", self.spec.name, self.start, self.version)
            self._encoded = (now, self._pull_codec.encode(self.values, draw=draw))
        return self._encoded[1]

    # --- pushes, as the core decides; see Values ------------------------------------------------
    def decoded(
        self, header: FrameHeader, meta: PushMeta, body: Bytes, view: Callable[[int, int], Bytes]
    ) -> Gradient:
        del view
        values, clock = self._gradient(meta, body), header.clock
        if not meta.flags & (INITIAL | ASSIGN | ABSENT):
            self._require_updater(meta)
        within = slice(meta.start, meta.start + meta.n)
        if self.spec.mode.has_rounds and not meta.flags & (INITIAL | ASSIGN):
            is_absent = meta.flags & ABSENT or self._is_masked(meta.mask)
            whole = None if is_absent else self._whole(within, values)
            return Gradient(meta.weight, meta.hyper, slice(0, self.count), whole, meta.mask, clock)
        return Gradient(meta.weight, meta.hyper, within, values, meta.mask, clock)

    def factor(self, meta: PushMeta) -> Factor:
        if not self.spec.mode.has_rounds:
            raise ValueError(f"release[{self.spec.name}]: its mode has no rounds")
        if not meta.flags & SKIP:
            self._require_updater(meta)
        return Factor(meta.weight, meta.hyper)

    def note_push(self, body: Bytes) -> None:
        self.counts.pushes += 1
        self.counts.nbytes += body.nbytes

    def note_late(self) -> None:
        self.counts.late += 1

    def apply(self, gradient: Gradient) -> bytes:
        missed = max(0, self.version - gradient.clock)
        seen = self.counts.staleness
        seen[missed] = seen.get(missed, 0) + 1
        assert gradient.values is not None
        self._update(gradient, bits(opened(gradient.values)))
        return b""

    def write(self, gradient: Gradient) -> bytes:
        whole = self.values.copy()
        whole[gradient.within] = gradient.values
        self._block.write(whole)
        self.is_ready = True
        return b""

    def hold(self, gradients: list[Gradient]) -> bytes:
        shares = shares_of(gradients)
        mean = None if shares is None else shares.mean(self.dtype)
        self.held = Mean(mean, None if mean is None else self._present_in(gradients))
        return packed_squares(mean)

    def end(
        self, number: int, gradients: list[Gradient], release: Factor | None, *, drops: bool
    ) -> tuple[bytes, bytes]:
        mean: Array | Shares | None
        if gradients:
            mean = shares_of(gradients)
            present = None if mean is None else self._present_in(gradients)
            hyper = gradients[0].hyper
        else:
            assert self.held is not None or drops  # a round whose workers are all dead has no mean
            (mean, present), self.held = self.held or (None, None), None
            hyper = self.updater.hyper if release is None else release.hyper
            if mean is not None and release is not None:
                scale(mean, release.weight)
        if mean is not None and not drops:
            self._apply(hyper, mean, present, number)
        self.version = number
        return b"" if mean is not None else b"empty", b""

    def _present_in(self, parts: list[Gradient]) -> Mask | None:
        if self.segments is None:
            return None
        present = np.zeros(len(self.segments.ids), np.bool_)
        for part in parts:
            if part.values is not None and part.weight:
                present |= self.segments.present(part.mask)
        return present

    def _is_masked(self, mask: bytes) -> bool:
        return self.segments is not None and not self.segments.present(mask).any()

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

    def _whole(self, within: slice, values: Array) -> Array:
        """Return the gradient of the whole slice; what was not pushed is 0."""
        if within == slice(0, self.count):
            return values
        values = opened(values)
        whole = np.zeros(self.count, values.dtype)
        whole[within] = values
        return whole

    def _update(self, gradient: Gradient, grad: Array) -> None:
        version, part, hyper = self.version + 1, gradient.within, gradient.hyper
        if self.segments is not None:
            present = self.segments.present(gradient.mask) & self.segments.touched(part)
            self._apply(hyper, grad, present, version, part)
            return
        if part == slice(0, self.count):
            self._apply(hyper, grad, None, version)
            return
        began_at = time.perf_counter()
        whole, values = self.values.copy(), self.values[part]
        slots = [slot[part] if len(slot) == self.count else slot for slot in self.slots]
        code = self.updater.code
        _core.apply_update(code, hyper, self.steps + 1, values, whole[part], slots, grad)
        self._block.write(whole, version)
        self.steps += 1
        self.counts.apply_s += time.perf_counter() - began_at

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
            grads = [bits(each) for each in grad.grads]
            weights, divisor = grad.weights, grad.divisor
            self._block.apply_mean(code, hyper, step, self.slots, grads, weights, divisor, version)
            self.steps = step
        else:
            grad = grad.mean(self.dtype) if isinstance(grad, Shares) else grad
            self._block.apply(code, hyper, step, self.slots, grad, version)
            self.steps = step
        self.counts.apply_s += time.perf_counter() - began_at

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
        code, full = self.updater.code, self.slots[: self._n_by_element]
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
        """Set what the block has once to that of the segment with the most steps."""
        oldest = int(np.argmax(segments.steps))
        self.steps = int(segments.steps[oldest])
        for slot, value in zip(
            self.slots[self._n_by_element :], segments.scalars[oldest], strict=True
        ):
            slot[:] = value

    def replace(self, values: Array) -> None:
        """Replace the values; that is an update, but no round."""
        self._block.write(values, self.version + (not self.spec.mode.has_rounds))

    def stats(self) -> dict[str, Any]:
        return {**asdict(self.traffic), "elements": self.count}

    # --- as data --------------------------------------------------------------------------------
    def state(self) -> PartitionState:
        """Return a copy of all there is to it, but for contributions to rounds."""
        slots = {f"slot{k}": slot.copy() for k, slot in enumerate(self.slots)}
        more = {} if self.segments is None else self.segments.arrays()
        meta = {"start": self.start, "stop": self.stop, "steps": self.steps}
        return PartitionState(meta, {"values": self.values.copy(), **slots, **more})

    def held_arrays(self) -> dict[str, Array]:
        arrays: dict[str, Array | None] = {}
        if self.held is not None:
            arrays = {"held": self.held.values, "held_present": self.held.present}
        return {name: array for name, array in arrays.items() if array is not None}

    def load_held(self, arrays: dict[str, Array]) -> None:
        held = {name: array.copy() for name, array in arrays.items() if name.startswith("held")}
        self.held = Mean(held.get("held"), held.get("held_present"))

    def load(self, state: PartitionState) -> None:
        """Become what another slice of these bounds was; rounds stay."""
        arrays = state.arrays
        self._block.write(np.ascontiguousarray(arrays["values"], self.dtype))
        slots = range(len(self.slots))
        self.slots = [np.array(arrays[f"slot{k}"], self.dtype) for k in slots]
        self.steps = int(state.meta["steps"])
        if self.segments is not None:
            scalars = self.slots[self._n_by_element :]
            self.segments.load(taken(arrays), self.steps, scalars)
        self.is_ready = True

    def load_values(self, state: PartitionState) -> None:
        """Take values alone, as a table begins with them, where there are some; the rest stays."""
        whole, n_filled = self.values.copy(), 0
        for start, stop in state.meta["filled"]:
            whole[start:stop] = state.arrays["values"][start:stop]
            n_filled += stop - start
        self._block.write(whole)
        self.is_ready |= n_filled == self.count


def _overlap(a: slice, b: slice) -> slice:
    return slice(max(a.start, b.start), min(a.stop, b.stop))


def numpy_dtype(name: str) -> np.dtype[Any]:
    if name == "bfloat16":
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return found
    return np.dtype(name)
