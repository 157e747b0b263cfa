"""This rank's part of an optimizer: the state and the updates of its chunks of the buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer

from ringcomm.arrays.torch import TORCH
from ringcomm.collectives.message_patterns import chunks, consecutive, within
from ringcomm.elastic import on_new_view
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.handle import Handle
from ringcomm.errors import RingcommError
from ringcomm.torch.optim.buckets import Bucket, flat_view, node_zeros, view_like
from ringcomm.torch.optim.gradient_slot import GradientSlot
from ringcomm.torch.optim.reducer import GradientReducer
from ringcomm.torch.optim.wrapping import Settings, settings_of
from ringcomm.torch.zero.chunk_update import ChunkUpdate
from ringcomm.torch.zero.parameter_state import ParameterState, TorchState
from ringcomm.torch.zero.whole_states import gather_states, start_allgather_into

Pieces: TypeAlias = dict[int, tuple[slice, ParameterState]]  # by the parameter's index
Shares: TypeAlias = dict[int, list[int]]  # elements of each rank, by the parameter's index
MakeUpdate = Callable[[Sequence[torch.Tensor]], ChunkUpdate]
Plan = Sequence[tuple[int, int]]  # (index, number of elements) of a bucket's parameters


class OptimizerShard:
    """The shards of an optimizer, one per bucket; the buckets may change between steps.

    Attributes:
        group: the ranks that have parts of the state; None: each rank has the whole state.
    """

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = reducer
        self._shards: list[BucketWeights] = []
        self.group: Group | None = None
        self._adopted: tuple[Pieces, Shares] | None = None  # until the next step
        self._is_stale = False  # a rank is lost, and with it a part
        on_new_view(self.begin_view)

    def forget(self) -> None:
        self._shards, self.group, self._adopted, self._is_stale = [], None, None, False

    def begin_view(self) -> None:
        """Refuse the state from now on, as parts of it are lost, until adopt() or forget()."""
        self._is_stale = self.group is not None

    def adopt(self, pieces: Pieces, shares: Shares) -> None:
        """Make `pieces` this rank's part; shares: elements of each parameter that each rank has.

        The next step deals them anew. All ranks call this.
        """
        self.forget()
        self.group, self._adopted = self._reducer.options.group, (pieces, shares)

    def pieces(self) -> Pieces:
        """Return this rank's part of the state, read only."""
        if self._adopted is not None:
            return self._adopted[0]
        return {
            index: (shard.updated[index], state)
            for shard in self._shards
            for index, state in shard.states().items()
        }

    def shares(self) -> Shares:
        if self._adopted is not None:
            return self._adopted[1]
        assert self.group is not None
        return shares_of((shard.plan for shard in self._shards), self.group.size)

    def require_fresh(self) -> None:
        if self._is_stale:
            raise RingcommError(
                "DistributedOptimizer(shard_state=1): a rank is lost, and with it its part of the "
                "optimizer's state. Pass the optimizer to a TorchState, whose commit() keeps a "
                "copy of each part on another rank (docs/elastic.md), and commit before a loss"
            )

    def step(self, optimizer: Optimizer, make_update: MakeUpdate) -> None:
        """Take over the optimizer's state, and update all weights by its settings. Collective.

        Each bucket's weights are sent as soon as this rank's chunk is updated.
        """
        self._arrange(make_update)
        self._take_over(optimizer)
        self._require_reduced()
        group_of = {
            p: number for number, each in enumerate(optimizer.param_groups) for p in each["params"]
        }
        before = after = settings_of(optimizer)
        under_way: list[tuple[BucketWeights, Handle[Any]]] = []
        try:
            for shard in self._shards:
                after = shard.update(before, group_of)
                under_way.append((shard, shard.send()))
        finally:
            _wait_for_all(under_way)
        for group, settings in zip(optimizer.param_groups, after, strict=True):
            group.update(settings)

    def states(self, *, is_wanted: bool) -> dict[torch.Tensor, TorchState]:
        """Return the states of whole parameters, {} unless is_wanted. Collective."""
        self.require_fresh()
        slots, shard_of = self._reducer.slots, _by_index(self._shards)
        states: dict[torch.Tensor, TorchState] = {}
        for index, whole in self._gather(self.shares()):
            p = slots[index].parameter
            if is_wanted:
                in_bucket = shard_of.get(index)
                view = (
                    view_like(p.new_empty(p.numel()), p)
                    if in_bucket is None
                    else in_bucket.view(index)
                )
                states[p] = whole.to(view.device).shaped(view)
        return states

    def _arrange(self, make_update: MakeUpdate) -> None:
        """If the buckets have changed, make new shards, which is collective."""
        group, buckets = self._reducer.options.group, self._reducer.plan.ensure_buckets()
        plans = [shard.plan for shard in self._shards]
        is_same = plans == [plan_of(bucket) for bucket in buckets] and self._adopted is None
        self.require_fresh()
        if group is self.group and is_same:
            return
        self._require_same_ranks(group)
        slots = self._reducer.slots
        fresh = [BucketWeights(bucket, slots, group, make_update) for bucket in buckets]
        self._hand_over(fresh, group.size)
        self._shards, self.group, self._adopted = fresh, group, None

    def _hand_over(self, fresh: Sequence[BucketWeights], size: int) -> None:
        """Give the state of each piece to the rank that updates it from now on."""
        before = self.shares() if self.group is not None else {}
        after = shares_of((shard.plan for shard in fresh), size)
        moving = {index: share for index, share in before.items() if share != after[index]}
        shard_of = _by_index(fresh)
        for index, state in self._states().items():
            if index not in moving:
                shard_of[index].set_state(index, state)
        if moving:
            for index, whole in self._gather(moving):
                shard_of[index].set_part(index, whole)

    def _take_over(self, optimizer: Optimizer) -> None:
        if not optimizer.state:
            return
        for index, shard in _by_index(self._shards).items():
            state = optimizer.state.pop(self._reducer.slots[index].parameter, None)
            if state:
                shard.set_part(index, ParameterState.of(state, shard.view(index)))

    def _states(self) -> dict[int, ParameterState]:
        return {index: state for index, (_, state) in self.pieces().items()}

    def _gather(self, shares: Mapping[int, Sequence[int]]) -> Iterable[tuple[int, ParameterState]]:
        assert self.group is not None
        names = [slot.name for slot in self._reducer.slots]
        return gather_states(self._states(), shares, names, self.group, self._reducer.plan.suffix)

    def _require_same_ranks(self, group: Group) -> None:
        mine = self.group
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
                    "updates it with shard_state=1: set .grad to None, or call requires_grad_(True)"
                )


