"""Updates that one kernel makes of a bucket, and pushes to all GPUs: SGD, Adam and AdamW."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import optim
from torch.optim import Optimizer

from ringcomm.arrays import DeviceAdapter, device_adapter_for
from ringcomm.engine.api.world import engine
from ringcomm.engine.core.group import Group
from ringcomm.engine.executors.device import device_executor
from ringcomm.torch.optim.buckets import is_16_bit, wide
from ringcomm.torch.optim.wrapping import Settings
from ringcomm.torch.zero.chunk_update import MASTER, Chunk
from ringcomm.torch.zero.parameter_state import COUNT, ParameterState

if TYPE_CHECKING:
    from ringcomm.gpu.kernels.kernel import Argument
    from ringcomm.gpu.kernels.update import Rule
    from ringcomm.gpu.transports.base import UpdatePiece

_STATES: Final = {
    optim.SGD: ("momentum_buffer",),
    optim.Adam: ("exp_avg", "exp_avg_sq"),
    optim.AdamW: ("exp_avg", "exp_avg_sq"),
}
_TOO_MUCH: Final = ("amsgrad", "capturable", "differentiable")  # settings that no kernel knows
_CPU: Final = torch.device("cpu")
_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)


def can_fuse(kind: type[Optimizer], settings: Sequence[Settings]) -> bool:
    """Return True if a kernel does what an optimizer of this class does with these settings."""
    return kind in _STATES and all(
        not any(each.get(name) for name in _TOO_MUCH)
        and not any(_has_tensor(value) for value in each.values())  # to read it, a host waits
        for each in settings
    )


def _has_tensor(value: Any) -> bool:
    values = value if isinstance(value, tuple | list) else (value,)
    return any(torch.is_tensor(each) for each in values)


def can_push(group: Group, weights: torch.Tensor) -> bool:
    """Return True if ranks of this group write to each other's GPU memory, and weights are there.

    Alike on all ranks, once an operation of the group on their GPUs is over.
    """
    if weights.dtype not in _DTYPES or device_adapter_for(weights) is None:
        return False
    choice = device_executor().choice(engine(), group)
    return choice is not None and choice.transport == "ipc"


@dataclass(frozen=True)
class _Step:
    """Neighbouring pieces of one param_group whose state has seen as many steps are one update."""

    group: int
    count: int


@dataclass
class _Kept:
    """State of a piece, but for its tensors.

    Attributes:
        count: of steps that its state has seen; of SGD, of those with momentum.
        has_master: the master differs from the weights.
        step_device: where torch has the number of steps.
        rest: what a kernel does not know, for when torch's class goes on.
    """

    count: int = 0
    has_master: bool = False
    step_device: torch.device = _CPU
    rest: ParameterState = field(default_factory=ParameterState)


class FusedUpdate:
    """ChunkUpdate whose work is a kernel's, which writes the new weights to all ranks.

    It computes in float32. Weights of 16 bits have float32 masters; one that somebody has changed
    since is a new master. State is what torch's class would have.
    """

    def __init__(self, kind: type[Optimizer], chunk: Chunk) -> None:
        self._kind, self._chunk = kind, chunk
        adapter = device_adapter_for(chunk.weights)
        assert adapter is not None
        self._adapter: DeviceAdapter = adapter
        self._kept = [_Kept() for _ in chunk.places]
        self._next: dict[int, _Kept] = {}  # by piece, once the kernel is through
        self._master = wide(chunk.weights[chunk.own])
        self._states: dict[str, torch.Tensor] = {}
        self.pieces: tuple[UpdatePiece, ...] = ()

    def update(
        self,
        gradients: Sequence[torch.Tensor | None],
        groups: Sequence[tuple[Settings, list[int]]],
        buffer: torch.Tensor,
    ) -> list[Settings]:
        """Say in `pieces` what the kernel has to do."""
        self._follow()
        steps: list[_Step | None] = [None for _ in gradients]
        following = {}
        for number, (settings, members) in enumerate(groups):
            for piece in members:
                gradient = gradients[piece]
                if gradient is None:
                    continue
                place = buffer[self._chunk.places[piece]]  # where the kernel reads it
                if gradient.data_ptr() != place.data_ptr():
                    place.copy_(gradient)
                following[piece] = kept = self._after(self._kept[piece], settings)
                steps[piece] = _Step(number, self._number(kept.count))
        self.pieces = tuple(
            self._piece(place, groups[step.group][0], step.count)
            for step, place in self._merged(steps)
        )
        self._next = following
        return [settings for settings, _ in groups]

    def note_done(self) -> None:
        """Note that the kernel has made the update."""
        for piece, kept in self._next.items():
            self._kept[piece] = kept
        self._next = {}

    def state_of(self, piece: int) -> ParameterState:
        """Return the state of a piece as torch's class would have it."""
        part, kept = self._part(piece), self._kept[piece]
        lines, alike = dict(kept.rest.by_element), dict(kept.rest.common)
        if kept.count:
            lines |= {name: line[part] for name, line in self._states.items()}
        if kept.count and self._kind is not optim.SGD:
            alike[COUNT] = torch.tensor(float(kept.count), device=kept.step_device)
        if kept.has_master:
            lines[MASTER] = self._master[part]
        return ParameterState(lines, alike)

    def set_state(self, piece: int, state: ParameterState) -> None:
        """Set the state of a piece, as torch's class has it."""
        part, names = self._part(piece), _STATES[self._kind]
        lines, alike = dict(state.by_element), dict(state.common)
        master, count = lines.pop(MASTER, None), alike.pop(COUNT, None)
        kept = _Kept()
        if self._kind is optim.SGD:
            kept.count = int("momentum_buffer" in lines)
        elif count is not None:
            kept.count = int(count)
            kept.step_device = count.device if torch.is_tensor(count) else _CPU
        for name in names:
            if name in lines:
                self._state(name)[part].copy_(lines.pop(name))
        if master is not None and is_16_bit(self._chunk.weights):
            self._master[part].copy_(master)
            kept.has_master = True
        unknown = {key: value for key, value in alike.items() if key not in names}  # or None
        kept.rest = ParameterState(lines, unknown)
        self._kept[piece] = kept

    def _after(self, kept: _Kept, settings: Settings) -> _Kept:
        """Return what is kept of a piece after one more step."""
        return replace(
            kept,
            count=kept.count + (settings.get("momentum") != 0),
            has_master=is_16_bit(self._chunk.weights),
            step_device=self._chunk.weights.device if settings.get("fused") else kept.step_device,
        )

    def _number(self, count: int) -> int:
        """Return what of a number of steps matters to the kernel: to SGD, if it is the first."""
        return min(count, 2) if self._kind is optim.SGD else count

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
        """Take over weights that somebody else has written; no host waits for the answer."""
        weights, master = self._chunk.weights[self._chunk.own], self._master
        if is_16_bit(weights):
            is_own = master.to(weights.dtype) == weights
            torch.where(is_own, master, weights.float(), out=master)

    def _merged(self, steps: Sequence[_Step | None]) -> Iterator[tuple[_Step, slice]]:
        """Return runs of neighbours that take the same step."""
        places = zip(steps, self._chunk.places, strict=True)
        for step, run in itertools.groupby(places, key=lambda each: each[0]):
            if step is not None:
                parts = [place for _, place in run]
                yield step, slice(parts[0].start, parts[-1].stop)

    def _piece(self, place: slice, settings: Settings, count: int) -> UpdatePiece:
        from ringcomm.gpu.transports.base import UpdatePiece

        start = self._chunk.own.start
        part = slice(place.start - start, place.stop - start)
        rule, numbers = _rule(self._kind, settings, count)
        names = () if rule == "Sgd" else _STATES[self._kind]
        owned = [self._master, *map(self._state, names)]
        spans = tuple(self._adapter.span(line[part]) for line in owned)
        return UpdatePiece(place.start, place.stop, spans, rule, numbers)


def _rule(kind: type[Optimizer], settings: Settings, count: int) -> tuple[Rule, Argument]:
    """Return the kernel's rule for a step, and its numbers."""
    from ringcomm.gpu.kernels.update import adam_numbers, sgd_numbers

    known = {name: settings[name] for name in ("lr", "weight_decay", "maximize")}
    if kind is not optim.SGD:
        adam: dict[str, Any] = {name: settings[name] for name in ("betas", "eps")}
        is_decoupled = kind is optim.AdamW or settings.get("decoupled_weight_decay", False)
        return "Adam", adam_numbers(count, **known, **adam, decoupled=is_decoupled)
    sgd: dict[str, Any] = {name: settings[name] for name in ("momentum", "dampening", "nesterov")}
    return "Momentum" if sgd["momentum"] else "Sgd", sgd_numbers(count, **known, **sgd)
