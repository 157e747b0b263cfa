"""A parameter, and where its gradient of the current step is.

Until backward() ends, .grad is this rank's own, and a program's hooks may do with it what they do
in plain torch: its bucket has a copy. Then .grad is the mean: in the tensor that the program had
there before backward(), or else in a new view of the bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Any, TypeGuard

import torch

from ringcomm._core import copy_memory
from ringcomm.arrays.torch import TORCH
from ringcomm.torch.backward.autograd_hooks import has_other_hooks
from ringcomm.torch.backward.parameter_hooks import Slot
from ringcomm.torch.backward.watched_tensors import (
    TensorMark,
    address_of,
    can_hold,
    is_held_elsewhere,
)
from ringcomm.torch.optim.buckets import Bucket, Member
from ringcomm.torch.optim.gradient_presence import (
    DENSE,
    HAS_BASE,
    LATE,
    LEFT,
    NO_BASE,
    SPARSE,
    WAS_SPARSE,
)
from ringcomm.torch.optim.gradient_shard import GradientShard


# --- where a gradient comes from ------------------------------------------------------------------
class GradientOrigin(Enum):
    """Origin of a .grad that is there before a reduction."""

    NOBODY = auto()  # it is zeros of zero_grad()
    REDUCTION = auto()  # a reduction of this step
    LEFT = auto()  # it was there when the last step() ended; the program may have written to it
    PROGRAM = auto()  # the program: this rank's own, to be reduced


class GradientHistory:
    """History of one parameter's .grad since the last reduction.

    Attributes:
        is_final: .grad was reduced in this step; what the program does now, it does to the result.
    """

    def __init__(self) -> None:
        self.is_final = False
        self._left: torch.Tensor | None = None
        self._zeroed: TensorMark | None = None  # .grad as zero_grad() has left it

    def origin_of(self, gradient: torch.Tensor) -> GradientOrigin:
        if self.is_final:
            return GradientOrigin.REDUCTION
        if self._zeroed is not None and self._zeroed.is_of(gradient):
            return GradientOrigin.NOBODY
        return GradientOrigin.LEFT if gradient is self._left else GradientOrigin.PROGRAM

    def note_zeroed(self, gradient: torch.Tensor | None) -> None:
        self._zeroed = None if gradient is None else TensorMark(gradient)

    def move(self, gradient: torch.Tensor | None, view: torch.Tensor) -> None:
        if gradient is None or gradient.requires_grad or gradient.dtype != view.dtype:
            return
        if gradient.shape == view.shape and gradient.stride() == view.stride():
            is_zeroed = self._zeroed is not None and self._zeroed.is_of(gradient)
            view.copy_(gradient)
            gradient.data = view.data
            self.note_zeroed(gradient if is_zeroed else None)

    def begin_step(self, left: torch.Tensor | None) -> None:
        """Note what step() leaves in .grad; None: nothing, or zero_grad() clears it."""
        self.is_final, self._zeroed, self._left = False, None, left

    def forget_unless(self, gradient: torch.Tensor | None) -> None:
        if self._left is not gradient:
            self._left = None


# Bytes; malloc maps each block of this size or more by itself. Such a gradient is kept until the
# next one: if it were freed, its pages would go back to the system, and the next backward() would
# fault them in again (4 to 8 ms for 80 MB).
WORTH_KEEPING = 128 << 10


class GradientState(Enum):
    SETTLED = auto()  # it is None, final, or set by hand
    OPEN = auto()  # None, or this rank's own sum, to which more may be added
    SENT = auto()  # under way in its bucket
    LATE = auto()  # like OPEN, but for gradients that come after the bucket was sent


class GradientSlot(Slot):
    """A parameter, and where its gradient of the current step is.

    Attributes:
        bucket: the bucket of its dense gradients; None if they have none.
        was_sparse: this rank's gradient was sparse, and was made dense for the reduction.
        is_sparse_in_step: some rank's gradient was sparse: make .grad sparse for the optimizer.
        complaint: error text about a change of .grad that cannot count; None: no such change.
        takes_mean: the reduction is a mean of whole gradients.
        history: tells who has made .grad.
        part: with shard_state=1, the part that this rank updates.
    """

    def __init__(
        self, index: int, name: str, parameter: torch.nn.Parameter, *, takes_mean: bool = True
    ) -> None:
        super().__init__(index, name, parameter)
        self.state = GradientState.SETTLED
        self.bucket: Bucket | None = None
        self.was_sparse = self.is_sparse_in_step = False
        self.complaint: str | None = None
        self.takes_mean, self.history = takes_mean, GradientHistory()
        self.part = GradientShard(name, parameter)
        self._view: torch.Tensor | None = None  # this gradient in the bucket
        # During backward():
        self._before: torch.Tensor | None = None  # .grad before backward(); it gets the result
        self._base: torch.Tensor | None = None  # what an earlier reduction left, added at the end
        self._has_left = False  # .grad contains the mean of an earlier step, to be reduced again
        self._is_base_inside = False  # .grad contains the base, because the program must see both
        self._packed: torch.Tensor | None = None  # see pack()
        self._is_packed = False
        self._version = 0  # of `_packed` when it was packed
        self._address: int | None = None  # the same; None: it is sparse
        self._is_large = False
        self._sent: torch.Tensor | None = None  # a copy of what was sent, if .grad contains it

    def place(self, bucket: Bucket | None, member: Member | None) -> None:
        """Send dense gradients in this bucket from now on; None: in no bucket."""
        is_settled = self.state is GradientState.SETTLED
        is_cut = bucket is not None and bucket.is_scattered
        self.part.move(member, is_scattered=is_cut, is_settled=is_settled)
        self.bucket = bucket
        self.move(None if member is None else member.view)

    def move(self, view: torch.Tensor | None) -> None:
        """Use another view of the same bucket, whose memory was replaced."""
        self._view, self._is_packed = view, False
        self._is_large = view is not None and view.is_cpu and view.nbytes >= WORTH_KEEPING

    # --- before the reduction ---------------------------------------------------------------------
    def expect_gradient(self, *, is_seen: bool) -> None:
        """Prepare for a gradient of autograd; is_seen: the program sees .grad before it is sent."""
        if self.state is GradientState.SENT:
            self._expect_late()
        self.take_part(is_seen=is_seen)

    def take_part(self, *, is_seen: bool | None = None) -> None:
        """Prepare for a reduction; is_seen: see expect_gradient(); None: there is no gradient."""
        if self.state is GradientState.SETTLED:
            if self.part.place is not None:
                self.part.require_unmoved()
            self.state = GradientState.OPEN
            if self.parameter.grad is not None:
                self._keep(self.parameter.grad, is_seen=is_seen)

    @property
    def has_own_gradient(self) -> bool:
        """True if the program has set a .grad by hand that no reduction has seen."""
        gradient = self.parameter.grad
        if self.state is not GradientState.SETTLED or gradient is None:
            return False
        origin = self.history.origin_of(gradient)
        if origin is GradientOrigin.NOBODY or (
            origin is GradientOrigin.LEFT and not self.takes_mean
        ):
            return bool(gradient.any())  # zeros may have been written to through .data
        return origin is not GradientOrigin.REDUCTION

    def begin_step(self, *, is_zeroed: bool) -> None:
        """Give .grad back to the program; is_zeroed: zero_grad() clears it now."""
        if self.state is not GradientState.SETTLED:  # after a failure
            if self._before is not None and self._is_stashed:
                self.parameter.grad = self._before
            self._close()
        self.complaint = None
        self.was_sparse = self.is_sparse_in_step = False
        self.history.begin_step(None if is_zeroed else self.parameter.grad)

    def _keep(self, gradient: torch.Tensor, *, is_seen: bool | None) -> None:
        """Keep the .grad that is there before backward(): the result is written to it."""
        self._before = gradient
        origin = self.history.origin_of(gradient)
        if origin is GradientOrigin.LEFT and self.takes_mean:
            self._has_left = True
        elif origin is GradientOrigin.LEFT and gradient.any():
            self._complain(
                "is of an earlier step, and perhaps changed. With op=SUM or shard_state=1 nobody "
                "can tell whether it is this rank's own: call optimizer.zero_grad() after step(), "
                "or assign a new tensor to .grad. To make another step with the same gradients, "
                "call step() within `with optimizer.skip_synchronize():`"
            )
        if origin is not GradientOrigin.REDUCTION:
            return
        if is_seen is not None:
            is_seen = is_seen or has_other_hooks(self.parameter)
        if is_seen and not self.takes_mean:
            self._complain(
                "contains the result of an earlier backward(), which hooks of the program would "
                "change once on each rank. With op=SUM or shard_state=1 call "
                "optimizer.zero_grad() or step() between two backward()"
            )
        self._base = gradient.detach()
        if is_seen or self.is_in_bucket:
            self._base = self._base.clone()
        if is_seen and gradient.layout is torch.strided:
            self._is_base_inside = True
        else:
            self.parameter.grad = None

    def _expect_late(self) -> None:
        """Prepare for a gradient of a parameter whose bucket has been sent."""
        self.finish()
        packed = self._packed
        if self._before is None and packed is not None and is_held_elsewhere(packed):
            self._before = packed
        if packed is None or _is_at(packed, self._view) or not has_other_hooks(self.parameter):
            self.parameter.grad = None
        else:
            self._sent = packed.detach().clone()
        self.state = GradientState.LATE

    def _complain(self, text: str) -> None:
        self.complaint = self.complaint or f"DistributedOptimizer: {self.name}.grad {text}"

    # --- the reduction ----------------------------------------------------------------------------
    @property
    def code(self) -> int:
        """This rank's code for the other ranks; see gradient_presence.py."""
        code = WAS_SPARSE if self.was_sparse else 0
        if self._has_left:
            code |= HAS_BASE | LEFT
        elif self.state is not GradientState.SETTLED:
            code |= NO_BASE if self._base is None else HAS_BASE
        if self.state is GradientState.SENT:
            return code | DENSE
        gradient = self.parameter.grad
        if self.state is GradientState.LATE:
            return code | DENSE | LATE
        if self.state is GradientState.SETTLED:
            is_base = (
                gradient is not None
                and self.history.origin_of(gradient) is GradientOrigin.REDUCTION
            )
            return code | (HAS_BASE if is_base else NO_BASE)
        if gradient is None:
            return code
        return code | (SPARSE if self.has_sparse else DENSE)

    @property
    def is_ready(self) -> bool:
        """True if .grad can go into a bucket now, rather than at the end of backward().

        A tensor of the program's own may share torch's count of writes with others, as the pieces
        of one flat tensor do: then nobody could see whether it changes when it is under way.
        """
        gradient = self.parameter.grad
        if self.bucket is None or gradient is None or self.has_sparse:
            return False
        return gradient is not self._before or self.is_in_bucket

    def make_sparse_again(self) -> None:
        gradient = self.parameter.grad
        if self.is_sparse_in_step and gradient is not None and not self.has_sparse:
            self.parameter.grad = gradient.to_sparse(1)

    @property
    def is_as_packed(self) -> bool:
        """True if .grad is in the bucket as it is now, as far as torch counts writes."""
        packed = self._packed
        return (
            self._is_packed
            and packed is not None
            and packed is self.parameter.grad
            and packed._version == self._version
            and (self._address is None or packed.data_ptr() == self._address)
        )

    def pack(self, code: int = DENSE) -> None:
        """Write this rank's gradient to the bucket, unless autograd has done so.

        It writes zeros if this rank has no gradient, or if no rank has a dense one (see `code`).
        """
        assert self._view is not None
        gradient = self.parameter.grad
        if gradient is None or not code & DENSE:
            self._view.zero_()
            self._is_packed = False
            return
        if self._before is None:
            _copy(self._view, _strided(gradient))
        elif not self.is_in_bucket:
            self._write_own_part(gradient, self._view)
        self._packed, self._is_packed = gradient, True
        self._version = gradient._version
        self._address = gradient.data_ptr() if gradient.layout is torch.strided else None

    def finish(self) -> None:
        """Complain if .grad has changed in a way that cannot count any more."""
        if self.state is GradientState.SENT and not self.is_as_packed:
            self._complain(
                "was changed within backward() after it had been sent. Change it in a hook of the "
                "parameter itself, or after backward()"
            )
        if self._is_base_inside and self.parameter.grad is None:
            self._base, self._is_base_inside = None, False  # the program has dropped both

    def take_back(self) -> None:
        """Send .grad again: what was sent met a gradient that another rank has given up."""
        self._is_packed = False
        if self.state is GradientState.SENT:
            self.state = GradientState.OPEN

    def pack_extra(self, target: torch.Tensor) -> None:
        """Fill `target` with the gradient if this step's bucket lacks it, else with zeros."""
        gradient = self.parameter.grad
        is_extra = self.state is GradientState.LATE or (
            self.state is GradientState.OPEN and self.bucket is None
        )
        if not is_extra or gradient is None:
            target.zero_()
        elif self._sent is not None:
            target.copy_(_strided(gradient)).sub_(self._sent)
        else:
            self._write_own_part(gradient, target)

    def settle(self, code: int, extra: Sequence[torch.Tensor]) -> None:
        """Make .grad final: the sum of the bucket's view, of `extra`, and of the earlier .grad.

        `code` has the codes of all ranks, or-ed; `extra` are reduced parts outside the bucket.
        """
        parts = list(extra)
        if code & DENSE and self._view is not None:
            parts.insert(0, self._view)
        if self._base is not None:
            parts.append(self._base)
        if len(parts) > 1:
            parts = [_total(parts)]
            self.part.zero_others(parts[0])
        for total in parts:
            self._give(total)
            self.history.is_final = True
        self._close()
        self.is_sparse_in_step = bool(code & WAS_SPARSE)
        if self.part.place is not None:
            self.part.accept()

    def _write_own_part(self, gradient: torch.Tensor, target: torch.Tensor) -> None:
        _copy(target, _strided(gradient))
        if self._is_base_inside and self._base is not None:
            target.sub_(self._base)

    @property
    def _is_stashed(self) -> bool:
        """True if the earlier .grad was taken away, so that autograd makes a new one."""
        is_aside = self._base is not None and not self._is_base_inside
        return is_aside or (self.state is GradientState.LATE and self._sent is None)

    def _give(self, total: torch.Tensor) -> None:
        """Make .grad the tensor that a program expects there, with these values."""
        if _has_graph(self.parameter.grad):
            self.parameter.grad = _differentiable(self.parameter.grad, total)
            return
        into = self._before
        if into is None or not (self._is_stashed or self.parameter.grad is into):
            into = self._packed  # of autograd, or of a hook
            if into is not None and not (into is self.parameter.grad and is_held_elsewhere(into)):
                into = None
        if into is None or into.layout is not torch.strided or not can_hold(into, total):
            into = total.data if total.layout is torch.strided else total
        elif address_of(into) == address_of(total):
            TORCH.written(into)
        else:
            into.copy_(total)
        self.parameter.grad = into

    def _close(self) -> None:
        self.state = GradientState.SETTLED
        self.was_sparse = self.is_sparse_in_step = False
        self._before = self._base = self._sent = None
        self._is_base_inside = self._is_packed = self._has_left = False
        if not self._is_large or _is_at(self._packed, self._view):
            self._packed = None

    @property
    def needs_own_memory(self) -> bool:
        """True if the program may write to .grad when the bucket is under way."""
        return self._is_base_inside or has_other_hooks(self.parameter)

    @property
    def is_in_bucket(self) -> bool:
        return _is_at(self.parameter.grad, self._view)


