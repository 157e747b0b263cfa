"""Pushes buckets of gradients to the servers, and fetches values, in one order on all workers.

Rounds hold the memory of what they wait for, so workers that pushed in different orders could wait
for each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ringcomm.errors import RingcommError
from ringcomm.ps.entering import Entering
from ringcomm.ps.future import Future, Pushed
from ringcomm.ps.job import Session
from ringcomm.ps.optim import Updater
from ringcomm.torch.ps.buckets import ServedBucket
from ringcomm.torch.ps.scaling import squares_of
from ringcomm.torch.ps.server_options import WHO, ServerOptions

Groups = Sequence[Mapping[str, Any]]


class BucketPusher:
    """The buckets of one optimizer, and which of them have been pushed in this step.

    Attributes:
        groups: the optimizer's param_groups as they are now; the owner replaces them.
        buckets: in the order in which they are pushed.
        n_pushed: how many have been, in this step.
        samples: of this worker's gradient of this step; None: not weighed.
    """

    def __init__(self, options: ServerOptions, groups: Groups, session: Session) -> None:
        self.options, self.groups = options, groups
        self.buckets: list[ServedBucket] = []
        self.n_pushed = 0
        self.samples: float | None = None
        self._updaters: dict[int, Updater] = {}
        self._entering: Entering | None = None  # of all tables: a gradient counts in all, or none
        if options.mode.name == "first_of":
            self._entering = Entering(session.client, is_shared=True)

    @property
    def weight(self) -> float:
        """Weight of this worker's gradient in the mean of a round."""
        return 1.0 if self.samples is None else self.samples

    def add(self, buckets: Sequence[ServedBucket]) -> None:
        """Push these, too, from the next step on."""
        if self._entering is not None:
            for bucket in buckets:
                bucket.table.share_rounds(self._entering)
        self.buckets += buckets

    def begin_step(self) -> None:
        """Expect gradients anew; nothing has been pushed."""
        self.n_pushed = 0
        self.forget_updaters()
        for bucket in self.buckets:
            bucket.restart()

    def forget_updaters(self) -> None:
        """Make new updaters of the hyper-parameters when they are needed next."""
        self._updaters.clear()

    def push_full(self) -> None:
        """Push buckets that are full, in order."""
        while self.n_pushed < len(self.buckets):
            bucket = self.buckets[self.n_pushed]
            if bucket.waiting and not bucket.is_frozen:
                return
            self._push(bucket)

    def flush(self, factor: float = 1.0, scale: float = 1.0) -> None:
        """Push what has not left: incomplete buckets, and all if step() is to push."""
        while self.n_pushed < len(self.buckets):
            self._push(self.buckets[self.n_pushed], factor, scale)

    def _push(self, bucket: ServedBucket, factor: float = 1.0, scale: float = 1.0) -> None:
        """Push the next bucket; `scale` stays in its gradients. What raises may be called again."""
        bucket.note_pushed(self._pushed(bucket, factor, scale))
        self.n_pushed += 1

    def _pushed(self, bucket: ServedBucket, factor: float, scale: float) -> Future[Pushed] | None:
        """Push a bucket; return None where there is nothing to push."""
        if bucket.is_frozen:
            # With FirstOf(k) workers may freeze it before different rounds.
            is_due = self._entering is not None
            return bucket.table.push(None, hold=self.options.is_held) if is_due else None
        _refuse_half_frozen(bucket)
        bucket.table.updater = self.updater_for(bucket)
        gradients, weight = bucket.gradients(), self.weight
        is_alone = not self.options.mode.has_rounds
        if is_alone and (gradients is None or weight == 0):
            return None
        absent = bucket.absent()
        if gradients is None and math.isnan(factor):  # see ServerStep.poison()
            gradients, absent = bucket.room_for_gradients().zero_(), []
        is_held = self.options.is_held
        if gradients is None:
            return bucket.table.push(None, weight=weight, hold=is_held)
        gradients = gradients if factor == 1.0 else gradients * factor
        weight = 1.0 if is_alone else weight
        return bucket.table.push(
            gradients.numpy(), weight=weight, hold=is_held, scale=scale, absent=absent
        )

    def updater_for(self, bucket: ServedBucket) -> Updater:
        """Return the updater with the hyper-parameters of now."""
        known = self._updaters.get(bucket.group)
        if known is None:
            known = self._updaters[bucket.group] = self.options.updater(self.groups[bucket.group])
        before = bucket.table.updater
        if known.slot_names != before.slot_names:
            raise ValueError(
                f"{WHO}: parameter group {bucket.group} is {known} now, and was {before}: another "
                "state beside the values. Wrap the optimizer anew, or begin with it: a momentum "
                "that is 0 for a while may be given as 1e-30"
            )
        return known

    def enter(self) -> None:
        """Ask to be in the round of what has been pushed, where not all are."""
        if self._entering is not None:
            self._entering.enter()

    def take_back(self) -> None:
        """The mean that fetch_mean() brought is of no use."""
        for bucket in self.buckets:
            bucket.table.take_back()

    def own_squares(self) -> tuple[float, bool]:
        """Return the sum of squares of this worker's gradients, and whether all is finite."""
        found = [bucket.gradients() for bucket in self.buckets]
        return squares_of(x for x in found if x is not None)

    def fetch_values(self, buckets: Sequence[ServedBucket]) -> list[str]:
        """Fetch the values, front layers first; return what became of the pushes."""
        pulls = [(bucket, bucket.table.pull(out=bucket.room())) for bucket in reversed(buckets)]
        outcomes = []
        for bucket, pull in pulls:
            if bucket.push is not None:  # if it was refused, the pull would wait for its round
                outcomes.append(bucket.push.wait().why)
            pull.wait()
            with torch.no_grad():
                bucket.land()
        return outcomes

    def refuse_changed_gradients(self) -> None:
        """Raise RingcommError if .grad or an option is not what was pushed."""
        for slot in (each for bucket in self.buckets for each in bucket.slots):
            grad = slot.parameter.grad
            if slot.pushed is None or not slot.parameter.requires_grad:
                continue
            sent, version = slot.pushed
            if grad is not sent or (grad is not None and grad._version != version):
                raise RingcommError(
                    f"{WHO}: .grad of {slot.name} was changed after backward(), which had pushed "
                    "it already. To clip gradients pass max_grad_norm=, to unscale them scaler="
                )
        if self.options.class_name is None:
            return
        for group, pushed in self._updaters.items():
            now = self.options.updater(self.groups[group])
            if self.n_pushed and now != pushed:
                raise RingcommError(
                    f"{WHO}: parameter group {group} became {now} after backward(), which had "
                    f"pushed gradients with {pushed}. Change hyper-parameters before backward()"
                )


def _refuse_half_frozen(bucket: ServedBucket) -> None:
    """A gradient of zeros would move a parameter that torch leaves alone."""
    frozen = [s.name for s in bucket.slots if s.has_hooks and not s.parameter.requires_grad]
    if frozen:
        raise RingcommError(
            f"{WHO}: {frozen[0]} was frozen after the optimizer was wrapped, and shares a table "
            "with others. Freeze it before, and wrap the optimizer anew"
        )
