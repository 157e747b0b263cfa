"""State of an optimizer for one parameter, or for a part of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from ringcomm.torch.optim.buckets import flatten_like

TorchState = dict[str, Any]  # as in torch's optimizer.state[parameter]
COUNT: Final = (
    "step"  # as torch calls it: a 0-d tensor, which is not for each element of a 0-d parameter
)


@dataclass(frozen=True)
class ParameterState:
    """State in two parts: tensors by element, flat as they lie in memory; the rest, alike."""

    by_element: dict[str, torch.Tensor] = field(default_factory=dict)
    common: TorchState = field(default_factory=dict)

    @classmethod
    def of(cls, state: Mapping[str, Any], view: torch.Tensor) -> ParameterState:
        """Take apart the state of a parameter that lies in memory as `view` does."""
        lines = {
            key: flatten_like(value, view)
            for key, value in state.items()
            if isinstance(value, torch.Tensor) and value.shape == view.shape and key != COUNT
        }
        return cls(lines, {key: value for key, value in state.items() if key not in lines})

    def shaped(self, view: torch.Tensor) -> TorchState:
        """Return it as torch has it, in the same memory; the other way round of `of`."""
        whole = {
            k: line.as_strided(view.shape, view.stride()) for k, line in self.by_element.items()
        }
        return whole | self.common

    def part(self, own: slice) -> ParameterState:
        """Return a copy of what belongs to these elements."""
        alike = {k: v.clone() if torch.is_tensor(v) else v for k, v in self.common.items()}
        return ParameterState(
            {key: line[own].clone() for key, line in self.by_element.items()}, alike
        )

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> ParameterState:
        """Return it with tensors by element changed."""
        return ParameterState(
            {key: change(line) for key, line in self.by_element.items()}, dict(self.common)
        )

    def to(self, device: torch.device) -> ParameterState:
        """Return it with tensors by element on another device."""
        return self.mapped(lambda line: line.to(device))

    def __bool__(self) -> bool:
        return bool(self.by_element or self.common)
