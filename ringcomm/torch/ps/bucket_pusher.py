"""Pushes buckets of gradients to the servers, and fetches values, in one order on all workers.

The order must be the same: a round holds memory on the servers until all workers have pushed, so
workers with different orders could wait for each other for ever.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ringcomm.errors import RingcommError
from ringcomm.ps.client.future import Future, Pushed
from ringcomm.ps.client.rounds_of_first_k_workers import FirstOfRounds
from ringcomm.ps.optim import Updater
from ringcomm.ps.session import Session
from ringcomm.torch.ps.buckets import ServedBucket
from ringcomm.torch.ps.clip_and_scale import squares_of
from ringcomm.torch.ps.distributed_optimizer_options import WHO, ServerOptions

Groups = Sequence[Mapping[str, Any]]


class BucketPusher:
    """The buckets of one optimizer, and which of them have been pushed in this step.

    Attributes:
        groups: the optimizer's current param_groups; the optimizer sets this.
        buckets: in the order in which they are pushed.
        n_pushed: number of buckets pushed in this step.
        samples: number of samples in this worker's gradient; None: it is not weighed.
    """

    def __init__(self, options: ServerOptions, groups: Groups, session: Session) -> None:
        self.options, self.groups = options, groups
        self.buckets: list[ServedBucket] = []
        self.n_pushed = 0
        self.samples: float | None = None
        self._updaters: dict[int, Updater] = {}  # of this step
        self._known_updaters: dict[int, tuple[Mapping[str, Any], Updater]] = {}
        self._rounds: FirstOfRounds | None = None  # a gradient counts in all tables, or none
        if options.mode.name == "first_of":
            self._rounds = FirstOfRounds(session.client, is_shared=True)

    @property
    def weight(self) -> float:
        return 1.0 if self.samples is None else self.samples

    def add(self, buckets: Sequence[ServedBucket]) -> None:
        if self._rounds is not None:
            for bucket in buckets:
                bucket.table.share_rounds(self._rounds)
        self.buckets += buckets

    def begin_step(self) -> None:
        self.n_pushed = 0
        self.forget_updaters()
        for bucket in self.buckets:
            bucket.restart()

    def forget_updaters(self) -> None:
        self._updaters.clear()

    def push_full(self) -> None:
        """Push the full buckets, up to the first that is not full, or that a GPU still copies."""
        for bucket in self.buckets[self.n_pushed :]:
            if bucket.is_frozen:
                is_there = True
            elif bucket.waiting:
                return
            else:
                is_there = bucket.fetch_gradients()
            if is_there and bucket is self.buckets[self.n_pushed]:
                self._push(bucket)

    def flush(self, factor: float = 1.0, scale: float = 1.0) -> None:
        for bucket in self.buckets[self.n_pushed :]:
            if not bucket.is_frozen:
                bucket.fetch_gradients()
        while self.n_pushed < len(self.buckets):
            self._push(self.buckets[self.n_pushed], factor, scale)

    def _push(self, bucket: ServedBucket, factor: float = 1.0, scale: float = 1.0) -> None:
        """Push the next bucket. After an error this may be called again."""
        push = self._pushed(bucket, factor, scale)
        bucket.note_pushed(push, is_early=not self.options.is_deferred)
        self.n_pushed += 1

    def _pushed(self, bucket: ServedBucket, factor: float, scale: float) -> Future[Pushed] | None:
        """Push a bucket's gradients times a factor; return None if there is nothing to push.

        `scale` is the scale of the loss that is still in the gradients.
        """
        if bucket.is_frozen:
            # In FirstOf(k), workers may freeze the bucket before different rounds.
            is_due = self._rounds is not None
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
        known = self._updaters.get(bucket.group)
        if known is None:
            known = self._updaters[bucket.group] = self._present_updater(bucket.group)
        before = bucket.table.updater
        if known.slot_names != before.slot_names:
            raise ValueError(
                f"{WHO}: parameter group {bucket.group} is {known} now, and was {before}: it needs "
                "another state on the servers. Wrap the optimizer anew, or begin with the new "
                "setting: for a momentum that is 0 at first, pass 1e-30"
            )
        return known

    def _present_updater(self, group: int) -> Updater:
        values = self.groups[group]
        known = self._known_updaters.pop(group, None)
        if known is None or known[0] != values:
            known = dict(values), self.options.updater(values)
            if not all(_is_fixed(x) for name, x in values.items() if name != "params"):
                return known[1]
        self._known_updaters[group] = known
        return known[1]

    def enter(self) -> None:
        """Ask to enter the round, in modes in which not all workers are in it."""
        if self._rounds is not None:
            self._rounds.enter()

    def take_back(self) -> None:
        for bucket in self.buckets:
            bucket.table.take_back()

    def own_squares(self) -> tuple[float, bool]:
        found = [bucket.gradients() for bucket in self.buckets]
        return squares_of(x for x in found if x is not None)

    def fetch_values(self, buckets: Sequence[ServedBucket]) -> list[str]:
        """Fetch the values, front layers first; return the outcomes of the pushes."""
        pulls = [(bucket, bucket.pull()) for bucket in reversed(buckets)]
        outcomes = []
        for bucket, pull in pulls:
            if bucket.push is not None:  # if the push was refused, the pull would never end
                outcomes.append(bucket.push.wait().why)
            pull.wait()
            bucket.land()
        return outcomes

    def refuse_update_by_hand(self) -> None:
        """Raise RingcommError if weights have changed since backward(), which was not pushed.

        The program drops .grad now, and seems to have used it for that, as SAM does.
        """
        for slot in (each for bucket in self.buckets for each in bucket.slots):
            if slot.are_weights_changed:
                raise RingcommError(
                    f"{WHO}: {slot.name} was changed between backward() and zero_grad(), while "
                    ".grad is this worker's own gradient: weights that are computed from it differ "
                    "between the workers. Change weights after step(), or use hybrid='ring'"
                )

    def refuse_changed_gradients(self) -> None:
        """Raise RingcommError if .grad or a hyper-parameter has changed since the push."""
        for bucket in self.buckets:
            if frozen := bucket.frozen_with_gradient():
                raise RingcommError(
                    f"{WHO}: {frozen[0].name} has a .grad and is frozen, so it is not pushed: set "
                    ".grad to None, or call requires_grad_(True)"
                )
            if (slot := bucket.changed_gradient()) is not None:
                raise RingcommError(
                    f"{WHO}: .grad of {slot.name} was changed after "
                    f"{'it had been pushed' if slot.is_pushed else 'backward()'}. To change "
                    "gradients after backward() pass overlap=False, to clip them max_grad_norm=, "
                    "to unscale them scaler="
                )
        if self.options.class_name is None:
            return
        for group, pushed in self._updaters.items():
            now = self._present_updater(group)
            if self.n_pushed and now is not pushed and now != pushed:
                raise RingcommError(
                    f"{WHO}: parameter group {group} became {now} after backward(), which had "
                    f"pushed gradients with {pushed}. Change hyper-parameters before backward()"
                )


def _is_fixed(x: object) -> bool:
    """Return True if nobody can change a hyper-parameter in place, as a tensor may be."""
    numbers = x if type(x) is tuple else (x,)
    return all(isinstance(each, int | float | str | None) for each in numbers)


def _refuse_half_frozen(bucket: ServedBucket) -> None:
    """Raise RingcommError if some parameters are frozen: gradients of zeros would change them."""
    frozen = [s.name for s in bucket.slots if s.has_hooks and not s.parameter.requires_grad]
    if frozen:
        raise RingcommError(
            f"{WHO}: {frozen[0]} was frozen after the optimizer was wrapped, and shares a table "
            "with others. Freeze it before, and wrap the optimizer anew"
        )
