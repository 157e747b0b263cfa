"""Updates that one kernel makes of a bucket, and pushes to all GPUs: SGD, Adam and AdamW."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import optim
from torch.optim import Optimizer

from ringcomm.arrays import DeviceAdapter, device_adapter_for
from ringcomm.engine.gpu import Gpus
from ringcomm.engine.group import Group
from ringcomm.engine.world import engine
from ringcomm.gpu.base import UpdatePiece
from ringcomm.gpu.kernels import Argument, Rule, adam_numbers, sgd_numbers
from ringcomm.torch.buckets import is_16_bit, wide
from ringcomm.torch.chunk_update import MASTER, Chunk, Settings
from ringcomm.torch.held import COUNT, Held, State

_STATES: Final = {
    optim.SGD: ("momentum_buffer",),
    optim.Adam: ("exp_avg", "exp_avg_sq"),
    optim.AdamW: ("exp_avg", "exp_avg_sq"),
}
_TOO_MUCH: Final = ("amsgrad", "capturable", "differentiable")  # settings that no kernel knows
_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)


def can_fuse(kind: type[Optimizer], settings: Sequence[Settings]) -> bool:
    """Return True if a kernel does what an optimizer of this class does with these settings."""
    return kind in _STATES and all(
        not any(each.get(name) for name in _TOO_MUCH)
        and not any(torch.is_tensor(value) for value in each.values())  # to read it, hosts wait
        for each in settings
    )


def can_push(group: Group, weights: torch.Tensor) -> bool:
    """Return True if ranks of this group write to each other's GPU memory, and these are there.

    Alike on all ranks, once an operation of the group on their GPUs is over.
    """
    if weights.dtype not in _DTYPES or device_adapter_for(weights) is None:
        return False
    team = Gpus.of(engine()).team_or_none(group)
    return team is not None and team.choice is not None and team.choice.transport == "ipc"


@dataclass(frozen=True)
class _Step:
    """What neighbours must have in common to be updated as one.

    Attributes:
        group: number of their param_group.
        count: steps that their state has seen, this one included.
    """

    group: int
    count: int


class FusedUpdate:
    """ChunkUpdate whose work is a kernel's, which writes the new weights to all ranks.

    It computes in float32. Weights of 16 bits have float32 masters; one that somebody has changed
    since is a new master. State is what torch's class would have.

    Args:
        kind: of the optimizer; see can_fuse().
        chunk: see can_push().
    """

    def __init__(self, kind: type[Optimizer], chunk: Chunk) -> None:
        self._kind, self._chunk = kind, chunk
        adapter = device_adapter_for(chunk.weights)
        assert adapter is not None
        self._adapter: DeviceAdapter = adapter
        self._counts = [0 for _ in chunk.places]
        self._has_master = [False for _ in chunk.places]  # one that differs from the weights
        self._step_device = torch.device("cpu")
        weights = chunk.weights[chunk.own]
        self._master = wide(weights)
        self._states: dict[str, torch.Tensor] = {}
        self.pieces: tuple[UpdatePiece, ...] = ()

    def update(
        self, gradients: Sequence[torch.Tensor | None], groups: Sequence[tuple[Settings, list[int]]]
    ) -> list[Settings]:
        """Say in `pieces` what there is to do; see ChunkUpdate."""
        self._follow()
        steps: list[_Step | None] = [None for _ in gradients]
        for number, (settings, members) in enumerate(groups):
            if settings.get("fused"):
                self._step_device = self._chunk.weights.device  # where torch has it then
            for piece in members:
                gradient = gradients[piece]
                if gradient is None:
                    continue
                self._bring(gradient, self._chunk.places[piece])
                self._counts[piece] += settings.get("momentum") != 0
                self._has_master[piece] = is_16_bit(self._chunk.weights)
                steps[piece] = _Step(number, self._counts[piece])
        self.pieces = tuple(
            self._piece(place, groups[step.group][0], step.count)
            for step, place in self._merged(steps)
        )
        return [settings for settings, _ in groups]

    def held(self, piece: int) -> Held:
        """See ChunkUpdate."""
        part, count = self._part(piece), self._counts[piece]
        lines = {name: line[part] for name, line in self._states.items()} if count else {}
        alike: State = {}
        if count and self._kind is not optim.SGD:
            alike[COUNT] = torch.tensor(float(count), device=self._step_device)
        if self._has_master[piece]:
            lines[MASTER] = self._master[part]
        return Held(lines, alike)

    def hold(self, piece: int, held: Held) -> None:
        """See ChunkUpdate."""
        part = self._part(piece)
        for name in _STATES[self._kind]:
            if name in held.lines:
                self._state(name)[part].copy_(held.lines[name])
        if self._kind is optim.SGD:
            self._counts[piece] = int("momentum_buffer" in held.lines)
        else:
            self._counts[piece] = int(held.alike.get(COUNT, 0))
        master = held.lines.get(MASTER)
        if master is not None and is_16_bit(self._chunk.weights):
            self._master[part].copy_(master)
            self._has_master[piece] = True

    def _state(self, name: str) -> torch.Tensor:
        """Return a line of state; SGD may never need its."""
        if name not in self._states:
            self._states[name] = torch.zeros_like(self._master)
        return self._states[name]

    def _part(self, piece: int) -> slice:
        """Return where a piece is in this rank's part of the bucket."""
        place, start = self._chunk.places[piece], self._chunk.own.start
        return slice(place.start - start, place.stop - start)

    def _follow(self) -> None:
        """See where somebody else has written to the weights; no host waits for the answer."""
        weights, master = self._chunk.weights[self._chunk.own], self._master
        if is_16_bit(weights):
            is_own = master.to(weights.dtype) == weights
            torch.where(is_own, master, weights.float(), out=master)

    def _bring(self, gradient: torch.Tensor, place: slice) -> None:
        """Let a gradient stand where the kernel reads it."""
        target = self._chunk.gradients[place]
        if gradient.data_ptr() != target.data_ptr():
            target.copy_(gradient)

    def _merged(self, steps: Sequence[_Step | None]) -> Iterator[tuple[_Step, slice]]:
        """Return runs of neighbours that take the same step."""
        places = zip(steps, self._chunk.places, strict=True)
        for step, run in itertools.groupby(places, key=lambda each: each[0]):
            if step is not None:
                parts = [place for _, place in run]
                yield step, slice(parts[0].start, parts[-1].stop)

    def _piece(self, place: slice, settings: Settings, count: int) -> UpdatePiece:
        start = self._chunk.own.start
        part = slice(place.start - start, place.stop - start)
        rule, numbers = _rule(self._kind, settings, count)
        names = () if rule == "Sgd" else _STATES[self._kind]
        owned = [self._master, *map(self._state, names)]
        spans = tuple(self._adapter.span(line[part]) for line in owned)
        return UpdatePiece(place.start, place.stop, spans, rule, numbers)


def _rule(kind: type[Optimizer], settings: Settings, count: int) -> tuple[Rule, Argument]:
    """Return the kernel's rule for a step, and its numbers."""
    known = {name: settings[name] for name in ("lr", "weight_decay", "maximize")}
    if kind is not optim.SGD:
        adam: dict[str, Any] = {name: settings[name] for name in ("betas", "eps")}
        is_decoupled = kind is optim.AdamW or settings.get("decoupled_weight_decay", False)
        return "Adam", adam_numbers(count, **known, **adam, decoupled=is_decoupled)
    sgd: dict[str, Any] = {name: settings[name] for name in ("momentum", "dampening", "nesterov")}
    return "Momentum" if sgd["momentum"] else "Sgd", sgd_numbers(count, **known, **sgd)
