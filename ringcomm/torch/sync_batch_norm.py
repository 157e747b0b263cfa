"""Batch normalization over the batches of all ranks, as one process with all of them would do.

Forward: each rank sends the count, mean and squared deviations of each channel, and combines what
the others sent (Chan et al. 1979, the parallel form, which does not cancel where a mean is large
beside its deviation). Backward: two sums per channel. Both travel as float64.
"""

from __future__ import annotations

from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from ringcomm.engine.api import collectives
from ringcomm.engine.api.world import engine
from ringcomm.engine.core.group import Group
from ringcomm.torch.backward.registry import weight_of_step
from ringcomm.torch.optim.buckets import wide


class SyncBatchNorm(_BatchNorm):
    """Batch normalization whose statistics are those of all ranks' batches together.

    In training mode forward() and backward() are collective: every rank of the process set runs
    them as often as the others, with batches of any size, 0 included. Gradients of weight and bias
    are this rank's own, for DistributedOptimizer to average; what set_samples() says is heeded. In
    eval mode nothing is sent: like torch.nn.BatchNorm it uses the running statistics, or, where
    there are none, this rank's batch. Parameters, buffers and state_dict() are those of
    torch.nn.BatchNorm; the running statistics are the same bits on every rank.

    Args:
        num_features: channels C of an input of shape (N, C, ...).
        eps: added to the variance.
        momentum: weight of the newest batch in the running statistics; None: their plain mean.
        affine: has weight and bias, each of shape (C,).
        track_running_stats: keep running statistics.
        process_set: a ProcessSet, or rc.Group, of the ranks that share statistics; None: all.
        device: of parameters and buffers.
        dtype: of parameters and buffers.

    forward() raises ValueError, for an input that has fewer than 2 dimensions or another number of
    channels, and on every rank if all of them together have fewer than 2 values per channel.

    Cost: forward, an allgather of 2 C + 1 float64 from each rank; backward, an allreduce of 2 C.
    With create_graph=True, for gradient penalties, two more in backward, and one for each of these
    in the backward of that; every rank must then create the graph.
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

        Parameters, buffers and hooks stay the same objects, so an optimizer made before still
        fits. A module that is itself a BatchNorm is not changed but replaced by what is returned.

        Raises:
            ValueError: a lazy BatchNorm has seen no batch yet.
        """
        return cls._converted(module, process_set, {})

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input, in its shape, dtype and memory format."""
        self._check_input_dim(input)
        if not self.training:
            return self._normalized_alone(input)
        group = _group_of(self.process_set)
        if (engine().size if group is None else group.size) == 1:
            return self._normalized_alone(input)
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

    def _normalized_alone(self, input: Tensor) -> Tensor:
        return super().forward(input)

    @torch.no_grad()
    def _track(self, mean: Tensor, unbiased_variance: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = self.momentum
        newest = 1 / float(self.num_batches_tracked) if momentum is None else momentum
        for running, value in ((self.running_mean, mean), (self.running_var, unbiased_variance)):
            running.mul_(1 - newest).add_(value.to(running), alpha=newest)

    @classmethod
    def _converted(
        cls, module: torch.nn.Module, process_set: Any, done: dict[torch.nn.Module, Any]
    ) -> Any:
        if module in done:
            return done[module]
        is_one = isinstance(module, _BatchNorm)
        result = done[module] = cls._of(module, process_set) if is_one else module
        for name, child in module._modules.items():  # named_children() skips a repeated one
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
        like_x = wide(x[:0]).dtype  # 16-bit inputs have statistics in float32
        y = functional.batch_norm(
            x,
            mean.to(x.device, like_x),
            variance.to(x.device, like_x),
            None if weight is None else weight.to(like_x),
            None if bias is None else bias.to(like_x),
            eps=eps,
        )
        ctx.save_for_backward(x, mean.to(x.device, like_x), inverse.to(x.device, like_x))
        # Within a checkpoint torch 2.6 forgets the hooks of a parameter that is saved like these.
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
        is_graph = torch.is_grad_enabled()  # create_graph=True: no operation in place
        if is_graph:
            deviation, inverse = _differentiable(ctx, deviation)
        sum_dy = dy.sum(axes)
        sum_product = (dy * deviation).sum(axes)
        dx = None
        if needs_x:
            mean_dy, mean_product = _means(sum_dy, sum_product, ctx.count, ctx.group)
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
    """Return deviation and inverse anew, by operations that can be differentiated again.

    Mean and deviation are functions of all ranks' inputs. `centred` is the input less the mean as a
    constant, so that a mean that is large beside its deviation does not cancel.
    """
    axes, count, group = _all_but_channels(centred), ctx.count, ctx.group
    shift = _sum_over_ranks(centred.sum(axes), group) / count
    deviation = centred - _per_channel(shift, centred)
    squares = _sum_over_ranks(deviation.square().sum(axes), group)
    return deviation, (squares / count + ctx.eps).rsqrt()


class _SumOverRanks(torch.autograd.Function):
    """Values and gradients are summed over all ranks, one of both weighed as _means() says.

    A rank's gradient is that of the sum of all losses, divided by its own weight: so the gradient
    of a plain sum is a weighed one, and the other way round.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Group | None, is_weighed: bool) -> Tensor:
        ctx.group, ctx.is_weighed = group, is_weighed
        weight = weight_of_step(engine()) if is_weighed else 1.0
        mine = values.detach().to("cpu", torch.float64)
        # The mean over an empty batch is NaN, which a factor of 0 would not cancel.
        mine = mine * weight if weight else torch.zeros_like(mine)
        total = collectives.allreduce(mine, group=group, deterministic=True)
        return (total / weight if weight else total).to(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _sum_over_ranks(gradient, ctx.group, is_weighed=not ctx.is_weighed), None, None


def _sum_over_ranks(values: Tensor, group: Group | None, *, is_weighed: bool = False) -> Tensor:
    return cast(Tensor, _SumOverRanks.apply(values, group, is_weighed))  # type: ignore[no-untyped-call]


def _statistics(x: Tensor, group: Group | None) -> tuple[Tensor, Tensor, float]:
    """Return mean and biased variance of each channel, float64 (C,), and how many values it has."""
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


def _means(
    sum_dy: Tensor, sum_product: Tensor, count: float, group: Group | None
) -> tuple[Tensor, Tensor]:
    """Return both sums as means over all ranks' values.

    Where gradients will be weighed by numbers of samples, a rank's loss reaches the others with its
    weight, too; theirs are applied to what is returned here, so it is divided by them.
    """
    sums = _sum_over_ranks(torch.stack([sum_dy, sum_product]), group, is_weighed=True)
    return sums[0] / count, sums[1] / count


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
