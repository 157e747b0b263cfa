"""The collective end of a backward(): sends the remaining gradients, and waits for all."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from ringcomm.collectives.operators import AVERAGE, BOR, MAX
from ringcomm.engine.api import collectives
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.core.handle import Handle
from ringcomm.errors import MismatchError, RingcommError
from ringcomm.torch.backward.collective_tasks import CollectiveTask
from ringcomm.torch.optim.bucket_order import BucketPlan
from ringcomm.torch.optim.buckets import Bucket, Scaling, make_buckets, unit_for, wide
from ringcomm.torch.optim.gradient_presence import (
    COMPLAINS,
    DENSE,
    EXCEEDS_UNIT,
    FAILED,
    HAS_SAMPLES,
    LATE,
    LEFT,
    UNWEIGHTED,
    WEIGHTED,
    GradientPresence,
    bit_of,
    samples_fault,
    sparse_ones,
    with_unlike_bases,
)
from ringcomm.torch.optim.gradient_slot import GradientSlot, GradientState


# --- sparse gradients -----------------------------------------------------------------------------
class SparseSum:
    """The reduction of one parameter's sparse gradients, under way.

    Attributes:
        result: the sum or mean, coalesced, with the same bits on every rank; land() sets it.
    """

    def __init__(self, slot: GradientSlot, scaling: Scaling, suffix: str = "") -> None:
        parameter = slot.parameter
        self.index = slot.index
        self.result = torch.empty(0)
        self._shape, self._dtype = parameter.shape, parameter.dtype
        self._divisor = scaling.group.size if scaling.wire_op is AVERAGE else 1
        rows, values = _rows(parameter, parameter.grad if slot.has_sparse else None)
        if scaling.samples is not None:
            values = wide(values)  # zeros for an empty batch, whose mean is NaN
            values = values * scaling.samples if scaling.samples else torch.zeros_like(values)
        title = f"sparse gradient of {slot.name}{suffix}"
        self.handles = (
            collectives.allgather_async(rows, name=f"{title}: rows", group=scaling.group),
            collectives.allgather_async(values, name=f"{title}: values", group=scaling.group),
        )

    def land(self, total: float | None) -> None:
        """Wait for all rows, and set `result`; total: number of samples; None: no weights."""
        rows, values = (handle.wait() for handle in self.handles)
        gathered = torch.sparse_coo_tensor(
            rows.unsqueeze(0), wide(values), self._shape, check_invariants=True
        )
        mean = gathered.coalesce() / (self._divisor if total is None else total)
        self.result = mean.to(self._dtype)


def _rows(
    parameter: torch.Tensor, gradient: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row numbers, shape (n,), and the values, shape (n, *parameter.shape[1:])."""
    if gradient is None:
        rows = torch.empty(0, dtype=torch.int64, device=parameter.device)
        return rows, parameter.new_empty((0, *parameter.shape[1:]))
    if gradient.sparse_dim() != 1:
        gradient = gradient.to_dense().to_sparse(1)
    gradient = gradient.detach().coalesce()
    return gradient.indices()[0], gradient.values()


_ASK_S: Final = 0.5  # limit of a question to the other ranks


@dataclass(frozen=True)
class Attempt:
    """A rank's report of its step if a backward() has failed on some rank.

    Attributes:
        number: zero_grad() calls since the last step, of which ranks make equally many.
        has_failed: this rank's backward() has failed.
        can_be_sent_again: all its gradients are there still.
    """

    number: int
    has_failed: bool
    can_be_sent_again: bool


