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
import time
import weakref
from collections.abc import Callable, Sequence
from typing import ParamSpec

import numpy as np
import torch

from ringcomm.arrays import any_adapter_for
from ringcomm.collectives.op import AVERAGE, Op
from ringcomm.engine import async_ops, ops
from ringcomm.engine.world import engine
from ringcomm.errors import MismatchError, RingcommError
from ringcomm.torch.backward.autograd import Hooks
from ringcomm.torch.backward.consistency_check import Check, Outline
from ringcomm.torch.backward.cooperative_finish import Work, carry_out
from ringcomm.torch.backward.passes import Passes
from ringcomm.torch.backward.registry import claim, enrol, note_samples, release
from ringcomm.torch.optim.buckets import MIB, Bucket, Scaling, make_buckets
from ringcomm.torch.optim.exchange import Exchange
from ringcomm.torch.optim.first_weights import FirstWeights
from ringcomm.torch.optim.fusion_tuner import FusionTuner
from ringcomm.torch.optim.gradient import Slot, State
from ringcomm.torch.optim.options import Recipe, require_passes
from ringcomm.torch.optim.presence import SPARSE, Presence, ready_order

P = ParamSpec("P")
Named = Sequence[tuple[str, torch.nn.Parameter]]


class GradientReducer:
    """Owns the hooks and buckets of one optimizer's parameters.

    Args:
        named_parameters: (name, parameter), frozen ones too, alike on every rank and in one order.
        recipe: how they are reduced.
        passes_per_step: backward() calls whose gradients are added up before anything is sent.
        known: parameters that have names, among them others; see FirstWeights.

    Attributes:
        step: how many steps have been completed.
        slots: the parameters, in order of registration.
        buckets: of their dense gradients, in the order in which they are expected to leave; None
            until the first gradient that is to be sent.
        number: see registry.Numbered.
    """

    def __init__(
        self,
        named_parameters: Named,
        recipe: Recipe,
        passes_per_step: int,
        known: Named = (),
    ) -> None:
        self.recipe = recipe
        self.set_passes_per_step(passes_per_step)
        self.step = 0
        self.slots: list[Slot] = []
        self.buckets: list[Bucket] | None = None
        self.number = 0
        self._engine = weakref.ref(engine())
        self._hooks: list[Hooks] = []
        self._passes = Passes()
        self._n_passes = 0  # of this step
        self._is_communicating = False
        self._is_synchronized = False  # since the step began, this rank has taken part
        self._is_spoiled = False
        self._is_interrupted = False
        self._samples: float | None = None
        self._are_samples_used = False
        self._check: Check | None = None
        self._weights = FirstWeights(is_wanted=recipe.sync_weights, known=known)
        self._is_agreed = False
        self._full: list[Bucket] = []  # they leave as soon as ranks have agreed on the parameters
        self._fired: dict[int, None] | None = {}  # in order; None once buckets go by that order
        self._order: list[int] | None = None  # of readiness, as rank 0 saw it; agreed on by all
        self._sparse: set[int] = set()  # agreed on by all
        self._tuner = FusionTuner() if engine().settings.autotune else None
        self._step_ended_at = 0.0
        self.extend(named_parameters)
        enrol(self, recipe.group)

    def set_passes_per_step(self, n: int) -> None:
        """Add up the gradients of n backward() calls before anything is sent; between two steps.

        Raises:
            ValueError: n is no whole number from 1 on.
        """
        require_passes(n)
        self.passes_per_step = n
        self._check, self._is_agreed = None, False

    def extend(self, named_parameters: Named) -> None:
        """Reduce the gradients of these, too; the same on every rank, between two steps.

        Raises:
            TypeError: a parameter is not in host memory, or of a dtype that cannot be reduced.
            ValueError: another optimizer reduces one already.
        """
        self._refuse_spoiled()
        self._weights.expect_more()
        n = len(self.slots)
        self.slots += [Slot(n + i, name, p) for i, (name, p) in enumerate(named_parameters)]
        self._replan()
        self._hear_new(State.SETTLED)

    def close(self) -> None:
        """Hear of no gradient any more."""
        for hooks in self._hooks:
            hooks.remove()
        for slot in self.slots:
            release(slot.parameter, self)

    def laid_out(self) -> list[Bucket]:
        """Return the buckets, made now if there are none; alike on every rank between two steps."""
        if self.buckets is None:
            self.buckets = self._make_buckets()
        return self.buckets

    def flush(self) -> None:
        """Take part in the reduction if no backward() has done so since the step began."""
        self._refuse_spoiled()
        self._refuse_unused_samples()
        if not self._is_synchronized:
            self._spoiling(self._prepare)
            carry_out([self._finish()])
            self._n_passes = max(self._n_passes, self.passes_per_step)

    def restart(self) -> None:
        """Gradients start anew, before zero_grad(). What a failed backward() sent is completed."""
        if any(bucket.is_under_way for bucket in self.buckets or ()):
            self._spoiling(self._drain)
        self._is_spoiled = False
        self._begin_step()

    def note_zeroed(self) -> None:
        """The gradients that are there have been set to zero in place."""
        for slot in self.slots:
            slot.note_zeroed()

    def complete_step(self) -> None:
        """The optimizer has used the gradients."""
        self.step += 1
        self._samples = None
        if self._fired is not None and self._order is not None:
            self._fired = None
            self._drop_buckets()
        if self._tuner is not None:
            self._tune(self._tuner)
        self._begin_step()

    def go_on_from(self, step: int) -> None:
        """Count steps from this one on, and agree on all else anew; on every rank, between steps.

        For ranks of which some have made fewer steps, in join().
        """
        self.step = step
        self._weights.expect_more()
        self._sparse.clear()
        self._replan()

    def _tune(self, tuner: FusionTuner) -> None:
        """Go on to the next bucket size if it is time to. Collective at the end of the trials."""
        now, before = time.monotonic(), self._step_ended_at
        self._step_ended_at = now
        if before and tuner.note_step(now - before):
            if tuner.is_over:
                name, group = f"bucket size{self.suffix}", self.recipe.group
                chosen = ops.allgather_object(tuner.choose(), name=name, group=group)
                tuner.mib = next(mib for mib in chosen if mib is not None)  # None: in join()
            self._drop_buckets()

    def set_samples(self, n: float) -> None:
        """Weigh this rank's gradient of this step by n."""
        if self.recipe.op is not AVERAGE:
            raise ValueError("set_samples() weighs a mean, but this optimizer's op is SUM")
        n = float(n)
        if not 0 <= n < math.inf:
            raise ValueError(f"set_samples({n:g}): a number of samples is finite and at least 0")
        self._samples, self._are_samples_used = n, False
        note_samples(self, engine())

    @property
    def samples(self) -> float | None:
        """See registry.Weighed."""
        return self._samples

    # --- what autograd calls ----------------------------------------------------------------------
    def before_gradient(self, index: int) -> None:
        """See autograd.Listener."""
        self._spoiling(self._passes.enter, self)
        self.slots[index].open()

    def after_gradient(self, index: int) -> None:
        """See autograd.Listener."""
        slot = self.slots[index]
        if self.recipe.sparse_as_dense and slot.has_sparse:
            slot.densify()
            slot.was_sparse = not self.recipe.is_sharded
        if slot.state is State.SETTLED:
            self._spoiling(self._require_heard, slot)
        elif self._is_communicating and slot.state is State.OPEN and slot.is_ready:
            self._spoiling(self._load, slot)

    def begin_pass(self) -> None:
        """See passes.Owner."""
        self._refuse_spoiled()
        self._n_passes += 1
        self._is_communicating = self._n_passes >= self.passes_per_step
        if self._is_communicating:
            self._prepare()

    def end_pass(self) -> Work:
        """See passes.Owner."""
        if self._is_communicating:
            yield from self._finish()

    def _load(self, slot: Slot) -> None:
        """Put a gradient into its bucket; buckets that are full leave."""
        bucket = slot.bucket
        assert bucket is not None
        slot.pack()
        bucket.note_loaded()
        if self._fired is not None:
            self._fired.setdefault(slot.index)
        if slot.index in bucket.waiting:
            bucket.waiting.remove(slot.index)
            if not bucket.waiting:
                self._full.append(bucket)
        if self._full and self._has_agreed():
            for full in self._full:
                full.launch(self._scaling)
                for member in full.members:
                    self.slots[member.index].state = State.SENT
            self._full.clear()

    # --- reductions -------------------------------------------------------------------------------
    @property
    def _scaling(self) -> Scaling:
        return Scaling(self.recipe, self._samples)

    @property
    def _max_nbytes(self) -> float:
        tuner = self._tuner
        return (engine().settings.fusion_mib if tuner is None else tuner.mib) * MIB

    @property
    def suffix(self) -> str:
        """Of the names of messages: other optimizers, and users, may have names of their own."""
        return f" (optimizer {self.number})"

    def _prepare(self) -> None:
        """Before the first gradient of a pass: see what is new, and make buckets if there are none.

        Nothing here waits: several optimizers may come here in another order on another rank.
        """
        self._hear_new(State.OPEN)
        if self._engine() is not engine():  # shutdown() and init() lie between
            self._engine = weakref.ref(engine())
            enrol(self, self.recipe.group)
            self._replan()
        if self._check is None:
            name = f"parameters{self.suffix}"
            weights = self._weights.digest(self._named)
            self._check = Check(self._outline(), name, self.recipe.group, weights)
        self._full.clear()
        for bucket in self.laid_out():
            bucket.expect_all()

    def _has_agreed(self) -> bool:
        """Return True if all ranks are known to have wrapped the same parameters.

        Raises:
            MismatchError: they have not; nothing was sent.
        """
        if not self._is_agreed:
            check = self._check
            assert check is not None
            if not check.handle.done():
                return False
            self._check = None  # for the case that they have not
            check.require_alike()
            self._weights.note(check.combined_weights())
            self._check, self._is_agreed = check, True
        return True

    def _make_buckets(self) -> list[Bucket]:
        order = self._order if self._fired is None else None
        indices = [
            index
            for index in order or reversed(range(len(self.slots)))
            if self.slots[index].is_heard and index not in self._sparse
        ]
        batches = self.recipe.batches(indices, [slot.parameter for slot in self.slots])
        buckets = [
            bucket for each in batches.together for bucket in self._buckets_of(each, math.inf)
        ]
        buckets += self._buckets_of(batches.others, self._max_nbytes)
        for bucket in buckets:
            for member in bucket.members:
                self.slots[member.index].place(bucket, member)
        return buckets

    def _buckets_of(self, indices: Sequence[int], max_nbytes: float) -> list[Bucket]:
        named = [(i, self.slots[i].name, self.slots[i].parameter) for i in indices]
        return make_buckets(
            "gradients",
            named,
            max_nbytes,
            self.recipe.group,
            self.suffix,
            is_scattered=self.recipe.is_sharded,
        )

    def _exchange(self) -> Exchange:
        return Exchange(
            self.slots, self.buckets or (), self._scaling, self.step, self._max_nbytes, self.suffix
        )

    def _finish(self) -> Work:
        """End a pass that communicates."""
        try:
            for slot in self.slots:
                slot.require_placed()
            assert self._check is not None
            yield self._check.handle
            self._has_agreed()
            presence = yield from self._exchange().run()
            yield from self._weights.make_alike(self._named, self.recipe.group, self.suffix)
            self._is_synchronized = self._are_samples_used = True
            yield from self._learn(presence)
        except BaseException as error:
            self._spoil(error)
            raise

    def _drain(self) -> None:
        """Complete what a failed backward() has sent, so that no other rank waits for it."""

        def work() -> Work:
            with contextlib.suppress(MismatchError):
                yield from self._exchange().run(has_failed=True)

        carry_out([work()])

    def _learn(self, presence: Presence) -> Work:
        """Remember what makes better buckets. Collective during the first step."""
        sparse = {index for index, code in enumerate(presence.codes) if code & SPARSE}
        if not sparse <= self._sparse:
            self._sparse |= sparse
            self._drop_buckets()
        if self._fired is not None:
            mine = np.array(ready_order(list(self._fired), len(self.slots)), np.int32)
            name, group = f"order of gradients{self.suffix}", self.recipe.group
            handle = async_ops.allgather_async(mine.reshape(1, -1), name=name, group=group)
            yield handle
            self._order = handle.wait()[0].tolist()  # of the first that is not in join()

    # --- what is reduced --------------------------------------------------------------------------
    def _hear_new(self, state: State) -> None:
        """Attach hooks to parameters that require gradients and have none: added, or unfrozen."""
        new = [s for s in self.slots if not s.is_heard and s.parameter.requires_grad]
        if not new:
            return
        for slot in new:
            _require_reducible(slot, self.recipe.op)
        claim([(slot.name, slot.parameter) for slot in new], self)
        self._hooks.append(Hooks(self, {slot.index: slot.parameter for slot in new}))
        for slot in new:
            slot.is_heard = True
            slot.state = state
        self._replan()

    def _replan(self) -> None:
        self._drop_buckets()
        self._check, self._is_agreed = None, False
        self._fired, self._order = {}, None

    def _drop_buckets(self) -> None:
        self.buckets = None
        self._full.clear()
        for slot in self.slots:
            slot.place(None, None)

    @property
    def _named(self) -> Named:
        return [(slot.name, slot.parameter) for slot in self.slots]

    def _outline(self) -> Outline:
        settings = {
            **self.recipe.outline([slot.parameter for slot in self.slots]),
            "backward_passes_per_step": self.passes_per_step,
            "RINGCOMM_FUSION_MIB": engine().settings.fusion_mib,
        }
        return Outline(
            tuple((slot.name, slot.outline) for slot in self.slots),
            tuple((what, str(value)) for what, value in settings.items()),
        )

    # --- what goes wrong --------------------------------------------------------------------------
    def _spoiling(self, action: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Do it; if that fails, gradients are not to be used before they start anew."""
        try:
            action(*args, **kwargs)
        except BaseException as error:
            self._spoil(error)
            raise

    def _spoil(self, error: BaseException) -> None:
        self._is_spoiled = True
        self._is_interrupted |= not isinstance(error, Exception)
        self._passes.forget()
        is_lost = isinstance(error, RingcommError) and not isinstance(error, MismatchError)
        if is_lost or self._is_interrupted:  # the engine may still write to buckets under way
            self._drop_buckets()

    def _begin_step(self) -> None:
        self._passes.forget()
        self._n_passes = 0
        self._is_communicating = self._is_synchronized = False
        for slot in self.slots:
            slot.restart()

    def _refuse_spoiled(self) -> None:
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

    def _refuse_unused_samples(self) -> None:
        if self._is_synchronized and self._samples is not None and not self._are_samples_used:
            raise RingcommError(
                "DistributedOptimizer: set_samples() came after backward(), which had reduced the "
                "gradients already: call it before"
            )

    def _require_heard(self, slot: Slot) -> None:
        """Refuse a gradient of which before_gradient() was not told."""
        parameter = slot.parameter
        if parameter.requires_grad and any(h.has_lost(slot.index, parameter) for h in self._hooks):
            raise RingcommError(
                f"DistributedOptimizer: the dtype or device of {slot.name} has changed since the "
                "optimizer was wrapped: call model.to() before"
            )


def _require_reducible(slot: Slot, op: Op) -> None:
    try:
        op.require(any_adapter_for(slot.parameter).dtype(slot.parameter))
    except TypeError as error:
        raise TypeError(f"DistributedOptimizer: {slot.name}: {error}") from error
