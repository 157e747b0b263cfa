"""Gives the models and optimizers of all ranks the same state."""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ringcomm.arrays.dtypes import DTYPES
from ringcomm.engine.api import collectives
from ringcomm.engine.api.init_rank_size import engine, rank
from ringcomm.engine.api.require_nobody_in_join import require_nobody_in_join
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.handle import Handle
from ringcomm.engine.core.plan import Plan
from ringcomm.engine.operations.objects import plan_allgather_object
from ringcomm.errors import MismatchError
from ringcomm.torch.horovod.process_sets import ProcessSet, global_process_set
from ringcomm.torch.optim.averaging_optimizer import AveragingOptimizer, StateSharding
from ringcomm.torch.optim.wrapping import settings_of

_AT_ONCE = 1024  # a rank may have 16,384 operations under way
_Parameters = Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]] | Iterable[torch.Tensor]


def broadcast_parameters(
    params: _Parameters, root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrite tensors with those of the root, on every rank.

    Args:
        params: model.state_dict(), model.named_parameters() or model.parameters(); the same names,
            shapes and dtypes on every rank. Entries of a state_dict that are no tensors are
            not changed.
        root_rank: the root, a rank of the job.
        process_set: the ranks that take part.

    Raises:
        ValueError: params is none of these.
        MismatchError: names, shapes or dtypes differ between ranks.
    """
    ProcessSet.require(process_set)
    root, group = process_set.root(root_rank), process_set.group
    tensors: dict[str, torch.Tensor] = {}

    def plan(group: Group) -> Plan[list[bytes]]:
        tensors.update(_by_name(params))  # here, so that other ranks get the error, too
        return plan_allgather_object(group, "names of parameters", list(tensors))

    names_of = engine().execute("allgather_object", "names of parameters", plan, group)
    _require_alike([pickle.loads(each) for each in names_of], group)
    _broadcast_each(tensors, root, group)


def _broadcast_each(tensors: Mapping[str, torch.Tensor], root: int, group: Group) -> None:
    """Overwrite tensors with those of the root, many at once. Raises the first error."""
    named = iter(tensors.items())
    while some := list(itertools.islice(named, _AT_ONCE)):
        handles = [
            collectives.broadcast_async_(tensor, root, name=name, group=group)
            for name, tensor in some
        ]
        errors = [error for each in handles if (error := _error_of(each)) is not None]
        if errors:
            raise errors[0]


def _error_of(handle: Handle[torch.Tensor]) -> Exception | None:
    try:
        handle.wait()
    except Exception as error:  # noqa: BLE001 - it is raised once the others are over
        return error
    return None


def _by_name(params: Any) -> dict[str, torch.Tensor]:
    """Return the tensors by name; a tensor without a name gets its place as a name."""
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
    """Raise MismatchError on every rank if names differ, before ranks wait for each other."""
    require_nobody_in_join("broadcast_parameters", names_of, group.ranks)
    first = names_of[0]
    for other, names in zip(group.ranks, names_of, strict=True):
        if names != first:
            lacking = [name for name in first if name not in names]
            beside = [name for name in names if name not in first]
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
    """Load the root's optimizer.state_dict() on every other rank; parameters stay as they are.

    Ranks that have made fewer steps than the root, because they were in hvd.join(), get the root's
    number of steps. With shard_state=1, after a step, each rank has its share of one state; then
    only hyper-parameters are sent.

    Args:
        optimizer: an optimizer of the same class and the same shapes of parameters on every rank.
            If the root has no state, because it has made no step, each .grad that is None becomes
            zeros on every rank, as in Horovod.
        root_rank: the root, a rank of the job; its hyper-parameters are sent, too.
        model: ignored; Horovod needs it for some optimizers.
        process_set: the ranks that take part.
    """
    del model
    ProcessSet.require(process_set)
    if not hasattr(optimizer, "state_dict"):
        raise TypeError(
            f"broadcast_optimizer_state: optimizer is no optimizer of torch, but {optimizer!r}"
        )
    root, group = process_set.root(root_rank), process_set.group
    if isinstance(optimizer, AveragingOptimizer):
        steps = collectives.allgather_object(optimizer.n_steps, name="optimizer steps", group=group)
        require_nobody_in_join("broadcast_optimizer_state", steps, group.ranks)
        if len(set(steps)) > 1:
            optimizer.go_on_from(steps[root])
    if isinstance(optimizer, StateSharding) and _is_spread(optimizer, root, group):
        settings = broadcast_tree(
            settings_of(optimizer), root_rank, name="optimizer settings", process_set=process_set
        )
        for param_group, root_s in zip(optimizer.param_groups, settings, strict=True):
            param_group.update(root_s)
        return
    is_root = rank() == root_rank
    sent = (optimizer.state_dict(), not optimizer.state) if is_root else None
    state, is_new = broadcast_tree(sent, root_rank, name="optimizer state", process_set=process_set)
    if not is_root:
        optimizer.load_state_dict(state)
        _restore_dtypes(optimizer, state)
    if is_new:  # the root's is_new: all ranks must make gradients, or none
        _make_gradients(optimizer)


def _restore_dtypes(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Give the loaded state the root's dtypes: torch has cast it to those of the parameters."""
    if not state.keys() >= {"state", "param_groups"}:
        return  # a format of the optimizer's own, which it has loaded itself
    numbers = [i for group in state["param_groups"] for i in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, p in zip(numbers, parameters, strict=True):
        if (mine := optimizer.state.get(p)) and number in state["state"]:
            mine.update(_uncast(mine, state["state"][number]))


def _uncast(loaded: Any, sent: Any) -> Any:
    """Return `loaded` with the dtypes of `sent`; an optimizer may have changed it as it loaded."""
    if isinstance(loaded, torch.Tensor) and isinstance(sent, torch.Tensor):
        return loaded if loaded.dtype == sent.dtype else sent.to(loaded.device)
    if isinstance(loaded, dict) and isinstance(sent, dict):
        return {key: _uncast(each, sent.get(key)) for key, each in loaded.items()}
    if isinstance(loaded, list) and isinstance(sent, list) and len(loaded) == len(sent):
        return [_uncast(*each) for each in zip(loaded, sent, strict=True)]
    return loaded


def _make_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Set each .grad that is None to zeros: scripts use .grad after broadcast_optimizer_state()."""
    is_sparse = isinstance(optimizer, torch.optim.SparseAdam)  # takes only sparse gradients
    for p in [p for group in optimizer.param_groups for p in group["params"]]:
        if not p.requires_grad or p.grad is not None or is_lazy(p):
            continue
        if is_sparse:
            none = torch.empty((1, 0), dtype=torch.int64, device=p.device)
            rows = p.new_empty((0, *p.shape[1:]))
            p.grad = torch.sparse_coo_tensor(none, rows, p.shape, check_invariants=True)
        else:
            p.grad = torch.zeros_like(p)


def _is_spread(optimizer: StateSharding, root: int, group: Group) -> bool:
    """Return True if each rank has its share of the root's state. Collective."""
    are_spread = collectives.allgather_object(optimizer.is_spread, name="whose state", group=group)
    if are_spread[root] and not all(are_spread):
        root_rank, other = group.ranks[root], group.ranks[are_spread.index(False)]
        raise MismatchError(
            f"broadcast_optimizer_state: rank {root_rank} has its share of the state, and rank "
            f"{other} has loaded a whole one. Call load_state_dict() on every rank, or on rank "
            f"{root_rank}"
        )
    return bool(are_spread[root])


def broadcast_tree(
    tree: Any, root_rank: int = 0, *, name: str, process_set: ProcessSet = global_process_set
) -> Any:
    """Return a copy of the root's tree; on the root, return `tree` itself. Collective.

    A tree is an object that can be pickled. Dense tensors in it are sent without pickling, as
    operations whose names begin with `name`. Ranks other than the root may pass any tree.
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
    _broadcast_each({f"{name}, tensor {i}": each for i, each in enumerate(tensors)}, root, group)
    return tree


class _Packer(pickle.Pickler):
    """Pickles all objects except dense tensors, which it appends to a list."""

    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_id(self, obj: Any) -> Any:
        if not (isinstance(obj, torch.Tensor) and obj.layout is torch.strided):
            return None
        self._tensors.append(_as_sent(obj))
        return tuple(obj.shape), obj.dtype, obj.device.type


class _Unpacker(pickle.Unpickler):
    """Makes an empty tensor for each tensor of a _Packer, and appends it to a list."""

    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, known: Any) -> torch.Tensor:
        shape, dtype, device = known  # this rank's current device of that type
        tensor = torch.empty(shape, dtype=dtype, device=device)
        self._tensors.append(_as_sent(tensor))
        return tensor


def _as_sent(x: torch.Tensor) -> torch.Tensor:
    """Return a view that collectives take: as bytes if x has a float8 dtype, else x itself."""
    is_known = str(x.dtype).removeprefix("torch.") in DTYPES
    return x if is_known or x.itemsize > 1 else x.view(torch.uint8)
