"""The collective end of a backward(): sends the remaining gradients, and waits for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ringcomm.collectives.operators import BOR
from ringcomm.engine.api import collectives
from ringcomm.errors import MismatchError, RingcommError
from ringcomm.torch.backward.concurrent_tasks import CollectiveTask
from ringcomm.torch.optim.bucket_plan import BucketPlan
from ringcomm.torch.optim.buckets import Bucket, Scaling, make_buckets
from ringcomm.torch.optim.gradient import GradientState
from ringcomm.torch.optim.gradient_presence import (
    COMPLAINS,
    DENSE,
    FAILED,
    HAS_SAMPLES,
    LATE,
    LEFT,
    UNWEIGHTED,
    WEIGHTED,
    Presence,
    bit_of,
    samples_fault,
    sparse_ones,
    with_unlike_bases,
)
from ringcomm.torch.optim.sparse import SparseSum


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


@dataclass(frozen=True)
class Exchange:
    """The end of one backward(), or of a step without one.

    Attributes:
        step: how many steps are complete.
        attempt: how many zero_grad() there were since.
    """

    plan: BucketPlan
    scaling: Scaling
    step: int
    attempt: int

    def run(self, *, has_failed: bool = False) -> CollectiveTask[Presence]:
        """Make .grad of all slots final, and return the Presence of all ranks. Collective.

        If this rank's backward() has failed, only complete the buckets under way.

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
            elif slot.has_own_gradient and not has_failed:
                slot.take_part()
        presence = yield from self._agree(has_failed=has_failed)
        if not presence.is_one_step:
            yield from self._end_in_different_steps()
        if presence.flags & FAILED:
            return (yield from self._end_of_failed(presence, has_failed=has_failed))
        problem = self._problem(presence)
        # Even if there is a problem: another rank may have sent any bucket, and wait for this rank.
        self._launch_rest(presence)
        sums = [] if problem else self._launch_sparse(presence)
        extra = [] if problem else self._launch_extra(presence)
        total = None if problem else (yield from self._total_samples())
        yield from self._land([*sums, *extra], total, problem)
        self._settle(presence, sums, extra)
        return presence

    @property
    def _buckets(self) -> Sequence[Bucket]:
        return self.plan.buckets or ()

    def _agree(self, *, has_failed: bool) -> CollectiveTask[Presence]:
        samples = self.scaling.samples
        flags = UNWEIGHTED if samples is None else WEIGHTED
        flags |= (HAS_SAMPLES if samples else 0) | (FAILED if has_failed else 0)
        flags |= COMPLAINS if self._complaint else 0
        group = self.scaling.group
        codes = bytes(slot.code for slot in self.plan.slots)
        mine = Presence(codes, flags, ranks=bit_of(group.index, group.size))
        message = np.frombuffer(bytearray(mine.pack(self.step)), np.uint8)
        name = f"which gradients are there{self.plan.suffix}"
        handle = collectives.allreduce_async_(message, BOR, name=name, group=self.scaling.group)
        yield handle
        return Presence.unpack(handle.wait().tobytes(), group.size)

    @property
    def _complaint(self) -> str | None:
        return next((slot.complaint for slot in self.plan.slots if slot.complaint), None)

    def _problem(self, presence: Presence) -> Exception | None:
        """Return the error that all ranks must raise, or None. Collective."""
        unusable = self._unusable(presence)
        if unusable is not None:
            return unusable
        fault = samples_fault(presence)
        if fault == "partial":
            samples = collectives.allgather_object(
                self.scaling.samples, name=f"samples{self.plan.suffix}", group=self.scaling.group
            )
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

    def _unusable(self, presence: Presence) -> Exception | None:
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

    def _end_of_failed(self, presence: Presence, *, has_failed: bool) -> CollectiveTask[Presence]:
        """Complete the buckets of a failed backward(); go on if it is of a batch that all skip."""
        can_be_sent_again = not any(  # what is in its bucket gets overwritten by the sum
            slot.is_in_bucket or slot.state is GradientState.LATE for slot in self.plan.slots
        )
        mine = Attempt(self.attempt, has_failed, can_be_sent_again)
        group = self.scaling.group
        attempts = collectives.allgather_object(
            mine, name=f"failed backward(){self.plan.suffix}", group=group
        )
        self._launch_rest(presence)
        problem = MismatchError(explain_failed(attempts, group.ranks))
        is_skipped = is_skipped_by_all(attempts) and not has_failed
        yield from self._land((), None, None if is_skipped else problem)
        for slot in self.plan.slots:
            slot.take_back()
        return (yield from self.run())

    def _end_in_different_steps(self) -> CollectiveTask[None]:
        """Complete the buckets that any rank has sent, then raise MismatchError on every rank."""
        mine = [each.reduction.description for each in self._buckets if each.is_under_way]
        group = self.scaling.group
        steps = collectives.allgather_object(
            (self.step, mine), name=f"steps{self.plan.suffix}", group=group
        )
        known = {each.name for each in mine}
        missing = {each for _, theirs in steps for each in theirs if each.name not in known}
        handles = [each.launch_zeros(group) for each in sorted(missing)]
        yield from handles
        problem = MismatchError(explain_steps([step for step, _ in steps]))
        yield from self._land((), None, problem)

    def _launch_rest(self, presence: Presence) -> None:
        for bucket in self._buckets:
            indices = [member.index for member in bucket.members]
            if bucket.is_under_way or not any(presence.codes[i] & DENSE for i in indices):
                continue
            for index in indices:
                slot = self.plan.slots[index]
                slot.take_part()
                if not slot.is_as_packed:
                    slot.pack(presence.codes[index])
            bucket.launch(self.scaling)

    def _launch_sparse(self, presence: Presence) -> list[SparseSum]:
        sums = []
        for index in sparse_ones(presence):
            slot = self.plan.slots[index]
            slot.take_part()
            sums.append(SparseSum(slot, self.scaling, self.plan.suffix))
        return sums

    def _launch_extra(self, presence: Presence) -> list[Bucket]:
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
        self, others: Sequence[Bucket | SparseSum], total: float | None, problem: Exception | None
    ) -> CollectiveTask[None]:
        """Wait for all reductions; only then raise `problem`, or the most serious error."""
        errors: list[Exception] = []
        for each in (*(bucket for bucket in self._buckets if bucket.is_under_way), *others):
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
        self, presence: Presence, sums: Sequence[SparseSum], extra: Sequence[Bucket]
    ) -> None:
        parts: dict[int, list[torch.Tensor]] = {each.index: [each.result] for each in sums}
        for bucket in extra:
            for member in bucket.members:
                parts.setdefault(member.index, []).append(member.view)
        for slot in self.plan.slots:
            if slot.state is not GradientState.SETTLED:
                slot.settle(presence.codes[slot.index], parts.get(slot.index, ()))


