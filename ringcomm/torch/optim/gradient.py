"""A parameter, and where its gradient of the current step is."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from enum import Enum, auto

import torch

from ringcomm._core import copy_memory
from ringcomm.arrays.torch import TORCH
from ringcomm.errors import RingcommError
from ringcomm.torch.backward.parameter_hooks import Slot
from ringcomm.torch.optim.buckets import Bucket, Member, flat_view
from ringcomm.torch.optim.gradient_presence import DENSE, LATE, SPARSE, WAS_SPARSE

WORTH_KEEPING = 128 << 10  # bytes; malloc maps each block of this size or more by itself


class GradientState(Enum):
    """State of a parameter's .grad."""

    SETTLED = auto()  # it belongs to the user: None, final, or set by hand
    OPEN = auto()  # None, or this rank's own sum, to which more may be added
    SENT = auto()  # under way in its bucket
    LATE = auto()  # like OPEN, but for gradients that come after the bucket was sent


class GradientSlot(Slot):
    """A parameter, and where its gradient of the current step is.

    Attributes:
        bucket: the bucket of its dense gradients; None if they have none.
        was_sparse: this rank's gradient was sparse, and was made dense for the reduction.
        is_sparse_in_step: some rank's gradient was sparse: make .grad sparse for the optimizer.
    """

    def __init__(self, index: int, name: str, parameter: torch.nn.Parameter) -> None:
        super().__init__(index, name, parameter)
        self.state = GradientState.SETTLED
        self.bucket: Bucket | None = None
        self.was_sparse = self.is_sparse_in_step = False
        self._view: torch.Tensor | None = None  # this gradient in the bucket
        self._base: torch.Tensor | None = None  # .grad before backward(), to be added at the end
        self._packed: torch.Tensor | None = None  # see pack()
        self._zeroed_version = -1
        self._own: slice | None = None  # the elements that this rank updates; None: all
        self._reduced: _Version | None = None  # .grad as settle() left it
        self._displaced: _Version | None = None  # .grad of a step in which `_own` was different

    def place(self, bucket: Bucket | None, member: Member | None) -> None:
        """Send dense gradients in this bucket from now on; None: in no bucket."""
        gradient = self.parameter.grad
        if self._own is not None and gradient is not None and self.state is GradientState.SETTLED:
            self._displaced = _Version(gradient)
        self.bucket = bucket
        self._view = None if member is None else member.view
        self._own = member.own if bucket is not None and bucket.is_scattered and member else None

    def open(self) -> None:
        """Clear .grad for this rank's gradient; settle() adds the old value again."""
        if self.state is GradientState.SENT:
            self.parameter.grad = None
            self.state = GradientState.LATE
        elif self.state is GradientState.SETTLED:
            self.require_own_part()
            self.state = GradientState.OPEN
            if not self._is_zeroed():
                self._base, self.parameter.grad = self._outside_bucket(), None

    def take_part(self) -> None:
        """Prepare for a reduction in which other ranks may have a gradient."""
        if self.state is GradientState.SETTLED:
            self.open()

    def note_zeroed(self) -> None:
        """Note that .grad was set to zeros: autograd then adds gradients directly to the bucket."""
        if self._view is not None and self.parameter.grad is self._view:
            self._zeroed_version = self._view._version

    def restart(self) -> None:
        """Give .grad back to the user, whatever its value is."""
        self.state = GradientState.SETTLED
        self.was_sparse = self.is_sparse_in_step = False
        self._base = self._reduced = None
        self._zeroed_version = -1  # a reduction writes to the view without a new version

    def require_own_part(self) -> None:
        """Raise RingcommError if .grad is of an earlier step, and this rank's part has changed.

        New buckets give a rank other parts of the parameters.
        """
        if self._displaced is not None and self._displaced.is_of(self.parameter.grad):
            raise RingcommError(
                f"DistributedOptimizer: {self.name}.grad is of an earlier step. With shard_state=1 "
                "it holds this rank's part of the gradient, and since then ranks have other parts: "
                "call optimizer.zero_grad() between step() and backward()"
            )

    def own_gradient(self) -> torch.Tensor | None:
        """Return a flat view of the part of .grad that this rank updates, in the bucket's layout.

        If .grad has another layout, it is replaced by a copy.
        """
        gradient, view = self.parameter.grad, self._view
        if gradient is None or view is None:
            return None
        self.require_own_part()
        if gradient.layout is not torch.strided or gradient.stride() != view.stride():
            aligned = torch.empty_strided(
                view.shape, view.stride(), dtype=gradient.dtype, device=gradient.device
            )
            gradient = self.parameter.grad = aligned.copy_(_strided(gradient))
        return flat_view(gradient.detach())[self._own or slice(None)]

    def accept(self) -> None:
        """Accept the changes of .grad up to now: is_changed is then False until the next change."""
        gradient = self.parameter.grad
        self._reduced = None if gradient is None else _Version(gradient)

    @property
    def is_changed(self) -> bool:
        """True if somebody has written to .grad since settle() or accept()."""
        gradient, reduced = self.parameter.grad, self._reduced
        return reduced is not None and gradient is not None and not reduced.is_of(gradient)

    @property
    def code(self) -> int:
        """This rank's code for the other ranks; see gradient_presence.py."""
        was_sparse = WAS_SPARSE if self.was_sparse else 0
        if self.state is GradientState.SENT:
            return DENSE | was_sparse
        if self.state is GradientState.LATE:
            return DENSE | LATE | was_sparse
        if self.state is GradientState.SETTLED or self.parameter.grad is None:
            return was_sparse
        return (SPARSE if self.has_sparse else DENSE) | was_sparse

    @property
    def is_ready(self) -> bool:
        """True if .grad can go into a bucket."""
        return self.bucket is not None and self.parameter.grad is not None and not self.has_sparse

    @property
    def has_sparse(self) -> bool:
        """True if .grad is a torch.sparse_coo tensor."""
        gradient = self.parameter.grad
        return gradient is not None and gradient.layout is torch.sparse_coo

    def densify(self) -> None:
        """Make .grad dense."""
        gradient = self.parameter.grad
        if gradient is not None:
            self.parameter.grad = gradient.to_dense()

    def make_sparse_again(self) -> None:
        """Make .grad sparse if it was sparse on some rank."""
        gradient = self.parameter.grad
        if self.is_sparse_in_step and gradient is not None and not self.has_sparse:
            self.parameter.grad = gradient.to_sparse(1)

    def pack(self, code: int = DENSE) -> None:
        """Write this rank's gradient to the bucket, and make .grad a view of the bucket.

        It writes zeros if this rank has no gradient, or if no rank has a dense one (see `code`).
        A large gradient is kept until the next one: if it were freed here, its pages would go back
        to the system, and the next backward() would fault them in again (4 to 8 ms for 80 MB).
        """
        assert self._view is not None
        gradient = self.parameter.grad
        if gradient is self._view:
            return
        if gradient is None or not code & DENSE:
            self._view.zero_()
            return
        _copy(self._view, _strided(gradient))
        self.parameter.grad = self._view
        is_large = gradient.is_cpu and self._view.nbytes >= WORTH_KEEPING
        self._packed = gradient if is_large else None

    def pack_extra(self, target: torch.Tensor) -> None:
        """Fill `target` with the gradient if this step's bucket lacks it, else with zeros."""
        gradient = self.parameter.grad
        is_extra = self.state is GradientState.LATE or (
            self.state is GradientState.OPEN and self.bucket is None
        )
        if is_extra and gradient is not None:
            target.copy_(_strided(gradient))
        else:
            target.zero_()

    def settle(self, code: int, extra: Sequence[torch.Tensor]) -> None:
        """Make .grad final: the sum of the bucket's view, of `extra`, and of the earlier .grad.

        Args:
            code: codes of all ranks, or-ed.
            extra: reduced parts that were not in the bucket.
        """
        parts = list(extra)
        if code & DENSE and self._view is not None:
            parts.insert(0, self._view)
        if self._base is not None:
            parts.append(self._base)
        if parts:
            self.parameter.grad = _total(parts)
        self.restart()
        self.is_sparse_in_step = bool(code & WAS_SPARSE)
        if self._own is not None:
            if len(parts) > 1 and self._view is not None:
                self._zero_other_parts(self._view, self._own)
            self.accept()

    def _zero_other_parts(self, view: torch.Tensor, own: slice) -> None:
        """Zero the elements that other ranks update: parts from outside the bucket changed them."""
        assert self.parameter.grad is view
        flat = flat_view(view)
        flat[: own.start].zero_()
        flat[own.stop :].zero_()

    def _is_zeroed(self) -> bool:
        """Return True if .grad is the bucket's view, and nobody wrote to it since zero_grad()."""
        view = self._view
        return (
            view is not None
            and self.parameter.grad is view
            and view._version == self._zeroed_version
        )

    def _outside_bucket(self) -> torch.Tensor | None:
        """Return .grad; a copy if .grad is in the bucket's memory, which will be overwritten."""
        gradient = self.parameter.grad
        if gradient is None or self._view is None or gradient.layout is not torch.strided:
            return gradient
        own, bucket = gradient.untyped_storage(), self._view.untyped_storage()
        return gradient.detach().clone() if own.data_ptr() == bucket.data_ptr() else gradient


class _Version:
    """Recognizes a tensor as long as nobody writes to it; does not keep it alive."""

    def __init__(self, x: torch.Tensor) -> None:
        self._x = weakref.ref(x)
        self._version = x._version

    def is_of(self, x: torch.Tensor | None) -> bool:
        return x is not None and self._x() is x and x._version == self._version


def _copy(view: torch.Tensor, gradient: torch.Tensor) -> None:
    """Copy a gradient to a bucket's view; if possible, a large one bypasses the CPU's caches."""
    is_plain = type(gradient) is torch.Tensor and gradient.is_cpu
    is_alike = view.dtype == gradient.dtype and view.stride() == gradient.stride()
    if is_plain and is_alike and not (gradient.is_conj() or gradient.is_neg()):
        copy_memory(view.data_ptr(), gradient.data_ptr(), view.nbytes)  # a view has no gaps
        TORCH.written(view)
    else:
        view.copy_(gradient)


def _strided(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.detach()
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def _total(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum, in the memory of the first dense part if there is one."""
    total, *others = sorted(parts, key=lambda part: part.layout is not torch.strided)
    for part in others:
        total = total.add_(part) if total.layout is torch.strided else total + part
    return total
