"""ps.DistributedOptimizer: an existing optimizer whose parameters are on servers."""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Literal, TypeVar

import torch
from torch.optim import Optimizer

from ringcomm.codec import BF16, FP16, Codec
from ringcomm.codec.named_codecs import codec_of
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.errors import RingcommError
from ringcomm.ps import optim
from ringcomm.ps.checkpoint.auto_recovery import recovered_from, require_alone
from ringcomm.ps.job import size
from ringcomm.ps.session import is_chief, session
from ringcomm.ps.update_modes import Mode, mode_of
from ringcomm.torch.backward.shared_loss import goes_by_loss, loss_of_all_ranks
from ringcomm.torch.compression import Compression
from ringcomm.torch.optim.wrapping import derive, name_last_group, named_in_order, plain_step
from ringcomm.torch.optimizer import DistributedOptimizer as RingOptimizer
from ringcomm.torch.ps.chief_buffers import buffers_of
from ringcomm.torch.ps.clipping import clip_gradients, is_on, note_found_inf
from ringcomm.torch.ps.feeder import Feeder
from ringcomm.torch.ps.options import WHO, ServerOptions
from ringcomm.torch.ps.server_state import (
    StateRecovery,
    gather_state,
    pull_values,
    push_state,
    push_values,
    require_between_steps,
    unrounded_state,
)
from ringcomm.torch.ps.worker_counts import (
    count_step,
    enrol_optimizer,
    require_something_served,
    same_number_if_called_again,
)


# --- steps within steps ---------------------------------------------------------------------------
class NestedOptimizers:
    """The optimizers that are attributes of an optimizer, whose workers make the updates.

    Outside of the whole optimizer's step(), .grad is this worker's own, and each worker would train
    by itself: there a step() of a part raises RingcommError.
    """

    def __init__(self, whole: Optimizer) -> None:
        self._is_stepping = False
        ref = weakref.ref(self)

        def require_whole(part: Optimizer, *_: object) -> None:
            nested = ref()
            if nested is not None and not nested._is_stepping:
                raise RingcommError(
                    f"{WHO}: {type(part).__name__}.step() was called outside of step() of the "
                    "optimizer of which it is a part, with gradients of this worker alone. Call "
                    "step() of the whole optimizer (SAM: with a closure), or use hybrid='ring'"
                )

        for part in vars(whole).values():
            if isinstance(part, Optimizer):
                part.register_step_pre_hook(require_whole)

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Return the context of the whole optimizer's own step()."""
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False


T = TypeVar("T", bound=Optimizer)
_log: Final = logging.getLogger("ringcomm")


