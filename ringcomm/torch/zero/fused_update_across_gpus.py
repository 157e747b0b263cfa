"""SGD, Adam and AdamW by one kernel per bucket, which also writes weights to the other GPUs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import optim
from torch.optim import Optimizer

from ringcomm.arrays import DeviceAdapter, device_adapter_for
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.core.group import Group
from ringcomm.engine.executors.gpu_loader import device_executor
from ringcomm.torch.optim.buckets import is_16_bit, wide
from ringcomm.torch.optim.wrapping import Settings
from ringcomm.torch.zero.chunk_update_by_own_class import MASTER, Chunk, ChunkUpdate
from ringcomm.torch.zero.parameter_state import COUNT, ParameterState

if TYPE_CHECKING:
    from ringcomm.gpu.kernels.base import Argument
    from ringcomm.gpu.kernels.reduce_and_optimizer_step import Rule
    from ringcomm.gpu.transports.works import UpdatePiece

_STATES: Final = {
    optim.SGD: ("momentum_buffer",),
    optim.Adam: ("exp_avg", "exp_avg_sq"),
    optim.AdamW: ("exp_avg", "exp_avg_sq"),
}
_UNSUPPORTED: Final = ("amsgrad", "capturable", "differentiable")  # no kernel supports these
_CPU: Final = torch.device("cpu")
_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)


def can_fuse(kind: type[Optimizer], settings: Sequence[Settings]) -> bool:
    return kind in _STATES and all(
        not any(each.get(name) for name in _UNSUPPORTED)
        and not any(_has_tensor(value) for value in each.values())  # may be on the GPU
        for each in settings
    )


def _has_tensor(value: Any) -> bool:
    values = value if isinstance(value, tuple | list) else (value,)
    return any(torch.is_tensor(each) for each in values)


def can_push(group: Group, weights: torch.Tensor) -> bool:
    """Return True if the weights are on GPUs, and the ranks can write to each other's GPU memory.

    Once the group has completed an operation on GPUs, the result is the same on all ranks.
    """
    if weights.dtype not in _DTYPES or device_adapter_for(weights) is None:
        return False
    choice = device_executor().choice(engine(), group)
    return choice is not None and choice.transport == "ipc"


class _Step(NamedTuple):
    """A step of a piece; neighbouring pieces with equal steps are one update."""

    group: int
    n_steps: int


@dataclass
class _PieceState:
    """State of a piece, except its tensors.

    Attributes:
        count: number of steps; for SGD, number of steps with momentum.
        has_master: True if the master differs from the weights.
        step_device: device on which torch's state has the number of steps.
        rest: state that no kernel uses, for torch's class.
    """

    count: int = 0
    has_master: bool = False
    step_device: torch.device = _CPU
    rest: ParameterState = field(default_factory=ParameterState)


class FusedUpdate(ChunkUpdate):
    """An update by a kernel, which computes in float32 and writes the new weights to all ranks.

    16-bit weights have float32 masters. If somebody has changed a weight, its master gets
    the new value. The state has the form of torch's class.
    """

    def __init__(self, kind: type[Optimizer], chunk: Chunk) -> None:
        self._kind, self._chunk = kind, chunk
        adapter = device_adapter_for(chunk.weights)
        assert adapter is not None
        self._adapter: DeviceAdapter = adapter
        self._kept = [_PieceState() for _ in chunk.places]
        self._next: dict[int, _PieceState] = {}  # by piece: the state after the kernel has run
        self._master = wide(chunk.weights[chunk.own])
        self._states: dict[str, torch.Tensor] = {}
        self.pieces: tuple[UpdatePiece, ...] = ()

    def update(
        self,
        gradients: Sequence[torch.Tensor | None],
        groups: Sequence[tuple[Settings, list[int]]],
        buffer: torch.Tensor,
    ) -> list[Settings]:
        self._take_changed_weights()
        steps: list[_Step | None] = [None for _ in gradients]
        following = {}
        for number, (settings, members) in enumerate(groups):
            for piece in members:
                gradient = gradients[piece]
                if gradient is None:
                    continue
                place = buffer[self._chunk.places[piece]]  # the kernel reads the gradient here
                if gradient.data_ptr() != place.data_ptr():
                    place.copy_(gradient)
                following[piece] = after = self._after_step(self._kept[piece], settings)
                # The kernel of SGD needs to know only whether this is the first step.
                count = min(after.count, 2) if self._kind is optim.SGD else after.count
                steps[piece] = _Step(number, count)
        self.pieces = tuple(
            self._piece(place, groups[step.group][0], step.n_steps)
            for step, place in self._merged(steps)
        )
        self._next = following
        return [settings for settings, _ in groups]

    def note_done(self) -> None:
        for piece, kept in self._next.items():
            self._kept[piece] = kept
        self._next = {}

    def state_of(self, piece: int) -> ParameterState:
        part, kept = self._within_chunk(self._chunk.places[piece]), self._kept[piece]
        lines, common = dict(kept.rest.by_element), dict(kept.rest.common)
        if kept.count:
            lines |= {name: line[part] for name, line in self._states.items()}
        if kept.count and self._kind is not optim.SGD:
            common[COUNT] = torch.tensor(float(kept.count), device=kept.step_device)
        if kept.has_master:
            lines[MASTER] = self._master[part]
        return ParameterState(lines, common)

    def set_state(self, piece: int, state: ParameterState) -> None:
        part, names = self._within_chunk(self._chunk.places[piece]), _STATES[self._kind]
        lines, common = dict(state.by_element), dict(state.common)
        master, count = lines.pop(MASTER, None), common.pop(COUNT, None)
        kept = _PieceState()
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
        # A state that is None is in `common`, not in `lines`.
        unused = {key: value for key, value in common.items() if key not in names}
        kept.rest = ParameterState(lines, unused)
        self._kept[piece] = kept

    def _after_step(self, kept: _PieceState, settings: Settings) -> _PieceState:
        return replace(
            kept,
            count=kept.count + (settings.get("momentum") != 0),
            has_master=is_16_bit(self._chunk.weights),
            step_device=self._chunk.weights.device if settings.get("fused") else kept.step_device,
        )

    def _state(self, name: str) -> torch.Tensor:
        if name not in self._states:
            self._states[name] = torch.zeros_like(self._master)
        return self._states[name]

    def _within_chunk(self, place: slice) -> slice:
        start = self._chunk.own.start
        return slice(place.start - start, place.stop - start)

    def _take_changed_weights(self) -> None:
        """Without a host sync, set the masters to the weights that somebody else has written."""
        weights, master = self._chunk.weights[self._chunk.own], self._master
        if is_16_bit(weights):
            is_own = master.to(weights.dtype) == weights
            torch.where(is_own, master, weights.float(), out=master)

    def _merged(self, steps: Sequence[_Step | None]) -> Iterator[tuple[_Step, slice]]:
        places = zip(steps, self._chunk.places, strict=True)
        for step, run in itertools.groupby(places, key=lambda each: each[0]):
            if step is not None:
                parts = [place for _, place in run]
                yield step, slice(parts[0].start, parts[-1].stop)

    def _piece(self, place: slice, settings: Settings, count: int) -> UpdatePiece:
        from ringcomm.gpu.transports.works import UpdatePiece

        part = self._within_chunk(place)
        rule, numbers = _rule(self._kind, settings, count)
        names = () if rule == "Sgd" else _STATES[self._kind]
        owned = [self._master, *map(self._state, names)]
        spans = tuple(self._adapter.span(line[part]) for line in owned)
        return UpdatePiece(place.start, place.stop, spans, rule, numbers)


def _rule(kind: type[Optimizer], settings: Settings, count: int) -> tuple[Rule, Argument]:
    from ringcomm.gpu.kernels.reduce_and_optimizer_step import adam_numbers, sgd_numbers

    known = {name: settings[name] for name in ("lr", "weight_decay", "maximize")}
    if kind is not optim.SGD:
        adam: dict[str, Any] = {name: settings[name] for name in ("betas", "eps")}
        is_decoupled = kind is optim.AdamW or settings.get("decoupled_weight_decay", False)
        return "Adam", adam_numbers(count, **known, **adam, decoupled=is_decoupled)
    sgd: dict[str, Any] = {name: settings[name] for name in ("momentum", "dampening", "nesterov")}
    return "Momentum" if sgd["momentum"] else "Sgd", sgd_numbers(count, **known, **sgd)
