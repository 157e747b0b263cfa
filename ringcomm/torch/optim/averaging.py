"""The part of a DistributedOptimizer that knows of other ranks, and lets them reduce gradients."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch.optim import Optimizer

from ringcomm.engine.api.world import engine
from ringcomm.errors import NotInitializedError
from ringcomm.torch.optim.options import GradientOptions
from ringcomm.torch.optim.reducer import GradientReducer
from ringcomm.torch.optim.wrapping import derive, name_last_group, underlying

T = TypeVar("T", bound=Optimizer)
OURS = ("_reducer", "_is_skipping", "_has_synchronized", "_has_warned", "step")


def with_averaging(optimizer: T, reducer: GradientReducer) -> T:
    """Return `optimizer` with its gradients reduced by `reducer`."""
    return derive(optimizer, AveragingOptimizer, _reducer=reducer)


@runtime_checkable
class StateSharding(Protocol):
    """An optimizer whose state is spread over the ranks; ringcomm.torch.zero has it.

    Attributes:
        is_spread: this rank has a share of the state, not all of it; alike on all ranks.
        is_unscaled: unscale() has divided the gradients of this step.
    """

    is_spread: bool
    is_unscaled: bool

    def unscale(self, divide: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Divide by divide(), which returns numbers above 0 for infinities. Collective."""
        ...

    def state_dict(self, *, root_rank: int | None = None) -> Any:
        """Return the state of the whole optimizer, to root_rank or to all. Collective."""
        ...


class AveragingOptimizer(Optimizer):
    """The part of the new class that knows of other ranks; the optimizer's own class follows it."""

    _reducer: GradientReducer
    _is_skipping = False
    _has_synchronized = False  # by the user, since the last step
    _has_warned = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters; takes part in the reduction if no backward() has here."""
        if self._has_synchronized and not self._is_skipping and not self._has_warned:
            self._has_warned = True
            _warn_of_synchronize()
        self._has_synchronized = False
        if closure is None:
            self._finish_gradients()
            result = self._update()
        else:
            result = self._update(functools.partial(self._evaluate, closure))
        self._reducer.complete_step()
        engine().note_step(self._reducer.step)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, as torch does, and recover from a backward() that failed."""
        self._reducer.restart()
        super().zero_grad(set_to_none)
        if not set_to_none:
            for slot in self._reducer.slots:
                slot.note_zeroed()

    def synchronize(self) -> None:
        """Make .grad final now. Collective if this rank has run too few backward(), else free."""
        self._reducer.flush()
        self._has_synchronized = True

    @property
    def _parameter_names(self) -> dict[torch.nn.Parameter, str]:
        """Names by parameter, which scripts for Horovod look at."""
        return {slot.parameter: slot.name for slot in self._reducer.slots}

    @property
    def n_steps(self) -> int:
        """Number of step() calls that this rank has completed."""
        return self._reducer.step

    def go_on_from(self, step: int) -> None:
        """Count steps from this one on; on every rank alike, between two steps."""
        self._reducer.go_on_from(step)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Send nothing before the n-th backward() of a step; on every rank alike, between steps."""
        self._reducer.set_passes_per_step(passes)

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Return a context in which step() uses .grad as it is, and takes part in no reduction."""
        self._is_skipping = True
        try:
            yield
        finally:
            self._is_skipping = False

    def set_samples(self, n: float) -> None:
        """Weigh this rank's gradient of this step by n: the result is sum(n * g) / sum(n).

        To be called on every rank before backward(), for each step or never.

        Args:
            n: how many samples the loss is the mean of; 0 for a rank whose batch is empty.

        Raises:
            ValueError: n is negative or no number, or op is SUM.

        backward() raises MismatchError if not every rank has called this, and ValueError if all
        have passed 0.
        """
        self._reducer.set_samples(n)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale gradients down to a norm of at most max_norm, and return the norm that they had.

        As torch.nn.utils.clip_grad_norm_ of all of the optimizer's parameters; to be called on
        every rank, between backward() and step().

        Args:
            max_norm: of all gradients together.
            norm_type: the norm's p; inf: the largest magnitude.
            error_if_nonfinite: raise RuntimeError if the norm is NaN or infinite.
        """
        self._flush()
        parameters = [p for group in self.param_groups for p in group["params"]]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, on every rank alike, between two steps; they are reduced from now on."""
        super().add_param_group(param_group)
        reducer = self.__dict__.get("_reducer")
        if reducer is not None:
            reducer.extend(name_last_group(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        reducer = self._reducer
        names = [slot.name for slot in reducer.slots]
        plain = underlying(self, OURS)
        return _rewrap, (plain, names, reducer.options, reducer.passes_per_step)

    def _update(self, *closure: Callable[[], Any]) -> Any:
        """Do what the optimizer's own class does with the gradients."""
        return super().step(*closure)

    def _flush(self) -> None:
        if not self._is_skipping:
            self._reducer.flush()

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        self._finish_gradients()
        return loss

    def _finish_gradients(self) -> None:
        """Make .grad what the optimizer's own class takes; clipping takes dense ones only."""
        self._flush()
        if self._reducer.options.sparse_as_dense:
            for slot in self._reducer.slots:
                slot.make_sparse_again()


# torch wraps the step() of a class to run its step hooks, and the base class's is wrapped already.
AveragingOptimizer.step.hooked = True  # type: ignore[attr-defined]


def _warn_of_synchronize() -> None:
    """Say once what Horovod's users forget; here it costs nothing."""
    warnings.warn(
        # Horovod's words, by which scripts filter it
        "optimizer.step() called without optimizer.skip_synchronize() context after "
        "optimizer.synchronize(): in Horovod that reduces gradients twice. Here it does not, but "
        "`with optimizer.skip_synchronize(): optimizer.step()` is right in both",
        stacklevel=3,
    )


def _rewrap(
    optimizer: Optimizer, names: Sequence[str], options: GradientOptions, passes: int
) -> Optimizer:
    """Make a DistributedOptimizer of a copy."""
    try:
        engine()
    except NotInitializedError as error:
        raise NotInitializedError(
            "a DistributedOptimizer can be unpickled after ringcomm.init() only. To read it "
            "elsewhere, save optimizer.state_dict(), which is plain torch"
        ) from error
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    named = list(zip(names, parameters, strict=True))
    return with_averaging(optimizer, GradientReducer(named, options, passes))
