"""The buckets of an optimizer; after the first step, in the order in which gradients get ready.

In the first step the ranks also tell each other a digest of their gradients, before these are
reduced: if all train on the same data, that costs their work and gains nothing.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from ringcomm.engine.api import collectives
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.core.group import Group
from ringcomm.torch.backward.collective_tasks import CollectiveTask
from ringcomm.torch.backward.optimizer_numbers import next_number
from ringcomm.torch.backward.watched_tensors import n_storage_references
from ringcomm.torch.optim.buckets import Bucket, Member, Scaling, make_buckets
from ringcomm.torch.optim.distributed_optimizer_options import GradientOptions
from ringcomm.torch.optim.gradient_presence import SPARSE, GradientPresence, ready_order
from ringcomm.torch.optim.gradient_slot import GradientSlot, GradientState

_SAMPLE: Final = 4096  # elements of each gradient
_MOST: Final = 64  # gradients
NO_VALUES: Final = (0, 0)

_log = logging.getLogger("ringcomm")


class BucketPlan:
    """The buckets of one optimizer's gradients; between two steps, all ranks have the same.

    Attributes:
        buckets: the buckets, in the order in which they will probably be full; None: not made yet.
        suffix: end of the names of messages; it names the optimizer.
        unit: see Scaling; the same on all ranks that take part.
    """

    def __init__(self, slots: Sequence[GradientSlot], options: GradientOptions) -> None:
        self.buckets: list[Bucket] | None = None
        self.suffix = ""
        self.unit = 0.0
        self.slots, self._options = slots, options
        self._full: list[Bucket] = []  # sent as soon as ranks have agreed on the parameters
        self._fired: dict[int, None] | None = {}  # ready gradients; None: buckets follow `_order`
        self._order: list[int] | None = None  # order of readiness on the first rank
        self._values: tuple[int, ...] | None = None  # digest of the first gradients
        self._has_compared_values = False
        self._sparse: set[int] = set()  # indices of sparse gradients; the same on all ranks

    def enrol(self) -> None:
        self.suffix = f" (optimizer {next_number(self._options.group)})"

    @property
    def max_nbytes(self) -> float:
        on_gpus = bool(self.slots) and all(slot.parameter.is_cuda for slot in self.slots)
        return engine().settings.fusion_nbytes("cuda" if on_gpus else None)

    def ensure_buckets(self) -> list[Bucket]:
        if self.buckets is None:
            self.buckets = self._make_buckets()
        return self.buckets

    def begin_pass(self) -> None:
        """Expect every gradient again; leave memory that the program refers to alone."""
        self._full.clear()
        for bucket in self.ensure_buckets():
            bucket.expect_all()
            if bucket.n_other_references and not bucket.is_under_way:
                self._leave_to_program(bucket)

    def _leave_to_program(self, bucket: Bucket) -> None:
        """Use new memory for a bucket if the program uses the old one, except by .grad alone."""
        slots = [self.slots[member.index] for member in bucket.members]
        for slot in slots:
            slot.history.forget_unless(slot.parameter.grad)
        inside = [slot for slot in slots if slot.is_in_bucket]
        is_held = bucket.n_other_references > len(inside)
        if is_held or any(slot.needs_own_memory for slot in inside):
            bucket.renew()
            for slot, member in zip(slots, bucket.members, strict=True):
                slot.move(member.view)

    def note_loaded(self, slot: GradientSlot) -> bool:
        """Note that a gradient is in its bucket; return True if a bucket is full."""
        bucket = slot.bucket
        assert bucket is not None
        bucket.streams.note()
        if self._fired is not None:
            self._fired.setdefault(slot.index)
        if slot.index in bucket.waiting:
            bucket.waiting.remove(slot.index)
            if not bucket.waiting:
                self._full.append(bucket)
        return bool(self._full)

    def launch_full(self, scaling: Scaling) -> None:
        for full in self._full:
            for member in full.members:
                slot = self.slots[member.index]
                if not slot.is_as_packed:
                    slot.pack()
                slot.state = GradientState.SENT
            full.launch(scaling)
        self._full.clear()

    def note_values(self) -> None:
        """Note a digest of this rank's gradients, before they are reduced, in the first step."""
        if self._fired is not None and self._values is None:
            self._values = digest_of([slot.parameter.grad for slot in self.slots])

    def learn(self, presence: GradientPresence) -> CollectiveTask[None]:
        """Note sparse gradients, and the order of readiness. Collective in the first step."""
        sparse = {index for index, code in enumerate(presence.codes) if code & SPARSE}
        if not sparse <= self._sparse:
            self._sparse |= sparse
            self.drop()
        if self._fired is not None:
            order = ready_order(list(self._fired), len(self.slots))
            mine = np.array([*order, *(self._values or NO_VALUES)], np.int32)
            name, group = f"order of gradients{self.suffix}", self._options.group
            handle = collectives.allgather_async(mine.reshape(1, -1), name=name, group=group)
            yield handle
            told = handle.wait()
            self._order = told[0, : len(order)].tolist()  # of the first rank that is not in join()
            if not self._has_compared_values:
                self._has_compared_values = True
                warn_of_same_data(told[:, len(order) :], group)

    def end_step(self) -> None:
        if self._fired is not None and self._order is not None:
            self._fired = None
            self.drop()

    def forget_order(self) -> None:
        """Plan as in the first step: parameters or ranks have changed."""
        self.drop()
        self._fired, self._order, self.unit = {}, None, 0.0

    def forget_sparse(self) -> None:
        self._sparse.clear()

    def drop(self) -> None:
        self.buckets = None
        self._full.clear()
        for slot in self.slots:
            slot.place(None, None)

    def _make_buckets(self) -> list[Bucket]:
        order = self._order if self._fired is None else None
        indices = [
            index
            for index in order or reversed(range(len(self.slots)))
            if self.slots[index].has_hooks and index not in self._sparse
        ]
        groups, others = self._options.batches(indices, [slot.parameter for slot in self.slots])
        buckets: list[Bucket] = []
        for batch, max_nbytes in [
            *((each, math.inf) for each in groups),
            (others, self.max_nbytes),
        ]:
            buckets += make_buckets(
                "gradients",
                [(i, self.slots[i].name, self.slots[i].parameter) for i in batch],
                max_nbytes,
                self._options,
                self.suffix,
                is_scattered=self._options.is_sharded,
            )
        for bucket in buckets:
            for member in bucket.members:
                self.slots[member.index].place(bucket, member)
        if not self._options.is_sharded:
            self._bring_along([member for bucket in buckets for member in bucket.members])
        return buckets

    def _bring_along(self, members: Sequence[Member]) -> None:
        """Move .grad into its bucket, where autograd can add to it, if no one uses its memory."""
        by_memory: dict[int, list[tuple[GradientSlot, Member]]] = {}
        for member in members:
            gradient = self.slots[member.index].parameter.grad
            if gradient is not None and gradient.layout is torch.strided:
                place = gradient.untyped_storage().data_ptr()
                by_memory.setdefault(place, []).append((self.slots[member.index], member))
        for together in by_memory.values():
            gradient = together[0][0].parameter.grad
            if gradient is None or n_storage_references(gradient) > len(together) + 1:
                continue
            for slot, member in together:
                slot.history.move(slot.parameter.grad, member.view)


