"""Options of DistributedOptimizer for the reduction of gradients, checked."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ringcomm.collectives.op import AVERAGE, SUM, Op
from ringcomm.engine.api.world import engine
from ringcomm.engine.core.engine import Engine
from ringcomm.engine.core.group import Group
from ringcomm.torch.backward.parameters import Named
from ringcomm.torch.compression import Compression
from ringcomm.torch.horovod.process_sets import ProcessSet, global_process_set

_alone: WeakKeyDictionary[Engine, Group] = WeakKeyDictionary()


@dataclass(frozen=True)
class GradientOptions:
    """Arguments of DistributedOptimizer; ValueError: out of range, or they do not fit together."""

    op: Op = AVERAGE
    compression: Any = Compression.none
    predivide: float = 1.0
    groups: int | Sequence[Sequence[torch.nn.Parameter]] = 0
    sparse_as_dense: bool = False
    process_set: ProcessSet = global_process_set
    shard_state: int = 0
    sync_weights: bool = True

    def __post_init__(self) -> None:
        if self.op not in (AVERAGE, SUM):
            raise ValueError(f"DistributedOptimizer: op is AVERAGE or SUM, not {self.op}")
        if not 0 < self.predivide < math.inf:
            raise ValueError(
                f"gradient_predivide_factor is {self.predivide!r}; it is a finite number above 0"
            )
        require_mean(self.predivide, self.op)
        if self.shard_state not in (0, 1):
            raise ValueError(
                f"shard_state is 0, or 1 for ZeRO-1, not {self.shard_state!r}. FSDP spreads "
                "gradients and weights, too: docs/torch_distributed.md"
            )

    @property
    def is_sharded(self) -> bool:
        """True if each rank updates only its share."""
        return self.shard_state == 1

    @property
    def group(self) -> Group:
        """The ranks that reduce together; of one outside the process set, itself only."""
        if self.process_set.included():
            return self.process_set.group
        current = engine()
        if current not in _alone:
            _alone[current] = Group([current.rank])
        return _alone[current]

    def batches(
        self, order: Sequence[int], parameters: Sequence[torch.nn.Parameter]
    ) -> tuple[list[list[int]], list[int]]:
        """Split `order` (of readiness) into groups that travel as one, and the others."""
        if isinstance(self.groups, int):
            assigned = _even(len(parameters), self.groups)
        else:
            place_of = {p: place for place, p in enumerate(parameters)}
            assigned = [[place_of[p] for p in each if p in place_of] for each in self.groups]
        group_of = {index: number for number, each in enumerate(assigned) for index in each}
        together: dict[int, list[int]] = {}
        for index in order:
            if index in group_of:
                together.setdefault(group_of[index], []).append(index)
        return list(together.values()), [i for i in order if i not in group_of]

    def summary(self, parameters: Sequence[torch.nn.Parameter]) -> dict[str, object]:
        """Return what all ranks must have alike."""
        together, _ = self.batches(range(len(parameters)), parameters)
        return {
            "op": self.op,
            "compression": getattr(self.compression, "__name__", type(self.compression).__name__),
            "gradient_predivide_factor": self.predivide,
            "groups": together,
            "sparse_as_dense": self.sparse_as_dense,
            "shard_state": int(self.shard_state),
            "sync_weights": bool(self.sync_weights),
        }


def groups_of(
    groups: int | Sequence[Sequence[torch.nn.Parameter]] | None, num_groups: int
) -> int | Sequence[Sequence[torch.nn.Parameter]]:
    """Return the number of groups, or the groups, that two arguments of DistributedOptimizer name.

    Raises:
        ValueError: both are passed, or one is invalid.
    """
    if groups is not None and num_groups:
        raise ValueError("groups replaces num_groups: pass one of them, not both")
    which = num_groups if groups is None else groups
    if isinstance(which, bool) or (isinstance(which, int) and which < 0):
        raise ValueError(f"groups is {which!r}; it is a number >= 0, or lists of parameters")
    if isinstance(which, int):
        return which
    which = [list(each) for each in which]
    listed = [p for each in which for p in each]
    if any(not isinstance(p, torch.Tensor) for p in listed):
        raise ValueError("groups must be lists of parameters")
    if len({id(p) for p in listed}) < len(listed):
        raise ValueError("groups: a parameter is in two groups, or twice in one")
    return which


def require_mean(predivide: float, op: object) -> None:
    """Raise ValueError if gradients are to be divided before they are sent, and op is no mean."""
    if predivide != 1.0 and op is not AVERAGE:
        raise ValueError(
            "gradient_predivide_factor splits the division of a mean in two: it needs "
            f"op=hvd.Average, not {op}"
        )


def require_passes(n: object) -> None:
    """Raise ValueError if n is not a number of backward() per step."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"backward_passes_per_step is a whole number from 1 on, not {n!r}")


def require_own(options: GradientOptions, own: Named, known: Named) -> None:
    """Raise ValueError if groups have a parameter not in `own`; `known` may have its name."""
    if isinstance(options.groups, int):
        return
    ids = {id(p) for _, p in own}
    names = {id(p): name for name, p in known}
    for number, group in enumerate(options.groups):
        for place, p in enumerate(group):
            if id(p) not in ids:
                raise ValueError(
                    f"groups[{number}][{place}], "
                    f"{names.get(id(p), 'a parameter')} of shape {tuple(p.shape)}, is not one of "
                    f"this optimizer's {len(own)} parameters: leave it out, or give it to the "
                    "optimizer"
                )


def _even(n: int, n_groups: int) -> list[list[int]]:
    """Split range(n) into n_groups parts of about the same length; none if n_groups is 0."""
    if n_groups == 0:
        return []
    bounds = [n * number // n_groups for number in range(n_groups + 1)]
    parts = [list(range(a, b)) for a, b in itertools.pairwise(bounds)]
    return [part for part in parts if part]