@dataclass
class Exchange:
    """The end of one backward(), or of a step without one.

    Attributes:
        scaling: run() replaces it if the ranks need a larger unit.
        step: how many steps are complete.
        attempt: how many zero_grad() there were since.
    """

    plan: BucketPlan
    scaling: Scaling
    step: int
    attempt: int

    def run(self) -> CollectiveTask[GradientPresence]:
        """Make .grad of all slots final, and return the Presence of all ranks. Collective.

        Raises:
            MismatchError: on every rank: a backward() failed, ranks are in different steps, some
                ranks have not called set_samples(), or buckets differ. Nothing is under way.
            ValueError: all ranks have called set_samples(0). Nothing is under way.
            TypeError: on every rank: a gradient is sparse, and shard_state is 1.
            RingcommError: on every rank: some rank's .grad was changed in a way that cannot count.
            PeerFailedError, CommTimeoutError: a rank is lost; the engine may still use buckets.
        """
        for slot in self.plan.slots:
            if slot.state is not GradientState.SETTLED:
                slot.finish()
            elif slot.has_own_gradient:
                slot.take_part()
        handle = self.send_presence()
        yield handle
        presence = self._read(handle)
        if not presence.is_one_step:
            yield from self._end_in_different_steps(self._buckets)
        if presence.flags & FAILED:
            return (yield from self._end_of_others_failure(presence))
        problem = self._problem(presence)
        if problem is None and presence.flags & EXCEEDS_UNIT:
            yield from self._enlarge_unit(presence)
        # Even if there is a problem: another rank may have sent any bucket, and wait for this rank.
        self._launch_rest(presence)
        sums = [] if problem else self._launch_sparse(presence)
        extra = [] if problem else self._launch_extra(presence)
        total = None if problem else (yield from self._total_samples())
        yield from self._land([*self._buckets, *sums, *extra], total, problem)
        self._settle(presence, sums, extra)
        return presence

    @property
    def _buckets(self) -> Sequence[Bucket]:
        return self.plan.buckets or ()

    def complete_failed(
        self, handle: Handle[NDArray[np.uint8]], buckets: Sequence[Bucket]
    ) -> CollectiveTask[None]:
        """Complete `buckets`, which this rank's failed backward() has left. Collective.

        handle: of send_presence(has_failed=True).
        """
        yield handle
        presence = self._read(handle)
        if not presence.is_one_step:
            yield from self._end_in_different_steps(buckets)
        self._exchange_attempts(has_failed=True)
        for bucket in buckets:  # nobody uses the sums, so any values will do
            if not bucket.is_under_way and _is_sent_by_any(bucket, presence):
                bucket.launch(self.scaling)
        yield from self._land(buckets, None, None)

    def send_presence(self, *, has_failed: bool = False) -> Handle[NDArray[np.uint8]]:
        """Begin to combine all ranks' Presence. Collective."""
        samples = self.scaling.samples
        flags = UNWEIGHTED if samples is None else WEIGHTED
        flags |= (HAS_SAMPLES if samples else 0) | (FAILED if has_failed else 0)
        flags |= (COMPLAINS if self._complaint else 0) | EXCEEDS_UNIT * self.scaling.exceeds_unit
        group = self.scaling.group
        codes = bytes(slot.code for slot in self.plan.slots)
        mine = GradientPresence(codes, flags, ranks=bit_of(group.index, group.size))
        message = np.frombuffer(bytearray(mine.pack(self.step)), np.uint8)
        return collectives.allreduce_async_(message, BOR, name=self._name, group=group)

    @property
    def _name(self) -> str:
        return f"which gradients are there{self.plan.suffix}"

    def is_begun_by_others(self) -> bool:
        """Return True if another rank has called send_presence(), and waits for this rank."""
        return engine().here.have_others_begun(engine(), self._name, self.scaling.group, _ASK_S)

    def _read(self, handle: Handle[NDArray[np.uint8]]) -> GradientPresence:
        group = self.scaling.group
        presence = GradientPresence.unpack(handle.wait().tobytes(), group.size)
        if group.size == engine().size:
            engine().seen_in_join = presence.absent(group.size)
        return presence

    @property
    def _complaint(self) -> str | None:
        complaints = (slot.complaint or slot.dtype_complaint for slot in self.plan.slots)
        return next((each for each in complaints if each), None)

    def _problem(self, presence: GradientPresence) -> Exception | None:
        """Return the error that all ranks must raise, or None. Collective."""
        unusable = self._unusable(presence)
        if unusable is not None:
            return unusable
        fault = samples_fault(presence)
        if fault == "partial":
            name, mine = f"samples{self.plan.suffix}", (self.scaling.samples,)
            samples = collectives.allgather_object(mine, name=name, group=self.scaling.group)
            return MismatchError(explain_samples(samples))
        if fault == "empty":
            return ValueError(
                "DistributedOptimizer: set_samples(0) on every rank: there is no mean over 0 "
                "samples. Skip this step on all ranks"
            )
        sparse = sparse_ones(presence)
        if sparse and self.scaling.options.is_sharded:
            name = self.plan.slots[sparse[0]].name
            return TypeError(
                f"DistributedOptimizer: the gradient of {name} is sparse, and shard_state=1 "
                "takes dense ones only: pass sparse_as_dense=True, or shard_state=0"
            )
        return None

    def _unusable(self, presence: GradientPresence) -> Exception | None:
        """Return the error for what programs have done to .grad, or None. Collective."""
        if presence.flags & COMPLAINS:
            name, group = f"changed gradients{self.plan.suffix}", self.scaling.group
            return RingcommError(
                explain_complaints(
                    collectives.allgather_object(self._complaint, name=name, group=group)
                )
            )
        index = with_unlike_bases(presence)
        if index is not None:
            return MismatchError(
                f"DistributedOptimizer: {self.plan.slots[index].name}.grad is what an earlier step "
                "left on some ranks, and cleared or set by hand on others: call "
                "optimizer.zero_grad() on all of them or on none"
            )
        is_left = any(code & LEFT for code in set(presence.codes))
        if is_left and not presence.is_of_all(self.scaling.group.size):
            return MismatchError(
                "DistributedOptimizer: a rank is in join(), and gradients of an earlier step are "
                "left, which it has not: call optimizer.zero_grad() before backward()"
            )
        return None

    def _end_of_others_failure(
        self, presence: GradientPresence
    ) -> CollectiveTask[GradientPresence]:
        """Complete the buckets of a backward() that failed on other ranks.

        If it is of a batch that all ranks skip, run again.
        """
        attempts = self._exchange_attempts(has_failed=False)
        self._launch_rest(presence)
        problem = MismatchError(explain_failed(attempts, self.scaling.group.ranks))
        is_skipped = is_skipped_by_all(attempts)
        yield from self._land(self._buckets, None, None if is_skipped else problem)
        for slot in self.plan.slots:
            slot.take_back()
        return (yield from self.run())

    def _exchange_attempts(self, *, has_failed: bool) -> list[Attempt | None]:
        can_be_sent_again = not any(  # what is in its bucket gets overwritten by the sum
            slot.is_in_bucket or slot.state is GradientState.LATE for slot in self.plan.slots
        )
        mine = Attempt(self.attempt, has_failed, can_be_sent_again)
        name, group = f"failed backward(){self.plan.suffix}", self.scaling.group
        return collectives.allgather_object(mine, name=name, group=group)

    def _end_in_different_steps(self, buckets: Sequence[Bucket]) -> CollectiveTask[None]:
        """Complete the buckets that any rank has sent, then raise MismatchError on every rank."""
        mine = [each.reduction.description for each in buckets if each.is_under_way]
        group = self.scaling.group
        steps = collectives.allgather_object(
            (self.step, mine), name=f"steps{self.plan.suffix}", group=group
        )
        known = {each.name for each in mine}
        reports = [each for each in steps if each is not None]  # None: in join()
        missing = {each for _, theirs in reports for each in theirs if each.name not in known}
        handles = [each.launch_zeros(group) for each in sorted(missing)]
        yield from handles
        problem = MismatchError(explain_steps([each and each[0] for each in steps]))
        yield from self._land(buckets, None, problem)

    def _launch_rest(self, presence: GradientPresence) -> None:
        for bucket in self._buckets:
            if bucket.is_under_way or not _is_sent_by_any(bucket, presence):
                continue
            for member in bucket.members:
                slot = self.plan.slots[member.index]
                slot.take_part()
                if not slot.is_as_packed:
                    slot.pack(presence.codes[member.index])
            bucket.launch(self.scaling)

    def _enlarge_unit(self, presence: GradientPresence) -> CollectiveTask[None]:
        """Choose a unit for the samples of all ranks; send again what was sent in a smaller one."""
        if self.scaling.unit:  # else no rank has sent anything
            self._launch_rest(presence)
        mine = np.array([self.scaling.samples])
        name, group = f"largest number of samples{self.plan.suffix}", self.scaling.group
        handle = collectives.allreduce_async_(mine, MAX, name=name, group=group)
        yield handle
        self.plan.unit = unit_for(float(handle.wait()[0]))
        self.scaling = replace(self.scaling, unit=self.plan.unit)
        for bucket in self._buckets:
            if bucket.is_under_way:
                yield from bucket.handles
                bucket.launch_again(self.scaling)

    def _launch_sparse(self, presence: GradientPresence) -> list[SparseSum]:
        sums = []
        for index in sparse_ones(presence):
            slot = self.plan.slots[index]
            slot.take_part()
            sums.append(SparseSum(slot, self.scaling, self.plan.suffix))
        return sums

    def _launch_extra(self, presence: GradientPresence) -> list[Bucket]:
        """Send late gradients, and dense ones of parameters without a bucket."""
        apart = [
            slot
            for slot in self.plan.slots
            if (code := presence.codes[slot.index]) & LATE or (code & DENSE and slot.bucket is None)
        ]
        named = [(slot.index, slot.name, slot.parameter) for slot in apart]
        options = self.scaling.options
        buckets = make_buckets(
            "late gradients", named, self.plan.max_nbytes, options, self.plan.suffix
        )
        for bucket in buckets:
            for member in bucket.members:
                self.plan.slots[member.index].take_part()
                self.plan.slots[member.index].pack_extra(member.view)
            bucket.launch(self.scaling)
        return buckets

    def _total_samples(self) -> CollectiveTask[float | None]:
        if self.scaling.samples is None:
            return None
        mine = np.array([self.scaling.samples])
        name, group = f"number of samples{self.plan.suffix}", self.scaling.group
        handle = collectives.allreduce_async_(mine, name=name, group=group)
        yield handle
        return float(handle.wait()[0])

    def _land(
        self, parts: Sequence[Bucket | SparseSum], total: float | None, problem: Exception | None
    ) -> CollectiveTask[None]:
        """Wait for all reductions; only then raise `problem`, or the most serious error."""
        errors: list[Exception] = []
        for each in [each for each in parts if each.handles]:
            yield from each.handles
            try:
                each.land(total)
            except RingcommError as error:
                errors.append(error)
        # The problem may have caused a MismatchError, but no other error.
        errors.sort(key=lambda error: isinstance(error, MismatchError))
        if problem is not None and (not errors or isinstance(errors[0], MismatchError)):
            raise problem
        if errors:
            raise errors[0]

    def _settle(
        self, presence: GradientPresence, sums: Sequence[SparseSum], extra: Sequence[Bucket]
    ) -> None:
        parts: dict[int, list[torch.Tensor]] = {each.index: [each.result] for each in sums}
        for bucket in extra:
            for member in bucket.members:
                parts.setdefault(member.index, []).append(member.view)
        for slot in self.plan.slots:
            if slot.state is not GradientState.SETTLED:
                slot.settle(presence.codes[slot.index], parts.get(slot.index, ()))


