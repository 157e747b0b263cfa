"""Parameters in tables of the servers: a large one has its own, small ones share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final

import torch
from numpy.typing import NDArray

from ringcomm.arrays.torch import TORCH
from ringcomm.codec import Codec
from ringcomm.ps.future import Future, Pushed
from ringcomm.ps.optim import Assign, Updater
from ringcomm.ps.rounds import Mode
from ringcomm.ps.segments import MOST
from ringcomm.ps.table import table
from ringcomm.torch.backward.parameters import Slot
from ringcomm.torch.optim.buckets import flat_view, is_dense, plan_buckets, view_like
from ringcomm.torch.optim.gradient import WORTH_KEEPING

BLOCK_NBYTES: Final = 4 << 20  # what servers cut tables into
FUSED_NBYTES: Final = 4 << 20  # the largest shared table
ALONE_NBYTES: Final = 256 << 10  # from here on a parameter has a table of its own

Array = NDArray[Any]


class ServedSlot(Slot):
    """A parameter, and what became of its gradient in this step.

    Attributes:
        group: its parameter group.
        pushed: (gradient or None, its version) as pushed in this step; None: not yet.
        known: `now` as it was when the values last were the servers'.
        kept: last large gradient; see ServedBucket.note_pushed().
    """

    def __init__(self, index: int, name: str, parameter: torch.nn.Parameter, group: int) -> None:
        super().__init__(index, name, parameter)
        self.group = group
        self.pushed: tuple[torch.Tensor | None, int] | None = None
        self.known = (0, 0)
        self.kept: torch.Tensor | None = None

    @property
    def now(self) -> tuple[int, int]:
        """Version and address of the values."""
        return self.parameter._version, self.parameter.data_ptr()

    @property
    def summary(self) -> str:
        """Text that must be the same on all workers."""
        p = self.parameter
        return f"{p.dtype} {tuple(p.shape)}, {'trainable' if p.requires_grad else 'frozen'}"


def plan(slots: Sequence[ServedSlot]) -> list[list[ServedSlot]]:
    """Return which parameters share a table, in the order in which gradients are complete.

    Those are small, of one parameter group and dtype. A frozen one is alone: it may be unfrozen.
    """
    backward = list(reversed(slots))
    sizes: list[tuple[int, object]] = []
    for slot in backward:
        p = slot.parameter
        is_small = p.numel() * p.element_size() < ALONE_NBYTES and p.requires_grad
        sizes.append(
            (p.numel() * p.element_size(), (slot.group, p.dtype) if is_small else (slot.index,))
        )
    batches = plan_buckets(sizes, range(len(backward)), FUSED_NBYTES)
    return [
        [backward[place] for place in some]
        for batch in sorted(batches, key=max)
        for some in (batch[k : k + MOST] for k in range(0, len(batch), MOST))
    ]


class ServedBucket:
    """Parameters that share a table. Collective to make; it begins with the chief's values.

    Attributes:
        group: parameter group of all of them.
        waiting: indices of those whose gradients are not there yet.
        push: under way in this step, or None.
        is_pushed: this step's gradients have been dealt with.
        has_segments: single parameters of it may lack a gradient.
    """

    def __init__(
        self, slots: Sequence[ServedSlot], suffix: str, updater: Updater, mode: Mode,
        compression: Codec | None = None,
    ) -> None:  # fmt: skip
        self.slots = slots
        self.group = slots[0].group
        self._counts = [slot.parameter.numel() for slot in slots]
        self._dtype = slots[0].parameter.dtype
        self._values: torch.Tensor | None = None
        self._gradients: torch.Tensor | None = None
        more = f"+{len(slots) - 1}" if slots[1:] else ""
        self.table = table(
            f"{slots[0].name}{more}{suffix}",
            sum(self._counts),
            str(self._dtype).removeprefix("torch."),
            updater=updater,
            mode=mode,
            init=self.values().copy(),
            block_nbytes=BLOCK_NBYTES,
            compression=compression,
            segments=self._segments(updater),
        )
        self.has_segments = bool(self._segments(updater))
        self.push: Future[Pushed] | None = None
        self.restart()

    def _segments(self, updater: Updater) -> list[int]:
        """Return where each parameter begins, if one without gradient is left alone.

        If servers only take means, workers cannot tell a missing gradient from zeros.
        """
        if isinstance(updater, Assign) or not self.slots[1:]:
            return []
        return list(accumulate(self._counts[:-1], initial=0))

    def absent(self) -> list[int]:
        """Return the numbers of the table's segments that have no gradient here."""
        if not self.has_segments:
            return []
        return [k for k, slot in enumerate(self.slots) if slot.parameter.grad is None]

    def restart(self) -> None:
        """Begin a step."""
        self.waiting = {slot.index for slot in self.slots}
        self.push, self.is_pushed = None, False
        for slot in self.slots:
            slot.pushed = None

    @property
    def is_frozen(self) -> bool:
        """True if nothing in it is trained."""
        return not any(slot.parameter.requires_grad for slot in self.slots)

    # --- values ---------------------------------------------------------------------------------
    def values(self) -> Array:
        """Return the parameters' values, flat: a copy, or a lone dense one's own memory."""
        if (alone := self._alone()) is not None:
            return alone
        for view, slot in zip(self._views_of_values(), self.slots, strict=True):
            view.copy_(slot.parameter.detach())
        assert self._values is not None
        return _numpy(self._values)

    def room(self) -> Array:
        """Return where values are to be fetched to; land() follows."""
        if (alone := self._alone()) is not None:
            return alone
        self._views_of_values()
        assert self._values is not None
        return _numpy(self._values)

    def land(self) -> None:
        """Give the parameters the values now in room()."""
        if self._alone() is not None:
            TORCH.written(self.slots[0].parameter)
        else:
            for view, slot in zip(self._views_of_values(), self.slots, strict=True):
                slot.parameter.detach().copy_(view)
        for slot in self.slots:
            slot.known = slot.now

    def _alone(self) -> Array | None:
        p = self.slots[0].parameter
        if len(self.slots) > 1 or not is_dense(p.shape, p.stride()):
            return None
        return _numpy(flat_view(p.detach()))

    def _views_of_values(self) -> list[torch.Tensor]:
        if self._values is None:
            self._values = torch.empty(sum(self._counts), dtype=self._dtype)
        return self.views(self._values)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return each parameter's part of a flat tensor, in its shape and strides."""
        pieces = torch.split(flat, self._counts)
        return [view_like(x, s.parameter) for x, s in zip(pieces, self.slots, strict=True)]

    # --- gradients ------------------------------------------------------------------------------
    def gradients(self) -> torch.Tensor | None:
        """Return .grad of all, flat; a missing one is zeros; None if all are missing.

        It is .grad itself where that fits, else memory that the next call overwrites.
        """
        found = [slot.parameter.grad for slot in self.slots]
        if all(grad is None for grad in found):
            return None
        if len(found) == 1 and (line := _fitting(found[0], self.slots[0].parameter)) is not None:
            return line
        flat = self.room_for_gradients()
        for view, grad in zip(self.views(flat), found, strict=True):
            if grad is None:
                view.zero_()
            else:
                view.copy_(grad.detach().to_dense() if grad.is_sparse else grad.detach())
        return flat

    def room_for_gradients(self) -> torch.Tensor:
        """Return memory for all gradients, flat."""
        if self._gradients is None:
            self._gradients = torch.empty(sum(self._counts), dtype=self._dtype)
        return self._gradients

    def note_pushed(self, push: Future[Pushed] | None) -> None:
        """Note that the gradients, as they are now, are on their way.

        Large ones are kept until the next, also if zero_grad() lets go of them: see
        GradientSlot.pack() of the ring's optimizer.
        """
        self.push, self.is_pushed = push, True
        for slot in self.slots:
            grad = slot.parameter.grad
            slot.pushed = (grad, 0 if grad is None else grad._version)
            slot.kept = grad if slot.parameter.nbytes >= WORTH_KEEPING else None


def _fitting(grad: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor | None:
    """Return a gradient as a flat view, if that needs no copy."""
    if grad is None or type(grad) is not torch.Tensor or grad.layout is not torch.strided:
        return None
    is_alike = grad.dtype == parameter.dtype and grad.stride() == parameter.stride()
    if not is_alike or not is_dense(grad.shape, grad.stride()) or grad.is_conj() or grad.is_neg():
        return None
    return flat_view(grad.detach())


def _numpy(x: torch.Tensor) -> Array:
    found: Array = x.numpy()
    return found
