"""The class that DistributedOptimizer adds with shard_state=1: ZeRO-1.

Source: Rajbhandari et al. 2020, doi:10.1109/SC41405.2020.00024.
"""

from __future__ import annotations

import functools
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NoReturn

import numpy as np
import torch
from torch import optim
from torch.optim import Optimizer

from ringcomm.collectives.operators import MAX, SUM
from ringcomm.engine.api import collectives
from ringcomm.engine.api.init_rank_size import rank
from ringcomm.errors import RingcommError
from ringcomm.torch.horovod.process_sets import global_process_set
from ringcomm.torch.optim.averaging_optimizer import OUR_ATTRIBUTES, AveragingOptimizer
from ringcomm.torch.optim.buckets import is_16_bit, wide
from ringcomm.torch.optim.wrapping import underlying
from ringcomm.torch.zero.chunk_update import ChunkUpdate
from ringcomm.torch.zero.optimizer_shard import OptimizerShard
from ringcomm.torch.zero.share_copies import ShareCopies

_ELEMENTWISE: Final = (
    optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam,
    optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD,
)  # fmt: skip
_OUR_ATTRIBUTES: Final = (
    *OUR_ATTRIBUTES, "_shards", "_copies", "_has_warned_of_changes", "is_unscaled", "grad_scale",
    "found_inf",
)  # fmt: skip


def require_elementwise(optimizer: Optimizer) -> None:
    """Raise TypeError unless the optimizer is known to update each element by itself.

    Many of torch's classes are known; other classes need an attribute `is_elementwise = True`.
    """
    kind = type(optimizer)
    if not getattr(kind, "is_elementwise", kind in _ELEMENTWISE):
        raise TypeError(
            f"DistributedOptimizer: with shard_state=1 each rank updates its part of a parameter, "
            f"and {kind.__name__} is not known to update a part as it would within the whole: "
            "LBFGS, Adafactor, Muon and LAMB do not. Pass shard_state=0; or, if all that it "
            "computes and keeps is element by element, set is_elementwise = True on the class"
        )