def is_skipped_by_all(attempts: Sequence[Attempt | None]) -> bool:
    """Return True if the backward() that failed is of a batch that the others skip, too. Pure.

    A rank that failed is in the zero_grad() after it. Those that have left that zero_grad() behind
    compute the gradients of a later batch: theirs failed before the optimizer heard of it.
    """
    known = [each for each in attempts if each is not None]  # None: in join()
    failed_at = max(each.number for each in known if each.has_failed)
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


def explain_steps(steps: Sequence[int]) -> str:
    """Return the error text for ranks that have completed different numbers of steps. Pure."""
    other = next(r for r, step in enumerate(steps) if step != steps[0])
    return (
        f"DistributedOptimizer: rank 0 is in step {steps[0] + 1}, rank {other} in step "
        f"{steps[other] + 1}. Every rank must run as many backward() and step() as the others: "
        "give all of them the same number of batches. After last = hvd.join(), call "
        "hvd.broadcast_optimizer_state(optimizer, root_rank=last) to give all ranks the same step"
    )


def explain_complaints(complaints: Sequence[str | None]) -> str:
    """Return the error text if .grad was changed on some ranks in a way that cannot count. Pure."""
    rank, text = next((r, text) for r, text in enumerate(complaints) if text)
    return f"{text} (on rank {rank})"


def explain_samples(samples: Sequence[float | None]) -> str:
    """Return the error text if some ranks (None) have not called set_samples(). Pure."""
    with_it = next(r for r, n in enumerate(samples) if n is not None)
    without = samples.index(None)
    return (
        f"DistributedOptimizer: rank {with_it} called set_samples({samples[with_it]:g}) for this "
        f"step, rank {without} did not call set_samples(). Call it for each step on every rank, or "
        "on none"
    )