def DistributedOptimizer(
    optimizer: T,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    *,
    mode: str | Mode = "sync",
    apply: Literal["auto", "server", "worker"] = "auto",
    hybrid: Literal["ring"] | None = None,
    compression: Any = None,
    backward_passes_per_step: int = 1,
    max_grad_norm: float | None = None,
    scaler: Any = None,
    overlap: bool | None = None,
    buffers: Iterable[tuple[str, torch.Tensor]] | None = None,
) -> T:
    """Return `optimizer` with its parameters on the servers, which make the updates.

    backward() pushes gradients while it runs; step() fetches the new values. Collective over the
    workers, which must wrap the same parameters in the same order. All begin with the chief's
    values. The class of the result is a subclass of the optimizer's class. state_dict() gathers the
    state from the servers and returns that of the plain optimizer; load_state_dict() is called on
    every worker and takes the chief's state. add_param_group(), hooks, closures and learning-rate
    schedulers work, also schedulers that were made earlier. The result also has

    - set_samples(n): weigh this worker's gradient of this step by n, for example its batch size.
    - push_parameters(): call it on every worker after parameters were changed by hand.
    - pull_parameters(): fetch the servers' values, also of buffers; for evaluators, and after
      ps.restore().
    - was_applied: False if this worker was late in a round of FirstOf(k), so that its last gradient
      does not count, or if a scaler skipped the round.
    - n_rounds: rounds that are over, in modes with rounds. Workers of FirstOf(k) that are to meet,
      as in a barrier, end their loops at the same number of rounds, not of steps.

    .grad is this worker's own gradient. The servers already have it after backward(), so changes of
    it, and zero_grad() instead of step(), raise RingcommError: pass overlap=False, max_grad_norm or
    scaler instead. docs/torch.md has a table of what a program may do. Hyper-parameters are sent
    with the gradients. Change them before backward(), as schedulers do; in "sync" those of the
    chief count. A parameter without a gradient counts as zeros if other workers have one. If no
    worker has one, its value, state and steps stay the same. With apply="worker" this holds for
    parameters of 256 KiB and more; smaller ones share tables, and get a gradient of zeros if
    another one in the table has a gradient.

    Args:
        optimizer: any torch.optim.Optimizer over float32, float64, bfloat16 or float16 parameters,
            in host memory or on a GPU. Of those of 16 bits, servers have float32 masters.
        named_parameters: model.named_parameters(), for error messages.
        mode: "sync": an update is the mean over all workers, equal to one process with all their
            samples. "async": each push is an update. ps.SSP(s): as "async", but no worker is more
            than s steps ahead of the slowest. ps.FirstOf(k): an update is the mean over the first k
            workers that have pushed all gradients; the same k for each parameter.
        apply: who makes the updates. "server": SGD, Adagrad, Adam, AdamW, RMSprop, Adadelta, NAdam,
            RAdam. "worker": the servers only take means, and every worker makes the update; not
            for modes in which a worker may miss a mean. "auto": the servers if they can.
        hybrid: "ring": the ring's DistributedOptimizer updates the parameters; embeddings are on
            the servers.
        compression: how gradients are pushed: None, "fp16", "bf16", "int8", a codec of ringcomm
            such as codec.TopK(0.01), or Compression.fp16 and the like; the same on every worker.
            Values that TopK drops are added to this worker's next gradient; see ps.table().
        backward_passes_per_step: n: the n-th backward() of a step pushes the sum of all.
        max_grad_norm: clip the gradients of a step to this norm, over all parameters and rows of
            embeddings: the mean in modes with rounds, otherwise each worker's own gradient. Then
            step() pushes.
        scaler: the torch.amp.GradScaler that scales the loss, for scaler.step(optimizer). In modes
            with rounds, one inf in any gradient skips the step on all workers; otherwise, on its
            worker. In FirstOf(k), gradients of the k workers count, and scales may differ; a late
            worker checks its own gradient.
        overlap: False: step() pushes, so that .grad may be changed or dropped before, as in torch.
            None: if a worker has several of these optimizers, step() pushes, so that .grad may be
            dropped, or filled by several backward(): as in a GAN, in any order. True: backward()
            pushes all the same.
        buffers: model.named_buffers(): step() sends the chief's to the servers, for evaluators and
            checkpoints. None: those in state_dict() of the model whose named_parameters() is
            passed. If a list is passed, the model is not known, and None means none. (): none.

    Raises:
        NotInitializedError: ps.init() has not run.
        MismatchError: workers pass different parameters or arguments.
        TypeError, ValueError: servers cannot take a parameter or an argument.

    backward() and step() raise PeerFailedError; CommTimeoutError if the servers, or the other
    workers of a round, do not answer within ps.init(deadline_s=); and RingcommError for a change
    that comes too late.
    """
    session()
    if isinstance(optimizer, _Served):
        raise ValueError("the optimizer is a ps.DistributedOptimizer already: wrap it once")
    served_buffers = buffers_of(named_parameters, buffers)
    named = named_in_order(optimizer, named_parameters)
    compression = _compression(compression)
    if hybrid is not None:
        if max_grad_norm is not None or scaler is not None:
            raise ValueError(
                f"hybrid is {hybrid!r}, and max_grad_norm= or scaler= was passed: the ring's "
                "optimizer clips and unscales .grad, and rows of embeddings have no .grad. Leave "
                "out hybrid=, or the other two"
            )
        if overlap is False:
            raise ValueError(
                "overlap=False is for servers: with hybrid='ring' .grad may be changed"
            )
        return _by_the_ring(optimizer, named, hybrid, compression, backward_passes_per_step)
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm is {max_grad_norm!r}; it must be more than 0")
    when = mode_of(mode)
    class_name = _class_on_servers(optimizer, apply, when)
    options = ServerOptions(when, class_name, compression, max_grad_norm, scaler, overlap)
    if class_name is None:
        served_buffers = []  # the workers have the parameters, too
        if session().is_newcomer:
            raise RingcommError(
                "ps.DistributedOptimizer: with apply='worker' the servers take means of gradients "
                "only, and this rank has joined in the place of another: nobody has parameters for "
                "it. Leave worker_spares= out, or use an optimizer whose updates the servers make"
            )
    require_alone(session(), is_on_servers=class_name is not None)
    with same_number_if_called_again(session()):
        feeder = Feeder(
            named, optimizer.param_groups, options, backward_passes_per_step, served_buffers
        )
        if options.class_name is not None:
            push_state(feeder, optimizer.state)
            optimizer.state.clear()
    recovery = StateRecovery(feeder)
    return derive(
        optimizer, _Served, _feeder=feeder, _nested=NestedOptimizers(optimizer), _recovery=recovery
    )


