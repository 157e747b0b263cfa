"""Registry of this process's distributed optimizers, and of the parameters that they own."""

from __future__ import annotations

import gc
from collections.abc import MutableMapping, Sequence
from typing import Protocol
from weakref import WeakKeyDictionary, ref

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ringcomm.engine.core.engine import Engine
from ringcomm.engine.core.group import Group


class Numbered(Protocol):
    """A reducer; its number tells its messages from those of others with the same names."""

    number: int


class Weighed(Protocol):
    """A reducer whose gradient of this step is the mean of so many samples; None: not weighed."""

    @property
    def samples(self) -> float | None:
        """Number of samples."""
        ...


_weighed: WeakKeyDictionary[Engine, ref[Weighed]] = WeakKeyDictionary()
_owners: MutableMapping[torch.Tensor, ref[Numbered]] = WeakIdKeyDictionary()
_counts: WeakKeyDictionary[Group, int] = WeakKeyDictionary()


def enrol(newcomer: Numbered, group: Group) -> None:
    """Give it the group's next number: alike on its ranks, whatever their garbage collectors do."""
    newcomer.number = _counts.get(group, 0) + 1
    _counts[group] = newcomer.number


def claim(named: Sequence[tuple[str, torch.Tensor]], owner: Numbered) -> None:
    """Make `owner` the reducer of these parameters. Raises ValueError if one has another."""
    if any(_other_owner(parameter, owner) for _, parameter in named):
        gc.collect()  # it may have been dropped, and wait in a cycle
    for name, parameter in named:
        if _other_owner(parameter, owner) is not None:
            raise ValueError(
                f"DistributedOptimizer: {name} belongs to another DistributedOptimizer, and its "
                "gradients would be reduced twice: delete that one first"
            )
    for _, parameter in named:
        _owners[parameter] = ref(owner)


def note_samples(owner: Weighed, engine: Engine) -> None:
    """Make weight_of_step() return the samples of `owner`."""
    _weighed[engine] = ref(owner)


def weight_of_step(engine: Engine) -> float:
    """Return the samples that set_samples() named last for the step under way, 1 if it did not."""
    known = _weighed.get(engine)
    owner = None if known is None else known()
    return 1.0 if owner is None or owner.samples is None else owner.samples


def release(parameter: torch.Tensor, owner: Numbered) -> None:
    """Release a parameter, for another optimizer to claim."""
    if parameter in _owners and _other_owner(parameter, owner) is None:
        del _owners[parameter]


def _other_owner(parameter: torch.Tensor, owner: Numbered) -> Numbered | None:
    known = _owners.get(parameter)
    other = None if known is None else known()
    return None if other is owner else other
