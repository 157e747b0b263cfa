"""Batch normalization with the statistics of all ranks' batches.

In forward(), each rank sends its count of values and, for each channel, the mean and the sum of
squared deviations; every rank combines them (Chan et al. 1979). This form stays exact even if a
mean is large compared to the deviations. In backward(), ranks add up two sums per channel. Ranks
send float64.
"""

from __future__ import annotations

from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from ringcomm.engine.api import collectives
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.core.group import Group
from ringcomm.torch.backward.optimizer_numbers import weight_of_step
from ringcomm.torch.optim.buckets import wide


class SyncBatchNorm(_BatchNorm):
    """Batch normalization with the statistics of all ranks' batches.

    In training mode forward() and backward() are collective: every rank of the process set calls
    them as often as the others, with batches of any size, 0 included. Gradients of weight and bias
    are this rank's own; DistributedOptimizer averages them, weighted as set_samples() says. In eval
    mode ranks send nothing: like torch.nn.BatchNorm, the layer uses the running statistics, or the
    statistics of this rank's batch if there are none. Parameters, buffers and state_dict() are as
    in torch.nn.BatchNorm. The running statistics have the same bits on every rank.

    Args:
        num_features: channels C of an input of shape (N, C, ...).
        eps: small number, added to the variance.
        momentum: weight of the latest batch in the running statistics; None: mean of all batches.
        affine: True: the layer has weight and bias, each of shape (C,).
        track_running_stats: True: the layer keeps running statistics.
        process_set: a ProcessSet, or rc.Group, of the ranks that share statistics; None: all.
        device: device of parameters and buffers.
        dtype: dtype of parameters and buffers.

    forward() raises ValueError if the input has fewer than 2 dimensions or another number of
    channels, and on every rank if all ranks together have fewer than 2 values per channel.

    Cost: forward, an allgather of 2 C + 1 float64 from each rank; backward, an allreduce of 2 C.
    With create_graph=True, for gradient penalties, backward() has three allreduces, and the
    backward() of its graph has three, too. Every rank must then pass create_graph=True.
    """

    def __init__(  # noqa: PLR0917 - as in torch and Horovod
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: Any = None,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        self.process_set = process_set
        _group_of(process_set)

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module, process_set: Any = None) -> Any:
        """Return `module` with every BatchNorm in it replaced by a SyncBatchNorm.

        Parameters, buffers and hooks stay the same objects, so optimizers that were made before
        still work. If `module` itself is a BatchNorm, a new module is returned.

        Raises:
            ValueError: a lazy BatchNorm has seen no batch yet.
        """
        return cls._converted(module, process_set, {})

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input, in its shape, dtype and memory format."""
        self._check_input_dim(input)
        if not self.training:
            return super().forward(input)
        group = _group_of(self.process_set)
        if (engine().size if group is None else group.size) == 1:
            return super().forward(input)
        y, mean, variance, count = _Normalize.apply(input, self.weight, self.bias, self.eps, group)  # type: ignore[no-untyped-call]
        if self.track_running_stats:
            self._track(mean, variance * (count / (count - 1)))
        return cast(Tensor, y)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(
                f"SyncBatchNorm: the input has {input.dim()} dimension(s); it must have the shape "
                "(N, C, ...)"
            )
        if input.shape[1] != self.num_features:
            raise ValueError(
                f"SyncBatchNorm: the input has {input.shape[1]} channels, the layer "
                f"{self.num_features}"
            )

    @torch.no_grad()
    def _track(self, mean: Tensor, unbiased_variance: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = self.momentum
        weight = 1 / float(self.num_batches_tracked) if momentum is None else momentum
        for running, value in ((self.running_mean, mean), (self.running_var, unbiased_variance)):
            running.mul_(1 - weight).add_(value.to(running), alpha=weight)

    @classmethod
    def _converted(
        cls, module: torch.nn.Module, process_set: Any, done: dict[torch.nn.Module, Any]
    ) -> Any:
        if module in done:
            return done[module]
        is_batch_norm = isinstance(module, _BatchNorm)
        result = done[module] = cls._of(module, process_set) if is_batch_norm else module
        for name, child in module._modules.items():  # named_children() lists a module only once
            if child is not None:
                result._modules[name] = cls._converted(child, process_set, done)
        return result

    @classmethod
    def _of(cls, module: torch.nn.Module, process_set: Any) -> Self:
        if isinstance(module, torch.nn.modules.lazy.LazyModuleMixin):
            raise ValueError(
                f"convert_sync_batchnorm: {type(module).__name__} does not know its channels yet: "
                "run a batch through the model first"
            )
        made = cls.__new__(cls)
        made.__dict__ = {
            name: value.copy() if isinstance(value, dict) else value
            for name, value in module.__dict__.items()
        }
        made.process_set = process_set
        _group_of(process_set)
        return made


class _Normalize(torch.autograd.Function):
    """(input, weight, bias) -> (output, mean, biased variance, values per channel on all ranks)."""

    @staticmethod
    def forward(  # noqa: PLR0917 - apply() passes no keywords
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: Group | None,
    ) -> tuple[Tensor, Tensor, Tensor, float]:
        mean, variance, count = _statistics(x, group)
        inverse = (variance + eps).rsqrt()
        like_x = wide(x[:0]).dtype  # float32 for inputs of 16 bits
        y = functional.batch_norm(
            x,
            mean.to(x.device, like_x),
            variance.to(x.device, like_x),
            None if weight is None else weight.to(like_x),
            None if bias is None else bias.to(like_x),
            eps=eps,
        )
        ctx.save_for_backward(x, mean.to(x.device, like_x), inverse.to(x.device, like_x))
        # weight is not saved: in checkpointed code torch 2.6 loses the hooks of saved parameters.
        ctx.weight, ctx.weight_version = weight, None if weight is None else weight._version
        ctx.group, ctx.count, ctx.eps = group, count, eps
        ctx.mark_non_differentiable(mean, variance)
        return y, mean, variance, count

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> Any:
        (x, mean, inverse), weight = ctx.saved_tensors, _weight_of(ctx)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        axes, dy = _all_but_channels(x), dy.to(mean.dtype)
        deviation = x - _per_channel(mean, x)
        is_graph = torch.is_grad_enabled()  # create_graph=True: no in-place operations
        if is_graph:
            deviation, inverse = _differentiable(ctx, deviation)
        sum_dy = dy.sum(axes)
        sum_product = (dy * deviation).sum(axes)
        dx = None
        if needs_x:
            # Each rank's gradients are multiplied by its weight (set_samples()) later. So the ranks
            # sum weighted gradients, and each rank divides the sum by its own weight.
            sums = torch.stack([sum_dy, sum_product])
            mean_dy, mean_product = _sum_over_ranks(sums, ctx.group, is_weighted=True) / ctx.count
            slope = _per_channel(-inverse.square() * mean_product, x)
            dx = deviation * slope + dy if is_graph else deviation.mul_(slope).add_(dy)
            shift = _per_channel(mean_dy, x)
            scale = _per_channel(inverse if weight is None else inverse * weight, x)
            dx = (dx - shift) * scale if is_graph else dx.sub_(shift).mul_(scale)
            dx = dx.to(x.dtype)
        d_weight = (sum_product * inverse).to(weight.dtype) if needs_weight else None
        return dx, d_weight, sum_dy.to(weight.dtype) if needs_bias else None, None, None


def _weight_of(ctx: Any) -> Any:
    weight = ctx.weight
    if weight is not None and weight._version != ctx.weight_version:
        raise RuntimeError(
            "SyncBatchNorm: its weight was changed in place between forward and backward (version "
            f"{weight._version}, was {ctx.weight_version}): call step() after backward()"
        )
    return weight


def _differentiable(ctx: Any, centred: Tensor) -> tuple[Tensor, Tensor]:
    """Return deviation and inverse again, as differentiable functions of all ranks' inputs.

    `centred` is the input minus the mean, which is a constant here. Sums of `centred` stay exact
    even if the mean is large compared to the deviations.
    """
    axes, count, group = _all_but_channels(centred), ctx.count, ctx.group
    shift = _sum_over_ranks(centred.sum(axes), group) / count
    deviation = centred - _per_channel(shift, centred)
    squares = _sum_over_ranks(deviation.square().sum(axes), group)
    return deviation, (squares / count + ctx.eps).rsqrt()


class _SumOverRanks(torch.autograd.Function):
    """Sums values over all ranks, and gradients in backward(). One of the two sums is weighted.

    A rank with weight w has gradients of (sum of w * loss over all ranks) / w. So backward() of
    a plain sum is a weighted sum, and backward() of a weighted sum is a plain sum.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Group | None, is_weighted: bool) -> Tensor:
        ctx.group, ctx.is_weighted = group, is_weighted
        weight = weight_of_step(engine()) if is_weighted else 1.0
        mine = values.detach().to("cpu", torch.float64)
        # Not a product: an empty batch has NaN, and 0 * NaN is NaN.
        mine = mine * weight if weight else torch.zeros_like(mine)
        total = collectives.allreduce(mine, group=group, deterministic=True)
        return (total / weight if weight else total).to(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _sum_over_ranks(gradient, ctx.group, is_weighted=not ctx.is_weighted), None, None


def _sum_over_ranks(values: Tensor, group: Group | None, *, is_weighted: bool = False) -> Tensor:
    return cast(Tensor, _SumOverRanks.apply(values, group, is_weighted))  # type: ignore[no-untyped-call]


def _statistics(x: Tensor, group: Group | None) -> tuple[Tensor, Tensor, float]:
    """Return each channel's mean and biased variance, float64 (C,), and its number of values."""
    axes, channels = _all_but_channels(x), x.shape[1]
    count = x.numel() // channels if channels else 0
    mine = torch.zeros(2 * channels + 1, dtype=torch.float64)
    if count:
        mean = wide(x).mean(axes)
        squares = (x - _per_channel(mean, x)).square_().sum(axes)
        mine[0], mine[1 : channels + 1], mine[channels + 1 :] = count, mean, squares
    parts = collectives.allgather(mine.unsqueeze(0), group=group)
    counts, means, deviations = torch.split(parts, [1, channels, channels], 1)
    total = float(counts.sum())
    if total < 2:
        raise ValueError(
            "SyncBatchNorm: training needs at least 2 values per channel, and all "
            f"{len(parts)} ranks together have {total:.0f}. Use larger batches, or eval()"
        )
    mean = (counts * means).sum(0) / total
    squares = (deviations + counts * (means - mean).square()).sum(0)
    return mean, squares / total, total


def _all_but_channels(x: Tensor) -> list[int]:
    return [axis for axis in range(x.dim()) if axis != 1]


def _per_channel(values: Tensor, x: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (x.dim() - 2))


def _group_of(process_set: Any) -> Group | None:
    if process_set is None or isinstance(process_set, Group):
        return process_set
    if not hasattr(process_set, "group"):
        raise TypeError(
            f"SyncBatchNorm: process_set is a ProcessSet, an rc.Group or None, not {process_set!r}"
        )
    return cast("Group | None", process_set.group)
