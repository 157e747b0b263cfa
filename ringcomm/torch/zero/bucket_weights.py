"""The weights of one bucket: a rank updates its chunk, and receives the other ranks' chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ringcomm.arrays.torch import TORCH
from ringcomm.collectives.message_patterns import chunks
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.handle import Handle
from ringcomm.torch.optim.buckets import Bucket, flat_view, node_zeros, view_like
from ringcomm.torch.optim.gradient_slot import GradientSlot
from ringcomm.torch.optim.wrapping import Settings
from ringcomm.torch.zero.chunk_update import ChunkUpdate
from ringcomm.torch.zero.gather_whole_states import start_allgather_into
from ringcomm.torch.zero.parameter_state import ParameterState
from ringcomm.torch.zero.shares import Plan

MakeUpdate = Callable[[Sequence[torch.Tensor]], ChunkUpdate]


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
