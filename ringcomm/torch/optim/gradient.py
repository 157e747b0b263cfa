"""One parameter, and where its gradient of this step is."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from enum import Enum, auto

import torch

from ringcomm._core import copy_memory
from ringcomm.arrays.torch import TORCH
from ringcomm.errors import RingcommError
from ringcomm.torch.backward.parameters import Slot
from ringcomm.torch.optim.buckets import Bucket, Member, flat_view
from ringcomm.torch.optim.presence import DENSE, LATE, SPARSE, WAS_SPARSE

WORTH_KEEPING = 128 << 10  # bytes; what malloc asks the system for by itself


class GradientState(Enum):
    """State of a parameter's .grad."""

    SETTLED = auto()  # the user's: None, final, or set by hand
    OPEN = auto()  # what this rank alone has computed, or None; more may be added
    SENT = auto()  # under way in its bucket
    LATE = auto()  # OPEN once more: what was computed after its bucket had left


class GradientSlot(Slot):
    """A parameter, and where its gradient of this step is.

    Attributes:
        bucket: where its dense gradients travel, or None.
        was_sparse: what this rank has computed was sparse, and is made dense for the reduction.
        is_sparse_in_step: .grad, dense now, was so on some rank: the optimizer is to see it sparse.
    """

    def __init__(self, index: int, name: str, parameter: torch.nn.Parameter) -> None:
        super().__init__(index, name, parameter)
        self.state = GradientState.SETTLED
        self.bucket: Bucket | None = None
        self.was_sparse = self.is_sparse_in_step = False
        self._view: torch.Tensor | None = None
        self._base: torch.Tensor | None = None
        self._packed: torch.Tensor | None = None  # kept, see pack()
        self._zeroed_version = -1
        self._own: slice | None = None  # of the elements, what this rank updates; None: all
        self._reduced: _Mark | None = None  # .grad as settle() left it
        self._displaced: _Mark | None = None  # .grad of which another rank's share was elsewhere

    def place(self, bucket: Bucket | None, member: Member | None) -> None:
        """Send its dense gradients in this bucket from now on; None: in none."""
        gradient = self.parameter.grad
        if self._own is not None and gradient is not None and self.state is GradientState.SETTLED:
            self._displaced = _Mark(gradient)
        self.bucket = bucket
        self._view = None if member is None else member.view
        self._own = member.own if bucket is not None and bucket.is_scattered and member else None

    def open(self) -> None:
        """Make room in .grad for what this rank computes; what was there is added at the end."""
        if self.state is GradientState.SENT:
            self.parameter.grad = None
            self.state = GradientState.LATE
        elif self.state is GradientState.SETTLED:
            self.require_placed()
            self.state = GradientState.OPEN
            if not self._is_zeroed():
                self._base, self.parameter.grad = self._apart(), None

    def take_part(self) -> None:
        """Make ready for a reduction in which other ranks may have a gradient."""
        if self.state is GradientState.SETTLED:
            self.open()

    def note_zeroed(self) -> None:
        """Zeros were written to .grad: if it is the bucket's memory, gradients are added there."""
        if self._view is not None and self.parameter.grad is self._view:
            self._zeroed_version = self._view._version

    def restart(self) -> None:
        """Leave .grad, whatever it is now, to the user."""
        self.state = GradientState.SETTLED
        self.was_sparse = self.is_sparse_in_step = False
        self._base = self._reduced = None
        self._zeroed_version = -1  # what a reduction writes to the view does not count as a change

    def require_placed(self) -> None:
        """Raise RingcommError if .grad is of the last step(), and shares have changed since."""
        if self._displaced is not None and self._displaced.fits(self.parameter.grad):
            raise RingcommError(
                f"DistributedOptimizer: {self.name}.grad is of an earlier step, and with "
                "shard_state=1 each rank has a part of it, which is another one now: call "
                "optimizer.zero_grad() between step() and backward()"
            )

    def own_gradient(self) -> torch.Tensor | None:
        """Return the part of .grad that this rank updates: flat, after it was laid out so."""
        gradient, view = self.parameter.grad, self._view
        if gradient is None or view is None:
            return None
        self.require_placed()
        if gradient.layout is not torch.strided or gradient.stride() != view.stride():
            aligned = torch.empty_strided(
                view.shape, view.stride(), dtype=gradient.dtype, device=gradient.device
            )
            gradient = self.parameter.grad = aligned.copy_(_strided(gradient))
        return flat_view(gradient.detach())[self._own or slice(None)]

    def accept(self) -> None:
        """Note that .grad was changed in a way that is right for a part of it."""
        gradient = self.parameter.grad
        self._reduced = None if gradient is None else _Mark(gradient)

    @property
    def is_changed(self) -> bool:
        """True if somebody has written to .grad since it became this rank's part of the result."""
        gradient = self.parameter.grad
        reduced = self._reduced
        return reduced is not None and gradient is not None and not reduced.fits(gradient)

    @property
    def code(self) -> int:
        """Code of what this rank contributes, for the other ranks; see presence.py."""
        return self._present | (WAS_SPARSE if self.was_sparse else 0)

    @property
    def _present(self) -> int:
        if self.state is GradientState.SENT:
            return DENSE
        if self.state is GradientState.LATE:
            return DENSE | LATE
        if self.state is GradientState.SETTLED or self.parameter.grad is None:
            return 0
        return SPARSE if self.has_sparse else DENSE

    @property
    def is_ready(self) -> bool:
        """True if .grad can go into a bucket."""
        return self.bucket is not None and self.parameter.grad is not None and not self.has_sparse

    @property
    def summary(self) -> str:
        """Text that must be the same on all ranks."""
        p = self.parameter
        return f"{p.dtype} {tuple(p.shape)}, {'trainable' if self.has_hooks else 'frozen'}"

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
        """Make .grad sparse if autograd has made it so on some rank."""
        gradient = self.parameter.grad
        if self.is_sparse_in_step and gradient is not None and not self.has_sparse:
            self.parameter.grad = gradient.to_sparse(1)

    def pack(self, code: int = DENSE) -> None:
        """Write this rank's gradient to the bucket; zeros if `code` says that none is dense.

        What was a large gradient is kept until the next one: freed at once, its pages would go back
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

    def spare(self, target: torch.Tensor) -> None:
        """Write what this rank has beside its bucket, or zeros, to `target`."""
        gradient = self.parameter.grad
        is_apart = self.state is GradientState.LATE or (
            self.state is GradientState.OPEN and self.bucket is None
        )
        if is_apart and gradient is not None:
            target.copy_(_strided(gradient))
        else:
            target.zero_()

    def settle(self, code: int, extra: Sequence[torch.Tensor]) -> None:
        """Make .grad final, of what any rank had (code) and parts beside the bucket (extra)."""
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
            self._keep_own(len(parts))

    def _keep_own(self, n_parts: int) -> None:
        """Set to zero what other ranks update; the bucket has done so for the part that it held."""
        view = self._view
        if n_parts > 1 and self._own is not None and view is not None:
            assert self.parameter.grad is view
            line = flat_view(view)
            line[: self._own.start].zero_()
            line[self._own.stop :].zero_()
        self.accept()

    def _is_zeroed(self) -> bool:
        view = self._view
        return (
            view is not None
            and self.parameter.grad is view
            and view._version == self._zeroed_version
        )

    def _apart(self) -> torch.Tensor | None:
        """Return .grad; a copy if it is in the bucket's memory, which will be overwritten."""
        gradient = self.parameter.grad
        if gradient is None or self._view is None or gradient.layout is not torch.strided:
            return gradient
        own, bucket = gradient.untyped_storage(), self._view.untyped_storage()
        return gradient.detach().clone() if own.data_ptr() == bucket.data_ptr() else gradient


class _Mark:
    """Knows a tensor again, as long as nobody writes to it; does not keep it alive."""

    def __init__(self, x: torch.Tensor) -> None:
        self._x = weakref.ref(x)
        self._version = x._version

    def fits(self, x: torch.Tensor | None) -> bool:
        """Return True if x is that tensor, as it was."""
        return x is not None and self._x() is x and x._version == self._version


def _copy(view: torch.Tensor, gradient: torch.Tensor) -> None:
    """Set a bucket's view to a gradient; a large one is not to drive all else out of the caches."""
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
    """Return the sum, in the memory of the first part that is dense, if any is."""
    total, *others = sorted(parts, key=lambda part: part.layout is not torch.strided)
    for part in others:
        total = total.add_(part) if total.layout is torch.strided else total + part
    return total
