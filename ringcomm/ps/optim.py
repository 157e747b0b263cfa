"""Updaters: how servers apply pushes, with the names and hyper-parameters of torch's optimizers.

They hold numbers alone, and travel as numbers with every push, so that a learning-rate schedule
reaches the servers. The updates themselves are in C++ (`_core.apply_update`, `_core.Shard.push`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final, Self

import numpy as np
from numpy.typing import NDArray

from ringcomm import _core


@dataclass(frozen=True)
class Updater:
    """Base of all updaters: they compute the next value from a value and a push.

    Attributes:
        code: the number of the updater in the C++ core.
        slot_names: the state beside the values, named as in torch's state_dict; in the order in
            which `_core.apply_update` takes it.
    """

    code: ClassVar[int]

    @cached_property
    def hyper(self) -> NDArray[np.float64]:
        """The hyper-parameters as float64 numbers, which travel with every push; read-only."""
        values: list[float] = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            values.extend(value if isinstance(value, tuple) else (value,))
        numbers = np.array(values, np.float64)
        numbers.flags.writeable = False
        return numbers

    @property
    def slot_names(self) -> tuple[str, ...]:
        """The names of the slots."""
        return ()

    @property
    def n_slots(self) -> int:
        """Number of slots, each of which is an array."""
        return len(self.slot_names)

    @property
    def slot_fill(self) -> tuple[float, ...]:
        """The value with which each slot starts."""
        return tuple(_core.slot_plan(self.code, self.hyper)[2])

    @property
    def n_full_slots(self) -> int:
        """Number of slots, counted from the first, that have one number per value.

        The others have one number per row: of a dense block, one per block, but for RowwiseAdagrad,
        which takes the block as so many rows as its slot has numbers.
        """
        return _core.slot_plan(self.code, self.hyper)[0]

    def new_slots(
        self, shape: tuple[int, ...], dtype: np.dtype[Any] | type[Any] = np.float32
    ) -> list[NDArray[Any]]:
        """Return slots as they are before the first update of a block of this shape.

        Args:
            shape: of the values; its first number is the number of rows to RowwiseAdagrad.
            dtype: of the values, float32 or float64.
        """
        one_per_row = shape[0] if isinstance(self, RowwiseAdagrad) and shape else 1
        return [
            np.full(math.prod(shape) if k < self.n_full_slots else one_per_row, fill, dtype)
            for k, fill in enumerate(self.slot_fill)
        ]

    def with_(self, **changes: Any) -> Self:
        """Return this updater with other hyper-parameters: with_(lr=0.01).

        Raises:
            ValueError: the state beside the values would be another (momentum that was 0 is no
                longer, amsgrad, centered).
        """
        changed = dataclasses.replace(self, **changes)
        if changed.slot_names != self.slot_names[: changed.n_slots]:
            raise ValueError(
                f"{type(self).__name__}.with_({', '.join(changes)}): needs the state "
                f"{changed.slot_names}, and there is {self.slot_names}. Begin with it: a momentum "
                "that is 0 for a while may be given as 1e-30"
            )
        return changed

    def to_json(self) -> dict[str, Any]:
        """Return JSON from which from_json() makes this updater again."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {"updater": type(self).__name__} | {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
        }


def _require(updater: Updater, **ranges: tuple[float, float, bool]) -> None:
    """Check that hyper-parameters lie in (least, most, whether most itself is allowed)."""
    for name, (least, most, is_closed) in ranges.items():
        value = getattr(updater, name)
        for x in value if isinstance(value, tuple) else (value,):
            if not (least <= x < most or (is_closed and x == most)):
                bracket = "]" if is_closed else ")"
                raise ValueError(
                    f"{type(updater).__name__}: {name} is {x!r}, and must lie in "
                    f"[{least}, {most}{bracket}"
                )


_POSITIVE: Final = (0.0, math.inf, False)
_SHARE: Final = (0.0, 1.0, False)


