"""Parameters in tables on the servers: large parameters have one each, small ones share.

| parameters | the table has | values and gradients |
|---|---|---|
| float32, float64 in host memory | the same dtype | of a large parameter are where they are |
| bf16, fp16 | float32: the servers have the masters | are rounded when they come from the servers |
| on a GPU | the dtype as above | go through host memory: torch/backward/gpu_staging.py |
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any, Final

import torch
from numpy.typing import NDArray

from ringcomm._core import TensorSnapshot
from ringcomm.arrays import device_adapter_for
from ringcomm.arrays.torch import TORCH
from ringcomm.codec import Codec
from ringcomm.collectives.fusion import Item, plan_fusion
from ringcomm.ps.client.dense.table import table
from ringcomm.ps.client.future import Future, Pushed
from ringcomm.ps.optim import Assign, Updater
from ringcomm.ps.segments import MOST
from ringcomm.ps.table_spec import Part
from ringcomm.ps.update_modes import Mode
from ringcomm.torch.backward.parameter_hooks import Slot
from ringcomm.torch.backward.watched_tensors import (
    TensorMark,
    can_hold,
    n_storage_references,
)
from ringcomm.torch.optim.buckets import Streams, flat_view, is_dense, view_like
from ringcomm.torch.optim.gradient_slot import WORTH_KEEPING

BLOCK_NBYTES: Final = 4 << 20  # servers cut tables into blocks
FUSED_NBYTES: Final = 4 << 20  # the largest shared table
ALONE_NBYTES: Final = 256 << 10  # from here on a parameter has a table of its own

IN_16_BITS: Final = (torch.bfloat16, torch.float16)

Array = NDArray[Any]
_REQUIRES_GRAD: Final = attrgetter("requires_grad")


class ServedSlot(Slot):
    """A parameter, and the state of its gradient in this step.

    Attributes:
        group: its parameter group.
        is_pushed: this step's gradient has been pushed.
    """

    def __init__(self, index: int, name: str, parameter: torch.nn.Parameter, group: int) -> None:
        super().__init__(index, name, parameter)
        self.group = group
        self._kept: torch.Tensor | None = None  # last large gradient; see note_pushed()
        self.begin_step()

    def begin_step(self) -> None:
        self.is_pushed = False
        self._before: torch.Tensor | None = None  # .grad before backward(), which adds to it
        self._weights: TensorMark | None = None  # the parameter before backward()

    def note_before_gradient(self) -> None:
        if self._before is None:
            self._before = self.parameter.grad
        if self._weights is None:
            self._weights = TensorMark(self.parameter)

    @property
    def are_weights_changed(self) -> bool:
        """True if the weights have changed since backward(), except through .data."""
        return self._weights is not None and not self._weights.is_of(self.parameter)

    def note_pushed(self) -> None:
        self.is_pushed = True
        # For the reason that GradientSlot.pack() gives, a large one is kept until the next one.
        self._kept = self.parameter.grad if self.parameter.nbytes >= WORTH_KEEPING else None

    def take_mean(self, mean: torch.Tensor) -> None:
        """Make .grad the mean over the workers: in the same tensor if the program refers to it."""
        if not self.parameter.requires_grad:
            self.parameter.grad = None
            return
        into = self._before
        if into is None or into is not self.parameter.grad or not can_hold(into, mean):
            self.parameter.grad = mean
        else:
            into.copy_(mean)


def plan(slots: Sequence[ServedSlot]) -> list[list[ServedSlot]]:
    """Return the parameters of each table, in the order in which gradients become complete.

    Small parameters of one group and dtype share tables. A frozen parameter has its own table,
    because it may be unfrozen.
    """
    backward = list(reversed(slots))
    items: list[Item] = []
    for slot in backward:
        p = slot.parameter
        is_small = p.nbytes < ALONE_NBYTES and p.requires_grad
        alike = (slot.group, p.dtype, p.device) if is_small else (slot.index,)
        items.append(Item(p.nbytes, alike))
    batches = plan_fusion(items, FUSED_NBYTES)
    return [
        [backward[place] for place in some]
        for batch in sorted(batches, key=max)
        for some in (batch[k : k + MOST] for k in range(0, len(batch), MOST))
    ]


class ServedBucket:
    """Parameters that share a table, which begins with the chief's values. Collective to make.

    Attributes:
        group: the parameter group of all of them.
        waiting: indices of parameters whose gradients are not complete.
        push: this step's push, or None.
        has_segments: the servers leave single parameters alone if they have no gradient.
    """

    def __init__(
        self, slots: Sequence[ServedSlot], scope: str, updater: Updater, mode: Mode,
        compression: Codec | None = None,
    ) -> None:  # fmt: skip
        self.slots = slots
        self.group = slots[0].group
        self._indices = {slot.index for slot in slots}
        self._parameters: list[torch.Tensor] = [slot.parameter for slot in slots]
        self._counts = [p.numel() for p in self._parameters]
        first = slots[0].parameter
        self._dtype = torch.float32 if first.dtype in IN_16_BITS else first.dtype  # of the table
        adapter = device_adapter_for(first)
        self._is_on_gpu = adapter is not None
        if adapter is not None:
            from ringcomm.torch.backward.gpu_staging import GradientStaging

            size = adapter, first, sum(self._counts), self._dtype
            self._staged_values, self._staged = GradientStaging(*size), GradientStaging(*size)
        self._streams = Streams(first)
        self._values: torch.Tensor | None = None
        self._gradients: torch.Tensor | None = None
        self._fetched = TensorSnapshot()  # of the parameters, unless new values are under way
        self._pushed = TensorSnapshot("grad")  # what was pushed, or what step() is to push
        self._turn = 0
        more = f"+{len(slots) - 1}" if slots[1:] else ""
        # If servers only take means, they cannot distinguish a missing gradient from zeros.
        only_means = isinstance(updater, Assign)
        has_segments = len(slots) > 1 and not only_means
        segments = list(accumulate(self._counts[:-1], initial=0)) if has_segments else []
        self.table = table(
            f"{slots[0].name}{more} ({scope})",
            sum(self._counts),
            str(self._dtype).removeprefix("torch."),
            updater=updater,
            mode=mode,
            init=self.values().copy(),
            block_nbytes=BLOCK_NBYTES,
            compression=compression,
            segments=segments,
            parts=() if only_means else [_part(slot.name, slot.parameter) for slot in slots],
            scope="" if only_means else scope,
        )
        self.has_segments = bool(segments)
        self.push: Future[Pushed] | None = None
        self.restart()

    def absent(self) -> list[int]:
        if not self.has_segments:
            return []
        return [k for k, p in enumerate(self._parameters) if p.grad is None]

    def restart(self) -> None:
        self.waiting = self._indices.copy()
        self.push = None
        self._is_fetched = False
        self._pushed.forget()
        for slot in self.slots:
            slot.begin_step()

    @property
    def is_frozen(self) -> bool:
        return not any(slot.parameter.requires_grad for slot in self.slots)

    # --- values ---------------------------------------------------------------------------------
    def values(self) -> Array:
        """Return the parameters' values, flat, in the memory of room()."""
        flat = self._flat()
        if self._is_on_gpu or not self._is_lone:
            for view, slot in zip(self.views(flat), self.slots, strict=True):
                view.copy_(slot.parameter.detach())
        values: Array = flat.numpy()
        return values

    def room(self) -> Array:
        """Return memory for new values: that of a lone dense parameter, or of a copy."""
        values: Array = self._flat().numpy()
        return values

    def pull(self) -> Future[NDArray[Any]]:
        """Ask for the servers' values; land() follows, in a step that is repeated if this fails."""
        self._fetched.forget()
        return self.table.pull(out=self.room())

    def land(self) -> None:
        """Give the parameters the values in room()."""
        if self._is_on_gpu:
            flat = self._lone_view() if self._is_lone else self._empty_on_gpu()
            self._staged_values.bring(flat)
        else:
            flat = self._flat()
        if self._is_lone:
            TORCH.written(self.slots[0].parameter)
        else:
            with torch.no_grad():
                torch._foreach_copy_(self._parameters, self.views(flat))
        self._turn += 1
        self._fetched.take(self._parameters, None if self._is_on_gpu else self._turn)

    def changed_values(self, *, is_thorough: bool) -> ServedSlot | None:
        """Return a parameter whose values the program has changed since they were fetched, or None.

        is_thorough: look for writes through .data, too.
        """
        place = self._fetched.changed(self._parameters, is_thorough)
        return None if place is None else self.slots[place]

    @property
    def _is_lone(self) -> bool:
        p = self.slots[0].parameter
        is_lone = len(self.slots) == 1 and p.dtype == self._dtype
        return is_lone and is_dense(p.shape, p.stride())

    def _lone_view(self) -> torch.Tensor:
        return flat_view(self.slots[0].parameter.detach())

    def _empty_on_gpu(self) -> torch.Tensor:
        device = self.slots[0].parameter.device
        return torch.empty(sum(self._counts), dtype=self._dtype, device=device)

    def _flat(self) -> torch.Tensor:
        if self._is_on_gpu:
            return self._staged_values.wait()
        if self._is_lone:
            return self._lone_view()
        if self._values is None:
            self._values = torch.empty(sum(self._counts), dtype=self._dtype)
        return self._values

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        pieces = flat.split_with_sizes(self._counts)
        return [view_like(x, p) for x, p in zip(pieces, self._parameters, strict=True)]

    # --- gradients ------------------------------------------------------------------------------
    def note_gradient(self, index: int) -> None:
        if index in self.waiting:
            self.waiting.discard(index)
            self._streams.note()

    def expect_gradient(self, index: int) -> None:
        """Wait for a gradient of a parameter of this bucket, which is not pushed before step()."""
        if index in self._indices:
            self.waiting.add(index)
            self._pushed.forget()

    def watch_gradient(self, index: int) -> None:
        """Note that such a gradient is complete; the last one: what .grad step() is to push."""
        if index in self.waiting:
            self.waiting.discard(index)
            if not self.waiting:
                self._pushed.take(self._parameters, None if self._is_on_gpu else self._turn)

    def fetch_gradients(self) -> bool:
        """Begin to copy .grad to host memory, once in a step; return True if it is there."""
        if not self._is_on_gpu:
            return True
        if not self._is_fetched:
            self._streams.join()
            flat = self._gathered()
            self._has_gradients = flat is not None
            if flat is not None:
                self._staged.wait()
                self._staged.fetch(flat)
            self._is_fetched = True
        return self._staged.is_idle

    def gradients(self) -> torch.Tensor | None:
        """Return .grad of all parameters, flat, zeros for a missing one; None if all are missing.

        The result is a view of .grad, or memory that the next call overwrites; in host memory.
        """
        if not self._is_on_gpu:
            return self._gathered()
        self.fetch_gradients()
        return self._staged.wait() if self._has_gradients else None

    def _gathered(self) -> torch.Tensor | None:
        """Return .grad as gradients() does, in the memory where the parameters are."""
        found = [p.grad for p in self._parameters]
        if all(grad is None for grad in found):
            return None
        if len(found) == 1:
            line = _fitting(found[0], self.slots[0].parameter, self._dtype)
            if line is not None:
                return line
        flat = self._empty_on_gpu() if self._is_on_gpu else self.room_for_gradients()
        views = self.views(flat)
        for view, grad in zip(views, found, strict=True):
            if grad is None:
                view.zero_()
        pairs = [(v, g) for v, g in zip(views, found, strict=True) if g is not None]
        with torch.no_grad():
            grads = [g.to_dense() if g.is_sparse else g for _, g in pairs]
            torch._foreach_copy_([v for v, _ in pairs], grads)
        return flat

    def room_for_gradients(self) -> torch.Tensor:
        """Return host memory for all gradients, flat, to which nobody else refers."""
        if self._is_on_gpu:
            return self._staged.wait()
        if self._gradients is None or n_storage_references(self._gradients) > 2:
            self._gradients = torch.empty(sum(self._counts), dtype=self._dtype)
        return self._gradients

    def means(self, room: torch.Tensor) -> list[torch.Tensor]:
        """Return what room_for_gradients() has, as gradients of the parameters."""
        if self._is_on_gpu:
            room = self._empty_on_gpu()
            self._staged.bring(room)
        parts = zip(self.views(room), self._parameters, strict=True)
        return [view.to(p.dtype) for view, p in parts]

    def note_pushed(self, push: Future[Pushed] | None, *, is_early: bool) -> None:
        """Note the push of .grad as it is; is_early: the program may change it before step()."""
        self.push = push
        for slot in self.slots:
            slot.note_pushed()
        can_read = is_early and not self._is_on_gpu
        self._pushed.take(self._parameters, self._turn if can_read else None)

    def frozen_with_gradient(self) -> list[ServedSlot]:
        if all(map(_REQUIRES_GRAD, self._parameters)):
            return []
        return [
            slot
            for slot, p in zip(self.slots, self._parameters, strict=True)
            if not p.requires_grad and p.grad is not None
        ]

    def changed_gradient(self) -> ServedSlot | None:
        """Return a parameter whose .grad is not what backward() has left, or None.

        Unless it has been pushed, a program may drop .grad of the whole bucket.
        """
        place = self._pushed.changed(self._parameters)
        if place is None or not (self.slots[place].is_pushed or self._has_gradients_not_zero()):
            return None
        return self.slots[place]

    def _has_gradients_not_zero(self) -> bool:
        found = [p.grad for p in self._parameters if p.grad is not None]
        return any(bool(grad.count_nonzero()) for grad in found)


def _part(name: str, parameter: torch.Tensor) -> Part:
    """Return what checkpoints know of a parameter; its elements lie in the order of its strides."""
    shape, strides = tuple(parameter.shape), parameter.stride()
    order: tuple[int, ...] = ()
    if parameter.numel() and is_dense(shape, strides):
        axes = sorted(range(len(shape)), key=lambda k: (shape[k] == 1, -strides[k], k))
        long = [k for k in axes if shape[k] > 1]
        order = () if long == sorted(long) else tuple(axes)
    return Part(name, shape, order, str(parameter.dtype).removeprefix("torch."))


def _fitting(
    grad: torch.Tensor | None, parameter: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor | None:
    """Return a flat view of a gradient, or None if that needs a copy."""
    if grad is None or type(grad) is not torch.Tensor or grad.layout is not torch.strided:
        return None
    is_alike = grad.dtype == dtype and grad.stride() == parameter.stride()
    if not is_alike or not is_dense(grad.shape, grad.stride()) or grad.is_conj() or grad.is_neg():
        return None
    return flat_view(grad.detach())
