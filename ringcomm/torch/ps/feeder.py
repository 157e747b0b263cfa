"""Pushes gradients to the servers while backward() runs, and fetches the new values.

Autograd calls a hook when a gradient is complete. A full bucket is pushed as soon as all buckets
before it have been. With clipping or a GradScaler, which need all gradients, step() pushes. So it
does if a worker has several optimizers: the loss of one may fill gradients of another, as in a GAN,
and the program drops them before that one's step.

All workers push in the same order: a round holds memory on the servers until all have pushed, so
workers with different orders could wait for each other for ever.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec

import torch

from ringcomm._core import StepClock
from ringcomm.errors import RingcommError
from ringcomm.ps.checkpoint.auto_recovery import push_unless_lost
from ringcomm.ps.client.dense.table import Table
from ringcomm.ps.client.first_of import FirstOfRounds
from ringcomm.ps.client.future import Future, Pushed
from ringcomm.ps.client.table_base import close_abandoned
from ringcomm.ps.optim import Updater
from ringcomm.ps.session import session
from ringcomm.torch.backward.collective_tasks import CollectiveTask
from ringcomm.torch.backward.consistency_check import ConsistencyCheck, OptimizerSummary
from ringcomm.torch.backward.optimizer_numbers import (
    checked_samples,
    next_number,
    note_samples,
)
from ringcomm.torch.backward.parameter_hooks import Named, ParameterHooks, without_hooks
from ringcomm.torch.backward.passes import Passes
from ringcomm.torch.optim.distributed_optimizer_options import checked_passes
from ringcomm.torch.ps.buckets import IN_16_BITS, ServedBucket, ServedSlot, plan
from ringcomm.torch.ps.chief_buffers import Buffer, ServedBuffers
from ringcomm.torch.ps.clipping import factor_of, is_on, squares_of
from ringcomm.torch.ps.options import WHO, ServerOptions
from ringcomm.torch.ps.row_gradients import NO_ROWS, RowGradients, let_rows_wait, take
from ringcomm.torch.ps.worker_counts import (
    catch_up,
    count_step,
    end_step,
    enrol_optimizer,
    let_in,
)

P = ParamSpec("P")
Groups = Sequence[Mapping[str, Any]]


class Feeder:
    """Owns the hooks and tables of one optimizer's parameters. Its constructor is collective.

    Attributes:
        groups: the optimizer's current param_groups; the optimizer sets this.
        buckets: in the order in which they are pushed.
        n_pushed: number of buckets pushed in this step.
        samples: number of samples in this worker's gradient; None: it is not weighed.
        clock: of the phases of its steps.
        was_applied: this worker's last gradients are part of the parameters.
        rows: gradients of embeddings that belong to this step; set when the step begins to end.
        buffers: of the model.
        n_replaced: number of checkpoints that were loaded when all values were last fetched.
    """

    def __init__(
        self, named_parameters: Named, groups: Groups, options: ServerOptions, passes_per_step: int,
        buffers: Sequence[Buffer] = (),
    ) -> None:  # fmt: skip
        self.options, self._passes_per_step = options, checked_passes(passes_per_step)
        self.step = self._n_passes = 0
        self.was_applied = True
        self.session = session()
        self.groups = groups
        self.buckets: list[ServedBucket] = []
        self.n_pushed = 0
        self.samples: float | None = None
        self._updaters: dict[int, Updater] = {}  # of this step
        self._known_updaters: dict[int, tuple[Mapping[str, Any], Updater]] = {}
        self._rounds: FirstOfRounds | None = None  # a gradient counts in all tables, or none
        if options.mode.name == "first_of":
            self._rounds = FirstOfRounds(self.session.client, is_shared=True)
        self._slots: list[ServedSlot] = []
        self._known_ids: list[list[int]] = []  # of param_groups as the last check has found them
        self._tables: list[Table] = []
        self._parameters: list[weakref.ref[torch.nn.Parameter]] = []
        self._hooks = ParameterHooks(self)
        self._passes, self.clock = Passes(), StepClock()
        self._is_spoiled = self._has_ticked = self._is_beside_others = False
        self.note_fetching()
        self._is_weighed: bool | None = None
        self.rows: RowGradients = NO_ROWS
        self.number = next_number(self.session.group)
        means = "means of " if options.class_name is None else ""
        self._scope = f"{means}optimizer {self.number}"  # of names of tables
        self.extend(named_parameters)
        self.buffers = ServedBuffers(buffers, self._scope)
        self.buffers.fetch()
        let_rows_wait(self, self.session)
        enrol_optimizer(self, self.session, f"optimizers (ps optimizer {self.number})")
        self._tables += self.buffers.tables
        gone = weakref.finalize(
            self, _abandon, self.session.abandoned, self._tables, self._parameters
        )
        gone.atexit = False

    def extend(self, named_parameters: Named) -> None:
        """Move more parameters to the servers. Collective, between two steps."""
        group_of = {p: g for g, group in enumerate(self.groups) for p in group["params"]}
        numbered = enumerate(named_parameters, len(self._slots))
        new = [ServedSlot(i, name, p, group_of[p]) for i, (name, p) in numbered]
        for slot in new:
            _require_servable(slot)
        parameters = tuple(
            (slot.name, slot.summary(is_trainable=slot.parameter.requires_grad)) for slot in new
        )
        settings = _settings(self.options, self._passes_per_step)
        close_abandoned(self.session)  # on all workers before one opens tables
        _require_alike(self, "parameters", OptimizerSummary(parameters, settings))
        mode, groups, codec = self.options.mode, self.groups, self.options.compression
        scope = self._scope
        buckets = [
            ServedBucket(slots, scope, self.options.updater(groups[slots[0].group]), mode, codec)
            for slots in plan(new)
        ]
        self._hooks.attach(without_hooks(new))
        self._slots += new
        if self._rounds is not None:
            for bucket in buckets:
                bucket.table.share_rounds(self._rounds)
        self.buckets += buckets
        if self.options.mode.name == "ssp":
            catch_up(self.session, f"steps (ps optimizer {self.number})")
        self._tables += [bucket.table for bucket in buckets]
        self._parameters += [weakref.ref(slot.parameter) for slot in new]
        self.fetch_values(buckets)

    def require_known(self, groups: Groups) -> None:
        if (ids := [[*map(id, group["params"])] for group in groups]) != self._known_ids:
            _require_known(self._slots, groups, may_move=self.options.class_name is None)
            self._known_ids = ids

    # --- called by autograd ---------------------------------------------------------------------
    def before_gradient(self, index: int) -> None:
        """Raise RingcommError if this step's gradient of the parameter has been pushed."""
        self._spoiling(self._passes.enter, self)
        slot = self._slots[index]
        if self.options.class_name is None:
            slot.note_before_gradient()
        if slot.is_pushed:
            self._is_spoiled = True
            raise RingcommError(
                f"{WHO}: a second backward() in this step brings a gradient for {slot.name}, which"
                " has been pushed. Call step() after each, say how many there are by "
                "backward_passes_per_step=, or pass overlap=False"
            )
        if self._is_beside_others:
            for bucket in self.buckets:
                bucket.expect_gradient(index)

    def after_gradient(self, index: int) -> None:
        """Push the full buckets, unless step() pushes all; then note what it is to find."""
        if self.options.is_deferred or self._n_passes < self._passes_per_step:
            return
        for bucket in self.buckets[self.n_pushed :]:
            if self._is_beside_others:
                bucket.watch_gradient(index)
            else:
                bucket.note_gradient(index)
        if self._is_beside_others:
            return
        self._spoiling(push_unless_lost, self.session, self._push_full)

    def begin_pass(self) -> None:
        self._refuse_spoiled()
        self.clock.mark(1)
        self._refuse_changed_values(is_thorough=False)
        self._hooks.attach(without_hooks(self._slots))
        self._n_passes += 1

    def end_pass(self) -> CollectiveTask[None]:
        """Do nothing: step() pushes the other buckets."""
        yield from ()

    # --- pushes, in one order ---------------------------------------------------------------------
    def _push_full(self) -> None:
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

    def _flush(self, factor: float = 1.0, scale: float = 1.0) -> None:
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
        gradients, weight = bucket.gradients(), self._weight
        is_alone = not self.options.mode.has_rounds
        if is_alone and (gradients is None or weight == 0):
            return None
        absent = bucket.absent()
        if gradients is None and math.isnan(factor):  # see _poison()
            gradients, absent = bucket.room_for_gradients().zero_(), []
        is_held = self.options.is_held
        if gradients is None:
            return bucket.table.push(None, weight=weight, hold=is_held)
        gradients = gradients if factor == 1.0 else gradients * factor
        weight = 1.0 if is_alone else weight
        return bucket.table.push(
            gradients.numpy(), weight=weight, hold=is_held, scale=scale, absent=absent
        )

    @property
    def _weight(self) -> float:
        return 1.0 if self.samples is None else self.samples

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

    def forget_updaters(self) -> None:
        self._updaters.clear()

    def _enter(self) -> None:
        """Ask to enter the round, in modes in which not all workers are in it."""
        if self._rounds is not None:
            self._rounds.enter()

    def take_back(self) -> None:
        for bucket in self.buckets:
            bucket.table.take_back()

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

    # --- the end of a step ----------------------------------------------------------------------
    def apply_on_servers(self, grad_scale: float) -> bool:
        """Make this step's update on the servers, and fetch the new values.

        Returns False if the step was skipped because a gradient is not finite. grad_scale is the
        factor of the loss.
        """
        self._begin_end()
        factor = self._own_factor(grad_scale)
        if factor is None:
            is_finite = False
        elif self.options.is_held:
            self._flush(factor, grad_scale if self.options.pushes_scaled else 1.0)
            self._enter()
            self.rows.hold(grad_scale, self._weight)
            is_finite = self._release(grad_scale)
        else:
            self._flush(factor)
            self._enter()
            if self.options.needs_all:
                self.rows.push(factor, self._weight)
            else:
                self.rows.push_as_they_are(self._weight)
            is_finite = True
        self._tick()
        outcomes = self.fetch_values([b for b in self.buckets if not b.is_frozen])
        self.clock.mark(3)
        self.was_applied = is_finite and "late" not in outcomes
        return is_finite

    def fetch_mean(self, grad_scale: float) -> None:
        """Set .grad to the mean over the workers, still multiplied by grad_scale."""
        self._begin_end()
        self._flush(self._poison(), grad_scale)
        self._enter()
        self.rows.hold(grad_scale, self._weight)
        pulls = [
            (bucket, room := bucket.room_for_gradients(), bucket.table.pull(out=room.numpy()))
            for bucket in reversed(self.buckets)
            if not bucket.is_frozen
        ]
        outcomes = []
        for bucket, room, pull in pulls:
            assert bucket.push is not None
            outcomes.append(bucket.push.wait().why)
            pull.wait()
            if outcomes[-1] != "empty":
                for slot, mean in zip(bucket.slots, bucket.means(room), strict=True):
                    slot.take_mean(mean)
        self.clock.mark(3)
        self.was_applied = "late" not in outcomes
        self.begin_step()

    def complete_step(self) -> None:
        if (page := self.session.engine.page) is not None:
            self.clock.end(page)
        self._tick()
        self.step += 1
        self.samples = None
        self._has_ticked, self.rows = False, NO_ROWS
        self.begin_step()
        end_step(self.session, self.number)

    def let_in(self) -> None:
        """Let in who is to begin between this step and the next; after the step boundary."""
        let_in(self.session, self.number)

    def _tick(self) -> None:
        """Count the step once, also if step() is called again after an error."""
        if not self._has_ticked:
            self.buffers.push()
            count_step(self.session, self)
        self._has_ticked = True

    def _begin_end(self) -> None:
        self._refuse_spoiled()
        self.clock.mark(2)
        self._refuse_changed_values(is_thorough=True)
        self._refuse_changed_gradients()
        if self.options.is_deferred:
            self.rows = self.rows or take(self.session)  # the same ones after an error
            if self.options.needs_all:
                has_norm = self.options.max_norm is not None
                self.rows.require_fit(WHO, self.options.mode, has_norm=has_norm)
            if not is_on(self.options.scaler):
                self.rows.require_finite()
        self._refuse_unlike_samples()

    # --- clipping, and steps that are skipped -----------------------------------------------------
    def _own_factor(self, grad_scale: float) -> float | None:
        """Return the factor for the gradients before the push; None: push nothing.

        In modes without rounds each push is an update, and is clipped or skipped by itself.
        """
        if not self.options.needs_all:
            return 1.0
        if self.options.is_held:
            return self._poison() / (1.0 if self.options.pushes_scaled else grad_scale)
        squares, is_finite = self._own_squares()
        of_rows, are_finite = self.rows.own_squares()
        if not (is_finite and are_finite) and is_on(self.options.scaler):
            return None
        return factor_of(squares + of_rows, grad_scale, self.options.max_norm)

    def _poison(self) -> float:
        """Return NaN, so that all workers skip the step, if waiting rows are not finite; else 1."""
        is_finite = not is_on(self.options.scaler) or self.rows.own_squares()[1]
        return 1.0 if is_finite else math.nan

    def _release(self, grad_scale: float) -> bool:
        """Make updates of the means that the servers hold; return False if one is not finite.

        A late worker checks its own gradient instead.
        """
        scale = grad_scale if self.options.pushes_scaled else 1.0
        held = [bucket for bucket in self.buckets if bucket.push is not None]
        pushed = []
        for bucket in held:
            assert bucket.push is not None
            pushed.append(bucket.push.wait())
        if any(each.why == "late" for each in pushed):  # the means are of the other workers
            is_finite = not is_on(self.options.scaler) or (
                self._own_squares()[1] and self.rows.own_squares()[1]
            )
            self.finish_rows(1.0 if is_finite else None, grad_scale)
            return is_finite
        of_rows, are_finite = self.rows.mean_squares()
        are_finite &= all(each.is_finite for each in pushed)
        is_finite = are_finite or not is_on(self.options.scaler)
        squares = sum(each.squares for each in pushed) + of_rows * scale**2
        factor = factor_of(squares, scale, self.options.max_norm)
        releases = [bucket.table.release(factor if is_finite else None) for bucket in held]
        for each in releases:
            each.wait()
        self.finish_rows(factor * scale if is_finite else None, grad_scale)
        return is_finite

    def finish_rows(self, clip: float | None, grad_scale: float) -> None:
        """Update rows by their unscaled gradients times a factor; None: drop the gradients."""
        self.rows.release(clip)
        if clip is not None:
            self.rows.push(clip / grad_scale, self._weight)

    def _own_squares(self) -> tuple[float, bool]:
        found = [bucket.gradients() for bucket in self.buckets]
        return squares_of(x for x in found if x is not None)

    # --- between steps ----------------------------------------------------------------------------
    def set_samples(self, n: float) -> None:
        n = checked_samples(n)
        if self.n_pushed:
            raise RingcommError(f"{WHO}: set_samples() came after backward(): call it before")
        self.samples = n
        note_samples(self, self.session.engine)

    def note_others(self) -> bool:
        was_alone = not self._is_beside_others
        self._is_beside_others = self.options.yields_to_others
        return self._is_beside_others and was_alone

    @property
    def is_deferred(self) -> bool:
        return self.options.is_deferred

    def restart(self) -> None:
        """Restart the step, before zero_grad()."""
        has_failed = self._is_spoiled or self._passes.has_failed
        if self.n_pushed and (self.options.mode.has_rounds or not has_failed):
            raise RingcommError(
                f"{WHO}: zero_grad() between backward() and step(): gradients of this step have "
                "been pushed, and cannot be taken back. Call step() first; to drop or change "
                "gradients after backward() pass overlap=False, to skip steps whose gradients are "
                "not finite scaler=, to clip max_grad_norm="
            )
        if self.options.class_name is None and not self.n_pushed:
            self._refuse_update_by_hand()
        self.begin_anew()

    def begin_step(self) -> None:
        self._passes.forget()
        self._n_passes = self.n_pushed = 0
        self.forget_updaters()
        for bucket in self.buckets:
            bucket.restart()

    def note_fetching(self) -> None:
        """Note that all values are about to be fetched: those of any checkpoint by now."""
        self.n_replaced = self.session.n_replaced

    def begin_anew(self) -> None:
        self._is_spoiled = self._has_ticked = False
        if self.options.is_deferred:
            take(self.session)
        self.rows = NO_ROWS
        self.begin_step()

    # --- failures -------------------------------------------------------------------------------
    def _spoiling(self, action: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            action(*args, **kwargs)
        except BaseException:
            self._is_spoiled = True
            raise

    def _refuse_spoiled(self) -> None:
        if self._is_spoiled or self._passes.has_failed:
            can_repeat = not self.n_pushed or not self.options.mode.has_rounds
            raise RingcommError(
                f"{WHO}: the last backward() failed. "
                + (
                    "Call optimizer.zero_grad() and repeat it"
                    if can_repeat
                    else "Part of its gradients has been pushed, and cannot be taken back: end this"
                    " job"
                )
            )

    def _refuse_update_by_hand(self) -> None:
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

    def _refuse_changed_gradients(self) -> None:
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

    def _refuse_changed_values(self, *, is_thorough: bool) -> None:
        if self.options.class_name is None:
            return
        self.session.client.listen()
        if self.n_replaced != self.session.n_replaced:
            raise RingcommError(
                f"{WHO}: the chief has loaded a checkpoint since this worker fetched the "
                "parameters, and the model still has those before. Call "
                "optimizer.pull_parameters() on every worker after ps.restore() or ps.load()"
            )
        for bucket in self.buckets:
            if (slot := bucket.changed_values(is_thorough=is_thorough)) is not None:
                raise RingcommError(
                    f"{WHO}: {slot.name} was changed by hand, and the servers have other values, "
                    "which step() would bring back. Call optimizer.push_parameters() on every "
                    "worker after load_state_dict() or the like: the chief's values count"
                )

    def _refuse_unlike_samples(self) -> None:
        is_weighed = self.samples is not None
        if self._is_weighed is None:
            self._is_weighed = is_weighed
            if self.options.mode.name == "sync":  # in others no worker waits for all
                settings = (("set_samples() called", str(is_weighed)),)
                _require_alike(self, "samples", OptimizerSummary((), settings))
        elif self._is_weighed != is_weighed:
            raise RingcommError(
                f"{WHO}: set_samples() was {'not ' * self._is_weighed}called for this step, and "
                f"{'' if self._is_weighed else 'not '}before. Call it for each step, or never"
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


def _require_alike(feeder: Feeder, what: str, mine: OptimizerSummary) -> None:
    """Compare something with the other workers, who may recover from the death of a server.

    They enter the comparison later then, and need no more of this worker than that it has entered.
    """
    if feeder.session.takes_what_servers_have:  # the others have compared it long since
        return
    name, client = f"{what} (ps optimizer {feeder.number})", feeder.session.client
    check = ConsistencyCheck(mine, name, feeder.session.group)

    def is_over() -> bool:
        return check.handle.done() or client.loss is not None

    if feeder.session.engine.watch.peers.survivable:  # else a death ends all waits
        client.drive_until(is_over, name, None)
    if client.loss is not None and not check.handle.done():
        raise client.loss.error(WHO)
    check.wait()


def _abandon(
    abandoned: deque[tuple[Table, list[weakref.ref[torch.nn.Parameter]]]],
    tables: list[Table],
    parameters: list[weakref.ref[torch.nn.Parameter]],
) -> None:
    """Note tables to be closed once the parameters are gone, too; in any thread, at any time."""
    abandoned.extend((table, parameters) for table in tables)


def _require_servable(slot: ServedSlot) -> None:
    p = slot.parameter
    if p.device.type not in ("cpu", "cuda"):
        raise TypeError(
            f"{WHO}: {slot.name} is on {p.device}; parameters must be in host memory or on a GPU"
        )
    if p.dtype not in (torch.float32, torch.float64, *IN_16_BITS):
        raise TypeError(
            f"{WHO}: {slot.name} is of {p.dtype}; servers take float32, float64, bfloat16 and "
            "float16. Keep the model in float32, and use torch.autocast for the rest"
        )


def _settings(options: ServerOptions, passes_per_step: int) -> tuple[tuple[str, str], ...]:
    """Return the settings that must be the same on all workers, as text."""
    settings = {
        "optimizer on the servers": options.class_name,
        "max_grad_norm": options.max_norm,
        "overlap": options.overlap,
        "scaler": is_on(options.scaler),
        "backward_passes_per_step": passes_per_step,
        "mode": options.mode,
        "compression": options.compression,
    }
    return tuple((name, str(value)) for name, value in settings.items())


def _require_known(slots: Sequence[ServedSlot], groups: Groups, *, may_move: bool) -> None:
    """Raise RingcommError if the groups have not these parameters, each in its group."""
    group_of = {id(p): g for g, group in enumerate(groups) for p in group["params"]}
    if group_of.keys() != {id(slot.parameter) for slot in slots}:
        raise RingcommError(
            f"{WHO}: param_groups have other parameters than the servers. Wrap a new optimizer to "
            "exchange parameters, or add some by optimizer.add_param_group()"
        )
    moved = [each for each in slots if group_of[id(each.parameter)] != each.group]
    if moved and not may_move:
        name, group = moved[0].name, group_of[id(moved[0].parameter)]
        raise RingcommError(
            f"{WHO}: {name} is in param_groups[{group}] now, and the servers know it in group "
            f"{moved[0].group}. To give parameters other groups, wrap a new optimizer"
        )