@dataclass(frozen=True)
class Assign(Updater):
    """The value becomes what was pushed. Works on every table and leaves its state alone."""

    code = 0


@dataclass(frozen=True)
class Add(Updater):
    """Adds what is pushed to the value. Works on every table and leaves its state alone."""

    code = 1


@dataclass(frozen=True)
class SGD(Updater):
    """torch.optim.SGD."""

    code = 2
    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False

    def __post_init__(self) -> None:
        _require(self, lr=_POSITIVE, momentum=_POSITIVE, weight_decay=_POSITIVE)
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise ValueError("SGD: nesterov needs a momentum and a dampening of 0")

    @property
    def slot_names(self) -> tuple[str, ...]:
        """The names of the slots."""
        return ("momentum_buffer",) if self.momentum != 0 else ()


@dataclass(frozen=True)
class Adagrad(Updater):
    """torch.optim.Adagrad."""

    code = 3
    lr: float = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    maximize: bool = False

    def __post_init__(self) -> None:
        _require(self, lr=_POSITIVE, lr_decay=_POSITIVE, weight_decay=_POSITIVE, eps=_POSITIVE)
        _require(self, initial_accumulator_value=_POSITIVE)

    @property
    def slot_names(self) -> tuple[str, ...]:
        """The names of the slots."""
        return ("sum",)


@dataclass(frozen=True)
class Adam(Updater):
    """torch.optim.Adam."""

    code = 4
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False
    maximize: bool = False
    decoupled_weight_decay: bool = False

    def __post_init__(self) -> None:
        _require(self, lr=_POSITIVE, betas=_SHARE, eps=_POSITIVE, weight_decay=_POSITIVE)

    @property
    def slot_names(self) -> tuple[str, ...]:
        """The names of the slots."""
        names = ("exp_avg", "exp_avg_sq")
        return (*names, "max_exp_avg_sq") if self.amsgrad else names


@dataclass(frozen=True)
class AdamW(Adam):
    """torch.optim.AdamW."""

    weight_decay: float = 1e-2
    decoupled_weight_decay: bool = True


@dataclass(frozen=True)
class RMSprop(Updater):
    """torch.optim.RMSprop."""

    code = 5
    lr: float = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False
    maximize: bool = False

    def __post_init__(self) -> None:
        _require(self, lr=_POSITIVE, alpha=_POSITIVE, eps=_POSITIVE, momentum=_POSITIVE)
        _require(self, weight_decay=_POSITIVE)

    @property
    def slot_names(self) -> tuple[str, ...]:
        """The names of the slots."""
        centered = ("grad_avg",) if self.centered else ()
        momentum = ("momentum_buffer",) if self.momentum > 0 else ()
        return ("square_avg", *centered, *momentum)


@dataclass(frozen=True)
class Adadelta(Updater):
    """torch.optim.Adadelta."""

    code = 6
    lr: float = 1.0
    rho: float = 0.9
    eps: float = 1e-6
    weight_decay: float = 0.0
    maximize: bool = False

    def __post_init__(self) -> None:
        _require(self, lr=_POSITIVE, rho=(0.0, 1.0, True), eps=_POSITIVE, weight_decay=_POSITIVE)

    @property
    def slot_names(self) -> tuple[str, ...]:
        """The names of the slots."""
        return ("square_avg", "acc_delta")


@dataclass(frozen=True)
class NAdam(Updater):
    """torch.optim.NAdam."""

    code = 7
    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum_decay: float = 4e-3
    decoupled_weight_decay: bool = False
    maximize: bool = False

    def __post_init__(self) -> None:
        _require(self, lr=_POSITIVE, betas=_SHARE, eps=_POSITIVE, weight_decay=_POSITIVE)
        _require(self, momentum_decay=_POSITIVE)

    @property
    def slot_names(self) -> tuple[str, ...]:
        """The names of the slots; mu_product is one number per row or block."""
        return ("exp_avg", "exp_avg_sq", "mu_product")


