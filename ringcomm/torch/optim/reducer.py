"""Reduces gradients over all ranks while backward() runs.

Autograd calls a hook when a gradient is complete. The gradient is copied into its bucket, and a
full bucket is sent at once. When the outermost run ends, one small message shows each rank which
gradients any rank has. Then the ranks send the other buckets, and wait (exchange.py).
So .grad is final, and the same on every rank, when backward() returns: clipping, GradScaler and
logging read the values that the optimizer will use. A rank that runs no backward() takes part in
step().
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import ParamSpec

from ringcomm._core import StepClock
from ringcomm.arrays import any_adapter_for
from ringcomm.collectives.operators import AVERAGE
from ringcomm.elastic import on_new_view
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.api.world import is_outside
from ringcomm.engine.core.group import Group
from ringcomm.errors import MismatchError, RingcommError
from ringcomm.torch.backward.collective_tasks import CollectiveTask, finish_together
from ringcomm.torch.backward.consistency_check import ConsistencyCheck, OptimizerSummary
from ringcomm.torch.backward.optimizer_numbers import (
    checked_samples,
    note_samples,
)
from ringcomm.torch.backward.parameter_hooks import Named, ParameterHooks, without_hooks
from ringcomm.torch.backward.passes import Passes
from ringcomm.torch.horovod.process_sets import global_process_set
from ringcomm.torch.optim.bucket_order import BucketPlan
from ringcomm.torch.optim.buckets import Scaling
from ringcomm.torch.optim.distributed_optimizer_options import GradientOptions, checked_passes
from ringcomm.torch.optim.exchange import Exchange, FailedPass
from ringcomm.torch.optim.first_weights import FirstWeights
from ringcomm.torch.optim.gradient_shard import GradientShard
from ringcomm.torch.optim.gradient_slot import GradientSlot, GradientState


# --- agreement of optimizers ----------------------------------------------------------------------
class OptimizerAgreement:
    """Compares an optimizer with those of the other ranks, in the first backward().

    That one sends no gradient before its end: how many are sent before the ranks agree would depend
    on how fast they are, and a backward() that fails on all ranks would leave unlike buckets.

    Attributes:
        check: the comparison, in progress or over; None: begin() starts the next one.
        is_reached: True if the ranks are known to agree.
    """

    def __init__(self, weights: FirstWeights) -> None:
        self.weights = weights
        self.forget()

    def forget(self) -> None:
        self.check: ConsistencyCheck | None = None
        self.is_reached = False

    def begin(self, mine: OptimizerSummary, named: Named, name: str, group: Group) -> None:
        """Begin to compare, without waiting. Collective."""
        self.check = ConsistencyCheck(mine, name, group, self.weights.digest(named))

    def reach(self) -> CollectiveTask[None]:
        """Wait for the agreement. Raises MismatchError if the ranks differ."""
        if self.is_reached:
            return
        check = self.check
        assert check is not None
        yield check.handle
        self.check = None  # if they differ, the next backward() compares again
        self.weights.note(check.wait())
        self.check, self.is_reached = check, True


P = ParamSpec("P")


class GradientReducer:
    """Owns the hooks and buckets of one optimizer's parameters.

    Args:
        named_parameters: pairs (name, parameter), also of frozen parameters; the same on every
            rank, in the same order.
        options: options of the reduction of the gradients.
        passes_per_step: number of backward() calls whose gradients are added up before sending.
        known: pairs (name, parameter) that the user passed for the model; see FirstWeights.

    Attributes:
        ids: id() of each parameter.
        samples: number of samples whose mean is this rank's gradient; None: the gradient has no
            weight.
    """

    def __init__(
        self,
        named_parameters: Named,
        options: GradientOptions,
        passes_per_step: int,
        known: Named = (),
    ) -> None:
        self.options = options
        self._agreement = OptimizerAgreement(
            FirstWeights(is_wanted=options.sync_weights, known=known)
        )
        self.set_passes_per_step(passes_per_step)
        self.step = 0
        self.slots: list[GradientSlot] = []
        self.ids: set[int] = set()
        self._shards: list[GradientShard] = []  # with shard_state=1
        self.plan = BucketPlan(self.slots, options)
        self._engine = weakref.ref(engine())
        self._hooks = ParameterHooks(self)
        self._passes = Passes()
        self._clock = StepClock()
        self._n_joins = 0  # of the engine
        self._n_passes = 0  # of this step
        self._is_communicating = False
        self._is_sending = False  # a pass has begun that sends buckets before its end
        self._n_attempts = 0  # zero_grad() calls since the last step
        self._failed: FailedPass | None = None  # a backward() whose buckets are not complete
        self._is_synchronized = False  # this rank has taken part since the step began
        self._is_spoiled = False  # refuse gradients until restart()
        self._is_interrupted = False  # refuse gradients for ever
        self.samples: float | None = None
        self._are_samples_used = False
        self.follow(named_parameters)
        if not is_outside():  # in a spare begin_view() does it
            _enrol(self)
        on_new_view(self.begin_view)

    def set_passes_per_step(self, n: int) -> None:
        """Add up the gradients of n backward() calls before sending; call it between two steps."""
        self.passes_per_step = checked_passes(n)
        self._agreement.forget()

    def follow(self, named: Named) -> None:
        """Reduce gradients of these parameters, and of no others.

        All ranks pass the same between two backward().
        """
        self._require_usable()
        slot_of = {id(slot.parameter): slot for slot in self.slots}
        self._hooks.remove(self.slots)
        self.slots.clear()
        for index, (name, p) in enumerate(named):
            takes_mean = self.options.takes_mean
            slot = slot_of.get(id(p)) or GradientSlot(index, name, p, takes_mean=takes_mean)
            slot.index = index
            self.slots.append(slot)
        self.ids = {id(p) for _, p in named}
        self._shards = [slot.part for slot in self.slots] if self.options.is_sharded else []
        self._agreement.weights.expect_more()
        self.plan.forget_sparse()
        self._replan()
        self._attach_hooks()

    def flush(self) -> None:
        """Take part in the reduction, unless a backward() has done so since the step began."""
        self._require_usable()
        if self._is_synchronized and self.samples is not None and not self._are_samples_used:
            raise RingcommError(
                "DistributedOptimizer: set_samples() came after backward(), which had reduced the "
                "gradients already: call it before backward()"
            )
        is_over = self._is_synchronized and not any(
            not slot.history.is_final and slot.has_own_gradient for slot in self.slots
        )
        if not is_over:
            self._spoiling(self._prepare)
            finish_together([self._finish()])
            self._n_passes = max(self._n_passes, self.passes_per_step)

    def restart(self) -> None:
        """Restart the step, before zero_grad(). Collective if a backward() failed that sends early.

        Then buckets may be under way on any rank, and are completed.
        """
        self._n_attempts += 1
        buckets = self.plan.buckets or ()
        if (self._is_sending and buckets) or any(each.is_under_way for each in buckets):
            self._failed = FailedPass(_exchange(self))
        if self._failed is not None:
            self._spoiling(self._drain, self._failed)
        for part in self._shards:
            part.require_equal_weights()
        self._is_spoiled = False
        self._begin_step(is_zeroed=True)
        if self._failed is not None:
            self._failed.leave_buckets(self.plan)

    def complete_step(self) -> None:
        """Begin the next step: the optimizer has used the gradients."""
        if (page := engine().page) is not None:
            self._clock.end(page)
        self.step += 1
        self._n_attempts = 0
        self.samples = None
        self.plan.end_step()
        self._begin_step(is_zeroed=False)

    def go_on_from(self, step: int) -> None:
        """Count steps from `step` on; plan and compare again. Every rank calls it, after join()."""
        self.step, self._n_joins = step, engine().n_joins
        self._agreement.weights.expect_more()
        self.plan.forget_sparse()
        self._replan()

    def begin_view(self) -> None:
        """Begin a step among the ranks that are left, as in a first step. Every rank calls it."""
        if self.options.process_set is not global_process_set:  # it is over: step() says so
            self._hooks.remove(self.slots)
            self.plan.drop()
            self._failed = None
            self._begin_step(is_zeroed=True)
            return
        self._engine = weakref.ref(engine())
        self._is_spoiled = False
        _enrol(self)
        self.samples = None
        self.go_on_from(self.step)
        self._begin_step(is_zeroed=True)

    def set_samples(self, n: float) -> None:
        if self.options.op is not AVERAGE:
            raise ValueError("set_samples() sets weights of a mean, but this optimizer's op is SUM")
        self.samples, self._are_samples_used = checked_samples(n), False
        note_samples(self, engine())

    # --- called by autograd -----------------------------------------------------------------------
    def before_gradient(self, index: int) -> None:
        self._spoiling(self._passes.enter, self)
        self.slots[index].expect_gradient(is_seen=not self._is_communicating)

    def after_gradient(self, index: int) -> None:
        slot = self.slots[index]
        if self.options.sparse_as_dense and slot.has_sparse:
            slot.densify()
            slot.was_sparse = not self.options.is_sharded
        if slot.state is GradientState.SETTLED:
            self._spoiling(self._hooks.require_announced, slot)
        elif self._is_communicating and slot.state is GradientState.OPEN and slot.is_ready:
            self._spoiling(self._load, slot)

    def begin_pass(self) -> None:
        """Count the pass; make buckets if it communicates."""
        self._require_usable()
        self._clock.mark(1)
        self._n_passes += 1
        self._is_communicating = self._n_passes >= self.passes_per_step
        if self._is_communicating:
            self._prepare()
            is_known = bool(self.plan.unit) or not self._scaling.has_unit
            self._is_sending = self._agreement.is_reached and is_known and self._failed is None

    def end_pass(self) -> CollectiveTask[None]:
        if self._is_communicating:
            yield from self._finish()

    def _load(self, slot: GradientSlot) -> None:
        slot.pack()
        if self.plan.note_loaded(slot) and self._is_sending:
            self.plan.launch_full(self._scaling)

    # --- reductions -------------------------------------------------------------------------------
    @property
    def _scaling(self) -> Scaling:
        return Scaling(self.options, self.samples, self.plan.unit)

    @property
    def named(self) -> Named:
        return [(slot.name, slot.parameter) for slot in self.slots]

    def _prepare(self) -> None:
        """Attach hooks to new parameters, and make buckets, before the first gradient of a pass.

        It waits for no rank, because ranks may prepare several optimizers in different orders.
        """
        if self._engine() is not engine():  # after shutdown() and init()
            _enrol(self)
            self._engine = weakref.ref(engine())
            self._replan()
        if self._n_joins != engine().n_joins:  # a rank that was there may know less than others
            self.go_on_from(self.step)
        if self._attach_hooks():
            self._replan()
        if self._agreement.check is None:
            name, group = f"parameters{self.plan.suffix}", self.options.group
            self._agreement.begin(_summary(self), self.named, name, group)
        self.plan.begin_pass()

    def _attach_hooks(self) -> bool:
        new = without_hooks(self.slots)
        for slot in new:
            _require_reducible(slot, self.options)
        self._hooks.attach(new)
        return bool(new)

    def _finish(self) -> CollectiveTask[None]:
        self._clock.mark(2)
        try:
            for part in self._shards:
                part.require_unmoved()
            yield from self._agreement.reach()
            self._is_sending = False
            if self._failed is not None:
                yield from self._failed.complete(_exchange(self))
                self._failed = None
            self.plan.note_values()
            presence = yield from _exchange(self).run()
            group, suffix = self.options.group, self.plan.suffix
            yield from self._agreement.weights.make_alike(self.named, group, suffix)
            self._is_synchronized = self._are_samples_used = True
            yield from self.plan.learn(presence)
            self._clock.mark(3)
        except BaseException as error:
            self._spoil(error)
            raise

    def _drain(self, failed: FailedPass) -> None:
        """Complete the buckets of a failed backward(), so that no other rank waits for them.

        If another rank waits elsewhere for this one, the end of the next backward() does it.
        """
        if failed.is_noticed():
            finish_together([failed.complete(_exchange(self))])
            self._failed = None

    def _replan(self) -> None:
        self.plan.forget_order()
        self._agreement.forget()

    def _begin_step(self, *, is_zeroed: bool) -> None:
        self._passes.forget()
        self._n_passes = 0
        self._is_communicating = self._is_sending = self._is_synchronized = False
        for slot in self.slots:
            slot.begin_step(is_zeroed=is_zeroed)
        for part in self._shards:
            part.forget()

    # --- failures ---------------------------------------------------------------------------------
    def _spoiling(self, action: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call `action`; if it fails, refuse the gradients until restart()."""
        try:
            action(*args, **kwargs)
        except BaseException as error:
            self._spoil(error)
            raise

    def _spoil(self, error: BaseException) -> None:
        self._passes.forget()
        self._is_spoiled = True
        self._is_interrupted |= not isinstance(error, Exception)
        is_lost = isinstance(error, RingcommError) and not isinstance(error, MismatchError)
        if is_lost or self._is_interrupted:
            self.plan.drop()  # the engine may still write to buckets under way
            self._failed = None

    def _require_usable(self) -> None:
        """Raise RingcommError if gradients cannot be used after a failure."""
        if self._is_interrupted:
            raise RingcommError(
                "DistributedOptimizer: a reduction was interrupted half-way, and other ranks may "
                "wait in it: end this job"
            )
        if self._is_spoiled or self._passes.has_failed:
            raise RingcommError(
                "DistributedOptimizer: the last backward() failed, or its gradients could not be "
                "reduced: call optimizer.zero_grad() and repeat the backward()"
            )


