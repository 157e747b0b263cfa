"""The parameters of an optimizer, and their hooks: a parameter has at most one optimizer."""

from __future__ import annotations

import gc
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar
from weakref import ref

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ringcomm.errors import RingcommError
from ringcomm.torch.backward.autograd_hooks import Hooks, Listener

Named = Sequence[tuple[str, torch.nn.Parameter]]
_owners: MutableMapping[torch.Tensor, ref[Listener]] = WeakIdKeyDictionary()


@dataclass(eq=False)
class Slot:
    """A parameter, and its index among the optimizer's parameters."""

    index: int
    name: str
    parameter: torch.nn.Parameter
    has_hooks: bool = field(default=False, init=False)

    def summary(self, *, is_trainable: bool) -> str:
        """Return a description that must be the same on all ranks."""
        p = self.parameter
        return f"{p.dtype} {tuple(p.shape)}, {'trainable' if is_trainable else 'frozen'}"

    @property
    def has_sparse(self) -> bool:
        gradient = self.parameter.grad
        return gradient is not None and gradient.layout is torch.sparse_coo

    @property
    def dtype_complaint(self) -> str | None:
        """Error text if .grad cannot be reduced as one of the parameter's dtype; None if it can."""
        gradient, dtype = self.parameter.grad, self.parameter.dtype  # each read costs, in each step
        if gradient is None or gradient.dtype is dtype:
            return None
        return (
            f"DistributedOptimizer: {self.name}.grad is {gradient.dtype} by the grad_dtype of its "
            f"parameter, which is {dtype}: gradients must have the dtype of their parameter here"
        )

    def densify(self) -> None:
        gradient = self.parameter.grad
        if gradient is not None:
            self.parameter.grad = gradient.to_dense()


S = TypeVar("S", bound=Slot)


class ParameterHooks(Hooks):
    """Hooks of one optimizer's parameters; the listener is the owner of these parameters."""

    def attach(self, slots: Sequence[Slot]) -> None:
        """Attach hooks to these parameters. Raises ValueError if a parameter has another owner."""
        if not slots:
            return
        if any(self._has_other_owner(slot) for slot in slots):
            gc.collect()  # the other owner may be garbage in a reference cycle
        for slot in slots:
            if self._has_other_owner(slot):
                raise ValueError(
                    f"DistributedOptimizer: {slot.name} belongs to another DistributedOptimizer, "
                    "and its gradients would be reduced twice: delete that optimizer first"
                )
        for slot in slots:
            _owners[slot.parameter] = self._listener
            self.add(slot.index, slot.parameter)
            slot.has_hooks = True

    def remove(self, slots: Sequence[Slot]) -> None:
        self.remove_all()
        for slot in slots:
            if slot.has_hooks and not self._has_other_owner(slot):
                _owners.pop(slot.parameter, None)
            slot.has_hooks = False

    def require_announced(self, slot: Slot) -> None:
        """Raise RingcommError if the node is new: then it did not call before_gradient()."""
        if slot.parameter.requires_grad and self.has_new_node(slot.index, slot.parameter):
            raise RingcommError(
                f"DistributedOptimizer: the dtype or device of {slot.name} has changed since the "
                "optimizer was wrapped: call model.to() before"
            )

    def _has_other_owner(self, slot: Slot) -> bool:
        owner = _owners.get(slot.parameter)
        return owner is not None and owner is not self._listener and owner() is not None


def without_hooks(slots: Iterable[S]) -> list[S]:
    return [slot for slot in slots if not slot.has_hooks and slot.parameter.requires_grad]
