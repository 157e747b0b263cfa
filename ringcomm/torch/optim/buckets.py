"""Gradients in fused buckets: few large messages instead of many small ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ringcomm.arrays import DTYPES, device_adapter_for
from ringcomm.collectives.fusion import Item, plan_fusion
from ringcomm.collectives.op import AVERAGE, SUM, Op
from ringcomm.collectives.schedule import chunks, consecutive, within
from ringcomm.engine.api import collectives
from ringcomm.engine.api.registered import on_gpu, zeros
from ringcomm.engine.api.world import engine
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.handle import Handle
from ringcomm.torch.backward.streams import Streams
from ringcomm.torch.optim.options import GradientOptions

MIB = 1 << 20
_16_BIT = (torch.float16, torch.bfloat16)


def plan_buckets(
    sizes: Sequence[tuple[int, object]], order: Sequence[int], max_nbytes: float
) -> list[list[int]]:
    """Return which tensors share a bucket: their indices, in `order`. Pure, so alike on every rank.

    Args:
        sizes: (bytes, what must be alike) of each tensor.
        order: indices of tensors, in the order in which they are expected to be ready.
        max_nbytes: of a bucket; a tensor that is larger has one of its own.
    """
    items = [Item(*sizes[index]) for index in order]
    return [[order[place] for place in batch] for batch in plan_fusion(items, max_nbytes)]


@dataclass(frozen=True)
class Scaling:
    """Options of one step's reduction; samples: how many this rank's gradient is the mean of."""

    options: GradientOptions
    samples: float | None = None

    @property
    def wire_op(self) -> Op:
        """The engine's operator: a weighted mean is a sum, divided at the end."""
        return self.options.op if self.samples is None else SUM

    @property
    def group(self) -> Group:
        """The ranks whose gradients become one."""
        return self.options.group


@dataclass(frozen=True)
class Member:
    """A parameter's place in its bucket.

    Attributes:
        view: of the buffer, in the parameter's shape and, if it is dense, strides; it has a version
            counter of its own.
        place: which elements of the buffer these are.
        own: which elements, in the order in which they lie in memory, this rank gets the result of.
    """

    index: int
    view: torch.Tensor
    place: slice
    own: slice


@dataclass(frozen=True, order=True)
class BucketDescription:
    """A bucket that other ranks are reducing and this one does not have."""

    name: str
    count: int
    dtype: str
    op: str
    is_scattered: bool
    device: str  # "cpu" or "cuda"

    def launch_zeros(self, group: Group) -> Handle[torch.Tensor]:
        """Take part with zeros, so that those ranks do not wait for this one."""
        zeros = torch.zeros(self.count, dtype=getattr(torch, self.dtype), device=self.device)
        return _launch(zeros, Op(self.op), self.name, group, is_scattered=self.is_scattered)


class Bucket:
    """A flat buffer with a view for the gradient of each (index, name, parameter), of one dtype.

    Attributes:
        whose: names its parameters.
        name: by which the ranks know the bucket.
        own: which elements this rank gets the result of: all; if is_scattered, its chunk.
        waiting: indices of members that are not ready.
        handles: of the reduction under way, if any: until land() returns the engine owns the
            buffer, views included.
    """

    def __init__(
        self,
        kind: str,
        parameters: Sequence[tuple[int, str, torch.nn.Parameter]],
        group: Group,
        suffix: str = "",
        *,
        is_scattered: bool = False,
    ) -> None:
        more = len(parameters) - 1
        self.whose = parameters[0][1] + (f"+{more}" if more else "") + suffix
        self.name = f"{kind} of {self.whose}"
        places = consecutive([p.numel() for _, _, p in parameters])
        count = places[-1].stop
        self.buffer = node_zeros(count, parameters[0][2], group)
        self._streams = Streams(self.buffer)
        self.own = chunks(count, group.size)[group.index] if is_scattered else slice(0, count)
        self.members = [
            Member(index, view_like(self.buffer[place], p), place, within(place, self.own))
            for (index, _, p), place in zip(parameters, places, strict=True)
        ]
        self.is_scattered = is_scattered
        self._wide: torch.Tensor | None = None
        self._wire, self._op = self.buffer, AVERAGE
        self._restore: Callable[[torch.Tensor], torch.Tensor] = _as_it_is
        self._factor = 1.0
        self.handles: tuple[Handle[torch.Tensor], ...] = ()
        self.expect_all()

    @property
    def description(self) -> BucketDescription:
        """All that another rank needs to take part in the reduction under way."""
        kind = str(self._wire.dtype).removeprefix("torch.")
        count = self._wire.numel()
        place = self._wire.device.type
        return BucketDescription(self.name, count, kind, self._op.value, self.is_scattered, place)

    @property
    def is_under_way(self) -> bool:
        """True from launch() to the end of land()."""
        return bool(self.handles)

    def expect_all(self) -> None:
        """Wait for every member anew."""
        self.waiting = {member.index for member in self.members}

    def note_loaded(self) -> None:
        """A gradient was put into it, on the current stream if that is on a GPU."""
        self._streams.note()

    def launch(self, scaling: Scaling) -> None:
        """Start to reduce the buffer."""
        self._streams.join()
        options = scaling.options
        scaled = self._weighted(scaling.samples)
        if options.predivide != 1.0:
            scaled.div_(options.predivide)
        self._wire, ctx = options.compression.compress(scaled)
        self._restore = lambda wire: options.compression.decompress(wire, ctx)
        self._op = scaling.wire_op
        handle = _launch(
            self._wire, self._op, self.name, scaling.group, is_scattered=self.is_scattered
        )
        self.handles = (handle,)
        self._factor = options.predivide

    def land(self, total: float | None) -> None:
        """Wait for the result, divided by `total` samples of all ranks unless that is None.

        The buffer is this rank's again, also after a MismatchError.
        """
        (handle,), self.handles = self.handles, ()
        handle.wait()
        result = self._restore(self._wire)
        own = result[self.own]
        if total is not None or self._factor != 1.0:
            own.mul_(self._factor / (1.0 if total is None else total))
        if result is not self.buffer:
            self.buffer[self.own].copy_(own)
        if self.is_scattered:
            self.buffer[: self.own.start].zero_()
            self.buffer[self.own.stop :].zero_()

    def _weighted(self, samples: float | None) -> torch.Tensor:
        """Return what to send; float32 for 16-bit gradients, which a factor could overflow."""
        if samples is None:
            return self.buffer
        if self.buffer.dtype in _16_BIT:
            self._wide = wide(self.buffer) if self._wide is None else self._wide.copy_(self.buffer)
        wire = self.buffer if self._wide is None else self._wide
        # The mean over an empty batch is NaN, which a factor of 0 would not cancel.
        return wire.mul_(samples) if samples else wire.zero_()


