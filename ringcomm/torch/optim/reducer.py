"""Reduces gradients over all ranks while backward() runs.

Autograd's hooks tell when a gradient is there. It is copied into its bucket, and a bucket that is
full leaves at once. Where the outermost run ends, the ranks tell each other in one small message
what is present; what has not left yet follows, and all is waited for (exchange.py). So .grad is
final, and the same on every rank, when backward() returns: clipping, GradScaler and logging see
what the optimizer will use. A rank that runs no backward() takes part from step().
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable
from typing import ParamSpec

from ringcomm.arrays import any_adapter_for
from ringcomm.collectives.op import AVERAGE, Op
from ringcomm.engine.api.world import engine
from ringcomm.errors import MismatchError, RingcommError
from ringcomm.torch.backward.consistency_check import OptimizerSummary
from ringcomm.torch.backward.cooperative_finish import CollectiveTask, finish_together
from ringcomm.torch.backward.parameters import Named, ParameterHooks, without_hooks
from ringcomm.torch.backward.passes import Passes
from ringcomm.torch.backward.registry import enrol, note_samples
from ringcomm.torch.optim.agreement import Agreement
from ringcomm.torch.optim.bucket_plan import BucketPlan
from ringcomm.torch.optim.buckets import Scaling
from ringcomm.torch.optim.exchange import Exchange
from ringcomm.torch.optim.gradient import GradientSlot, GradientState
from ringcomm.torch.optim.options import GradientOptions, require_passes

P = ParamSpec("P")


class GradientReducer:
    """Owns the hooks and buckets of one optimizer's parameters.

    Args:
        named_parameters: (name, parameter), frozen ones too, alike on every rank and in one order.
        options: how they are reduced.
        passes_per_step: backward() calls whose gradients are added up before anything is sent.
        known: parameters that have names, among them others; see FirstWeights.
    """

    def __init__(
        self,
        named_parameters: Named,
        options: GradientOptions,
        passes_per_step: int,
        known: Named = (),
    ) -> None:
        self.options = options
        self._agreement = Agreement(is_wanted=options.sync_weights, known=known)
        self.set_passes_per_step(passes_per_step)
        self.step = 0
        self.slots: list[GradientSlot] = []
        self.plan = BucketPlan(self.slots)
        self.number = 0
        self._engine = weakref.ref(engine())
        self.hooks = ParameterHooks()
        self._passes = Passes()
        self._n_passes = 0  # of this step
        self._is_communicating = False
        self._is_synchronized = False  # since the step began, this rank has taken part
        self._usability = _Usability()
        self._samples: float | None = None
        self._are_samples_used = False
        self.extend(named_parameters)
        self._enrol()

    def set_passes_per_step(self, n: int) -> None:
        """Add up the gradients of n backward() calls before anything is sent; between two steps."""
        require_passes(n)
        self.passes_per_step = n
        self._agreement.forget()

    def extend(self, named_parameters: Named) -> None:
        """Reduce the gradients of these, too; the same on every rank, between two steps."""
        self._usability.require(self._passes)
        self._agreement.weights.expect_more()
        n = len(self.slots)
        self.slots += [GradientSlot(n + i, name, p) for i, (name, p) in enumerate(named_parameters)]
        self._replan()
        _attach_hooks(self, GradientState.SETTLED)

    def close(self) -> None:
        """Remove the hooks, and release the parameters for another optimizer."""
        self.hooks.close(self, self.slots)

    def flush(self) -> None:
        """Take part in the reduction if no backward() has done so since the step began."""
        self._usability.require(self._passes)
        if self._is_synchronized and self._samples is not None and not self._are_samples_used:
            raise RingcommError(
                "DistributedOptimizer: set_samples() came after backward(), which had reduced the "
                "gradients already: call it before"
            )
        if not self._is_synchronized:
            self._spoiling(self._prepare)
            finish_together([self._finish()])
            self._n_passes = max(self._n_passes, self.passes_per_step)

    def restart(self) -> None:
        """Gradients start anew, before zero_grad(). What a failed backward() sent is completed."""
        if any(bucket.is_under_way for bucket in self.plan.buckets or ()):
            self._spoiling(self._drain)
        self._usability.is_spoiled = False
        self._begin_step()

    def complete_step(self) -> None:
        """The optimizer has used the gradients."""
        self.step += 1
        self._samples = None
        self.plan.note_step(self.options)
        self._begin_step()

    def go_on_from(self, step: int) -> None:
        """Count steps from this one on, after join(), and agree on all else anew; on every rank."""
        self.step = step
        self._agreement.weights.expect_more()
        self.plan.forget_sparse()
        self._replan()

    def set_samples(self, n: float) -> None:
        """Weigh this rank's gradient of this step by n."""
        if self.options.op is not AVERAGE:
            raise ValueError("set_samples() weighs a mean, but this optimizer's op is SUM")
        n = float(n)
        if not 0 <= n < math.inf:
            raise ValueError(f"set_samples({n:g}): a number of samples is finite and at least 0")
        self._samples, self._are_samples_used = n, False
        note_samples(self, engine())

    @property
    def samples(self) -> float | None:
        """Number of samples that this rank's gradient is the mean of; None: it is not weighed."""
        return self._samples

    # --- what autograd calls ----------------------------------------------------------------------
    def before_gradient(self, index: int) -> None:
        """Make room in .grad for what this rank computes."""
        self._spoiling(self._passes.enter, self)
        self.slots[index].open()

    def after_gradient(self, index: int) -> None:
        """Put the gradient into its bucket, if this pass communicates."""
        slot = self.slots[index]
        if self.options.sparse_as_dense and slot.has_sparse:
            slot.densify()
            slot.was_sparse = not self.options.is_sharded
        if slot.state is GradientState.SETTLED:
            self._spoiling(self.hooks.require_current, slot)
        elif self._is_communicating and slot.state is GradientState.OPEN and slot.is_ready:
            self._spoiling(self._load, slot)

    def begin_pass(self) -> None:
        """Count the pass; make buckets if it communicates."""
        self._usability.require(self._passes)
        self._n_passes += 1
        self._is_communicating = self._n_passes >= self.passes_per_step
        if self._is_communicating:
            self._prepare()

    def end_pass(self) -> CollectiveTask[None]:
        """Complete the reduction, if this pass communicates."""
        if self._is_communicating:
            yield from self._finish()

    def _load(self, slot: GradientSlot) -> None:
        """Put a gradient into its bucket; buckets that are full leave."""
        bucket = slot.bucket
        assert bucket is not None
        slot.pack()
        if self.plan.note_loaded(slot, bucket) and self._agreement.is_reached():
            self.plan.launch_full(self.scaling)

    # --- reductions -------------------------------------------------------------------------------
    @property
    def scaling(self) -> Scaling:
        """Options of this step's reduction."""
        return Scaling(self.options, self._samples)

    @property
    def suffix(self) -> str:
        """End of the names of messages: other optimizers, and users, have names of their own."""
        return f" (optimizer {self.number})"

    def _prepare(self) -> None:
        """Before the first gradient of a pass: see what is new, and make buckets if there are none.

        Nothing here waits: several optimizers may come here in another order on another rank.
        """
        if _attach_hooks(self, GradientState.OPEN):
            self._replan()
        if self._engine() is not engine():  # shutdown() and init() lie between
            self._engine = weakref.ref(engine())
            self._enrol()
            self._replan()
        if not self._agreement.is_begun:
            name = f"parameters{self.suffix}"
            self._agreement.begin(_summary(self), _named(self), name, self.options.group)
        self.plan.expect_all(self.options)

    def _enrol(self) -> None:
        enrol(self, self.options.group)
        self.plan.suffix = self.suffix

    def _finish(self) -> CollectiveTask[None]:
        """End a pass that communicates."""
        try:
            for slot in self.slots:
                slot.require_placed()
            yield self._agreement.handle
            self._agreement.is_reached()
            presence = yield from _exchange(self).run()
            group, suffix = self.options.group, self.suffix
            yield from self._agreement.weights.make_alike(_named(self), group, suffix)
            self._is_synchronized = self._are_samples_used = True
            yield from self.plan.learn(presence, self.options)
        except BaseException as error:
            self._spoil(error)
            raise

    def _drain(self) -> None:
        """Complete what a failed backward() has sent, so that no other rank waits for it."""

        def work() -> CollectiveTask[None]:
            with contextlib.suppress(MismatchError):
                yield from _exchange(self).run(has_failed=True)

        finish_together([work()])

    # --- what is reduced --------------------------------------------------------------------------
    def _replan(self) -> None:
        self.plan.forget_order()
        self._agreement.forget()

    # --- what goes wrong --------------------------------------------------------------------------
    def _spoiling(self, action: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Do it; if that fails, gradients are not to be used before they start anew."""
        try:
            action(*args, **kwargs)
        except BaseException as error:
            self._spoil(error)
            raise

    def _spoil(self, error: BaseException) -> None:
        self._passes.forget()
        if self._usability.spoil(error):
            self.plan.drop()

    def _begin_step(self) -> None:
        self._passes.forget()
        self._n_passes = 0
        self._is_communicating = self._is_synchronized = False
        for slot in self.slots:
            slot.restart()


class _Usability:
    """Refuses gradients after a failure (is_spoiled), until they start anew."""

    def __init__(self) -> None:
        self.is_spoiled = False
        self._is_interrupted = False

    def spoil(self, error: BaseException) -> bool:
        """Note a failure; return True if the engine may still write to buckets under way."""
        self.is_spoiled = True
        self._is_interrupted |= not isinstance(error, Exception)
        is_lost = isinstance(error, RingcommError) and not isinstance(error, MismatchError)
        return is_lost or self._is_interrupted

    def require(self, passes: Passes) -> None:
        """Raise RingcommError if gradients cannot be used."""
        if self._is_interrupted:
            raise RingcommError(
                "DistributedOptimizer: a reduction was interrupted half-way, and other ranks may "
                "wait in it: end this job"
            )
        if self.is_spoiled or passes.has_failed:
            raise RingcommError(
                "DistributedOptimizer: the last backward() failed, or its gradients could not be "
                "reduced: call optimizer.zero_grad() and repeat the backward()"
            )


def _attach_hooks(reducer: GradientReducer, state: GradientState) -> bool:
    """Attach hooks to parameters that were added or unfrozen; return True if there are any."""
    new = without_hooks(reducer.slots)
    for slot in new:
        _require_reducible(slot, reducer.options.op)
    reducer.hooks.attach(reducer, new)
    for slot in new:
        slot.state = state
    return bool(new)


def _named(reducer: GradientReducer) -> Named:
    return [(slot.name, slot.parameter) for slot in reducer.slots]


def _exchange(reducer: GradientReducer) -> Exchange:
    plan = reducer.plan
    buckets, max_nbytes = plan.buckets or (), plan.max_nbytes
    return Exchange(
        reducer.slots, buckets, reducer.scaling, reducer.step, max_nbytes, reducer.suffix
    )


def _summary(reducer: GradientReducer) -> OptimizerSummary:
    """Return what all ranks must have alike."""
    settings = {
        **reducer.options.summary([slot.parameter for slot in reducer.slots]),
        "backward_passes_per_step": reducer.passes_per_step,
        "RINGCOMM_FUSION_MIB": engine().settings.fusion_mib,
    }
    return OptimizerSummary(
        tuple((slot.name, slot.summary) for slot in reducer.slots),
        tuple((what, str(value)) for what, value in settings.items()),
    )


def _require_reducible(slot: GradientSlot, op: Op) -> None:
    try:
        op.require(any_adapter_for(slot.parameter).dtype(slot.parameter))
    except TypeError as error:
        raise TypeError(f"DistributedOptimizer: {slot.name}: {error}") from error
