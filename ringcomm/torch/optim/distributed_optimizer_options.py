"""Options of DistributedOptimizer for the reduction of gradients, checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast
from weakref import WeakKeyDictionary

import torch

from ringcomm.collectives.message_patterns import chunks
from ringcomm.collectives.operators import AVERAGE, SUM, Op
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.core.engine import Engine
from ringcomm.engine.core.group import Group
from ringcomm.integers import is_integer
from ringcomm.torch.backward.parameter_hooks import Named
from ringcomm.torch.compression import Compression, Compressor, name_of
from ringcomm.torch.horovod.process_sets import ProcessSet, global_process_set

_alone: WeakKeyDictionary[Engine, Group] = WeakKeyDictionary()
ParameterGroups = int | Sequence[Sequence[torch.nn.Parameter]]  # a number of groups, or the groups


@dataclass(frozen=True)
class GradientOptions:
    """Arguments of DistributedOptimizer. Raises ValueError or TypeError if one is invalid."""

    op: Op = AVERAGE
    compression: Compressor = Compression.none
    predivide: float = 1.0
    groups: ParameterGroups = 0
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
        return self.shard_state == 1

    @property
    def takes_mean(self) -> bool:
        return self.op is AVERAGE and not self.is_sharded

    @property
    def group(self) -> Group:
        """The ranks that reduce together: the process set, or this rank if it is no member."""
        if self.process_set.included():
            return self.process_set.group
        current = engine()
        if current not in _alone:
            _alone[current] = Group([current.rank])
        return _alone[current]

    def batches(
        self, order: Sequence[int], parameters: Sequence[torch.nn.Parameter]
    ) -> tuple[list[list[int]], list[int]]:
        """Split the indices in `order`: return one list per group of parameters, and the rest."""
        if isinstance(self.groups, int):
            parts = chunks(len(parameters), self.groups) if self.groups else []
            assigned = [list(range(part.start, part.stop)) for part in parts]
        else:
            index_of = {p: index for index, p in enumerate(parameters)}
            assigned = [[index_of[p] for p in each if p in index_of] for each in self.groups]
        group_of = {index: number for number, each in enumerate(assigned) for index in each}
        together: dict[int, list[int]] = {}
        for index in order:
            if index in group_of:
                together.setdefault(group_of[index], []).append(index)
        return list(together.values()), [i for i in order if i not in group_of]

    def summary(self, parameters: Sequence[torch.nn.Parameter]) -> dict[str, object]:
        """Return the options that must be the same on all ranks."""
        together, _ = self.batches(range(len(parameters)), parameters)
        return {
            "op": self.op,
            "compression": name_of(self.compression),
            "gradient_predivide_factor": self.predivide,
            "groups": together,
            "sparse_as_dense": self.sparse_as_dense,
            "shard_state": int(self.shard_state),
            "sync_weights": bool(self.sync_weights),
        }


def groups_of(groups: ParameterGroups | None, num_groups: int) -> ParameterGroups:
    """Return `groups`; if `groups` is None, return `num_groups`.

    Raises:
        ValueError: both are passed, or one is invalid.
    """
    if groups is not None and num_groups:
        raise ValueError("groups replaces num_groups: pass one of them, not both")
    chosen = num_groups if groups is None else groups
    number = int(cast(int, chosen)) if is_integer(chosen) else None
    if isinstance(chosen, bool) or (number is not None and number < 0):
        raise ValueError(f"groups is {chosen!r}; it is a number >= 0, or lists of parameters")
    if number is not None:
        return number
    assert not isinstance(chosen, int)
    chosen = [list(each) for each in chosen]
    listed = [p for each in chosen for p in each]
    if any(not isinstance(p, torch.Tensor) for p in listed):
        raise ValueError("groups must be lists of parameters")
    if len({id(p) for p in listed}) < len(listed):
        raise ValueError("groups: a parameter is in two groups, or twice in one")
    return chosen


def require_mean(predivide: float, op: object) -> None:
    """Raise ValueError if gradients are divided before they are sent, and op is not AVERAGE."""
    if predivide != 1.0 and op is not AVERAGE:
        raise ValueError(
            "gradient_predivide_factor splits the division of a mean in two: it needs "
            f"op=hvd.Average, not {op}"
        )


def checked_passes(n: int) -> int:
    if not is_integer(n) or n < 1:
        raise ValueError(f"backward_passes_per_step is a whole number from 1 on, not {n!r}")
    return int(n)


def require_own(options: GradientOptions, own: Named, known: Named) -> None:
    """Raise ValueError if a parameter in options.groups is not in `own`; `known` gives its name."""
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