def make_buckets(
    kind: str,
    parameters: Sequence[tuple[int, str, torch.nn.Parameter]],
    max_nbytes: float,
    group: Group,
    suffix: str = "",
    *,
    is_scattered: bool = False,
) -> list[Bucket]:
    """Return the buckets of these (index, name, parameter), in the order of the list."""
    sizes = [(p.numel() * p.element_size(), (p.dtype, p.device)) for _, _, p in parameters]
    return [
        Bucket(
            kind, [parameters[place] for place in places], group, suffix, is_scattered=is_scattered
        )
        for places in plan_buckets(sizes, range(len(parameters)), max_nbytes)
    ]


def is_16_bit(x: torch.Tensor) -> bool:
    """Return True for float16 and bfloat16."""
    return x.dtype in _16_BIT


def wide(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a float32 copy if it has 16 bits: room for sums and factors."""
    return x.float() if is_16_bit(x) else x


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return True if the elements fill their memory without gap or overlap, in whatever order."""
    expected = 1
    for stride, n in sorted((stride, n) for stride, n in zip(strides, shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= n
    return True


def view_like(piece: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a view of `piece`, flat, in the shape and, if it is dense, strides of a parameter."""
    shape = parameter.shape
    view = piece.view(shape)
    if parameter.numel() and is_dense(shape, parameter.stride()):
        view = piece.as_strided(shape, parameter.stride())
    return view.data  # .detach() would share the version counter of the whole buffer


def flat_view(x: torch.Tensor) -> torch.Tensor:
    """Return a view of all elements of a tensor without gaps, in the order in which they lie."""
    return x.as_strided((x.numel(),), (1,))


def flatten_like(x: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """Return a dense x flat, with its elements in the order in which those of `view` lie."""
    x = x.detach()
    if x.stride() != view.stride():
        x = torch.empty_strided(view.shape, view.stride(), dtype=x.dtype, device=x.device).copy_(x)
    return flat_view(x)


def node_zeros(count: int, like: torch.Tensor, group: Group) -> torch.Tensor:
    """Return zeros, of like's dtype and device, that ranks of a node reduce where they are."""
    nbytes = count * like.dtype.itemsize
    adapter = device_adapter_for(like)
    if adapter is None:
        return torch.from_numpy(zeros(nbytes, "uint8", group=group)).view(like.dtype)
    x: torch.Tensor = on_gpu(engine(), DTYPES["uint8"], (nbytes,), adapter, adapter.device(like))
    x.zero_()
    if x.is_cuda:  # once: gradients come on any stream
        torch.cuda.current_stream(x.device).synchronize()
    return x.view(like.dtype)


def _launch(
    wire: torch.Tensor, op: Op, name: str, group: Group, *, is_scattered: bool
) -> Handle[torch.Tensor]:
    if is_scattered:
        return collectives.reduce_scatter_async_(wire, op, name=name, group=group)
    return collectives.allreduce_async_(wire, op, name=name, group=group)


def _as_it_is(wire: torch.Tensor) -> torch.Tensor:
    return wire
