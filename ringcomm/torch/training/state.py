"""Bring models and optimizers of all ranks to the same state before training."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ringcomm.engine.api import collectives
from ringcomm.engine.api.world import engine, rank
from ringcomm.engine.core.execution import Plan
from ringcomm.engine.core.group import Group
from ringcomm.engine.operations.objects import plan_allgather_object
from ringcomm.errors import MismatchError
from ringcomm.torch.horovod.process_sets import ProcessSet, global_process_set
from ringcomm.torch.optim.averaging import AveragingOptimizer, StateSharding
from ringcomm.torch.optim.wrapping import settings_of

_Parameters = Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]] | Iterable[torch.Tensor]


def broadcast_parameters(
    params: _Parameters, root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrite tensors with root's, on every rank.

    Args:
        params: model.state_dict(), model.named_parameters() or model.parameters(), a generator too;
            the same names, shapes and dtypes on every rank. Entries of a state_dict that are no
            tensors are left alone.
        root_rank: the rank of the job whose values all get.
        process_set: the ranks that take part.

    Raises:
        ValueError: params is nothing of this kind.
        MismatchError: names, shapes or dtypes differ between ranks.
    """
    ProcessSet.require(process_set)
    root, group = process_set.root(root_rank), process_set.group
    tensors: dict[str, torch.Tensor] = {}

    def plan(group: Group) -> Plan[list[bytes]]:
        tensors.update(_by_name(params))  # within the plan, so that all ranks learn of a mistake
        return plan_allgather_object(group, "names of parameters", list(tensors))

    names_of = engine().execute("allgather_object", "names of parameters", plan, group)
    _require_alike([pickle.loads(each) for each in names_of], group)
    for name, tensor in tensors.items():
        collectives.broadcast_(tensor, root, name=name, group=group)


def _by_name(params: Any) -> dict[str, torch.Tensor]:
    """Return the tensors, by names that are alike on all ranks."""
    entries = params.items() if isinstance(params, Mapping) else params
    if isinstance(entries, torch.Tensor | str | bytes) or not isinstance(entries, Iterable):
        raise ValueError(
            "broadcast_parameters: params is model.state_dict(), model.named_parameters() or "
            f"tensors, not {_shown(params)}"
        )
    named = []
    for place, entry in enumerate(entries):
        if not isinstance(entry, tuple | torch.Tensor):
            raise ValueError(f"broadcast_parameters: entry {place} of params is {_shown(entry)}")
        named.append(entry if isinstance(entry, tuple) else (f"parameter {place}", entry))
    return {name: each for name, each in named if isinstance(each, torch.Tensor)}


def _shown(x: Any) -> str:
    return f"a tensor of shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else repr(x)


def _require_alike(names_of: list[Any], group: Group) -> None:
    """Raise MismatchError, on every rank, if ranks have other names: they would wait for them."""
    joined = [rank for rank, names in zip(group.ranks, names_of, strict=True) if names is None]
    if joined:
        raise MismatchError(
            f"broadcast_parameters: ranks {joined} are in join(), and every rank must take part. "
            "Call it before the first rank calls join()"
        )
    for other, theirs in zip(group.ranks, names_of, strict=True):
        if theirs != names_of[0]:
            lacking = [name for name in names_of[0] if name not in theirs]
            beside = [name for name in theirs if name not in names_of[0]]
            how = f"lacks {lacking[:3]}" if lacking else "has another order"
            raise MismatchError(
                f"broadcast_parameters: rank {other} has other parameters than rank "
                f"{group.ranks[0]}: it {f'has {beside[:3]} besides' if beside else how}. Pass the "
                "same model on every rank"
            )


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Load root's optimizer.state_dict() on every other rank; parameters are not touched.

    Args:
        optimizer: of the same class over parameters of the same shapes on every rank. State that
            a rank lacks (it has made no step yet) is created. If root has none, .grad is zeros
            behind it, on every rank, where it was None, as in Horovod.
        root_rank: the rank of the job whose state, hyper-parameters included, all get.
        model: ignored; Horovod needs it for some optimizers.
        process_set: the ranks that take part.

    With shard_state=1, once there was a step, each rank has its share of one state already: then
    only hyper-parameters are sent.

    Ranks that have made fewer steps than root, in hvd.join(), count from root's on.
    """
    del model
    ProcessSet.require(process_set)
    if not hasattr(optimizer, "state_dict"):
        raise TypeError(
            f"broadcast_optimizer_state: optimizer is no optimizer of torch, but {optimizer!r}"
        )
    if isinstance(optimizer, AveragingOptimizer):
        _bring_in_step(optimizer, root_rank, process_set)
    if isinstance(optimizer, StateSharding) and _is_spread(optimizer, root_rank, process_set):
        settings = broadcast_tree(
            settings_of(optimizer), root_rank, name="optimizer settings", process_set=process_set
        )
        for group, root_s in zip(optimizer.param_groups, settings, strict=True):
            group.update(root_s)
        return
    is_root = rank() == root_rank
    sent = (optimizer.state_dict(), not optimizer.state) if is_root else None
    sent = broadcast_tree(sent, root_rank, name="optimizer state", process_set=process_set)
    state, is_new = sent
    if not is_root:
        optimizer.load_state_dict(state)
    if is_new:  # of root, not of each rank: they step alike without a backward, too
        _make_gradients(optimizer)


def _make_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Set .grad to zeros where it is None: scripts read it behind broadcast_optimizer_state()."""
    is_sparse = isinstance(optimizer, torch.optim.SparseAdam)  # it takes no other gradients
    for p in [p for group in optimizer.param_groups for p in group["params"]]:
        if not p.requires_grad or p.grad is not None or is_lazy(p):
            continue
        if is_sparse:
            none = torch.empty((1, 0), dtype=torch.int64, device=p.device)
            rows = p.new_empty((0, *p.shape[1:]))
            p.grad = torch.sparse_coo_tensor(none, rows, p.shape, check_invariants=True)
        else:
            p.grad = torch.zeros_like(p)