@dataclass(frozen=True)
class RAdam(Updater):
    """torch.optim.RAdam."""

    code = 8
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled_weight_decay: bool = False
    maximize: bool = False

    def __post_init__(self) -> None:
        _require(self, lr=_POSITIVE, betas=_SHARE, eps=_POSITIVE, weight_decay=_POSITIVE)

    @property
    def slot_names(self) -> tuple[str, ...]:
        """The names of the slots."""
        return ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class FTRL(Updater):
    """Follow the regularized leader, per coordinate.

    Values that stand there before the first update, random or trained, are kept: the paper, which
    starts from 0, does not say what should become of them. With beta and l2 both 0 they are lost.
    Source: McMahan et al. 2013, doi:10.1145/2487575.2488200, algorithm 1 (lr is its alpha).
    """

    code = 9
    lr: float = 0.1
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0

    def __post_init__(self) -> None:
        _require(self, beta=_POSITIVE, l1=_POSITIVE, l2=_POSITIVE)
        if not 0 < self.lr < math.inf:
            raise ValueError(f"FTRL: lr is {self.lr!r}, and must be more than 0")

    @property
    def slot_names(self) -> tuple[str, ...]:
        """The names of the slots."""
        return ("z", "n")


@dataclass(frozen=True)
class RowwiseAdagrad(Updater):
    """Adagrad with one accumulator per row: the mean of its squared gradients.

    It is for hash tables. In a dense table each element is a row.

    Source: as in FBGEMM; Naumov et al. 2019, arXiv:1906.00091.
    """

    code = 10
    lr: float = 1e-2
    eps: float = 1e-10

    def __post_init__(self) -> None:
        _require(self, lr=_POSITIVE, eps=_POSITIVE)

    @property
    def slot_names(self) -> tuple[str, ...]:
        """The names of the slots; one number per row."""
        return ("sum",)


_ALL: Final[dict[str, type[Updater]]] = {
    kind.__name__: kind
    for kind in (
        Assign, Add, SGD, Adagrad, Adam, AdamW, RMSprop, Adadelta, NAdam, RAdam, FTRL,
        RowwiseAdagrad,
    )
}  # fmt: skip
_OF_TORCH: Final = frozenset(
    ["SGD", "Adagrad", "Adam", "AdamW", "RMSprop", "Adadelta", "NAdam", "RAdam"]
)


def from_json(data: Mapping[str, Any]) -> Updater:
    """Return the updater that to_json() was called on.

    Raises:
        ValueError: there is no such updater or hyper-parameter, or its value is out of range.
    """
    name = data.get("updater")
    kind = _ALL.get(str(name))
    if kind is None:
        raise ValueError(f"no updater {name!r}; known: {', '.join(_ALL)}")
    values = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in data.items()
        if key != "updater"
    }
    unknown = values.keys() - {f.name for f in dataclasses.fields(kind)}
    if unknown:
        raise ValueError(f"{name} has no hyper-parameter {sorted(unknown)}")
    return kind(**values)


def from_torch(group: Mapping[str, Any], class_name: str) -> Updater | None:
    """Return the updater that does what a torch optimizer does to this parameter group.

    Args:
        group: one of `optimizer.param_groups`. How torch computes (foreach, fused, capturable) has
            no meaning here.
        class_name: `type(optimizer).__name__`.

    Returns:
        None where servers cannot do it: another class, or differentiable=True.
    """
    if class_name not in _OF_TORCH or group.get("differentiable"):
        return None
    kind = _ALL[class_name]
    return kind(**{f.name: _plain(f.default, group[f.name]) for f in dataclasses.fields(kind)
                   if f.name in group})  # fmt: skip


def _plain(default: Any, value: Any) -> Any:
    """Return a hyper-parameter, which may be a tensor of one element, as its default is typed."""
    if isinstance(default, tuple):
        return tuple(float(x) for x in value)
    return type(default)(value)