class ShardedOptimizer(AveragingOptimizer):
    """Updates this rank's chunk of each bucket, and receives the other ranks' chunks (ZeRO-1).

    In addition to the docstring of DistributedOptimizer, users must know:

    - The optimizer's class must update each element by itself, as torch's SGD, Adam and AdamW do.
    - The first step() takes over the optimizer's state. After it, a rank keeps about 1 / size of
      the state, and optimizer.state is empty except for parameters that were always frozen.
    - .grad is the mean where this rank updates the parameter, and zero elsewhere: the sum over all
      ranks is the mean. Gradients may be changed element by element. To clip them by their norm,
      call clip_grad_norm_().
    - step() moves the parameters (p.data) into memory of their bucket; tensors that shared their
      old memory no longer see updates.
    - 16-bit parameters have float32 masters and float32 state on the rank that updates them.
    - step() and clip_grad_norm_() are collective, and so is state_dict() after the first step().
    - It cannot be copied or pickled. state_dict() is that of the plain optimizer.
    """

    _has_warned_of_changes = False
    is_unscaled = False  # unscale() has divided the gradients of this step
    _step_supports_amp_scaling = True  # GradScaler then calls step() on all ranks

    @functools.cached_property
    def _shards(self) -> OptimizerShard:
        return OptimizerShard(self._reducer)

    @functools.cached_property
    def _copies(self) -> ShareCopies:
        return ShareCopies(self._reducer, self._shards)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, together with all ranks; see AveragingOptimizer.

        Raises:
            RingcommError: torch.amp.GradScaler looked for infinities in this rank's part alone.
        """
        found_inf = self.__dict__.get("found_inf")
        if found_inf is not None and not self.is_unscaled:
            raise RingcommError(
                "DistributedOptimizer: with shard_state=1 a torch.amp.GradScaler sees this rank's "
                "part of the gradients alone, and ranks would skip different steps: use "
                "hvd.GradScaler, which takes the same arguments"
            )
        self.is_unscaled = False
        return None if found_inf else super().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.is_unscaled = False
        super().zero_grad(set_to_none)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale gradients by the norm of all ranks' parts; see AveragingOptimizer. Collective."""
        self._flush()
        own = self._own_gradients()
        norm = self._norm(own, norm_type)
        if error_if_nonfinite and not np.isfinite(norm):
            raise RuntimeError(
                f"clip_grad_norm_: the norm of the gradients is {norm}. Pass "
                "error_if_nonfinite=False to scale by it nevertheless"
            )
        factor = min(max_norm / (norm + 1e-6), 1.0)  # as torch does
        if factor != 1.0:
            for gradient in own:
                gradient.mul_(factor)
        self._accept_gradients()
        return torch.tensor(norm, dtype=torch.float64)

    def state_dict(self, *, root_rank: int | None = None) -> Any:
        """Return the state of the whole optimizer. Collective after the first step().

        A plain optimizer can load it, and so can this one on any number of ranks. 16-bit parameters
        have an additional entry "master", which a plain optimizer ignores.

        Args:
            root_rank: the only rank that gets the state, to save memory; the others get None. If
                root_rank is None, all ranks get the state.
        """
        is_wanted = root_rank in (None, rank())
        if not self.is_spread:
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
    def is_for_all(self) -> bool:
        return self._reducer.options.process_set is global_process_set

    # --- for TorchState, in an elastic job --------------------------------------------------------
    def replicate(self, commit: int) -> None:
        self._copies.replicate(commit)

    @property
    def fewest_ranks(self) -> int:
        return self._copies.fewest_ranks

    def recover(self, commit: int) -> None:
        self._copies.recover(commit)

    def state_of_all(self) -> dict[str, Any]:
        return super().state_dict()

    def restore(self, state_dict: dict[str, Any]) -> None:
        self.load_state_dict(state_dict)
        self._copies.restore()

    @property
    def is_spread(self) -> bool:
        return self._shards.group is not None

    def unscale(self, divide: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Divide the gradients by calling divide(); for hvd.GradScaler. Collective.

        divide() returns one tensor per device, above 0 if it found infinities there. Each
        tensor is set to its maximum over all ranks.
        """
        self._flush()
        name, group = f"found infinities{self._reducer.plan.suffix}", self._reducer.options.group
        for each in divide():
            collectives.allreduce_(each, MAX, name=name, group=group)
        self._accept_gradients()
        self.is_unscaled = True

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a DistributedOptimizer with shard_state=1 cannot be copied or pickled, because this "
            "rank has a part of its state: take optimizer.state_dict(), on every rank"
        )

    @Optimizer.profile_hook_step  # it runs the hooks of a step
    def _update(self, *closure: Callable[[], Any]) -> Any:
        loss = None
        for each in closure:
            with torch.enable_grad():
                loss = each()
        self._warn_of_changes()
        self._shards.step(self, self._make)
        return loss

    def _follow(self) -> None:
        if self.is_spread and self._has_strangers:
            raise RingcommError(
                "DistributedOptimizer: param_groups have a new parameter, whose state the program "
                "cannot have moved: with shard_state=1 the state is spread over the ranks. Pass "
                "shard_state=0 to exchange parameters, or add them by optimizer.add_param_group()"
            )
        super()._follow()

    def _make(self, pieces: Sequence[torch.Tensor]) -> ChunkUpdate:
        return ChunkUpdate(underlying(self, _OUR_ATTRIBUTES), pieces)

    def _own_gradients(self) -> list[torch.Tensor]:
        self._reducer.plan.ensure_buckets()
        gradients = [slot.part.gradient() for slot in self._reducer.slots]
        return [gradient for gradient in gradients if gradient is not None]

    def _accept_gradients(self) -> None:
        for slot in self._reducer.slots:
            slot.part.accept()

    def _norm(self, gradients: Sequence[torch.Tensor], norm_type: float) -> float:
        """Return the norm over all ranks, with the same bits on each rank."""
        norm_type = float(norm_type)  # torch takes "inf", too
        norms = [
            float(torch.linalg.vector_norm(wide(g), norm_type)) for g in gradients if g.numel()
        ]
        group, is_max = self._reducer.options.group, norm_type == np.inf
        mine = max(norms, default=0.0) if is_max else sum(n**norm_type for n in norms)
        name = f"norm of the gradients{self._reducer.plan.suffix}"
        (total,) = collectives.allreduce(
            np.array([mine], np.float64), MAX if is_max else SUM, name=name, group=group
        )
        return float(total if is_max else total ** (1 / norm_type))

    def _warn_of_changes(self) -> None:
        """Warn once if the user may have called torch.nn.utils.clip_grad_norm_()."""
        if self._has_warned_of_changes or not any(s.part.is_changed for s in self._reducer.slots):
            return
        self._has_warned_of_changes = True
        warnings.warn(
            ".grad was changed between backward() and step(). With shard_state=1 it is this rank's "
            "part of the gradient, so torch.nn.utils.clip_grad_norm_ would scale each part by "
            "another factor: use optimizer.clip_grad_norm_(). Changes of each element by itself "
            "are right",
            stacklevel=7,
        )

    def _restore_wide(self, state_dict: dict[str, Any]) -> None:
        """Restore the float32 state of 16-bit parameters, which torch has made 16-bit."""
        saved = state_dict["state"]
        numbers = [i for group in state_dict["param_groups"] for i in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, p in zip(numbers, parameters, strict=True):
            if is_16_bit(p) and number in saved:
                mine = self.state[p]
                mine.update(
                    {k: v for k, v in saved[number].items() if torch.is_tensor(v) and k in mine}
                )
