"""Gradients in fused buckets: few large messages instead of many small ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ringcomm.arrays import DTYPES, device_adapter_for
from ringcomm.collectives.fusion import Item, plan_fusion
from ringcomm.collectives.message_patterns import chunks, consecutive, within
from ringcomm.collectives.operators import AVERAGE, SUM, Op
from ringcomm.engine.api import collectives
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.api.registered_arrays import on_gpu, zeros
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.handle import Handle
from ringcomm.errors import MismatchError
from ringcomm.torch.backward.watched_tensors import n_storage_references
from ringcomm.torch.compression import Compression, Compressor
from ringcomm.torch.optim.distributed_optimizer_options import GradientOptions


# --- the reduction of a bucket --------------------------------------------------------------------
class BucketReduction:
    """Reduces one bucket, step after step.

    It lasts as long as its bucket, so it may keep values from one step for the next.

    Args:
        compressor: the same on all ranks; see compression.name_of().
        name: name of the messages.
        is_scattered: each rank gets its chunk of the result, not all of it.
    """

    # Set by launch():
    _sent: torch.Tensor
    _context: Any
    _op: Op

    def __init__(self, compressor: Compressor, name: str, *, is_scattered: bool) -> None:
        self._compressor, self._name, self._is_scattered = compressor, name, is_scattered

    def launch(self, bucket: torch.Tensor, op: Op, group: Group) -> Handle[torch.Tensor]:
        """Start to reduce a bucket, which must not change until the handle is done."""
        self._op = op
        self._sent, self._context = self._compressor.compress(bucket)
        return _launch(self._sent, op, self._name, group, is_scattered=self._is_scattered)

    def land(self) -> torch.Tensor:
        """Return the result in the bucket's dtype, once the handle is done."""
        return self._compressor.decompress(self._sent, self._context)

    def has_copied(self, bucket: torch.Tensor) -> bool:
        """Return True if the reduction under way leaves the bucket as it is."""
        return self._sent.untyped_storage().data_ptr() != bucket.untyped_storage().data_ptr()

    @property
    def description(self) -> BucketDescription:
        return BucketDescription(
            self._name,
            self._sent.numel(),
            str(self._sent.dtype).removeprefix("torch."),
            self._op.value,
            self._is_scattered,
            self._sent.device.type,
        )


@dataclass(frozen=True, order=True)
class BucketDescription:
    """The data that a rank needs to take part in the reduction of a bucket that it lacks."""

    name: str
    count: int
    dtype: str
    op: str
    is_scattered: bool
    device: str  # "cpu" or "cuda"

    def launch_zeros(self, group: Group) -> Handle[torch.Tensor]:
        """Take part with zeros, so that the other ranks need not wait for this one."""
        zeros = torch.zeros(self.count, dtype=getattr(torch, self.dtype), device=self.device)
        return _launch(zeros, Op(self.op), self.name, group, is_scattered=self.is_scattered)


def _launch(
    sent: torch.Tensor, op: Op, name: str, group: Group, *, is_scattered: bool
) -> Handle[torch.Tensor]:
    if is_scattered:
        return collectives.reduce_scatter_async_(sent, op, name=name, group=group)
    return collectives.allreduce_async_(sent, op, name=name, group=group)


_16_BIT = (torch.float16, torch.bfloat16)


