"""With shard_state=1: the part of a gradient that this rank updates."""

from __future__ import annotations

import torch

from ringcomm.errors import RingcommError
from ringcomm.torch.backward.watched_tensors import TensorMark
from ringcomm.torch.optim.buckets import Member, flat_view


class GradientShard:
    """The part of one parameter's .grad that this rank updates; the other elements are zero.

    Attributes:
        place: the elements, in the order of the bucket; None: .grad is whole on each rank.
    """

    def __init__(self, name: str, parameter: torch.nn.Parameter) -> None:
        self._name, self._parameter = name, parameter
        self._view: torch.Tensor | None = None
        self.place: slice | None = None
        self._reduced: TensorMark | None = None  # .grad as the reduction has left it
        self._displaced: TensorMark | None = None  # .grad of a step in which `place` was different
        self._weights: TensorMark | None = None  # the parameter, since .grad has been this part

    def move(self, member: Member | None, *, is_scattered: bool, is_settled: bool) -> None:
        """Use another bucket's member from now on; is_settled: .grad is of an earlier step."""
        gradient = self._parameter.grad
        if self.place is not None and gradient is not None and is_settled:
            self._displaced = TensorMark(gradient)
        self._view = None if member is None else member.view
        self.place = member.own if member is not None and is_scattered else None

    def require_unmoved(self) -> None:
        """Raise RingcommError if .grad is of an earlier step, and this rank's part has changed.

        New buckets give a rank other parts of the parameters.
        """
        if self._displaced is not None and self._displaced.is_of(self._parameter.grad):
            raise RingcommError(
                f"DistributedOptimizer: {self._name}.grad is of an earlier step. With "
                "shard_state=1 it holds this rank's part of the gradient, and since then ranks "
                "have other parts: call optimizer.zero_grad() between step() and backward()"
            )

    def require_equal_weights(self) -> None:
        """Raise RingcommError if the weights have changed since .grad has been this rank's part.

        The program drops .grad now, and seems to have used it for that, as SAM does: weights would
        differ between the ranks. Writes through .data are not noticed.
        """
        if self._weights is not None and not self._weights.is_of(self._parameter):
            raise RingcommError(
                f"DistributedOptimizer: {self._name} was changed between backward() and "
                "zero_grad(). With shard_state=1 .grad is then this rank's part of the mean, and "
                "weights that are computed from it differ between the ranks. Pass shard_state=0, "
                "or change weights after step()"
            )

    def gradient(self) -> torch.Tensor | None:
        """Return a flat view of this part of .grad, in the bucket's layout.

        If .grad has another layout, its elements move. It stays the same tensor, if it is strided:
        only some ranks come here, and all must find the same of .grad in later reductions.
        """
        gradient, view = self._parameter.grad, self._view
        if gradient is None or view is None:
            return None
        self.require_unmoved()
        if gradient.layout is not torch.strided or gradient.stride() != view.stride():
            aligned = torch.empty_strided(
                view.shape, view.stride(), dtype=gradient.dtype, device=gradient.device
            )
            dense = gradient.detach()
            dense = dense if dense.layout is torch.strided else dense.to_dense()
            aligned.copy_(dense)
            if gradient.layout is torch.strided:
                gradient.data = aligned
            else:
                gradient = self._parameter.grad = aligned
        return flat_view(gradient.detach())[self.place or slice(None)]

    def zero_others(self, total: torch.Tensor) -> None:
        """Zero the elements that other ranks update, in a tensor of the bucket's layout."""
        if self.place is not None:
            flat = flat_view(total)
            flat[: self.place.start].zero_()
            flat[self.place.stop :].zero_()

    def accept(self) -> None:
        """Accept the changes of .grad up to now: is_changed is then False until the next change."""
        gradient = self._parameter.grad
        self._reduced = None if gradient is None else TensorMark(gradient)
        if gradient is not None and self._weights is None:
            self._weights = TensorMark(self._parameter)

    def forget(self) -> None:
        self._reduced = self._weights = None

    @property
    def is_changed(self) -> bool:
        gradient, reduced = self._parameter.grad, self._reduced
        return reduced is not None and gradient is not None and not reduced.is_of(gradient)