class FailedPass:
    """A backward() that has failed on this rank, until the other ranks know.

    Those may wait for its buckets, and take part at the end of their backward(), or in their
    zero_grad() if theirs failed, too. A rank that leaves the job asks whether others wait.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._buckets = list(exchange.plan.buckets or ())
        self._handle = exchange.send_presence(has_failed=True)

    def is_noticed(self) -> bool:
        """Wait for the other ranks; return False if one waits elsewhere for this rank."""
        return self._handle.wait_unless(engine().here.is_crossed)

    def complete(self, exchange: Exchange) -> CollectiveTask[None]:
        """Wait for the other ranks, and complete the buckets, so that nobody waits for them."""
        with contextlib.suppress(MismatchError):
            yield from exchange.complete_failed(self._handle, self._buckets)

    def leave_buckets(self, plan: BucketPlan) -> None:
        """Leave the buckets to the engine, which may write to them until complete() returns."""
        for slot in plan.slots:
            gradient = slot.parameter.grad
            if gradient is not None and slot.is_in_bucket:
                slot.history.move(gradient, torch.empty_like(gradient))
        plan.drop()


def _is_sent_by_any(bucket: Bucket, presence: GradientPresence) -> bool:
    return any(presence.codes[member.index] & DENSE for member in bucket.members)


def is_skipped_by_all(attempts: Sequence[Attempt | None]) -> bool:
    """Return True if the backward() that failed is of a batch that the others skip, too. Pure.

    A rank that failed is in the zero_grad() after it. Those that have left that zero_grad() behind
    compute the gradients of a later batch: theirs failed before the optimizer heard of it.
    """
    known = [each for each in attempts if each is not None]  # None: in join()
    failed_at = max((each.number for each in known if each.has_failed), default=0)
    return all(
        each.has_failed or (each.number >= failed_at and each.can_be_sent_again) for each in known
    )


def explain_failed(attempts: Sequence[Attempt | None], ranks: Sequence[int]) -> str:
    """Return the error text for ranks whose backward() has ended, where others failed. Pure."""
    pairs = zip(ranks, attempts, strict=True)
    failed = [rank for rank, each in pairs if each is not None and each.has_failed]
    return (
        f"DistributedOptimizer: backward() raised an error on another rank, {failed[0]}: call "
        "optimizer.zero_grad() and repeat the backward() on every rank"
    )


def explain_steps(steps: Sequence[int | None]) -> str:
    """Return the error text for ranks that have completed different numbers of steps. Pure.

    None: the rank is in join().
    """
    known = [(rank, step) for rank, step in enumerate(steps) if step is not None]
    first, begun = known[0]
    other, others = next((rank, step) for rank, step in known if step != begun)
    return (
        f"DistributedOptimizer: rank {first} is in step {begun + 1}, rank {other} in step "
        f"{others + 1}. Every rank must run as many backward() and step() as the others: "
        "give all of them the same number of batches. After last = hvd.join(), call "
        "hvd.broadcast_optimizer_state(optimizer, root_rank=last) to give all ranks the same step"
    )


def explain_complaints(complaints: Sequence[str | None]) -> str:
    rank, text = next((r, text) for r, text in enumerate(complaints) if text)
    return f"{text} (on rank {rank})"


def explain_samples(samples: Sequence[tuple[float | None] | None]) -> str:
    """Return the error text if some ranks, with (None,), have not called set_samples(). Pure.

    None: the rank is in join().
    """
    given = [(rank, each[0]) for rank, each in enumerate(samples) if each is not None]
    with_it, n = next((rank, n) for rank, n in given if n is not None)
    without = next(rank for rank, n in given if n is None)
    return (
        f"DistributedOptimizer: rank {with_it} called set_samples({n:g}) for this "
        f"step, rank {without} did not call set_samples(). Call it for each step on every rank, or "
        "on none"
    )