def _compression(compression: Any) -> Codec | None:
    if compression is Compression.none:
        return None
    return codec_of("ps.DistributedOptimizer", getattr(compression, "codec", compression))


def _by_the_ring(
    optimizer: T,
    named: list[tuple[str, torch.nn.Parameter]],
    hybrid: str,
    compression: Codec | None,
    passes: int,
) -> T:
    if hybrid != "ring":
        raise ValueError(f"hybrid is {hybrid!r}; it must be None or 'ring'")
    require_something_served()
    current = session()
    require_alone(current, is_on_servers=False)
    if compression not in (None, FP16(), BF16()):
        raise ValueError(
            f"compression is {compression}, and with hybrid='ring' it can be 'fp16' or 'bf16'. "
            "Embeddings have an argument compression= of their own"
        )
    wrapped = RingOptimizer(optimizer, named, compression, passes)
    enrol_optimizer(wrapped, current, "optimizers (hybrid='ring')")
    wrapped.register_step_post_hook(lambda stepped, *_: count_step(current, stepped))
    return wrapped


def _class_on_servers(optimizer: Optimizer, apply: str, mode: Mode) -> str | None:
    """Return the name of the class whose updates servers make; None: workers make the updates."""
    if apply not in ("auto", "server", "worker"):
        raise ValueError(f"apply is {apply!r}; it must be 'auto', 'server' or 'worker'")
    kind = type(optimizer)
    is_known = kind is getattr(torch.optim, kind.__name__, None) and all(
        optim.from_torch(group, kind.__name__) is not None for group in optimizer.param_groups
    )
    if is_known and apply != "worker":
        return kind.__name__
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError(
            "servers take dense gradients, and SparseAdam sparse ones only. Keep such embeddings "
            "in ps.Embedding(..., optimizer=ps.optim.Adam()), or use Adam"
        )
    if apply == "server":
        raise ValueError(
            f"servers cannot be {kind.__name__} with these hyper-parameters. Pass apply='worker'"
        )
    if not mode.has_rounds or (mode.name == "first_of" and mode.bound < size()):
        why = "each push is an update that the servers make"
        if mode.name == "first_of":
            why = "a worker that is late misses the means of rounds, which all must apply"
        raise ValueError(
            f"mode={mode}: {why}, and servers cannot make the updates of {kind.__name__} with "
            f"apply={apply!r}. Use mode='sync', or SGD, Adam or the like with apply='auto'"
        )
    if apply == "auto" and is_chief():
        _log.warning(
            "ps.DistributedOptimizer: the servers cannot be %s, so they take means only, and every "
            "worker makes the update (apply='worker')",
            kind.__name__,
        )
    return None