class _Mean(torch.autograd.Function):
    """The values of a mean, and the derivative of this rank's own gradient."""

    @staticmethod
    def forward(_: Any, own: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        del own
        return total.data

    @staticmethod
    def backward(_: Any, *gradients: Any) -> Any:
        return gradients[0], None


def _has_graph(gradient: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Return True for the .grad of backward(create_graph=True)."""
    return gradient is not None and gradient.grad_fn is not None


@torch.enable_grad()
def _differentiable(own: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Return `total`, whose derivative is that of `own`: other ranks' graphs are not here."""
    return _Mean.apply(own, total)  # type: ignore[no-untyped-call,no-any-return]


def _is_at(gradient: torch.Tensor | None, view: torch.Tensor | None) -> bool:
    if gradient is None or view is None or gradient.layout is not torch.strided:
        return False
    return gradient.data_ptr() == view.data_ptr() != 0


def _copy(view: torch.Tensor, gradient: torch.Tensor) -> None:
    """Copy a gradient to a bucket's view; if possible, a large one bypasses the CPU's caches."""
    if view.nbytes < WORTH_KEEPING:
        view.copy_(gradient)
        return
    is_plain = type(gradient) is torch.Tensor and gradient.is_cpu and view.shape == gradient.shape
    is_alike = view.dtype == gradient.dtype and view.stride() == gradient.stride()
    if is_plain and is_alike and not (gradient.is_conj() or gradient.is_neg()):
        copy_memory(view.data_ptr(), gradient.data_ptr(), view.nbytes)  # a view has no gaps
        TORCH.written(view)
    else:
        view.copy_(gradient)


def _strided(gradient: torch.Tensor) -> torch.Tensor:
    if gradient.requires_grad:
        gradient = gradient.detach()
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def _total(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum, in the memory of the first dense part if there is one."""
    total, *others = sorted(parts, key=lambda part: part.layout is not torch.strided)
    for part in others:
        total = total.add_(part) if total.layout is torch.strided else total + part
    return total
