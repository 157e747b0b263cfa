"""States for training with torch: what a job keeps when it loses ranks."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Sequence
from typing import Any, ClassVar, Final, get_args

import numpy as np
import torch
from torch.optim import Optimizer

from ringcomm import elastic
from ringcomm.data import Loader
from ringcomm.elastic.checksum import checksum_of
from ringcomm.engine.api import collectives
from ringcomm.engine.api.init_rank_size import is_initialized, size
from ringcomm.errors import ConfigError, RingcommError
from ringcomm.torch.elastic.sampler import ElasticSampler, Position
from ringcomm.torch.optim.averaging_optimizer import AveragingOptimizer, StateSharding
from ringcomm.torch.training.broadcast_states import broadcast_tree
from ringcomm.torch.training.learning_rates import Rule, rescale_rates


# --- groups of a commit ---------------------------------------------------------------------------
def go_back_to_groups(optimizer: Optimizer, name: str, n_groups: int) -> None:
    """Take away the groups that were added after a commit of `n_groups`, and their gradients.

    Args:
        optimizer: the optimizer. It gets the settings and the state of its groups afterwards.
        name: name of the optimizer in the state, for errors.
        n_groups: number of groups in the commit, from the first on.

    Raises:
        RingcommError: the optimizer has fewer groups.
    """
    n_here = len(optimizer.param_groups)
    if n_here < n_groups:
        raise RingcommError(
            f"elastic: the commit has {n_groups} groups of parameters of {name}, and here it has "
            f"{n_here}, because add_param_group() was called in the training, before this process "
            "joined it. Make all groups at first, for instance of frozen parameters"
        )
    if n_here == n_groups:
        return
    optimizer.zero_grad()
    if isinstance(optimizer, AveragingOptimizer):
        optimizer.remove_param_groups(n_groups)
    else:
        del optimizer.param_groups[n_groups:]


_log: Final = logging.getLogger("ringcomm")


class State(elastic.State):
    """Base class for states of one's own, with Horovod's methods: save(), restore() and sync().

    sync() is called after restore(). It gives all ranks the same values, such as those of rank 0,
    and saves them.

    Args:
        bcast_object: ignored, as is get_rank; Horovod needs them.
        get_rank: see bcast_object.
    """

    def __init__(self, bcast_object: Any = None, get_rank: Any = None) -> None:
        del bcast_object, get_rank
        super().__init__()

    def receive(self, root: int, *, is_new: bool) -> None:
        """Raise NotImplementedError: a derived class has sync() of its own."""
        del root, is_new
        raise NotImplementedError(f"{type(self).__name__}: derive sync() from elastic.State")


class ObjectState(elastic.ObjectState, State):
    """State of any objects that can be pickled: ObjectState(epoch=0, sampler=sampler).

    See ringcomm.elastic.ObjectState; an ElasticSampler keeps its place, too.

    Args:
        bcast_object: ignored, as is get_rank; Horovod needs them.
        get_rank: see bcast_object.
        kwargs: the values, which become attributes.
    """

    COPIES: ClassVar[tuple[str, ...]] = ("_saved", "_positions")

    def __init__(self, bcast_object: Any = None, get_rank: Any = None, **kwargs: Any) -> None:
        del bcast_object, get_rank
        super().__init__(**kwargs)
        self._sampler_names = [n for n, v in kwargs.items() if isinstance(v, ElasticSampler)]
        self._names = tuple(name for name in self._names if name not in self._sampler_names)
        self._positions: dict[str, Position] = {}

    def save(self) -> None:
        """Copy all values."""
        super().save()
        self._positions = {name: each.position for name, each in self._samplers.items()}

    def restore(self) -> None:
        """Set all attributes to copies of the saved values."""
        super().restore()
        for name, position in self._positions.items():
            self._samplers[name].position = position
        for name in self._names:
            scaler = getattr(self, name)
            if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled():
                # A step that has failed between unscale_() and update() is made anew.
                scaler._per_optimizer_states.clear()

    def unite(self, is_newest: Sequence[bool]) -> None:
        """Join what the ranks have recorded in their samplers. Collective."""
        if not self._sampler_names:
            return
        of_ranks = collectives.allgather_object(self._positions, name="elastic samplers")
        self._positions = {
            name: sampler.united([each[name] for each in of_ranks], is_newest)
            for name, sampler in self._samplers.items()
        }

    @property
    def _samplers(self) -> dict[str, ElasticSampler]:
        return {name: getattr(self, name) for name in self._sampler_names}


class TorchState(ObjectState):
    """State of models, optimizers and other values: TorchState(model, optimizer, epoch=0).

    Each argument becomes an attribute. commit() copies the tensors of the state_dict() of each
    model and optimizer to memory on the same device, that of schedules, scalers and others that
    have one, too, and other values by copy.deepcopy(). Gradients are not kept: after a loss, .grad
    is None. Nor are random generators.

    Of a DistributedOptimizer with shard_state=1, each rank keeps its part, and a copy of the part
    of the rank before, in host memory: commit() sends it, so it is collective. If a rank is lost,
    nothing is lost. If a rank and the one after it are lost between two commits, it is a
    RingcommError on all ranks.

    Args:
        model: a torch.nn.Module.
        optimizer: an optimizer, such as a DistributedOptimizer.
        scale_lr: "linear" or "sqrt": when the number of ranks changes, scale learning rates by this
            rule of scaled_lr(), for batches that keep their size on each rank; None: do not.
        kwargs: other modules and optimizers, schedules, samplers, and values that can be pickled.

    Raises:
        ConfigError: an optimizer has shard_state=1, and is for a process set, which ends with a
            view.
    """

    COPIES: ClassVar[tuple[str, ...]] = ("_saved", "_positions", "_copies")

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: Optimizer | None = None,
        *,
        scale_lr: Rule | None = None,
        **kwargs: Any,
    ) -> None:
        if scale_lr not in (None, *get_args(Rule)):
            rules = " or ".join(get_args(Rule))
            raise ValueError(f"TorchState: scale_lr is {rules}, or None, not {scale_lr!r}")
        self._rule = scale_lr
        given = {"model": model, "optimizer": optimizer, **kwargs}
        holders = {n: v for n, v in given.items() if isinstance(v, torch.nn.Module | Optimizer)}
        for name, each in holders.items():
            if isinstance(each, StateSharding) and not each.is_for_all:
                raise ConfigError(
                    f"TorchState: {name} has shard_state=1 and a process set, which is over when a "
                    "rank is lost. Use shard_state=0, or leave process_set out"
                )
        super().__init__(**given)
        self._holder_names = tuple(holders)
        self._names = tuple(name for name in self._names if name not in holders)
        self._copies: dict[str, Any] = {}

    def keep_in(self, path: str | os.PathLike[str], *, every: int = 1) -> None:
        """Keep every `every`-th commit in a file; see State.keep_in().

        Raises:
            ConfigError: an optimizer has shard_state=1: rank 0 has only its part of the state.
        """
        for name, each in self._holders.items():
            if isinstance(each, StateSharding):
                raise ConfigError(
                    f"keep_in: {name} has shard_state=1, so no rank has all of its state, and rank "
                    "0 alone writes the file. Keep it by hvd.Checkpoint, which writes the parts of "
                    "all ranks, or use shard_state=0"
                )
        super().keep_in(path, every=every)

    def save(self) -> None:
        """Copy all values."""
        super().save()
        to: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for name, each in self._holders.items():
            self._copies[name] = _copied(_tree(each), self._copies.get(name), to, sources)
        if to:
            torch._foreach_copy_(to, sources)

    def replicate(self, commit: int) -> None:
        """Keep copies of the parts that each rank has of an optimizer's state; see State."""
        for each in self._sharded:
            each.replicate(commit)
        self._note_fewest_ranks()

    def unite(self, is_newest: Sequence[bool]) -> None:
        """Join what the ranks have recorded in samplers, and their parts of optimizers."""
        super().unite(is_newest)
        if not self._sharded:
            return
        counts = collectives.allgather_object(self._last_commit, name="elastic parts")
        newest = counts[list(is_newest).index(True)]
        for each in self._sharded:
            if newest is None:
                each.replicate(0)
            else:
                each.recover(newest)
        self._note_fewest_ranks()

    def _note_fewest_ranks(self) -> None:
        self._fewest_ranks = max((each.fewest_ranks for each in self._sharded), default=1)

    @property
    def _last_commit(self) -> int | None:
        return self.n_commits if self._is_saved else None

    @property
    def _sharded(self) -> list[StateSharding]:
        return [each for each in self._holders.values() if isinstance(each, StateSharding)]

    def restore(self) -> None:
        """Load the copies into models and optimizers, and set the other values."""
        super().restore()
        for name, saved in self._copies.items():
            each = getattr(self, name)
            if isinstance(each, torch.nn.Module):
                each.load_state_dict(saved["state"])
                continue
            state = copy.deepcopy(saved["state"])  # it may keep the tensors
            go_back_to_groups(each, name, len(state["param_groups"]))
            if isinstance(each, StateSharding):
                each.restore(state)
            else:
                each.load_state_dict(state)
            if self._rule is not None:
                rescale_rates(each, saved["n_ranks"], self._rule)
            each.zero_grad()
            if isinstance(each, AveragingOptimizer) and each.n_steps != saved["n_steps"]:
                each.go_on_from(saved["n_steps"])

        self._warn_of_unequal_batches()

    def checksum(self) -> int:
        """See ObjectState.checksum(); models and optimizers are compared, too."""
        return checksum_of(self._copies, super().checksum(), array_of=_bytes_of)

    @property
    def _holders(self) -> dict[str, torch.nn.Module | Optimizer]:
        """The models and optimizers; a program may have set the attributes to others."""
        return {name: getattr(self, name) for name in self._holder_names}

    def receive(self, root: int, *, is_new: bool) -> None:
        """See State.receive()."""
        received = broadcast_tree(self._copies, root, name="elastic state")
        super().receive(root, is_new=is_new)
        if is_new:
            self._copies = received

    def _warn_of_unequal_batches(self) -> None:
        """Warn on one rank if a gradient of a small batch would count as much as of a large one."""
        for name in self._names:
            loader = getattr(self, name)
            if isinstance(loader, Loader) and loader.needs_weights and loader.sampler.rank == 0:
                _log.warning(
                    "elastic: %s has %d samples in a step, now on %d ranks, so their batches are "
                    "unequal, and gradients must be weighed. Pass optimizer= to the Loader, or "
                    "constant='local' to keep the batches of each rank",
                    name,
                    loader.batches.samples_per_step,
                    loader.sampler.size,
                )