class Streams:
    """CUDA streams that have written to a tensor since the last join(); none for a CPU tensor.

    Autograd writes gradients on the streams of forward().
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._device = tensor.device if tensor.is_cuda else None
        self._seen: set[torch.cuda.Stream] = set()

    def note(self) -> None:
        if self._device is not None:
            self._seen.add(torch.cuda.current_stream(self._device))

    def join(self) -> None:
        if self._device is None:
            return
        current = torch.cuda.current_stream(self._device)
        for stream in self._seen - {current}:
            current.wait_stream(stream)
        self._seen.clear()


@dataclass(frozen=True)
class Scaling:
    """Options of one step's reduction.

    A weighted mean is a sum of gradient * samples, divided at the end. In the 16 bits of a
    compressor that could overflow. So gradients are compressed as multiples of `unit`, which no
    rank's samples exceed, and averaged: what is sent is at most the gradient, and the average too.

    Attributes:
        samples: the weight of this rank's mean, if any.
        unit: a number of samples, the same on all ranks; 0: it is not known yet.
    """

    options: GradientOptions
    samples: float | None = None
    unit: float = 0.0

    @property
    def has_unit(self) -> bool:
        return self.samples is not None and self.options.compression is not Compression.none

    @property
    def exceeds_unit(self) -> bool:
        return self.has_unit and self.samples is not None and self.samples > self.unit

    @property
    def wire_op(self) -> Op:
        return self.options.op if self.samples is None else AVERAGE if self.has_unit else SUM

    @property
    def weight(self) -> float | None:
        if self.samples is None or not self.has_unit:
            return self.samples
        return self.samples / (self.unit or 1.0)

    @property
    def samples_of_one(self) -> float:
        """Number of samples that a result of 1 stands for."""
        return (self.unit or 1.0) * self.group.size if self.has_unit else 1.0

    @property
    def group(self) -> Group:
        return self.options.group


@dataclass(frozen=True)
class Member:
    """A parameter in its bucket.

    Attributes:
        view: the parameter's view of the buffer; see view_like().
        place: the parameter's elements in the buffer.
        own: the elements whose result this rank gets, counted from the start of `place`.
    """

    index: int
    view: torch.Tensor
    place: slice
    own: slice


class Bucket:
    """A flat buffer, with a view for each parameter's gradient; all have the same dtype.

    Attributes:
        whose: a short text that names the parameters.
        name: name of the bucket's messages.
        own: the elements whose result this rank gets: all, or its chunk if is_scattered.
        buffer: the memory; renew() replaces it, and the views in `members`.
        waiting: indices of the members that are not ready.
        streams: CUDA streams that have written gradients.
        reduction: sends the buffer; has its values from step to step, if it keeps any.
        handles: handle of the reduction under way, if any. Until land() returns, the engine owns
            the buffer, including its views.
    """

    _factor: float  # set by launch(), and used by land()

    def __init__(
        self,
        kind: str,
        parameters: Sequence[tuple[int, str, torch.nn.Parameter]],
        options: GradientOptions,
        suffix: str = "",
        *,
        is_scattered: bool = False,
    ) -> None:
        more = len(parameters) - 1
        self.whose = parameters[0][1] + (f"+{more}" if more else "") + suffix
        self.name = f"{kind} of {self.whose}"
        self._places = consecutive([p.numel() for _, _, p in parameters])
        self._parameters = [(index, p) for index, _, p in parameters]
        self._group = group = options.group
        count = self._places[-1].stop
        self.own = chunks(count, group.size)[group.index] if is_scattered else slice(0, count)
        self.is_scattered = is_scattered
        self.reduction = BucketReduction(options.compression, self.name, is_scattered=is_scattered)
        self.renew()
        self._wide: torch.Tensor | None = None
        self.handles: tuple[Handle[torch.Tensor], ...] = ()
        self.expect_all()

    def renew(self) -> None:
        """Use new memory, and leave the old one to those who refer to it."""
        parameters, places = self._parameters, self._places
        self.buffer = node_zeros(places[-1].stop, parameters[0][1], self._group)
        self.streams = Streams(self.buffer)
        self.members = [
            Member(index, view_like(self.buffer[place], p), place, within(place, self.own))
            for (index, p), place in zip(parameters, places, strict=True)
        ]
        self._n_references = n_storage_references(self.buffer)

    @property
    def n_other_references(self) -> int:
        return n_storage_references(self.buffer) - self._n_references

    @property
    def is_under_way(self) -> bool:
        """True from launch() to land()."""
        return bool(self.handles)

    def expect_all(self) -> None:
        self.waiting = {member.index for member in self.members}

    def launch(self, scaling: Scaling) -> None:
        self.streams.join()
        predivide = scaling.options.predivide
        scaled = self._weighted(scaling.weight)
        if predivide != 1.0:
            scaled.div_(predivide)
        self._send(scaled, scaling)

    def launch_again(self, scaling: Scaling) -> None:
        """Start to reduce the same gradients in another unit; call it when the handle is done."""
        scaled = self.buffer if self._wide is None else self._wide
        if not self.reduction.has_copied(scaled):
            return  # it has the dtype of the gradients, where no unit is too small
        try:
            self.handles[0].wait()
        except MismatchError:
            return  # land() raises it
        scaled.mul_(self._factor / _factor_of_result(scaling))
        self._send(scaled, scaling)

    def _send(self, scaled: torch.Tensor, scaling: Scaling) -> None:
        self._factor = _factor_of_result(scaling)
        self.handles = (self.reduction.launch(scaled, scaling.wire_op, scaling.group),)

    def land(self, total: float | None) -> None:
        """Wait for the result; divide it by the total number of samples, unless that is None.

        Once land() returns or raises MismatchError, the engine no longer uses the buffer.
        """
        (handle,), self.handles = self.handles, ()
        handle.wait()
        result = self.reduction.land()
        own = result[self.own]
        if total is not None or self._factor != 1.0:
            own.mul_(self._factor / (1.0 if total is None else total))
        if result is not self.buffer:
            self.buffer[self.own].copy_(own)
        if self.is_scattered:
            self.buffer[: self.own.start].zero_()
            self.buffer[self.own.stop :].zero_()

    def _weighted(self, weight: float | None) -> torch.Tensor:
        """Return the gradients times weight; in float32 if they have 16 bits, against overflow."""
        if weight is None:
            return self.buffer
        if self.buffer.dtype in _16_BIT:
            self._wide = wide(self.buffer) if self._wide is None else self._wide.copy_(self.buffer)
        wire = self.buffer if self._wide is None else self._wide
        # The mean over an empty batch is NaN, and NaN * 0 is NaN.
        return wire.mul_(weight) if weight else wire.zero_()


def _factor_of_result(scaling: Scaling) -> float:
    return scaling.options.predivide * scaling.samples_of_one


def unit_for(samples: float) -> float:
    """Return the unit for at most so many samples: a power of two, which rounds no gradient."""
    fraction, exponent = math.frexp(samples)
    return math.ldexp(1.0, min(exponent - (fraction == 0.5), 1023))


def make_buckets(
    kind: str,
    parameters: Sequence[tuple[int, str, torch.nn.Parameter]],
    max_nbytes: float,
    options: GradientOptions,
    suffix: str = "",
    *,
    is_scattered: bool = False,
) -> list[Bucket]:
    """Return buckets for these (index, name, parameter), in the order of the list."""
    items = [Item(p.nbytes, (p.dtype, p.device)) for _, _, p in parameters]
    return [
        Bucket(
            kind,
            [parameters[place] for place in places],
            options,
            suffix,
            is_scattered=is_scattered,
        )
        for places in plan_fusion(items, max_nbytes)
    ]


def is_16_bit(x: torch.Tensor) -> bool:
    return x.dtype in _16_BIT


def wide(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a float32 copy of 16-bit elements, so that sums and products do not overflow."""
    return x.float() if is_16_bit(x) else x


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return True if the elements, in any order, fill their memory without gap or overlap."""
    expected = 1
    for stride, n in sorted((stride, n) for stride, n in zip(strides, shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= n
    return True


def view_like(piece: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a view of the flat `piece` with a parameter's shape, and with its strides if dense."""
    shape, strides = parameter.shape, parameter.stride()
    view = piece.view(shape)
    if view.stride() != strides and parameter.numel() and is_dense(shape, strides):
        view = piece.as_strided(shape, strides)
    return view.data  # .detach() would share the version counter of the whole buffer


def flat_view(x: torch.Tensor) -> torch.Tensor:
    """Return a flat view of a tensor without gaps, in the order of its elements in memory."""
    return x.as_strided((x.numel(),), (1,))


def flatten_like(x: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense x as a flat tensor, in the memory order of `view`."""
    x = x.detach()
    if x.stride() != view.stride():
        x = torch.empty_strided(view.shape, view.stride(), dtype=x.dtype, device=x.device).copy_(x)
    return flat_view(x)


def node_zeros(count: int, like: torch.Tensor, group: Group) -> torch.Tensor:
    """Return zeros, with dtype and device of `like`, that the ranks of a node reduce in place."""
    nbytes = count * like.dtype.itemsize
    adapter = device_adapter_for(like)
    if adapter is None:
        return torch.from_numpy(zeros(nbytes, "uint8", group=group)).view(like.dtype)
    x: torch.Tensor = on_gpu(engine(), DTYPES["uint8"], (nbytes,), adapter, adapter.device(like))
    x.zero_()
    if x.is_cuda:  # any stream may write gradients
        torch.cuda.current_stream(x.device).synchronize()
    return x.view(like.dtype)
