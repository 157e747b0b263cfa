"""DistributedOptimizer: an existing optimizer whose gradients are averaged over all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch
from torch.optim import Optimizer

from ringcomm.collectives.op import AVERAGE, Op
from ringcomm.engine.world import engine
from ringcomm.torch.reducer import GradientReducer

T = TypeVar("T", bound=Optimizer)


def DistributedOptimizer(
    optimizer: T,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    *,
    op: Op = AVERAGE,
) -> T:
    """Return `optimizer` with gradients averaged over all ranks when backward() returns.

    The result is of a subclass of the optimizer's own class and shares its state, so learning-rate
    schedulers, state_dict(), param_groups and isinstance() work as before, also for a scheduler
    that was made earlier. Every rank must wrap the same parameters in the same order, run one
    backward() per step(), and use each parameter on all ranks or on none.

    Args:
        optimizer: any torch.optim.Optimizer over CPU parameters; closures work.
        named_parameters: model.named_parameters(), for error messages. It may name more
            parameters than the optimizer holds.
        op: rc.AVERAGE, or rc.SUM.

    Raises:
        NotInitializedError: init() has not run.
        TypeError: a parameter is not in host memory, or of a dtype that cannot be reduced.
        ValueError: names are not unique, or a parameter of the optimizer has none.

    backward() then raises MismatchError (on every rank), PeerFailedError, CommTimeoutError, and
    RingcommError for a second backward() that adds to gradients already reduced.

    Cost: one extra copy of the gradients in memory; 2 (size - 1) / size of their bytes sent per
    backward(). The sum over ranks of N batches of b equals one process with a batch of N * b as
    far as floating point allows.
    """
    if isinstance(optimizer, _Distributed):
        raise ValueError("the optimizer is a DistributedOptimizer already: wrap it once")
    named = _named(optimizer, named_parameters)
    base = type(optimizer)
    kind: type[_Distributed] = type(base.__name__, (_Distributed, base), {"__doc__": base.__doc__})
    wrapped = object.__new__(kind)
    earlier_step = optimizer.__dict__.pop("step", None)
    wrapped.__dict__ = optimizer.__dict__
    wrapped._reducer = GradientReducer(wrapped, named, op)
    wrapped._reduction = op
    wrapped._n_steps = 0
    if hasattr(earlier_step, "_wrapped_by_lr_sched"):
        _let_scheduler_see_steps(wrapped)
    return cast(T, wrapped)


class _Distributed(Optimizer):
    """The part of the new class that knows of other ranks; the optimizer's own class follows it."""

    _reducer: GradientReducer
    _reduction: Op
    _n_steps: int

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters; gradients have been reduced by backward()."""
        if closure is None:
            self._reducer.flush()
            result = super().step()
        else:
            result = super().step(closure)
        self._reducer.begin_step()
        self._n_steps += 1
        engine().note_step(self._n_steps)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, as torch does."""
        super().zero_grad(set_to_none)
        self._reducer.begin_step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, on every rank alike; they are reduced from now on."""
        super().add_param_group(param_group)
        reducer = self.__dict__.get("_reducer")
        if reducer is None:
            return
        reducer.close()
        names = dict(zip(reducer.parameters, reducer.names, strict=True))
        named = [
            (names.get(p, f"group{g}.{i}"), p)
            for g, group in enumerate(self.param_groups)
            for i, p in enumerate(group["params"])
            if p.requires_grad
        ]
        self._reducer = GradientReducer(self, named, self._reduction)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a DistributedOptimizer cannot be pickled or copied: save optimizer.state_dict(), and "
            "load it into a new one"
        )


# torch wraps the step() of a class to run its step hooks, and the base class's is wrapped already.
_Distributed.step.hooked = True  # type: ignore[attr-defined]


def _named(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the optimizer's trainable parameters with their names, in the optimizer's order."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if named_parameters is None:
        return [(f"parameter{i}", p) for i, p in enumerate(parameters) if p.requires_grad]
    given = list(named_parameters)
    names = [name for name, _ in given]
    doubles = sorted({name for name in names if names.count(name) > 1})
    if doubles:
        raise ValueError(f"named_parameters has names that are not unique: {', '.join(doubles)}")
    name_of = {p: name for name, p in given}
    nameless = [i for i, p in enumerate(parameters) if p not in name_of]
    if nameless:
        raise ValueError(
            f"{len(nameless)} of the optimizer's {len(parameters)} parameters are not in "
            "named_parameters; pass model.named_parameters() of the whole model"
        )
    return [(name_of[p], p) for p in parameters if p.requires_grad]


def _let_scheduler_see_steps(wrapped: _Distributed) -> None:
    """Keep the mark by which a scheduler made before the wrapping knows that step() was called."""

    @functools.wraps(type(wrapped).step)
    def step(*args: Any, **kwargs: Any) -> Any:
        wrapped.__dict__["_opt_called"] = True
        return type(wrapped).step(wrapped, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    wrapped.step = step  # type: ignore[method-assign]
