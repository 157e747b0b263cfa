"""State of an optimizer for one parameter, or for a part of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from ringcomm.torch.optim.buckets import flatten_like

TorchState = dict[str, Any]  # as in torch's optimizer.state[parameter]
COUNT: Final = "step"  # torch's key for the count of steps, a 0-d tensor per parameter


@dataclass(frozen=True)
class ParameterState:
    """State as flat tensors with one value per element, and values common to all elements."""

    by_element: dict[str, torch.Tensor] = field(default_factory=dict)
    common: TorchState = field(default_factory=dict)

    @classmethod
    def of(cls, state: Mapping[str, Any], view: torch.Tensor) -> ParameterState:
        """Split the state of a parameter; flat tensors have the element order of `view`."""
        lines = {
            key: flatten_like(value, view)
            for key, value in state.items()
            if isinstance(value, torch.Tensor) and value.shape == view.shape and key != COUNT
        }
        return cls(lines, {key: value for key, value in state.items() if key not in lines})

    def shaped(self, view: torch.Tensor) -> TorchState:
        """Return the state in torch's form, in the same memory; of() does the opposite."""
        whole = self.mapped(lambda line: line.as_strided(view.shape, view.stride()))
        return whole.by_element | whole.common

    def part(self, own: slice) -> ParameterState:
        common = {k: v.clone() if torch.is_tensor(v) else v for k, v in self.common.items()}
        return ParameterState(self.mapped(lambda line: line[own].clone()).by_element, common)

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> ParameterState:
        return ParameterState(
            {key: change(line) for key, line in self.by_element.items()}, dict(self.common)
        )

    def to(self, device: torch.device) -> ParameterState:
        return self.mapped(lambda line: line.to(device))

    def __bool__(self) -> bool:
        return bool(self.by_element or self.common)
