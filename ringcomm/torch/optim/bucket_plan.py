"""The buckets of an optimizer: first by order of registration, then by that of readiness."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np

from ringcomm.engine.api import collectives
from ringcomm.engine.api.world import engine
from ringcomm.torch.backward.cooperative_finish import CollectiveTask
from ringcomm.torch.optim.buckets import MIB, Bucket, Scaling, make_buckets
from ringcomm.torch.optim.fusion_tuner import FusionTuner
from ringcomm.torch.optim.gradient import GradientSlot, GradientState
from ringcomm.torch.optim.options import GradientOptions
from ringcomm.torch.optim.presence import SPARSE, Presence, ready_order


class BucketPlan:
    """The buckets of one optimizer's slots, alike on all ranks between two steps.

    Attributes:
        buckets: in the order in which they are expected to leave; None until the first gradient
            that is to be sent.
        suffix: of the names of messages.
    """

    def __init__(self, slots: Sequence[GradientSlot]) -> None:
        self.buckets: list[Bucket] | None = None
        self.suffix = ""
        self._slots = slots
        self._full: list[Bucket] = []  # they leave as soon as ranks have agreed on the parameters
        self._fired: dict[int, None] | None = {}  # in order; None once buckets go by that order
        self._order: list[int] | None = None  # of readiness, as rank 0 saw it; agreed on by all
        self._sparse: set[int] = set()  # agreed on by all
        self._tuner = FusionTuner() if engine().settings.autotune else None
        self._step_ended_at = 0.0

    @property
    def max_nbytes(self) -> float:
        """Size limit of a bucket."""
        tuner = self._tuner
        return (engine().settings.fusion_mib if tuner is None else tuner.mib) * MIB

    def buckets_for(self, options: GradientOptions) -> list[Bucket]:
        """Return the buckets; makes them if there are none."""
        if self.buckets is None:
            self.buckets = self._make_buckets(options)
        return self.buckets

    def expect_all(self, options: GradientOptions) -> None:
        """Expect every gradient anew, at the beginning of a pass."""
        self._full.clear()
        for bucket in self.buckets_for(options):
            bucket.expect_all()

    def note_loaded(self, slot: GradientSlot, bucket: Bucket) -> bool:
        """Note that a gradient is in its bucket; return True if a bucket is full."""
        bucket.note_loaded()
        if self._fired is not None:
            self._fired.setdefault(slot.index)
        if slot.index in bucket.waiting:
            bucket.waiting.remove(slot.index)
            if not bucket.waiting:
                self._full.append(bucket)
        return bool(self._full)

    def launch_full(self, scaling: Scaling) -> None:
        """Start to reduce the full buckets."""
        for full in self._full:
            full.launch(scaling)
            for member in full.members:
                self._slots[member.index].state = GradientState.SENT
        self._full.clear()

    def learn(self, presence: Presence, options: GradientOptions) -> CollectiveTask[None]:
        """Remember which gradients are sparse, and their order. Collective in the first step."""
        sparse = {index for index, code in enumerate(presence.codes) if code & SPARSE}
        if not sparse <= self._sparse:
            self._sparse |= sparse
            self.drop()
        if self._fired is not None:
            mine = np.array(ready_order(list(self._fired), len(self._slots)), np.int32)
            name, group = f"order of gradients{self.suffix}", options.group
            handle = collectives.allgather_async(mine.reshape(1, -1), name=name, group=group)
            yield handle
            self._order = handle.wait()[0].tolist()  # of the first that is not in join()

    def note_step(self, options: GradientOptions) -> None:
        """Go by the order of readiness after the first step; try another size if it is time to."""
        if self._fired is not None and self._order is not None:
            self._fired = None
            self.drop()
        if self._tuner is not None:
            self._tune(self._tuner, options)

    def forget_order(self) -> None:
        """Plan anew, as in the first step: parameters, or ranks, are other ones."""
        self.drop()
        self._fired, self._order = {}, None

    def forget_sparse(self) -> None:
        """Expect dense gradients of all parameters."""
        self._sparse.clear()

    def drop(self) -> None:
        """Make new buckets when they are needed next."""
        self.buckets = None
        self._full.clear()
        for slot in self._slots:
            slot.place(None, None)

    def _tune(self, tuner: FusionTuner, options: GradientOptions) -> None:
        """Go on to the next bucket size if it is time to. Collective at the end of the trials."""
        now, before = time.monotonic(), self._step_ended_at
        self._step_ended_at = now
        if before and tuner.note_step(now - before):
            if tuner.is_over:
                name, group = f"bucket size{self.suffix}", options.group
                chosen = collectives.allgather_object(tuner.choose(), name=name, group=group)
                tuner.mib = next(mib for mib in chosen if mib is not None)  # None: in join()
            self.drop()

    def _make_buckets(self, options: GradientOptions) -> list[Bucket]:
        order = self._order if self._fired is None else None
        indices = [
            index
            for index in order or reversed(range(len(self._slots)))
            if self._slots[index].has_hooks and index not in self._sparse
        ]
        together, others = options.batches(indices, [slot.parameter for slot in self._slots])
        wanted = [(each, math.inf) for each in together]
        buckets: list[Bucket] = []
        for each, max_nbytes in [*wanted, (others, self.max_nbytes)]:
            buckets += make_buckets(
                "gradients",
                [(i, self._slots[i].name, self._slots[i].parameter) for i in each],
                max_nbytes,
                options.group,
                self.suffix,
                is_scattered=options.is_sharded,
            )
        for bucket in buckets:
            for member in bucket.members:
                self._slots[member.index].place(bucket, member)
        return buckets