def _require_reducible(slot: GradientSlot, options: GradientOptions) -> None:
    p = slot.parameter
    if hasattr(p, "to_local"):
        raise TypeError(
            f"DistributedOptimizer: {slot.name} is a {type(p).__name__}, whose gradient FSDP or a "
            "mesh reduces: use the optimizer without this wrapper"
        )
    try:
        options.op.require(any_adapter_for(p).dtype(p))
    except TypeError as error:
        raise TypeError(f"DistributedOptimizer: {slot.name}: {error}") from error


def _exchange(reducer: GradientReducer) -> Exchange:
    return Exchange(reducer.plan, reducer._scaling, reducer.step, reducer._n_attempts)


def _enrol(reducer: GradientReducer) -> None:
    reducer._failed, reducer._n_joins = None, engine().n_joins
    reducer.plan.enrol()
    engine().extensions.before_leaving(partial(_say_goodbye, weakref.ref(reducer)))


def _say_goodbye(reference: weakref.ref[GradientReducer]) -> None:
    """Complete the buckets of a last batch that all ranks have skipped, before this rank leaves."""
    reducer = reference()
    if reducer is None or reducer._is_spoiled or reducer._engine() is not engine():
        return
    if reducer._failed is None:
        has_skipped = reducer._n_attempts > 1 and not reducer._is_synchronized
        if not (has_skipped and _exchange(reducer).is_begun_by_others()):
            return
        reducer._failed = FailedPass(_exchange(reducer))
    finish_together([reducer._failed.complete(_exchange(reducer))])


def _summary(reducer: GradientReducer) -> OptimizerSummary:
    settings = {
        **reducer.options.summary([slot.parameter for slot in reducer.slots]),
        "backward_passes_per_step": reducer.passes_per_step,
        "RINGCOMM_FUSION_MIB": engine().settings.fusion_mib,
    }
    return OptimizerSummary(
        tuple((slot.name, slot.summary(is_trainable=slot.has_hooks)) for slot in reducer.slots),
        tuple((name, str(value)) for name, value in settings.items()),
    )
