"""DistributedOptimizer: an existing optimizer whose gradients are averaged over all ranks."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch.optim import Optimizer

from ringcomm.collectives.op import AVERAGE, Op
from ringcomm.engine.world import engine
from ringcomm.errors import NotInitializedError
from ringcomm.torch.adasum import with_adasum
from ringcomm.torch.compression import Compression
from ringcomm.torch.process_sets import ProcessSet, global_process_set
from ringcomm.torch.recipe import Recipe, recipe_of, require_own
from ringcomm.torch.reducer import GradientReducer
from ringcomm.torch.reducing import AnyOp, op_of
from ringcomm.torch.wrapping import dressed, named_in_order

T = TypeVar("T", bound=Optimizer)
_OURS = ("_reducer", "_is_skipping", "_has_synchronized", "_has_warned", "step")


def DistributedOptimizer(
    optimizer: T,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: AnyOp = AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.nn.Parameter]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> T:
    """Return `optimizer` with gradients averaged over all ranks when backward() returns.

    The result is of a subclass of the optimizer's own class and shares its state, so learning-rate
    schedulers, state_dict(), param_groups and isinstance() work as before, also for a scheduler
    that was made earlier. It can be copied and pickled. It also has

    - synchronize(): see .grad final without a step; step() does it by itself.
    - skip_synchronize(): context in which step() uses .grad as it is.
    - set_samples(n): weigh this rank's gradient of this step by n, e.g. its batch size.
    - set_backward_passes_per_step(n): from the next step on.

    Every rank must wrap the same parameters in the same order, and run as many backward() and
    step() as the others. A rank may leave parameters out, or have no backward() for a step: what is
    missing counts as zeros. A parameter that no rank used keeps .grad None. .grad is a view of
    memory that the next backward() overwrites: clone what is to be kept.

    Args:
        optimizer: any torch.optim.Optimizer over CPU parameters; closures work.
        named_parameters: model.named_parameters(), for error messages. It may name more
            parameters than the optimizer holds.
        compression: what is sent: Compression.none, fp16 or bf16.
        backward_passes_per_step: the first n - 1 backward() of a step send nothing; the n-th sends
            the sum of what all have computed, and so do any that follow.
        op: Average or Sum. Adasum: gradients stay each rank's own, and what step() adds to the
            weights is combined; of the arguments that follow it takes process_set alone.
        gradient_predivide_factor: gradients are divided by it before they are sent and multiplied
            after, for 16-bit dtypes whose sums would overflow.
        num_groups: this many groups of parameters travel as one message each; 0: buckets of
            RINGCOMM_FUSION_MIB.
        groups: lists of parameters that travel as one message each, or their number.
        sparse_as_dense: sparse gradients are made dense first.
        process_set: the ranks that take part; on others the optimizer works alone.

    Raises:
        NotInitializedError: init() has not run.
        TypeError: a parameter is not in host memory, or of a dtype that cannot be reduced, or
            named_parameters has none of the names.
        ValueError: names are not unique, a parameter of the optimizer has none or belongs to
            another DistributedOptimizer, one in groups is not the optimizer's, or an argument is
            out of range.

    backward() and step() then raise MismatchError (on every rank), PeerFailedError and
    CommTimeoutError; and RingcommError after a backward() that failed, until zero_grad().

    Cost: the buckets, as large as the gradients; one copy of each gradient; per backward()
    2 (size - 1) / size of their bytes sent while it runs, and at its end one message of a byte per
    parameter. The sum over ranks of N batches of b equals one process with a batch of N * b as far
    as floating point allows.
    """
    if isinstance(optimizer, _Distributed):
        raise ValueError("the optimizer is a DistributedOptimizer already: wrap it once")
    engine()
    given = None if named_parameters is None else list(named_parameters)
    named = named_in_order(optimizer, given)
    op = op_of(op, None)
    if isinstance(op, Op):
        recipe = recipe_of(
            op,
            compression,
            gradient_predivide_factor,
            num_groups,
            groups,
            sparse_as_dense,
            process_set,
        )
        require_own(recipe, named, given or ())
        return _wrapped(optimizer, GradientReducer(named, recipe, backward_passes_per_step))
    return with_adasum(optimizer, named, compression, process_set)


def _wrapped(optimizer: T, reducer: GradientReducer) -> T:
    return cast(
        T,
        dressed(
            optimizer,
            _Distributed,
            _reducer=reducer,
            _is_skipping=False,
            _has_synchronized=False,
            _has_warned=False,
        ),
    )


class _Distributed(Optimizer):
    """The part of the new class that knows of other ranks; the optimizer's own class follows it."""

    _reducer: GradientReducer
    _is_skipping: bool
    _has_synchronized: bool  # by the user, since the last step
    _has_warned: bool

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters; takes part in the reduction if no backward() has here."""
        if self._has_synchronized and not self._is_skipping and not self._has_warned:
            self._has_warned = True
            _warn_of_synchronize()
        self._has_synchronized = False
        if closure is None:
            self._flush()
            result = super().step()
        else:
            result = super().step(functools.partial(self._evaluate, closure))
        self._reducer.complete_step()
        engine().note_step(self._reducer.step)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, as torch does; after a backward() that failed, mend what can be."""
        self._reducer.restart()
        super().zero_grad(set_to_none)
        if not set_to_none:
            self._reducer.note_zeroed()

    def synchronize(self) -> None:
        """Make .grad final now. Collective if this rank has run too few backward(), else free."""
        self._reducer.flush()
        self._has_synchronized = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Send nothing before the n-th backward() of a step; on every rank alike, between steps."""
        self._reducer.set_passes_per_step(passes)

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let step() use .grad as it is, without taking part in a reduction."""
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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, on every rank alike, between two steps; they are reduced from now on."""
        super().add_param_group(param_group)
        reducer = self.__dict__.get("_reducer")
        if reducer is not None:
            g = len(self.param_groups) - 1
            added = self.param_groups[g]["params"]
            reducer.extend([(f"group{g}.{i}", p) for i, p in enumerate(added)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Optimizer = object.__new__(type(self).__bases__[1])
        plain.__dict__ = {k: v for k, v in self.__dict__.items() if k not in _OURS}
        reducer = self._reducer
        names = [slot.name for slot in reducer.slots]
        return _rewrap, (plain, names, reducer.recipe, reducer.passes_per_step)

    def _flush(self) -> None:
        if not self._is_skipping:
            self._reducer.flush()

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        self._flush()
        return loss


# torch wraps the step() of a class to run its step hooks, and the base class's is wrapped already.
_Distributed.step.hooked = True  # type: ignore[attr-defined]


def _warn_of_synchronize() -> None:
    """Say once what Horovod's users forget; here it costs nothing."""
    warnings.warn(
        "optimizer.step() after optimizer.synchronize(): in Horovod that reduces gradients twice. "
        "Here it does not, but `with optimizer.skip_synchronize(): optimizer.step()` is right in "
        "both",
        stacklevel=3,
    )


def _rewrap(optimizer: Optimizer, names: Sequence[str], recipe: Recipe, passes: int) -> Optimizer:
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
    return _wrapped(optimizer, GradientReducer(named, recipe, passes))
