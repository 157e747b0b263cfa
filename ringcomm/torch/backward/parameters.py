"""The parameters of an optimizer, and the hooks of those that have ever required gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

import torch

from ringcomm.errors import RingcommError
from ringcomm.torch.backward.autograd import Hooks, Listener
from ringcomm.torch.backward.registry import Numbered, claim, release

Named = Sequence[tuple[str, torch.nn.Parameter]]


class Slot:
    """A parameter, by its place among the optimizer's; has_hooks: hooks tell of its gradients."""

    def __init__(self, index: int, name: str, parameter: torch.nn.Parameter) -> None:
        self.index = index
        self.name = name
        self.parameter = parameter
        self.has_hooks = False


S = TypeVar("S", bound=Slot)


class Owner(Listener, Numbered, Protocol):
    """A listener to gradients of parameters that have no other owner."""


class ParameterHooks:
    """Hooks of one optimizer's parameters."""

    def __init__(self) -> None:
        self._hooks: list[Hooks] = []

    def attach(self, owner: Owner, new: Sequence[Slot]) -> None:
        """Attach hooks to these, which have none. Raises ValueError if one has another owner."""
        if not new:
            return
        claim([(slot.name, slot.parameter) for slot in new], owner)
        self._hooks.append(Hooks(owner, {slot.index: slot.parameter for slot in new}))
        for slot in new:
            slot.has_hooks = True

    def close(self, owner: Owner, slots: Iterable[Slot]) -> None:
        """Call the owner no more, and release its parameters for another."""
        for hooks in self._hooks:
            hooks.remove()
        for slot in slots:
            release(slot.parameter, owner)

    def require_current(self, slot: Slot) -> None:
        """Refuse a gradient of which before_gradient() was not called."""
        parameter = slot.parameter
        if parameter.requires_grad and any(h.has_lost(slot.index, parameter) for h in self._hooks):
            raise RingcommError(
                f"DistributedOptimizer: the dtype or device of {slot.name} has changed since the "
                "optimizer was wrapped: call model.to() before"
            )


def without_hooks(slots: Iterable[S]) -> list[S]:
    """Return those that require gradients and have no hooks yet: added, or unfrozen."""
    return [slot for slot in slots if not slot.has_hooks and slot.parameter.requires_grad]