def digest_of(gradients: Iterable[torch.Tensor | None]) -> tuple[int, ...]:
    """Return two int32 that tell samples of gradients apart; NO_VALUES if these are all 0."""
    digest, n, is_zero = hashlib.blake2b(digest_size=8), 0, True
    for gradient in gradients:
        if gradient is None or gradient.layout is not torch.strided or not gradient.is_cpu:
            continue
        sample = gradient.detach().reshape(-1)[:_SAMPLE].resolve_conj().resolve_neg().contiguous()
        is_zero = is_zero and not bool(sample.any())
        digest.update(sample.view(torch.uint8).numpy().tobytes())
        n += 1
        if n == _MOST:
            break
    if is_zero:
        return NO_VALUES
    return tuple(np.frombuffer(digest.digest(), np.int32).tolist())


def warn_of_same_data(digests: NDArray[Any], group: Group) -> None:
    """Log a warning on the first rank if all digests, by rank, are the same."""
    if len(digests) < 2 or group.rank != 0 or not engine().settings.hints:
        return
    if (digests != digests[0]).any() or tuple(digests[0]) == NO_VALUES:
        return
    _log.warning(
        "the first gradients of all %d ranks are the same bit for bit: each rank seems to train on "
        "the same data, which takes their work and gains nothing. Give each one its part: "
        "DataLoader(dataset, batch_sampler=ringcomm.data.ShardedSampler(dataset).batches(n)), with "
        "n = batch_size // hvd.size() if a step is to have as many samples as in one process. "
        "RINGCOMM_HINTS=0 silences this",
        len(digests),
    )
