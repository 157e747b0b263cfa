"""Gradients in fused buckets: few large messages instead of many small ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ringcomm.collectives.fusion import Item, plan_fusion
from ringcomm.collectives.op import AVERAGE, SUM, Op
from ringcomm.engine import async_ops
from ringcomm.engine.group import Group
from ringcomm.engine.handle import Handle
from ringcomm.engine.registered import zeros
from ringcomm.torch.recipe import Recipe

MIB = 1 << 20
_16_BIT = (torch.float16, torch.bfloat16)


def plan_buckets(
    sizes: Sequence[tuple[int, object]], order: Sequence[int], max_nbytes: float
) -> list[list[int]]:
    """Return which tensors share a bucket; pure, so that every rank comes to the same plan.

    Args:
        sizes: (bytes, dtype) of each tensor.
        order: indices of tensors, in the order in which they are expected to be ready.
        max_nbytes: a bucket is closed when the next tensor would take it beyond; a tensor that is
            larger has a bucket of its own.

    Returns:
        The indices of each bucket.
    """
    items = [Item(*sizes[index]) for index in order]
    return [[order[place] for place in batch] for batch in plan_fusion(items, max_nbytes)]


@dataclass(frozen=True)
class Scaling:
    """How the gradients of the ranks become one.

    Attributes:
        recipe: what the optimizer was told.
        samples: how many this rank's gradient is the mean of; None: all count alike.
    """

    recipe: Recipe
    samples: float | None = None

    @property
    def wire_op(self) -> Op:
        """What the engine is asked for: a weighted mean is a sum, divided at the end."""
        return self.recipe.op if self.samples is None else SUM

    @property
    def group(self) -> Group:
        """The ranks whose gradients become one."""
        return self.recipe.group


@dataclass(frozen=True)
class Member:
    """A parameter's place in its bucket.

    Attributes:
        index: of the parameter.
        view: of the bucket's buffer, in the parameter's shape and, if it is dense, strides. Its
            version counter is its own.
    """

    index: int
    view: torch.Tensor


@dataclass(frozen=True, order=True)
class Stray:
    """A bucket that other ranks are reducing and this one does not have."""

    name: str
    count: int
    dtype: str
    op: str

    def launch_zeros(self, group: Group) -> Handle[torch.Tensor]:
        """Take part with zeros, so that those ranks do not wait for this one."""
        zeros = torch.zeros(self.count, dtype=getattr(torch, self.dtype))
        return async_ops.allreduce_async_(zeros, Op(self.op), name=self.name, group=group)


class Bucket:
    """A flat buffer with a view for the gradient of each of its parameters.

    Args:
        kind: "gradients", for the name.
        parameters: (index, name, parameter) of each, of one dtype.
        group: whose gradients they are.
        suffix: of the name.

    Attributes:
        name: says whose gradients it holds; by it the ranks know the bucket.
        buffer: shape (elements of all members,).
        members: who is in it, in order.
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
    ) -> None:
        more = len(parameters) - 1
        self.name = f"{kind} of {parameters[0][1]}" + (f"+{more}" if more else "") + suffix
        counts = [p.numel() for _, _, p in parameters]
        self.buffer = _registered(sum(counts), parameters[0][2].dtype, group)
        pieces = torch.split(self.buffer, counts)
        self.members = [
            Member(index, view_like(piece, p))
            for (index, _, p), piece in zip(parameters, pieces, strict=True)
        ]
        self._wide: torch.Tensor | None = None
        self._wire, self._op = self.buffer, AVERAGE
        self._restore: Callable[[torch.Tensor], torch.Tensor] = _as_it_is
        self._factor = 1.0
        self.handles: tuple[Handle[torch.Tensor], ...] = ()
        self.expect_all()

    @property
    def outline(self) -> Stray:
        """What another rank needs to take part in the reduction under way."""
        kind = str(self._wire.dtype).removeprefix("torch.")
        return Stray(self.name, self._wire.numel(), kind, self._op.value)

    @property
    def is_under_way(self) -> bool:
        """True from launch() to the end of land()."""
        return bool(self.handles)

    def expect_all(self) -> None:
        """Wait for every member anew."""
        self.waiting = {member.index for member in self.members}

    def launch(self, scaling: Scaling) -> None:
        """Start to reduce the buffer."""
        recipe = scaling.recipe
        scaled = self._weighted(scaling.samples)
        if recipe.predivide != 1.0:
            scaled.div_(recipe.predivide)
        self._wire, ctx = recipe.compression.compress(scaled)
        self._restore = lambda wire: recipe.compression.decompress(wire, ctx)
        self._op = scaling.wire_op
        handle = async_ops.allreduce_async_(
            self._wire, self._op, name=self.name, group=scaling.group
        )
        self.handles = (handle,)
        self._factor = recipe.predivide

    def land(self, total: float | None) -> None:
        """Wait for the result; the buffer is this rank's again, also after a MismatchError.

        Args:
            total: samples of all ranks, by which a weighted sum is divided; None: not weighted.
        """
        (handle,), self.handles = self.handles, ()
        handle.wait()
        result = self._restore(self._wire)
        if total is not None or self._factor != 1.0:
            result.mul_(self._factor / (1.0 if total is None else total))
        if result is not self.buffer:
            self.buffer.copy_(result)

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
) -> list[Bucket]:
    """Return the buckets of these (index, name, parameter), in the order of the list."""
    sizes = [(p.numel() * p.element_size(), p.dtype) for _, _, p in parameters]
    return [
        Bucket(kind, [parameters[place] for place in places], group, suffix)
        for places in plan_buckets(sizes, range(len(parameters)), max_nbytes)
    ]


def wide(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a float32 copy if it has 16 bits: room for sums and factors."""
    return x.float() if x.dtype in _16_BIT else x


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


def _registered(count: int, dtype: torch.dtype, group: Group) -> torch.Tensor:
    """Return zeros that the ranks of this node reduce where they stand."""
    return torch.from_numpy(zeros(count * dtype.itemsize, "uint8", group=group)).view(dtype)


def _as_it_is(wire: torch.Tensor) -> torch.Tensor:
    return wire
