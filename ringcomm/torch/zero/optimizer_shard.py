"""This rank's share of an optimizer: of its state, and of its work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ringcomm.engine.core.group import Group
from ringcomm.engine.core.handle import Handle
from ringcomm.errors import RingcommError
from ringcomm.torch.optim.buckets import Bucket
from ringcomm.torch.optim.reducer import GradientReducer
from ringcomm.torch.optim.wrapping import settings_of
from ringcomm.torch.zero.parameter_state import ParameterState, TorchState
from ringcomm.torch.zero.shares import shares_of
from ringcomm.torch.zero.weight_shard import MakeUpdate, WeightShard, plan_of
from ringcomm.torch.zero.whole_states import gather_states


class OptimizerShard:
    """The shards of an optimizer: as many as it has buckets, which may change between steps."""

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = reducer
        self._shards: list[WeightShard] = []
        self._group: Group | None = None  # who shares; None: each rank has the whole state
        self._is_fused = False

    @property
    def are_spread(self) -> bool:
        """True once each rank has its share of the state alone; alike on all ranks."""
        return self._group is not None

    def forget(self) -> None:
        """Drop this rank's share; the next step begins with the whole state."""
        self._shards, self._group = [], None

    def step(self, optimizer: Optimizer, make_update: MakeUpdate, *, is_fused: bool) -> None:
        """Update all weights, by the optimizer's settings; take over its states. Collective.

        Each bucket's weights leave as soon as this rank's chunk of them is updated.
        """
        buckets = self._arrange(make_update, is_fused=is_fused)
        self._take_over(optimizer)
        self._require_reduced()
        group_of = {
            p: number for number, each in enumerate(optimizer.param_groups) for p in each["params"]
        }
        before = after = settings_of(optimizer)
        under_way: list[tuple[WeightShard, Handle[Any]]] = []
        try:
            for shard, bucket in zip(self._shards, buckets, strict=True):
                after = shard.update(before, group_of, bucket.buffer)
                under_way.append((shard, shard.send(bucket.buffer)))
        finally:
            _wait_for_all(under_way)
        for group, settings in zip(optimizer.param_groups, after, strict=True):
            group.update(settings)

    def states(self, *, is_wanted: bool) -> dict[torch.Tensor, TorchState]:
        """Return the states of whole parameters, {} if they are not wanted here. Collective."""
        assert self._group is not None
        views = {index: shard.view(index) for index, shard in _by_index(self._shards).items()}
        shares = shares_of((shard.plan for shard in self._shards), self._group.size)
        return {
            self._reducer.slots[index].parameter: whole.to(views[index].device).shaped(views[index])
            for index, whole in self._gather(shares)
            if is_wanted
        }

    def _arrange(self, make_update: MakeUpdate, *, is_fused: bool) -> Sequence[Bucket]:
        """Return the buckets, with shards where they have changed; collective then."""
        options = self._reducer.options
        group, buckets = options.group, self._reducer.plan.buckets_for(options)
        plans = [shard.plan for shard in self._shards]
        is_same = plans == [plan_of(bucket) for bucket in buckets]
        if group is self._group and is_same and is_fused == self._is_fused:
            return buckets
        self._require_same_ranks(group)
        slots = self._reducer.slots
        fresh = [WeightShard(bucket, slots, group, make_update) for bucket in buckets]
        self._hand_over(fresh, group.size)
        self._shards, self._group, self._is_fused = fresh, group, is_fused
        return buckets

    def _hand_over(self, fresh: Sequence[WeightShard], size: int) -> None:
        """Give the state of each piece to who is to have it."""
        before = shares_of((shard.plan for shard in self._shards), size)
        after = shares_of((shard.plan for shard in fresh), size)
        moving = {index: share for index, share in before.items() if share != after[index]}
        shard_of = _by_index(fresh)
        for index, state in self._states().items():
            if index not in moving:
                shard_of[index].set_state(index, state)
        if moving:
            for index, whole in self._gather(moving):
                _set_part(shard_of[index], index, whole)

    def _take_over(self, optimizer: Optimizer) -> None:
        """Keep this rank's part of the states of whole parameters."""
        if not optimizer.state:
            return
        for index, shard in _by_index(self._shards).items():
            state = optimizer.state.pop(self._reducer.slots[index].parameter, None)
            if state:
                _set_part(shard, index, ParameterState.of(state, shard.view(index)))

    def _states(self) -> dict[int, ParameterState]:
        return {index: state for shard in self._shards for index, state in shard.states().items()}

    def _gather(self, shares: Mapping[int, Sequence[int]]) -> Iterable[tuple[int, ParameterState]]:
        assert self._group is not None
        names = [slot.name for slot in self._reducer.slots]
        return gather_states(self._states(), shares, names, self._group, self._reducer.suffix)

    def _require_same_ranks(self, group: Group) -> None:
        mine = self._group
        if mine is not None and (mine.size, mine.index) != (group.size, group.index):
            raise RingcommError(
                f"DistributedOptimizer: the state is spread over {mine.size} ranks, and there are "
                f"{group.size} now: take state_dict() before shutdown(), and load it after init()"
            )

    def _require_reduced(self) -> None:
        for slot in self._reducer.slots:
            if not slot.has_hooks and slot.parameter.grad is not None:
                raise RingcommError(
                    f"DistributedOptimizer: {slot.name} has a .grad and is frozen, so no rank "
                    "updates it with shard_state=1: set it to None, or requires_grad_(True)"
                )


def _wait_for_all(under_way: Sequence[tuple[WeightShard, Handle[Any]]]) -> None:
    """Wait until the weights of all are there, then raise the first error."""
    errors = []
    for shard, handle in under_way:
        try:
            handle.wait()
        except Exception as error:  # noqa: BLE001 - the others are carried out all the same
            errors.append(error)
        else:
            shard.note_written()
    if errors:
        raise errors[0]


def _by_index(shards: Iterable[WeightShard]) -> dict[int, WeightShard]:
    return {index: shard for shard in shards for index, _ in shard.plan}


def _set_part(shard: WeightShard, index: int, whole: ParameterState) -> None:
    own = shard.updated.get(index)
    if own is not None:
        shard.set_state(index, whole.part(own))
