"""ps.DistributedOptimizer: an existing optimizer whose parameters live on servers."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Literal, TypeVar

import torch
from torch.optim import Optimizer

from ringcomm.codec import BF16, FP16, Codec
from ringcomm.engine.api.world import engine
from ringcomm.errors import RingcommError
from ringcomm.ps import optim
from ringcomm.ps.compression import codec_of
from ringcomm.ps.job import is_chief, session, size
from ringcomm.ps.rounds import Mode, mode_of
from ringcomm.torch.compression import Compression
from ringcomm.torch.optim.wrapping import derive, name_last_group, named_in_order, plain_step
from ringcomm.torch.optimizer import DistributedOptimizer as RingOptimizer
from ringcomm.torch.ps.feeder import Feeder
from ringcomm.torch.ps.scaling import clip_gradients, is_on, note_found_inf
from ringcomm.torch.ps.server_options import ServerOptions
from ringcomm.torch.ps.server_state import gather_state, pull_values, push_state, push_values
from ringcomm.torch.ps.server_step import ServerStep
from ringcomm.torch.ps.steps import count_steps, require_something_served

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
) -> T:
    """Return `optimizer` with its parameters on the servers, which make the updates.

    Gradients are pushed while backward() runs; step() fetches the new values. Collective over the
    workers, which wrap the same parameters in the same order; all begin with the chief's values.
    The result is of a subclass of the optimizer's own class: learning-rate schedulers, also those
    made earlier, state_dict() (plain torch, gathered from the servers), load_state_dict() (on every
    worker; the chief's counts), add_param_group(), hooks and closures work. It also has

    - set_samples(n): weigh this worker's gradient of this step by n, e.g. its batch size.
    - push_parameters(): after parameters were changed by hand; on every worker.
    - pull_parameters(): have what the servers have; for evaluators.
    - was_applied: False if this worker was late in a round of FirstOf(k), so that nothing of its
      last gradient counts, or a scaler skipped the round.

    .grad stays this worker's own. What is done to it after backward() comes too late and is
    refused: pass max_grad_norm and scaler instead. Hyper-parameters travel with the gradients, so
    they are to be changed before backward(), as schedulers do; in "sync" the chief's count. A
    parameter without a gradient counts as zeros where other workers have one, and is left alone as
    in torch where none has: values, state and steps. With apply="worker" that holds for those of
    256 KiB and more; smaller ones have a gradient of zeros if a neighbour of theirs has one.

    Args:
        optimizer: any torch.optim.Optimizer over float32 or float64 parameters in host memory.
        named_parameters: model.named_parameters(), for error messages.
        mode: "sync": an update is the mean over all workers, equal to one process with all their
            samples; "async": each push is one; ps.SSP(s): likewise, but no worker is more than s
            steps ahead of the slowest; ps.FirstOf(k): the mean over the first k whose gradients
            of all parameters have been pushed; the same k for each of them.
        apply: "server": SGD, Adagrad, Adam, AdamW, RMSprop, Adadelta, NAdam, RAdam. "worker": the
            servers take means only, and every worker makes the update; where no worker may miss
            one. "auto": on the servers where they can.
        hybrid: "ring": parameters by the ring's DistributedOptimizer, embeddings by the servers.
        compression: what gradients are pushed in: None, "fp16", "bf16", "int8", one of ringcomm's
            codecs, as codec.TopK(0.01), or Compression.fp16 and so on; alike on every worker. What
            TopK drops goes with this worker's next gradient; see ps.table().
        backward_passes_per_step: the n-th backward() of a step pushes the sum of all.
        max_grad_norm: gradients of this step are clipped to this norm, over all parameters and rows
            of embeddings: that of the mean where there are rounds, which the round's workers get,
            else of each worker's own. step() pushes.
        scaler: the torch.amp.GradScaler that scales the loss, for scaler.step(optimizer). One inf
            anywhere, in rows too, skips the step everywhere; without rounds, on the worker that has
            it. With FirstOf(k) that is one of the k; scales may differ, and who is late looks at
            its own.

    Raises:
        NotInitializedError: ps.init() has not run.
        MismatchError: workers wrap different parameters, or say different things.
        TypeError, ValueError: a parameter or an argument that servers cannot take.

    backward() and step() raise CommTimeoutError where the servers, or in a round another worker,
    do not answer within ps.init(deadline_s=), PeerFailedError, and RingcommError for what came
    too late.
    """
    session()
    if isinstance(optimizer, _Served):
        raise ValueError("the optimizer is a ps.DistributedOptimizer already: wrap it once")
    named = named_in_order(optimizer, named_parameters)
    compression = _compression(compression)
    if hybrid is not None:
        if max_grad_norm is not None or scaler is not None:
            raise ValueError(
                f"hybrid is {hybrid!r}, and max_grad_norm= or scaler= was passed: the ring's "
                "optimizer clips and unscales .grad, and the rows of embeddings have none. Leave "
                "hybrid= out, or those"
            )
        return _by_the_ring(optimizer, named, hybrid, compression, backward_passes_per_step)
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm is {max_grad_norm!r}; it must be more than 0")
    when = mode_of(mode)
    class_name = _class_on_servers(optimizer, apply, when)
    options = ServerOptions(when, class_name, compression, max_grad_norm, scaler)
    feeder = Feeder(named, optimizer.param_groups, options, backward_passes_per_step)
    if options.class_name is not None:
        push_state(feeder, optimizer.state)
        optimizer.state.clear()
    return derive(optimizer, _Served, _feeder=feeder)


_OF_RING: Final[dict[Any, Any]] = {
    Compression.none: None,
    Compression.fp16: FP16(),
    Compression.bf16: BF16(),
}


def _compression(compression: Any) -> Codec | None:
    """Return the codec that is meant, also by what the ring's optimizer takes."""
    if isinstance(compression, type) and compression in _OF_RING:
        found: Codec | None = _OF_RING[compression]
        return found
    return codec_of("ps.DistributedOptimizer", compression)


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
    for of_ring, codec in _OF_RING.items():
        if codec == compression:
            wrapped = RingOptimizer(optimizer, named, of_ring, passes)
            count_steps(wrapped)
            return wrapped
    raise ValueError(
        f"compression is {compression}, and hybrid='ring' reduces by the ring, which knows 'fp16' "
        "and 'bf16'. That of embeddings is an argument of their own"
    )


def _class_on_servers(optimizer: Optimizer, apply: str, mode: Mode) -> str | None:
    """Return the class that servers are to be, None where workers make the updates."""
    if apply not in ("auto", "server", "worker"):
        raise ValueError(f"apply is {apply!r}; it must be 'auto', 'server' or 'worker'")
    kind = type(optimizer)
    is_known = kind is getattr(torch.optim, kind.__name__, None) and all(
        optim.from_torch(group, kind.__name__) is not None for group in optimizer.param_groups
    )
    if is_known and apply != "worker":
        return kind.__name__
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
    """The part of the new class that knows of servers; the optimizer's own class follows it."""

    _feeder: Feeder

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make the update on the servers, or take the mean from them, and fetch the new values."""
        feeder = self._feeder
        feeder.pusher.groups = self.param_groups
        if feeder.options.class_name is None:
            result = self._step_here(closure)
            feeder.complete_step_of_worker()
        else:
            result = None
            if closure is not None:
                with torch.enable_grad():
                    result = closure()
            with torch.no_grad():
                is_finite = feeder.apply_on_servers(self._grad_scale())
            self._tell_scaler(is_finite=is_finite)
            feeder.complete_step()
        engine().note_step(feeder.step)
        return result

    def _step_here(self, closure: Callable[[], Any] | None) -> Any:
        step = plain_step(type(self).__bases__[1])
        if closure is not None:
            return step(self, functools.partial(self._evaluate, closure))
        if not self._take_mean():
            return None
        with self._unscaled():
            return step(self)

    @contextlib.contextmanager
    def _unscaled(self) -> Iterator[None]:
        """Hide from the optimizer's own class what scaler.step() has set: it is done."""
        names = ["grad_scale", "found_inf"]
        hidden = {name: self.__dict__.pop(name) for name in names if name in self.__dict__}
        try:
            yield
        finally:
            self.__dict__.update(hidden)

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        self._take_mean()
        return loss

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
            self._tell_scaler(is_finite=is_finite)
            if not is_finite:
                feeder.was_applied = False
                feeder.pusher.take_back()
                ServerStep(feeder.pusher, feeder.rows, scale).finish_rows(None)
                return False
            for grad in grads:
                grad.div_(scale)
        clip = 1.0
        if feeder.options.max_norm is not None:
            clip = clip_gradients(grads, of_rows, feeder.options.max_norm)
        ServerStep(feeder.pusher, feeder.rows, scale).finish_rows(clip)
        return True

    def _grad_scale(self) -> float:
        """Return by what the gradients are scaled, as scaler.step() has set it; see GradScaler."""
        if not is_on(self._feeder.options.scaler):
            return 1.0
        if "found_inf" not in self.__dict__:
            raise RingcommError(
                "ps.DistributedOptimizer: scaler= was passed, and step() called without it. Call "
                "scaler.step(optimizer)"
            )
        scale = self.__dict__.get("grad_scale")
        return 1.0 if scale is None else float(scale)

    def _tell_scaler(self, *, is_finite: bool) -> None:
        scaler = self._feeder.options.scaler
        if is_on(scaler):
            note_found_inf(scaler, self, is_finite=is_finite)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Ask GradScaler for the scale instead of unscaled gradients."""
        return is_on(self._feeder.options.scaler)

    @property
    def was_applied(self) -> bool:
        """False if this worker's last gradients are no part of the parameters."""
        return self._feeder.was_applied

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, as torch does.

        Raises:
            RingcommError: they have been pushed, and step() was not called.
        """
        self._feeder.restart()
        super().zero_grad(set_to_none)

    def set_samples(self, n: float) -> None:
        """Weigh this worker's gradient of this step by n: the mean is sum(n * g) / sum(n).

        To be called on every worker before backward(), for each step or never. Without rounds it
        matters only whether n is 0: then nothing is pushed.

        Args:
            n: how many samples the loss is the mean of; 0 for an empty batch. If all say 0, the
                step changes nothing.
        """
        self._feeder.set_samples(n)

    def push_parameters(self) -> None:
        """Give all the chief's parameters, after they were changed by hand. Collective."""
        push_values(self._feeder)

    def pull_parameters(self) -> None:
        """Set the parameters to the servers' values of now, or of this rank's snapshot.

        For evaluators, which wrap the same model and optimizer once, and call this each time that
        they evaluate; and for workers between two steps.
        """
        pull_values(self._feeder)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, on every worker alike, between two steps. Collective."""
        super().add_param_group(param_group)
        feeder = self.__dict__.get("_feeder")
        if feeder is not None:
            feeder.pusher.groups = self.param_groups
            feeder.extend(name_last_group(self))

    def state_dict(self) -> dict[str, Any]:
        """Return what a plain optimizer would: its state is gathered from the servers."""
        if self._feeder.options.class_name is None:
            return super().state_dict()
        self.state.update(gather_state(self._feeder))
        try:
            return super().state_dict()
        finally:
            self.state.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state of a plain optimizer, or of one like this. Collective.

        The chief's counts, and so do its parameters: load the model before.
        """
        super().load_state_dict(state_dict)
        self._feeder.pusher.groups = self.param_groups
        if self._feeder.options.class_name is not None:
            push_state(self._feeder, self.state)
            self.state.clear()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a ps.DistributedOptimizer cannot be copied or pickled, for its state is on the "
            "servers. Save optimizer.state_dict(), which is plain torch"
        )


# As torch does to the step() of each class: run its step hooks, and let its profiler see it.
_Served.step = Optimizer.profile_hook_step(_Served.step)  # type: ignore[method-assign]
_Served.step.hooked = True  # type: ignore[attr-defined]
