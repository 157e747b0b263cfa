"""An optimizer whose ranks step by their own gradients, and combine by Adasum what that adds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch.optim import Optimizer

from ringcomm.torch.backward.parameters import Named
from ringcomm.torch.horovod.process_sets import ProcessSet
from ringcomm.torch.horovod.reduce_op import Adasum
from ringcomm.torch.horovod.reductions import allreduce_async
from ringcomm.torch.optim.first_weights import FirstWeights
from ringcomm.torch.optim.options import require_passes
from ringcomm.torch.optim.wrapping import derive, underlying

T = TypeVar("T", bound=Optimizer)
_OURS = ("_named", "_compression", "_process_set", "_weights", "_sync_weights", "step")


def with_adasum(
    optimizer: T,
    named_parameters: Named,
    compression: Any,
    process_set: ProcessSet,
    *,
    sync_weights: bool = True,
    known: Named = (),
) -> T:
    """Return `optimizer` with the change that each step() makes combined over all ranks."""
    attributes = {
        "_named": list(named_parameters),
        "_compression": compression,
        "_process_set": process_set,
        "_sync_weights": sync_weights,
        "_weights": FirstWeights(is_wanted=sync_weights, known=known),
    }
    return derive(optimizer, _Adaptive, **attributes)


class _Adaptive(Optimizer):
    """The part of the new class that knows of other ranks; the optimizer's own class follows it."""

    _named: list[tuple[str, torch.nn.Parameter]]
    _compression: Any
    _process_set: ProcessSet
    _weights: FirstWeights
    _sync_weights: bool

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters by the combination of what each rank would have added."""
        if self._process_set.included():
            self._weights.compare(self._named, self._process_set.group, " (adasum)")
        starts = [p.detach().clone() for _, p in self._named]
        result = super().step() if closure is None else super().step(closure)
        if self._process_set.included():
            self._combine(starts)
        return result

    def synchronize(self) -> None:
        """Do nothing: gradients stay each rank's own."""

    @property
    def _parameter_names(self) -> dict[torch.nn.Parameter, str]:
        return {p: name for name, p in self._named}

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Do nothing: gradients add up in .grad until step(), however many backward() there are.

        Raises:
            ValueError: passes is no whole number from 1 on.
        """
        require_passes(passes)

    def skip_synchronize(self) -> NoReturn:
        """Raise AssertionError, as Horovod does: what step() adds is combined in any case."""
        raise AssertionError(
            "skip_synchronize() is not supported with op=hvd.Adasum: gradients stay each rank's "
            "own, so change .grad and call step() without it"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = underlying(self, _OURS)
        rewrap = functools.partial(with_adasum, sync_weights=self._sync_weights)
        return rewrap, (plain, self._named, self._compression, self._process_set)

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


# torch wraps the step() of a class to run its step hooks, and the base class's is wrapped already.
_Adaptive.step.hooked = True  # type: ignore[attr-defined]
