"""The class that DistributedOptimizer adds to an optimizer: it reduces the gradients."""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch.optim import Optimizer

from ringcomm.engine.api.init_rank_size import engine
from ringcomm.errors import NotInitializedError
from ringcomm.torch.backward.shared_loss import goes_by_loss, loss_of_all_ranks
from ringcomm.torch.optim.distributed_optimizer_options import GradientOptions
from ringcomm.torch.optim.reducer import GradientReducer
from ringcomm.torch.optim.wrapping import derive, name_last_group, renamed, underlying

OUR_ATTRIBUTES = ("_reducer", "_is_skipping", "_has_synchronized", "_has_warned", "step")
_STEP_AFTER_SYNCHRONIZE = (
    # Horovod's words, by which scripts filter the warning
    "optimizer.step() called without optimizer.skip_synchronize() context after "
    "optimizer.synchronize(): in Horovod that reduces gradients twice. Here it does not, but "
    "`with optimizer.skip_synchronize(): optimizer.step()` is right in both"
)


@runtime_checkable
class StateSharding(Protocol):
    """An optimizer whose state is spread over the ranks, such as zero.sharding.ShardedOptimizer.

    Attributes:
        is_spread: True if each rank has a part of the state now; all ranks have the same value.
        is_unscaled: True if unscale() has divided the gradients of this step.
        is_for_all: True unless it is for a process set.
        fewest_ranks: so many, the first ones, have all parts of the last replicate().
    """

    is_spread: bool
    is_unscaled: bool
    is_for_all: bool
    fewest_ranks: int

    def unscale(self, divide: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Call divide(), which divides the gradients; see ShardedOptimizer. Collective."""

    def state_dict(self, *, root_rank: int | None = None) -> Any:
        """Return the state of the whole optimizer, on root_rank or on all ranks. Collective."""

    def replicate(self, commit: int) -> None:
        """Keep a copy of each rank's part for this commit on another rank, too. Collective."""

    def recover(self, commit: int) -> None:
        """Deal the parts of a commit to the ranks of a new view. Collective."""

    def state_of_all(self) -> dict[str, Any]:
        """Return a state_dict() without the ranks' parts."""

    def restore(self, state_dict: dict[str, Any]) -> None:
        """Return to a commit, given its state_of_all(); local, on all ranks."""


class AveragingOptimizer(Optimizer):
    """First base class of the wrapped optimizer; the second is the optimizer's own class."""

    _reducer: GradientReducer
    _is_skipping = False
    _has_synchronized = False  # the user called synchronize() for this step's gradients
    _has_warned = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters. If this rank has run no backward(), take part in the reduction."""
        if self._has_synchronized and not self._is_skipping and not self._has_warned:
            self._has_warned = True
            warnings.warn(_STEP_AFTER_SYNCHRONIZE, stacklevel=3)
        self._has_synchronized = False
        if closure is None:
            self._finish_gradients()
            result = self._update()
        else:
            result = self._update(functools.partial(self._evaluate, closure))
        reducer = self._reducer
        reducer.complete_step()
        if reducer.options.group.size == engine().size:  # else its steps are not the job's
            engine().control.come_to_boundary(reducer, reducer.step)
        else:
            engine().note_step(reducer.step)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as torch does, and recover from a backward() that failed."""
        self._reducer.restart()
        self._has_synchronized = False
        self._follow()
        super().zero_grad(set_to_none)
        if not set_to_none:
            for slot in self._reducer.slots:
                slot.history.note_zeroed(slot.parameter.grad)

    def synchronize(self) -> None:
        """Make .grad final now. Collective, unless a backward() of this step made it final."""
        self._follow()
        self._reducer.flush()
        self._has_synchronized = True

    @property
    def _parameter_names(self) -> dict[torch.nn.Parameter, str]:
        """Name of each parameter; scripts for Horovod read this attribute."""
        return {slot.parameter: slot.name for slot in self._reducer.slots}

    @property
    def n_steps(self) -> int:
        return self._reducer.step

    def go_on_from(self, step: int) -> None:
        """Count steps from `step` on; call it on every rank, between two steps."""
        self._reducer.go_on_from(step)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Send nothing before the `passes`-th backward() of a step. Call it on all ranks."""
        self._reducer.set_passes_per_step(passes)

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Return a context in which step() uses .grad as it is, and takes part in no reduction."""
        before, self._is_skipping = self._is_skipping, True
        try:
            yield
        finally:
            self._is_skipping = before

    def set_samples(self, n: float) -> None:
        """Weight this rank's gradient g of this step with n: .grad becomes sum(n * g) / sum(n).

        Call it on every rank before backward(), in every step or in none.

        Args:
            n: number of samples whose mean is the loss; 0 if this rank's batch is empty.

        Raises:
            ValueError: n is negative or not finite, or op is SUM.

        backward() raises MismatchError if only some ranks have called set_samples(), and ValueError
        if all ranks have passed 0.
        """
        self._reducer.set_samples(n)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale gradients so that their norm is at most max_norm; return their earlier norm.

        It does what torch.nn.utils.clip_grad_norm_() does for all parameters of the optimizer. Call
        it on every rank, between backward() and step().

        Args:
            max_norm: limit of the norm of all gradients together.
            norm_type: p of the p-norm; inf: the largest magnitude.
            error_if_nonfinite: True: raise RuntimeError if the norm is NaN or infinite.
        """
        self._flush()
        parameters = [p for group in self.param_groups for p in group["params"]]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, and reduce their gradients; call it on every rank, between two steps."""
        super().add_param_group(param_group)
        reducer = self.__dict__.get("_reducer")
        if reducer is not None:
            reducer.follow([*reducer.named, *name_last_group(self)])

    def remove_param_groups(self, n_kept: int) -> None:
        """Undo add_param_group() for all groups but the first `n_kept`; on every rank."""
        del self.param_groups[n_kept:]
        held = {id(p) for group in self.param_groups for p in group["params"]}
        self._reducer.follow([each for each in self._reducer.named if id(each[1]) in held])

    def __reduce_ex__(self, protocol: Any) -> Any:
        reducer = self._reducer
        names = [slot.name for slot in reducer.slots]
        plain = underlying(self, OUR_ATTRIBUTES)
        return _rewrap, (plain, names, reducer.options, reducer.passes_per_step)

    def _update(self, *closure: Callable[[], Any]) -> Any:
        return super().step(*closure)

    def _flush(self) -> None:
        self._follow()
        if not self._is_skipping:
            self._reducer.flush()

    def _follow(self) -> None:
        """Take in parameters that the program has put into param_groups."""
        if self._has_strangers:
            self._reducer.follow(renamed(self, self._reducer.named))

    @property
    def _has_strangers(self) -> bool:
        held = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        return not self._reducer.ids.issuperset(map(id, held))

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        self._finish_gradients()
        if self._is_skipping or not goes_by_loss(self):
            return loss
        reducer = self._reducer
        op, group = reducer.options.op, reducer.options.group
        return loss_of_all_ranks(loss, reducer.samples, f"loss{reducer.plan.suffix}", group, op)

    def _finish_gradients(self) -> None:
        """Make .grad final; undo sparse_as_dense now: clipping before step() needs dense .grad."""
        self._flush()
        if self._reducer.options.sparse_as_dense:
            for slot in self._reducer.slots:
                slot.make_sparse_again()


def _rewrap(
    optimizer: Optimizer, names: Sequence[str], options: GradientOptions, passes: int
) -> Optimizer:
    """Return a DistributedOptimizer for a copied or unpickled optimizer."""
    try:
        engine()
    except NotInitializedError as error:
        raise NotInitializedError(
            "a DistributedOptimizer can be unpickled after ringcomm.init() only. To read it "
            "elsewhere, save optimizer.state_dict(), which is plain torch"
        ) from error
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    named = list(zip(names, parameters, strict=True))
    return derive(optimizer, AveragingOptimizer, _reducer=GradientReducer(named, options, passes))
