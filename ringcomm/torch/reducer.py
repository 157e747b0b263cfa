"""Averages gradients over all ranks at the end of each backward().

Autograd calls a hook when the gradient of a parameter is complete; the first one of a backward
queues the reduction behind it. So .grad is final when backward() returns, and clipping, GradScaler
and logging between backward() and step() see what the optimizer will use.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from ringcomm.arrays.torch import TORCH
from ringcomm.collectives.op import Op
from ringcomm.engine import ops
from ringcomm.engine.world import engine
from ringcomm.errors import MismatchError, RingcommError
from ringcomm.torch.buckets import MIB, make_buckets, names_of

_SHOWN = 5


class GradientReducer:
    """Owns the hooks and buckets of one optimizer's parameters.

    Args:
        optimizer: the one that holds them.
        named_parameters: (name, parameter), alike on every rank and in the same order.
        op: rc.AVERAGE or rc.SUM.

    Attributes:
        names: of the parameters.
        parameters: in order of registration.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Sequence[tuple[str, torch.nn.Parameter]],
        op: Op,
    ) -> None:
        self._optimizer = optimizer
        self._op = op
        self.names = [name for name, _ in named_parameters]
        self.parameters = [p for _, p in named_parameters]
        self._index = {p: i for i, p in enumerate(self.parameters)}
        for name, parameter in named_parameters:
            _require_reducible(name, parameter, op)
        self._buckets = make_buckets(self.parameters, engine().settings.fusion_mib * MIB)
        self._bucket_names = list(names_of(self._buckets, self.names))
        # Which gradients are complete, per autograd run: reentrant checkpointing nests runs, and a
        # run that raised leaves its entry until the next step.
        self._fired: dict[int, set[int]] = {}
        self._is_reduced = False
        self._is_spoiled = False
        self._final: dict[int, weakref.ref[torch.Tensor]] = {}
        self._handles: list[RemovableHandle] = [
            p.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            for p in self.parameters
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def begin_step(self) -> None:
        """Gradients start anew: after step() and zero_grad()."""
        self._is_reduced = False
        self._is_spoiled = False
        self._fired.clear()
        self._final.clear()

    def flush(self) -> None:
        """Take part in the reduction even if no backward() ran here since the last step."""
        if self._is_spoiled:
            raise RingcommError(
                "DistributedOptimizer: step() after a backward() whose gradients could not be "
                "reduced: call optimizer.zero_grad() and repeat the backward()"
            )
        if not self._is_reduced:
            self._reduce(set())
        self._refuse_unknown_gradients()

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, torch.nn.Parameter)
        index = self._index[parameter]
        self._refuse_second_backward(index)
        run = torch._C._current_graph_task_id()
        if run not in self._fired:
            self._fired[run] = set()
            Variable._execution_engine.queue_callback(lambda: self._reduce(self._fired.pop(run)))
        self._fired[run].add(index)

    def _refuse_second_backward(self, index: int) -> None:
        reduced = self._final.get(index)
        if reduced is None or reduced() is not self.parameters[index].grad:
            return
        raise RingcommError(
            f"DistributedOptimizer: backward() added to the gradient of {self.names[index]}, "
            "which has been reduced already. This version takes one backward() per step(): add the "
            "losses up first, or call optimizer.step() or optimizer.zero_grad() in between"
        )

    def _refuse_unknown_gradients(self) -> None:
        """Refuse a parameter that was unfrozen after the wrapping: nobody reduces its gradient."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter not in self._index:
                    raise RingcommError(
                        "DistributedOptimizer: a parameter of shape "
                        f"{tuple(parameter.shape)} has a gradient but had requires_grad=False when "
                        "the optimizer was wrapped, so it is not reduced: unfreeze it before"
                    )

    def _reduce(self, fired: set[int]) -> None:
        self._is_spoiled = True  # until all has gone well
        is_present = self._agree_on_presence(fired)
        for bucket, name in zip(self._buckets, self._bucket_names, strict=True):
            if any(is_present[member.index] for member in bucket.members):
                bucket.fill(is_present)
                ops.allreduce_(bucket.buffer, self._op, name=f"gradients of {name}")
                bucket.empty(is_present)
        self._is_reduced = True
        self._is_spoiled = False
        for index, parameter in enumerate(self.parameters):
            if is_present[index] and parameter.grad is not None:
                self._final[index] = weakref.ref(parameter.grad)

    def _agree_on_presence(self, fired: set[int]) -> list[bool]:
        """Return which parameters have a fresh gradient, on every rank alike."""
        present = torch.zeros(len(self.parameters), dtype=torch.int32)
        present[list(fired)] = 1
        for index in fired:
            _require_dense(self.names[index], self.parameters[index])
        counts = ops.allreduce(present, name="which gradients are present")
        partial = [i for i, n in enumerate(counts.tolist()) if 0 < n < engine().size]
        if partial:
            raise MismatchError(self._explain_partial(partial, counts))
        return [bool(n) for n in counts.tolist()]

    def _explain_partial(self, partial: list[int], counts: torch.Tensor) -> str:
        shown = ", ".join(
            f"{self.names[i]} (on {int(counts[i])} of {engine().size})" for i in partial[:_SHOWN]
        )
        more = f" and {len(partial) - _SHOWN} more" if len(partial) > _SHOWN else ""
        return (
            f"DistributedOptimizer: gradients were computed on some ranks only: {shown}{more}. "
            "This version needs every parameter to be used on all ranks, or on none, in each "
            "backward(): let every rank run the same branches, e.g. by adding 0 * parameter.sum() "
            "to the loss"
        )


def _require_reducible(name: str, parameter: torch.nn.Parameter, op: Op) -> None:
    if parameter.device.type != "cpu":
        raise TypeError(
            f"DistributedOptimizer: {name} is on {parameter.device}; this version reduces "
            "gradients in host memory only. Keep the model on the CPU"
        )
    try:
        op.require(TORCH.dtype(parameter))
    except TypeError as error:
        raise TypeError(f"DistributedOptimizer: {name}: {error}") from error


def _require_dense(name: str, parameter: torch.nn.Parameter) -> None:
    if parameter.grad is not None and parameter.grad.layout is not torch.strided:
        raise TypeError(
            f"DistributedOptimizer: the gradient of {name} is sparse; this version reduces dense "
            "ones only. Use sparse=False in the embedding"
        )
