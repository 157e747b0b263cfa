"""The part of a DistributedOptimizer that has a share of the state: ZeRO-1.

Source: Rajbhandari et al. 2020, doi:10.1109/SC41405.2020.00024.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from torch.optim import Optimizer

from ringcomm.collectives.op import MAX, SUM
from ringcomm.engine.api import collectives
from ringcomm.engine.api.world import rank
from ringcomm.errors import RingcommError
from ringcomm.torch.optim import averaging
from ringcomm.torch.optim.averaging import AveragingOptimizer
from ringcomm.torch.optim.buckets import is_16_bit
from ringcomm.torch.optim.reducer import GradientReducer
from ringcomm.torch.optim.wrapping import derive, settings_of, underlying
from ringcomm.torch.zero.chunk_update import Chunk, ChunkUpdate, OwnClassUpdate
from ringcomm.torch.zero.fused_update import FusedUpdate, can_fuse, can_push
from ringcomm.torch.zero.optimizer_shard import OptimizerShard

T = TypeVar("T", bound=Optimizer)
_SCALERS = ("grad_scale", "found_inf")  # what a GradScaler tells an optimizer
_OURS = (*averaging.OURS, "_shards", "_has_told_of_changes", "_is_unscaled", *_SCALERS)


def with_sharding(optimizer: T, reducer: GradientReducer) -> T:
    """Return `optimizer` with its gradients, its state and its work spread over the ranks."""
    return derive(optimizer, ShardedOptimizer, _reducer=reducer, _shards=OptimizerShard(reducer))


class ShardedOptimizer(AveragingOptimizer):
    """Updates this rank's chunk of each bucket, and gets the others' chunks (ZeRO-1).

    What users must know, besides what DistributedOptimizer says:

    - The class goes by element: torch's SGD, Adam, AdamW and the like; see elementwise.py.
    - The first step() takes over what state there is; from then on optimizer.state is empty but for
      parameters that were always frozen, and a rank keeps about 1 / size of it.
    - .grad is the mean where this rank updates the parameter, and zero elsewhere: the sum over all
      ranks is the mean. Gradients may be changed element by element. Norms are clip_grad_norm_()'s.
    - Parameters are moved into memory of their bucket (p.data) in step(); tensors that shared their
      old memory no longer see updates.
    - 16-bit parameters have float32 masters and float32 state on the rank that updates them.
    - step(), clip_grad_norm_() and, once there was a step, state_dict() are collective.
    - It cannot be copied or pickled: state_dict() is plain torch.
    """

    _shards: OptimizerShard
    _has_told_of_changes = False
    _is_unscaled = False  # by hvd.GradScaler, in this step
    _step_supports_amp_scaling = True  # so that a GradScaler skips no step on some ranks only

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, together with all ranks; see AveragingOptimizer.

        Raises:
            RingcommError: a torch.amp.GradScaler has looked at this rank's part of the gradients.
        """
        found_inf = self.__dict__.get("found_inf")
        if found_inf is not None and not self._is_unscaled:
            raise RingcommError(
                "DistributedOptimizer: with shard_state=1 a torch.amp.GradScaler sees this rank's "
                "part of the gradients alone, and ranks would skip different steps: use "
                "hvd.GradScaler, which takes the same arguments"
            )
        self._is_unscaled = False
        return None if found_inf else super().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; see AveragingOptimizer."""
        self._is_unscaled = False
        super().zero_grad(set_to_none)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale gradients down by the norm of all ranks' parts, as torch does. Collective."""
        self._flush()
        own = self._own_gradients()
        norm = self._norm(own, norm_type)
        if error_if_nonfinite and not np.isfinite(norm):
            raise RuntimeError(
                f"clip_grad_norm_: the norm of the gradients is {norm}. Pass "
                "error_if_nonfinite=False to scale by it all the same"
            )
        factor = min(max_norm / (norm + 1e-6), 1.0)  # as torch does
        if factor != 1.0:
            for gradient in own:
                gradient.mul_(factor)
        self._accept_gradients()
        return torch.tensor(norm, dtype=torch.float64)

    def state_dict(self, *, root_rank: int | None = None) -> Any:
        """Return the state of the whole optimizer, as a plain one's. Collective after a step().

        A plain optimizer, and this one on any number of ranks, can load it; 16-bit parameters have
        an entry "master" more, which a plain one ignores.

        Args:
            root_rank: the rank that gets it, which saves memory; None: all do. The others get None.
        """
        is_wanted = root_rank in (None, rank())
        if not self._shards.are_spread:
            return super().state_dict() if is_wanted else None
        whole = self._shards.states(is_wanted=is_wanted)
        if not is_wanted:
            return None
        kept, self.state = self.state, defaultdict(dict, {**self.state, **whole})
        try:
            return super().state_dict()
        finally:
            self.state = kept

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a whole state, the same on every rank; the next step() keeps this rank's share."""
        super().load_state_dict(state_dict)
        self._restore_wide(state_dict)
        self._shards.forget()

    @property
    def is_spread(self) -> bool:
        """True if this rank has a share of the state, not all of it; alike on all ranks."""
        return self._shards.are_spread

    @property
    def is_unscaled(self) -> bool:
        """True once unscale() has divided the gradients of this step."""
        return self._is_unscaled

    def unscale(self, divide: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Divide the gradients by divide(); for hvd.GradScaler. Collective.

        It returns numbers above 0 for infinities, which become the highest of all ranks.
        """
        self._flush()
        name, group = f"found infinities{self._reducer.suffix}", self._reducer.options.group
        for each in divide():
            collectives.allreduce_(each, MAX, name=name, group=group)
        self._accept_gradients()
        self._is_unscaled = True

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a DistributedOptimizer with shard_state=1 cannot be copied or pickled, for this rank "
            "has a share of its state: take optimizer.state_dict(), on every rank"
        )

    @Optimizer.profile_hook_step
    def _update(self, *closure: Callable[[], Any]) -> Any:
        loss = None
        for each in closure:
            with torch.enable_grad():
                loss = each()
        self._tell_of_changes()
        is_fused = can_fuse(type(self).__bases__[1], settings_of(self))
        self._shards.step(self, self._make_fused if is_fused else self._make, is_fused=is_fused)
        return loss

    def _make(self, chunk: Chunk) -> ChunkUpdate:
        return OwnClassUpdate(underlying(self, _OURS), chunk.pieces)

    def _make_fused(self, chunk: Chunk) -> ChunkUpdate:
        if not can_push(self._reducer.options.group, chunk.weights):
            return self._make(chunk)
        return FusedUpdate(type(self).__bases__[1], chunk)

    def _own_gradients(self) -> list[torch.Tensor]:
        self._reducer.plan.buckets_for(self._reducer.options)
        gradients = [slot.own_gradient() for slot in self._reducer.slots]
        return [gradient for gradient in gradients if gradient is not None]

    def _accept_gradients(self) -> None:
        for slot in self._reducer.slots:
            slot.accept()

    def _norm(self, gradients: Sequence[torch.Tensor], norm_type: float) -> float:
        """Return the norm over all ranks, the same bits on each."""
        wide = [g.float() if is_16_bit(g) else g for g in gradients if g.numel()]
        norms = [float(torch.linalg.vector_norm(g, norm_type)) for g in wide]
        group, is_max = self._reducer.options.group, norm_type == np.inf
        mine = np.array([max(norms, default=0.0) if is_max else sum(n**norm_type for n in norms)])
        name = f"norm of the gradients{self._reducer.suffix}"
        (total,) = collectives.allreduce(mine, MAX if is_max else SUM, name=name, group=group)
        return float(total if is_max else total ** (1 / norm_type))

    def _tell_of_changes(self) -> None:
        """Warn once of what torch.nn.utils.clip_grad_norm_ would do."""
        if self._has_told_of_changes or not any(s.is_changed for s in self._reducer.slots):
            return
        self._has_told_of_changes = True
        warnings.warn(
            ".grad was changed between backward() and step(). With shard_state=1 it is this rank's "
            "part of the gradient, so torch.nn.utils.clip_grad_norm_ would scale each rank's by "
            "another factor: use optimizer.clip_grad_norm_(). What goes by element is right",
            stacklevel=6,
        )

    def _restore_wide(self, state_dict: dict[str, Any]) -> None:
        """Undo what torch does to the float32 state of 16-bit parameters: it makes it 16-bit."""
        saved = state_dict["state"]
        numbers = [i for group in state_dict["param_groups"] for i in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, p in zip(numbers, parameters, strict=True):
            if is_16_bit(p) and number in saved:
                mine = self.state[p]
                mine.update(
                    {k: v for k, v in saved[number].items() if torch.is_tensor(v) and k in mine}
                )


# torch wraps the step() of a class to run its step hooks; here _update() runs them.
ShardedOptimizer.step.hooked = True  # type: ignore[attr-defined]