def _wait_for_all(under_way: Sequence[tuple[BucketWeights, Handle[Any]]]) -> None:
    """Wait until all weights have arrived, then raise the first error."""
    errors = []
    for shard, handle in under_way:
        try:
            handle.wait()
        except Exception as error:  # noqa: BLE001 - the others must end, too
            errors.append(error)
        else:
            shard.note_written()
    if errors:
        raise errors[0]


def _by_index(shards: Iterable[BucketWeights]) -> dict[int, BucketWeights]:
    return {index: shard for shard in shards for index, _ in shard.plan}


class BucketWeights:
    """One bucket's weights, in memory that the ranks of this node read directly.

    Parameters are moved to this memory: tensors that shared their old memory no longer see updates.

    Attributes:
        updated: for each parameter's index, the elements of the parameter that this rank updates.
    """

    def __init__(
        self, bucket: Bucket, slots: Sequence[GradientSlot], group: Group, make_update: MakeUpdate
    ) -> None:
        self.plan = plan_of(bucket)
        self.updated = {
            member.index: member.own
            for member in bucket.members
            if member.own.start < member.own.stop
        }
        self._group = group
        self._name = f"weights of {bucket.whose}"
        self._weights = node_zeros(bucket.buffer.numel(), bucket.buffer, group)
        self._slots = {member.index: slots[member.index] for member in bucket.members}
        self._views = {
            member.index: view_like(self._weights[member.place], slots[member.index].parameter)
            for member in bucket.members
        }
        self._move_in()
        self._update = make_update(
            [flat_view(self._views[index])[part] for index, part in self.updated.items()]
        )

    @torch.no_grad()
    def update(
        self,
        settings: Sequence[Settings],
        group_of: Mapping[torch.Tensor, int],
    ) -> list[Settings]:
        """Update this rank's chunk, and return the new settings."""
        self._move_in()
        groups: list[tuple[Settings, list[int]]] = [(each, []) for each in settings]
        gradients: list[torch.Tensor | None] = []
        for piece, index in enumerate(self.updated):
            slot = self._slots[index]
            number = group_of.get(slot.parameter)
            gradients.append(None if number is None else slot.part.gradient())
            if number is not None:
                groups[number][1].append(piece)
        return self._update.update(gradients, groups)

    def send(self) -> Handle[Any]:
        """Start to exchange the chunks of all ranks. Collective."""
        parts = chunks(self._weights.numel(), self._group.size)
        own = self._weights[parts[self._group.index]]
        counts = [part.stop - part.start for part in parts]
        return start_allgather_into(self._weights, own, counts, self._name, self._group)

    def note_written(self) -> None:
        """Note that the weights have new values; give them new versions, for autograd."""
        for slot in self._slots.values():
            if slot.parameter.grad is not None:
                TORCH.written(slot.parameter)

    def view(self, index: int) -> torch.Tensor:
        return self._views[index]

    def states(self) -> dict[int, ParameterState]:
        return {index: self._update.state_of(piece) for piece, index in enumerate(self.updated)}

    def set_state(self, index: int, state: ParameterState) -> None:
        self._update.set_state(list(self.updated).index(index), state)

    def set_part(self, index: int, whole: ParameterState) -> None:
        own = self.updated.get(index)
        if own is not None:
            self.set_state(index, whole.part(own))

    @torch.no_grad()
    def _move_in(self) -> None:
        """Move the parameters into this memory, unless they are already there."""
        for index, view in self._views.items():
            parameter = self._slots[index].parameter
            is_there = parameter.data_ptr() == view.data_ptr()
            if not is_there or parameter.stride() != view.stride():
                view.copy_(parameter.clone())  # clone: the parameter may overlap the view
                parameter.data = view


def plan_of(bucket: Bucket) -> Plan:
    return [(member.index, member.view.numel()) for member in bucket.members]


def shares_of(plans: Iterable[Plan], size: int) -> dict[int, list[int]]:
    """Return, for each parameter's index, how many of its elements each of `size` ranks updates.

    A bucket holds the elements of its parameters one after another. It is cut into one chunk per
    rank; a cut may be within a parameter.
    """
    shares = {}
    for plan in plans:
        places = consecutive([count for _, count in plan])
        cut = chunks(places[-1].stop, size)
        for (index, _), place in zip(plan, places, strict=True):
            parts = [within(place, chunk) for chunk in cut]
            shares[index] = [part.stop - part.start for part in parts]
    return shares