class _Served(Optimizer):
    """First base class of the wrapped optimizer; the second is the optimizer's own class."""

    _feeder: Feeder
    _nested: NestedOptimizers
    _recovery: StateRecovery

    @Optimizer.profile_hook_step  # it runs the hooks of a step
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make the update on the servers and fetch the new values, or fetch the mean and update."""
        feeder = self._feeder
        feeder.groups = self.param_groups
        feeder.require_known(self.param_groups)
        results: list[Any] = []
        current = feeder.session
        if not recovered_from(current, lambda: results.append(self._step_once(closure))):
            return None
        return results[0]

    def _step_once(self, closure: Callable[[], Any] | None) -> Any:
        feeder = self._feeder
        if feeder.options.class_name is None:
            result = self._step_here(closure)
        else:
            result = None
            if closure is not None:
                with torch.enable_grad():
                    result = closure()
            with torch.no_grad():
                is_finite = feeder.apply_on_servers(self._grad_scale())
            self._report_to_scaler(is_finite=is_finite)
        feeder.complete_step()
        engine().note_step(feeder.step)
        engine().control.come_to_boundary(feeder, feeder.step)
        feeder.let_in()
        return result

    def _step_here(self, closure: Callable[[], Any] | None) -> Any:
        step = plain_step(type(self).__bases__[1])
        if closure is not None:
            with self._nested.allowed():
                return step(self, functools.partial(self._evaluate, closure))
        if not self._take_mean():
            return None
        with self._unscaled(), self._nested.allowed():
            return step(self)

    @contextlib.contextmanager
    def _unscaled(self) -> Iterator[None]:
        """Hide the attributes of scaler.step(): the gradients are unscaled already."""
        names = ["grad_scale", "found_inf"]
        hidden = {name: self.__dict__.pop(name) for name in names if name in self.__dict__}
        try:
            yield
        finally:
            self.__dict__.update(hidden)

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        loss, feeder = closure(), self._feeder
        samples = feeder.samples
        self._take_mean()
        if not goes_by_loss(self):
            return loss
        name = f"loss (ps optimizer {feeder.number})"
        return loss_of_all_ranks(loss, samples, name, feeder.session.group)

    @torch.no_grad()
    def _take_mean(self) -> bool:
        """Set .grad to the mean, unscaled and clipped; return False to skip the step."""
        feeder, scale = self._feeder, self._grad_scale()
        feeder.fetch_mean(scale)
        parameters = (p for group in self.param_groups for p in group["params"])
        grads = [p.grad for p in parameters if p.grad is not None]
        of_rows, is_finite = feeder.rows.mean_squares()
        if is_on(feeder.options.scaler):
            is_finite &= all(bool(torch.isfinite(grad).all()) for grad in grads)
            self._report_to_scaler(is_finite=is_finite)
            if not is_finite:
                feeder.was_applied = False
                feeder.take_back()
                feeder.finish_rows(None, scale)
                return False
            for grad in grads:
                grad.div_(scale)
        clip = 1.0
        if feeder.options.max_norm is not None:
            clip = clip_gradients(grads, of_rows, feeder.options.max_norm)
        feeder.finish_rows(clip, scale)
        return True

    def _grad_scale(self) -> float:
        """Return the scale of the gradients, which scaler.step() has set; see GradScaler."""
        if not is_on(self._feeder.options.scaler):
            return 1.0
        if "found_inf" not in self.__dict__:
            raise RingcommError(
                "ps.DistributedOptimizer: scaler= was passed, but step() was called without the "
                "scaler. Call scaler.step(optimizer)"
            )
        scale = self.__dict__.get("grad_scale")
        return 1.0 if scale is None else float(scale)

    def _report_to_scaler(self, *, is_finite: bool) -> None:
        scaler = self._feeder.options.scaler
        if is_on(scaler):
            note_found_inf(scaler, self, is_finite=is_finite)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Make GradScaler pass the scale instead of unscaling the gradients."""
        return is_on(self._feeder.options.scaler)

    @property
    def was_applied(self) -> bool:
        """False if this worker's last gradients do not count in the parameters."""
        return self._feeder.was_applied

    @property
    def n_rounds(self) -> int:
        """Rounds that are over for this worker, also those of FirstOf(k) for which it was late.

        Raises:
            RingcommError: the mode has no rounds.
        """
        if not self._feeder.options.mode.has_rounds:
            raise RingcommError(
                f"ps.DistributedOptimizer: n_rounds with mode={self._feeder.options.mode}, which "
                "has no rounds; ps.step_number() counts the steps of this worker"
            )
        return max(bucket.table.n_rounds for bucket in self._feeder.buckets)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, as torch does.

        Raises:
            RingcommError: the gradients have been pushed, and step() was not called.
        """
        self._feeder.restart()
        self._feeder.require_known(self.param_groups)
        super().zero_grad(set_to_none)

    def set_samples(self, n: float) -> None:
        """Weigh this worker's gradient of this step by n: the mean is sum(n * g) / sum(n).

        Call it on every worker before backward(), for each step or never. In modes without
        rounds only 0 matters: then nothing is pushed.

        Args:
            n: number of samples that the loss is the mean of; 0 for an empty batch. If all workers
                pass 0, the step changes nothing.
        """
        self._feeder.set_samples(n)

    def push_parameters(self) -> None:
        """Set all workers' parameters to the chief's, after a change by hand. Collective.

        Raises:
            RingcommError: gradients of this step have been pushed.
        """
        require_between_steps(self._feeder, "push_parameters()")
        push_values(self._feeder)

    def pull_parameters(self) -> None:
        """Set the parameters to the servers' current values, or to those of this rank's snapshot.

        Evaluators wrap the same model and optimizer once, and call this for each evaluation.
        Workers may call it between two steps, and must after ps.restore() or ps.load().

        Raises:
            RingcommError: with apply="worker", where servers have no parameters; or gradients of
                this step have been pushed.
        """
        if self._feeder.options.class_name is None:
            raise RingcommError(
                "ps.DistributedOptimizer: pull_parameters() with apply='worker': the servers take "
                "means of gradients only, and the workers have the parameters. Save and load those "
                "with torch, and call push_parameters() afterwards"
            )
        require_between_steps(self._feeder, "pull_parameters()")
        pull_values(self._feeder)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; call it on every worker, between two steps. Collective."""
        super().add_param_group(param_group)
        feeder = self.__dict__.get("_feeder")
        if feeder is not None:
            feeder.groups = self.param_groups
            feeder.extend(name_last_group(self))

    def state_dict(self) -> dict[str, Any]:
        """Return the state_dict() of the plain optimizer, gathered from the servers."""
        if self._feeder.options.class_name is None:
            return super().state_dict()
        self.state.update(gather_state(self._feeder))
        try:
            return super().state_dict()
        finally:
            self.state.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a plain optimizer, or of one like this. Collective.

        All workers take the chief's state and the chief's parameters: load the model before.

        Raises:
            RingcommError: gradients of this step have been pushed.
        """
        require_between_steps(self._feeder, "load_state_dict()")
        super().load_state_dict(state_dict)
        self._feeder.groups = self.param_groups
        if self._feeder.options.class_name is not None:
            push_state(self._feeder, unrounded_state(self, state_dict))
            self.state.clear()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a ps.DistributedOptimizer cannot be copied or pickled, because its state is on the "
            "servers. Save optimizer.state_dict(), which is plain torch"
        )