def _bring_in_step(optimizer: AveragingOptimizer, root_rank: int, process_set: ProcessSet) -> None:
    """Set the steps of all ranks to root's, if some have made fewer. Collective."""
    root, group = process_set.root(root_rank), process_set.group
    steps = collectives.allgather_object(optimizer.n_steps, name="optimizer steps", group=group)
    if len(set(steps)) > 1:
        optimizer.go_on_from(steps[root])


def _is_spread(optimizer: StateSharding, root_rank: int, process_set: ProcessSet) -> bool:
    """Return True if each rank has its share of root's state: the settings are all to send."""
    root, group = process_set.root(root_rank), process_set.group
    are_spread = collectives.allgather_object(optimizer.is_spread, name="whose state", group=group)
    if are_spread[root] and not all(are_spread):
        other = group.ranks[are_spread.index(False)]
        raise MismatchError(
            f"broadcast_optimizer_state: rank {root_rank} has its share of the state, and rank "
            f"{other} has loaded a whole one. Call load_state_dict() on every rank, or on rank "
            f"{root_rank}"
        )
    return bool(are_spread[root])


def broadcast_tree(
    tree: Any, root_rank: int = 0, *, name: str, process_set: ProcessSet = global_process_set
) -> Any:
    """Return root's tree on every rank; on root it is `tree` itself. Collective.

    Args:
        tree: of what can be pickled, and tensors, which travel as they are; looked at on root only.
        root_rank: the rank whose tree all get.
        name: begins the names of the messages.
        process_set: the ranks that take part.
    """
    root, group = process_set.root(root_rank), process_set.group
    tensors: list[torch.Tensor] = []
    packed = io.BytesIO()
    if rank() == root_rank:
        _Packer(packed, tensors).dump(tree)
    data = collectives.broadcast_object(
        packed.getvalue(), root, name=f"{name}, outline", group=group
    )
    if rank() != root_rank:
        tree = _Unpacker(io.BytesIO(data), tensors).load()
    for index, tensor in enumerate(tensors):
        collectives.broadcast_(tensor, root, name=f"{name}, tensor {index}", group=group)
    return tree


class _Packer(pickle.Pickler):
    """Pickles all but the dense tensors, which it lists."""

    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_id(self, obj: Any) -> Any:
        if not (isinstance(obj, torch.Tensor) and obj.layout is torch.strided):
            return None
        self._tensors.append(obj)
        return tuple(obj.shape), obj.dtype, obj.device.type


class _Unpacker(pickle.Unpickler):
    """Puts new tensors, which it lists, where those of the other side were."""

    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, known: Any) -> torch.Tensor:
        shape, dtype, device = known  # on this rank the current one of that type
        self._tensors.append(torch.empty(shape, dtype=dtype, device=device))
        return self._tensors[-1]
