"""Pushes gradients while backward() runs, and fetches what the servers make of them.

Autograd's hooks tell when a gradient is there. A bucket that is full is pushed at once, but none
before its turn: rounds hold the memory of what they wait for, so workers that pushed in different
orders could wait for each other. What clipping or a GradScaler must see first is pushed by step().
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, ParamSpec

import torch

from ringcomm.codec import Codec
from ringcomm.engine.api import collectives
from ringcomm.errors import RingcommError
from ringcomm.ps import optim
from ringcomm.ps.entering import Entering
from ringcomm.ps.future import Future, Pushed
from ringcomm.ps.job import is_chief, session
from ringcomm.ps.optim import Assign, Updater
from ringcomm.ps.rounds import Mode
from ringcomm.ps.states import pull_state, push_state
from ringcomm.torch.backward.autograd import Hooks
from ringcomm.torch.backward.consistency_check import ConsistencyCheck, OptimizerSummary
from ringcomm.torch.backward.cooperative_finish import CollectiveTask
from ringcomm.torch.backward.passes import Passes
from ringcomm.torch.backward.registry import claim, enrol, note_samples, release
from ringcomm.torch.ps import clock, states
from ringcomm.torch.ps.buckets import Bucket, Slot, plan
from ringcomm.torch.ps.row_gradients import NO_ROWS, RowGradients, let_rows_wait, take
from ringcomm.torch.ps.scaling import factor_of, is_on, squares_of

P = ParamSpec("P")
Named = Sequence[tuple[str, torch.nn.Parameter]]
Groups = Sequence[Mapping[str, Any]]
_WHO: Final = "ps.DistributedOptimizer"


@dataclass(frozen=True)
class ServerOptions:
    """Options of a ps.DistributedOptimizer.

    Attributes:
        mode: when pushes become updates.
        class_name: of the optimizer that servers are to be; None: they only take means.
        compression: of what is pushed, or None.
        max_norm: of the gradient of all parameters, or None.
        scaler: a torch.amp.GradScaler, or None.
    """

    mode: Mode
    class_name: str | None
    compression: Codec | None
    max_norm: float | None = None
    scaler: Any = None

    @property
    def is_deferred(self) -> bool:
        """True if step() pushes: what it pushes depends on all gradients, or the user scales."""
        return self.max_norm is not None or is_on(self.scaler)

    @property
    def is_held(self) -> bool:
        """True if the mean of a round becomes an update once its norm is known."""
        return self.is_deferred and self.mode.has_rounds and self.class_name is not None

    @property
    def pushes_scaled(self) -> bool:
        """True if release() undoes the scale of the loss: all in a round have the same.

        With FirstOf(k) a worker's GradScaler knows of the rounds alone that the worker was in.
        """
        return self.is_held and self.mode.name != "first_of"

    def updater(self, group: Mapping[str, Any]) -> Updater:
        """Return what the servers do with gradients of a parameter group."""
        if self.class_name is None:
            return Assign()
        found = optim.from_torch(group, self.class_name)
        if found is None:
            raise ValueError(f"{_WHO}: servers cannot do {self.class_name} with {dict(group)}")
        return found


class Feeder:
    """Owns the hooks, and the tables, of one optimizer's parameters. Collective to make.

    Args:
        named_parameters: (name, parameter), alike on every worker and in one order.
        groups: the optimizer's param_groups.
        options: the optimizer's.
        passes_per_step: backward() calls whose gradients are added up before anything is pushed.

    Attributes:
        groups: as they are now; the owner replaces them.
        step: how many steps have been completed.
        was_applied: this worker's last gradients are part of the parameters.
        rows: of embeddings, whose gradients go with this step; once it has begun to end.
        number: see registry.Numbered.
    """

    def __init__(
        self, named_parameters: Named, groups: Groups, options: ServerOptions, passes_per_step: int
    ) -> None:
        if not isinstance(passes_per_step, int) or passes_per_step < 1:
            raise ValueError(
                f"backward_passes_per_step is a whole number from 1 on, not {passes_per_step!r}"
            )
        self.groups, self.options, self._passes_per_step = groups, options, passes_per_step
        self.step = self.number = 0
        self.was_applied = True
        self._session = session()
        self._slots: list[Slot] = []
        self._buckets: list[Bucket] = []
        self._hooks: list[Hooks] = []
        self._passes = Passes()
        self._n_passes = 0
        self._n_pushed = 0  # buckets of this step, in order
        self._entering: Entering | None = None  # of all tables: a gradient counts in all, or none
        if options.mode.name == "first_of":
            self._entering = Entering(self._session.client, is_shared=True)
        self._updaters: dict[int, Updater] = {}
        self._is_spoiled = self._has_ticked = False
        self._samples: float | None = None
        self._is_weighed: bool | None = None
        self.rows: RowGradients = NO_ROWS
        enrol(self, self._session.group)
        self.extend(named_parameters)
        let_rows_wait(self, self._session)

    def extend(self, named_parameters: Named) -> None:
        """Move more parameters to the servers. Collective, between two steps.

        Raises:
            TypeError: a parameter is not in host memory, or neither float32 nor float64.
            ValueError: another optimizer has one already.
            MismatchError: workers have different parameters.
        """
        group_of = {p: g for g, group in enumerate(self.groups) for p in group["params"]}
        n = len(self._slots)
        new = [Slot(n + i, name, p, group_of[p]) for i, (name, p) in enumerate(named_parameters)]
        for slot in new:
            _require_servable(slot)
        self._require_alike("parameters", tuple((s.name, s.summary) for s in new), self._settings())
        suffix = f" (optimizer {self.number})"
        mode, groups, codec = self.options.mode, self.groups, self.options.compression
        buckets = [
            Bucket(slots, suffix, self.options.updater(groups[slots[0].group]), mode, codec)
            for slots in plan(new)
        ]
        if self._entering is not None:
            for bucket in buckets:
                bucket.table.share_rounds(self._entering)
        self._hear(new)
        self._slots += new
        self._buckets += buckets
        self._fetch_values(buckets)

    def _settings(self) -> tuple[tuple[str, str], ...]:
        options = self.options
        said = {
            "optimizer on the servers": options.class_name,
            "max_grad_norm": options.max_norm,
            "scaler": is_on(options.scaler),
            "backward_passes_per_step": self._passes_per_step,
            "mode": options.mode,
            "compression": options.compression,
        }
        return tuple((what, str(value)) for what, value in said.items())

    def _require_alike(
        self,
        what: str,
        parameters: tuple[tuple[str, str], ...],
        settings: tuple[tuple[str, str], ...],
    ) -> None:
        name = f"{what} (ps optimizer {self.number})"
        ConsistencyCheck(
            OptimizerSummary(parameters, settings), name, self._session.group
        ).require_alike()

    def _hear(self, slots: Sequence[Slot]) -> None:
        new = [slot for slot in slots if not slot.is_heard and slot.parameter.requires_grad]
        if not new:
            return
        claim([(slot.name, slot.parameter) for slot in new], self)
        self._hooks.append(Hooks(self, {slot.index: slot.parameter for slot in new}))
        for slot in new:
            slot.is_heard = True

    def close(self) -> None:
        """Remove the hooks, and release the parameters for another optimizer."""
        for hooks in self._hooks:
            hooks.remove()
        for slot in self._slots:
            release(slot.parameter, self)

    # --- what autograd calls --------------------------------------------------------------------
    def before_gradient(self, index: int) -> None:
        """See autograd.Listener."""
        self._spoiling(self._passes.enter, self)
        slot = self._slots[index]
        if slot.pushed is not None:
            self._is_spoiled = True
            raise RingcommError(
                f"{_WHO}: a second backward() in this step brings a gradient for {slot.name}, which"
                " has been pushed. Call step() after each, or say how many there are: "
                "backward_passes_per_step="
            )

    def after_gradient(self, index: int) -> None:
        """See autograd.Listener."""
        if self.options.is_deferred or self._n_passes < self._passes_per_step:
            return
        for bucket in self._buckets[self._n_pushed :]:
            bucket.waiting.discard(index)
        self._spoiling(self._push_full)

    def begin_pass(self) -> None:
        """See passes.Owner."""
        self._refuse_spoiled()
        self._refuse_changed_values()
        self._hear(self._slots)
        self._n_passes += 1

    def end_pass(self) -> CollectiveTask[None]:
        """See passes.Owner."""
        yield from ()

    def _push_full(self) -> None:
        while self._n_pushed < len(self._buckets):
            bucket = self._buckets[self._n_pushed]
            if bucket.waiting and not bucket.is_frozen:
                return
            self._push(bucket)

    # --- pushes ---------------------------------------------------------------------------------
    def _push(self, bucket: Bucket, factor: float = 1.0, scale: float = 1.0) -> None:
        """Push the next bucket; `scale` is in its gradients, and is not undone before.

        What raises has pushed nothing of it, and may be called again.
        """
        bucket.note_pushed(self._pushed(bucket, factor, scale))
        self._n_pushed += 1

    def _pushed(self, bucket: Bucket, factor: float, scale: float) -> Future[Pushed] | None:
        """Push a bucket; return None where there is nothing to push."""
        if bucket.is_frozen:
            # With FirstOf(k) workers may freeze it before different rounds.
            is_due = self._entering is not None
            return bucket.table.push(None, hold=self.options.is_held) if is_due else None
        _refuse_half_frozen(bucket)
        bucket.table.updater = self._updater_for(bucket)
        gradients, weight = bucket.gradients(), self._weight()
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

    def _updater_for(self, bucket: Bucket) -> Updater:
        """Return the updater with the hyper-parameters of now."""
        known = self._updaters.get(bucket.group)
        if known is None:
            known = self._updaters[bucket.group] = self.options.updater(self.groups[bucket.group])
        before = bucket.table.updater
        if known.slot_names != before.slot_names:
            raise ValueError(
                f"{_WHO}: parameter group {bucket.group} is {known} now, and was {before}: another "
                "state beside the values. Wrap the optimizer anew, or begin with it: a momentum "
                "that is 0 for a while may be given as 1e-30"
            )
        return known

    def _weight(self) -> float:
        return 1.0 if self._samples is None else self._samples

    def _flush(self, factor: float = 1.0, scale: float = 1.0) -> None:
        """Push what has not left: incomplete buckets, and all if step() is to push."""
        while self._n_pushed < len(self._buckets):
            self._push(self._buckets[self._n_pushed], factor, scale)

    def take_back(self) -> None:
        """The mean that fetch_mean() brought is of no use."""
        for bucket in self._buckets:
            bucket.table.take_back()

    # --- the end of a step ----------------------------------------------------------------------
    def apply_on_servers(self, grad_scale: float) -> bool:
        """Make this step's update on the servers, and fetch the new values.

        Args:
            grad_scale: by which the loss was multiplied.

        Returns:
            False if the step was skipped, for a gradient that is not finite.
        """
        self._begin_end()
        factor = self._own_factor(grad_scale)
        if factor is None:
            is_finite = False
        elif self.options.is_held:
            self._flush(factor, grad_scale if self.options.pushes_scaled else 1.0)
            self._enter()
            self.rows.hold(grad_scale, self._weight())
            is_finite = self._release(grad_scale)
        else:
            self._flush(factor)
            self._enter()
            self.rows.push(factor, self._weight())
            is_finite = True
        self._tick()
        outcomes = self._fetch_values([b for b in self._buckets if not b.is_frozen])
        self.was_applied = is_finite and "late" not in outcomes
        return is_finite

    def fetch_mean(self, grad_scale: float) -> None:
        """Set .grad to the mean over the workers, which the servers only take.

        Args:
            grad_scale: see apply_on_servers(); it is left in .grad.
        """
        self._begin_end()
        self._flush(self._poison(), grad_scale)
        self._enter()
        self.rows.hold(grad_scale, self._weight())
        pulls = [
            (bucket, room := bucket.room_for_gradients(), bucket.table.pull(out=room.numpy()))
            for bucket in reversed(self._buckets)
            if not bucket.is_frozen
        ]
        outcomes = []
        for bucket, room, pull in pulls:
            assert bucket.push is not None
            outcomes.append(bucket.push.wait().why)
            pull.wait()
            if outcomes[-1] != "empty":
                for slot, view in zip(bucket.slots, bucket.views(room), strict=True):
                    slot.parameter.grad = view if slot.parameter.requires_grad else None
        self.was_applied = "late" not in outcomes
        self._begin_step()

    def complete_step(self) -> None:
        """The optimizer has made its step."""
        self.step += 1
        self._samples = None
        self._has_ticked = False
        self.rows = NO_ROWS
        self._begin_step()

    def complete_step_of_worker(self) -> None:
        """Like complete_step(), where the worker's own optimizer has made it."""
        self._tick()
        self.complete_step()

    def _tick(self) -> None:
        """Count the step, once, also if step() is called again for what it raised."""
        if not self._has_ticked:
            clock.tick(self._session, self)
        self._has_ticked = True

    def _begin_end(self) -> None:
        self._refuse_spoiled()
        self._refuse_changed_values()
        self._refuse_changed_gradients()
        if self.options.is_deferred:
            self.rows = self.rows or take(self._session)  # the same if step() raised before
            self.rows.require_fit(
                _WHO, self.options.mode, has_norm=self.options.max_norm is not None
            )
            if not is_on(self.options.scaler):
                self.rows.require_finite()
        self._refuse_unlike_samples()

    def _own_factor(self, grad_scale: float) -> float | None:
        """Return what is to be done to gradients before they are pushed; None: not to push them.

        Without rounds each push is an update: it is clipped, and skipped, by itself.
        """
        if not self.options.is_deferred:
            return 1.0
        if self.options.is_held:
            return self._poison() / (1.0 if self.options.pushes_scaled else grad_scale)
        squares, is_finite = self._own_squares()
        of_rows, are_finite = self.rows.own_squares()
        if not (is_finite and are_finite) and is_on(self.options.scaler):
            return None
        return factor_of(squares + of_rows, grad_scale, self.options.max_norm)

    def _poison(self) -> float:
        """Return NaN, so that all workers skip the step, if rows are not finite that wait here."""
        is_finite = not is_on(self.options.scaler) or self.rows.own_squares()[1]
        return 1.0 if is_finite else math.nan

    def _enter(self) -> None:
        """Ask to be in the round of what has been pushed, where not all are."""
        if self._entering is not None:
            self._entering.enter()

    def _own_squares(self) -> tuple[float, bool]:
        found = [bucket.gradients() for bucket in self._buckets]
        return squares_of(x for x in found if x is not None)

    def _is_own_finite(self) -> bool:
        return self._own_squares()[1] and self.rows.own_squares()[1]

    def _release(self, grad_scale: float) -> bool:
        """Make updates of the means that the servers hold.

        Args:
            grad_scale: see apply_on_servers().

        Returns:
            False if a mean is not finite; of a worker that was late, if its own gradient is not.
        """
        scale = grad_scale if self.options.pushes_scaled else 1.0
        held = [bucket for bucket in self._buckets if bucket.push is not None]
        pushed = []
        for bucket in held:
            assert bucket.push is not None
            pushed.append(bucket.push.wait())
        if any(each.why == "late" for each in pushed):  # the means are those of others
            is_finite = not is_on(self.options.scaler) or self._is_own_finite()
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
        """Update rows by their gradients, unscaled and times a factor; None: do not."""
        self.rows.release(clip)
        if clip is not None:
            self.rows.push(clip / grad_scale, self._weight())

    def _fetch_values(self, buckets: Sequence[Bucket]) -> list[str]:
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

    # --- what the user does ---------------------------------------------------------------------
    def set_samples(self, n: float) -> None:
        """Weigh this worker's gradient of this step by n."""
        n = float(n)
        if not 0 <= n < math.inf:
            raise ValueError(f"set_samples({n:g}): a number of samples is finite and at least 0")
        if self._n_pushed:
            raise RingcommError(f"{_WHO}: set_samples() came after backward(): call it before")
        self._samples = n
        note_samples(self, self._session.engine)

    @property
    def is_deferred(self) -> bool:
        """See ps_row_gradients.Deferring."""
        return self.options.is_deferred

    @property
    def samples(self) -> float | None:
        """See registry.Weighed."""
        return self._samples

    def restart(self) -> None:
        """Gradients start anew, before zero_grad()."""
        if self._n_pushed and self.options.mode.has_rounds:
            raise RingcommError(
                f"{_WHO}: zero_grad() between backward() and step(): gradients of this step have "
                "been pushed, and cannot be taken back. Call step() first; to skip steps whose "
                "gradients are not finite pass scaler=, to clip pass max_grad_norm="
            )
        self._is_spoiled = False
        if self.options.is_deferred:
            take(self._session)
        self.rows = NO_ROWS
        self._begin_step()

    def push_values(self) -> None:
        """Give all the chief's values. Collective, between two steps."""
        self._from_chief(lambda bucket: bucket.table.push(bucket.values(), assign=True).wait())

    def pull_values(self) -> None:
        """Fetch the servers' values, between two steps."""
        self._begin_step()
        self._fetch_values(self._buckets)

    def push_state(self, state: Mapping[Any, Any]) -> None:
        """Give all the chief's values, and the servers the chief's state. Collective."""
        self._from_chief(lambda each: push_state(each.table, states.from_torch(each, state)))

    def _from_chief(self, push: Callable[[Bucket], object]) -> None:
        self._updaters.clear()
        for bucket in self._buckets:
            bucket.table.updater = self._updater_for(bucket)
            bucket.table.forget_residual()
            if is_chief():
                push(bucket)
        collectives.barrier(name=f"values (ps optimizer {self.number})", group=self._session.group)
        self._begin_step()
        self._fetch_values(self._buckets)

    def gather_state(self) -> dict[Any, Any]:
        """Return the state that the servers keep, by parameter, as torch would have it."""
        found: dict[Any, Any] = {}
        for bucket in self._buckets:
            if not bucket.is_frozen:
                states.to_torch(bucket, pull_state(bucket.table), found)
        return found

    # --- what goes wrong ------------------------------------------------------------------------
    def _begin_step(self) -> None:
        self._passes.forget()
        self._n_passes = self._n_pushed = 0
        self._updaters.clear()
        for bucket in self._buckets:
            bucket.restart()

    def _spoiling(self, action: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            action(*args, **kwargs)
        except BaseException:
            self._is_spoiled = True
            raise

    def _refuse_spoiled(self) -> None:
        if self._is_spoiled or self._passes.has_failed:
            can_repeat = not self._n_pushed or not self.options.mode.has_rounds
            raise RingcommError(
                f"{_WHO}: the last backward() failed. "
                + (
                    "Call optimizer.zero_grad() and repeat it"
                    if can_repeat
                    else "Part of its gradients has been pushed, and cannot be taken back: end this"
                    " job"
                )
            )

    def _refuse_changed_values(self) -> None:
        if self.options.class_name is None:
            return
        for slot in self._slots:
            if slot.known != slot.now:
                raise RingcommError(
                    f"{_WHO}: {slot.name} was changed by hand, and the servers have other values, "
                    "which step() would bring back. Call optimizer.push_parameters() on every "
                    "worker after load_state_dict() or the like: the chief's values count"
                )

    def _refuse_changed_gradients(self) -> None:
        """Raise RingcommError if .grad or an option is not what was pushed."""
        for slot in self._slots:
            grad = slot.parameter.grad
            if slot.pushed is None or not slot.parameter.requires_grad:
                continue
            sent, version = slot.pushed
            if grad is not sent or (grad is not None and grad._version != version):
                raise RingcommError(
                    f"{_WHO}: .grad of {slot.name} was changed after backward(), which had pushed "
                    "it already. To clip gradients pass max_grad_norm=, to unscale them scaler="
                )
        if self.options.class_name is None:
            return
        for group, pushed in self._updaters.items():
            now = self.options.updater(self.groups[group])
            if self._n_pushed and now != pushed:
                raise RingcommError(
                    f"{_WHO}: parameter group {group} became {now} after backward(), which had "
                    f"pushed gradients with {pushed}. Change hyper-parameters before backward()"
                )

    def _refuse_unlike_samples(self) -> None:
        is_weighed = self._samples is not None
        if self._is_weighed is None:
            self._is_weighed = is_weighed
            if self.options.mode.name == "sync":  # in others no worker waits for all
                self._require_alike("samples", (), (("set_samples() called", str(is_weighed)),))
        elif self._is_weighed != is_weighed:
            raise RingcommError(
                f"{_WHO}: set_samples() was {'not ' * self._is_weighed}called for this step, and "
                f"{'' if self._is_weighed else 'not '}before. Call it for each step, or never"
            )


def _require_servable(slot: Slot) -> None:
    p = slot.parameter
    if p.device.type != "cpu":
        raise TypeError(
            f"{_WHO}: {slot.name} is on {p.device}; this version serves parameters in host memory "
            "only. Keep the model on the CPU"
        )
    if p.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"{_WHO}: {slot.name} is of {p.dtype}; servers keep float32 and float64. Keep the "
            "model in float32, and use torch.autocast for the rest"
        )


def _refuse_half_frozen(bucket: Bucket) -> None:
    """A gradient of zeros would move a parameter that torch leaves alone."""
    frozen = [s.name for s in bucket.slots if s.is_heard and not s.parameter.requires_grad]
    if frozen:
        raise RingcommError(
            f"{_WHO}: {frozen[0]} was frozen after the optimizer was wrapped, and shares a table "
            "with others. Freeze it before, and wrap the optimizer anew"
        )