def _bytes_of(value: Any) -> np.ndarray[Any, Any] | None:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    flat = value.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)


def _tree(holder: torch.nn.Module | Optimizer) -> dict[str, Any]:
    n_steps = holder.n_steps if isinstance(holder, AveragingOptimizer) else 0
    n_ranks = size() if is_initialized() else 1
    spread = holder if isinstance(holder, StateSharding) else None
    state = holder.state_dict() if spread is None else spread.state_of_all()
    return {"state": state, "n_steps": n_steps, "n_ranks": n_ranks}


def _copied(tree: Any, before: Any, to: list[torch.Tensor], sources: list[torch.Tensor]) -> Any:
    """Return a copy of a tree; its tensors, those of `before` if they fit, go to `to`.

    The caller copies the tensors of `sources`, which belong to those of `to`.
    """
    if isinstance(tree, torch.Tensor):
        fits = isinstance(before, torch.Tensor) and _is_like(before, tree)
        out = before if fits else torch.empty_like(tree, requires_grad=False)
        to.append(out)
        sources.append(tree.detach())
        return out
    if isinstance(tree, dict):
        old = before if isinstance(before, dict) else {}
        return {key: _copied(each, old.get(key), to, sources) for key, each in tree.items()}
    if isinstance(tree, list | tuple):
        of = before if isinstance(before, list | tuple) and len(before) == len(tree) else tree
        parts = [_copied(each, b, to, sources) for each, b in zip(tree, of, strict=True)]
        return parts if isinstance(tree, list) else tuple(parts)
    return copy.deepcopy(tree)


def _is_like(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.shape, a.dtype, a.device, a.stride()) == (b.shape, b.dtype, b.device, b.stride())
