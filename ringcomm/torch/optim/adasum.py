"""Adasum: each rank makes a step with its own gradients; ranks combine the changes of weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch.optim import Optimizer

from ringcomm.engine.api.init_rank_size import engine
from ringcomm.torch.backward.parameter_hooks import Named
from ringcomm.torch.compression import Compressor
from ringcomm.torch.horovod.process_sets import ProcessSet
from ringcomm.torch.horovod.reduce_op import Adasum
from ringcomm.torch.horovod.reductions import allreduce_async
from ringcomm.torch.optim.distributed_optimizer_options import checked_passes
from ringcomm.torch.optim.first_weights import FirstWeights
from ringcomm.torch.optim.wrapping import derive, renamed, underlying

T = TypeVar("T", bound=Optimizer)
_OURS = ("_named", "_compression", "_process_set", "_weights", "_sync_weights", "step")


def with_adasum(
    optimizer: T,
    named_parameters: Named,
    compression: Compressor,
    process_set: ProcessSet,
    *,
    sync_weights: bool = True,
    known: Named = (),
) -> T:
    """Return `optimizer`, whose step() combines the ranks' changes of the weights."""
    return derive(
        optimizer,
        _AdasumOptimizer,
        _named=list(named_parameters),
        _compression=compression,
        _process_set=process_set,
        _sync_weights=sync_weights,
        _weights=FirstWeights(is_wanted=sync_weights, known=known),
    )


class _AdasumOptimizer(Optimizer):
    """First base class of the wrapped optimizer; the second is the optimizer's own class."""

    _named: list[tuple[str, torch.nn.Parameter]]
    _compression: Compressor
    _process_set: ProcessSet
    _weights: FirstWeights
    _sync_weights: bool
    _n_steps = 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self._follow()
        if self._process_set.included():
            self._weights.compare(self._named, self._process_set.group, " (adasum)")
        starts = [p.detach().clone() for _, p in self._named]
        result = super().step() if closure is None else super().step(closure)
        if self._process_set.included():
            self._combine(starts)
        self._n_steps += 1
        if self._process_set.size() == engine().size:
            engine().control.come_to_boundary(self, self._n_steps)
        return result

    def synchronize(self) -> None:
        """Do nothing: each rank keeps its own gradients."""

    @property
    def _parameter_names(self) -> dict[torch.nn.Parameter, str]:
        return {p: name for name, p in self._named}

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Check the number and ignore it: .grad is the sum of all backward() until step()."""
        checked_passes(passes)

    def skip_synchronize(self) -> NoReturn:
        raise AssertionError(
            "skip_synchronize() is not supported with op=hvd.Adasum: each rank keeps its own "
            "gradients, so change .grad and call step() without skip_synchronize()"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = underlying(self, _OURS)
        rewrap = functools.partial(with_adasum, sync_weights=self._sync_weights)
        return rewrap, (plain, self._named, self._compression, self._process_set)

    def _follow(self) -> None:
        """Take in parameters that the program has put into param_groups."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        if list(map(id, parameters)) != [id(p) for _, p in self._named]:
            self._named = renamed(self, self._named)
            self._weights.expect_more()

    @torch.no_grad()
    def _combine(self, starts: Sequence[torch.Tensor]) -> None:
        under_way = []
        for (name, p), start in zip(self._named, starts, strict=True):
            sent, ctx = self._compression.compress(p.detach() - start)
            handle = allreduce_async(
                sent, name=f"adasum of {name}", op=Adasum, process_set=self._process_set
            )
            under_way.append((handle, ctx))
        for (_, p), start, (handle, ctx) in zip(self._named, starts, under_way, strict=True):
            p.copy_(start + self._compression.decompress(handle.wait(), ctx))
