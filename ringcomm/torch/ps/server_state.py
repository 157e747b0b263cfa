"""Values and state that the servers have of an optimizer: set to the chief's, or fetched."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch.optim import Optimizer

from ringcomm.engine.api import collectives
from ringcomm.errors import RingcommError
from ringcomm.ps.checkpoint.reader import read_parts
from ringcomm.ps.client.dense.optimizer_state import TableState
from ringcomm.ps.client.dense.optimizer_state import pull_state as pull_table_state
from ringcomm.ps.client.dense.optimizer_state import push_state as push_table_state
from ringcomm.ps.segments import IDS, SCALARS, STEPS
from ringcomm.ps.session import is_chief
from ringcomm.torch.ps.buckets import IN_16_BITS, ServedBucket
from ringcomm.torch.ps.feeder import Feeder
from ringcomm.torch.ps.options import WHO

_WITHOUT_STEP: Final = ("SGD",)  # torch counts no steps for it


def require_between_steps(feeder: Feeder, what: str) -> None:
    """Raise RingcommError if gradients of this step have been pushed, and count."""
    feeder.session.client.listen()
    has_new_values = feeder.n_replaced != feeder.session.n_replaced  # then they do not count
    if feeder.n_pushed and not has_new_values:
        raise RingcommError(
            f"{WHO}: {what} between backward() and step(): gradients of this step have been "
            "pushed, and would count twice or not at all. Call step() before, or pass "
            "overlap=False"
        )


def push_values(feeder: Feeder) -> None:
    """Give the chief's values to the servers and all workers. Collective, between two steps."""
    _from_chief(feeder, lambda bucket: bucket.table.push(bucket.values(), assign=True).wait())


def pull_values(feeder: Feeder) -> None:
    """Fetch the servers' values, between two steps."""
    feeder.begin_step()
    feeder.note_fetching()
    feeder.fetch_values(feeder.buckets)
    feeder.buffers.fetch()


class StateRecovery:
    """Takes an optimizer back to a checkpoint, with the tables. See ringcomm.ps.session.Recovering.

    Attributes:
        number: of the optimizer.
    """

    def __init__(self, feeder: Feeder) -> None:
        self._feeder = weakref.ref(feeder)
        self.number = feeder.number
        feeder.session.recovering.add(self)

    def require_recoverable(self) -> None:
        feeder = self._feeder()
        if feeder is not None and feeder.options.class_name is None:
            raise RingcommError(
                f"{WHO}: ps.recover() with apply='worker': the servers take means of gradients "
                "only, and have no parameters to go back to. Start the job again from a checkpoint "
                "of your own"
            )

    def on_recovered(self) -> None:
        feeder = self._feeder()
        if feeder is None or feeder.session.drops_step:  # a forward pass needs them as they are
            return
        feeder.was_applied, feeder.samples = False, None
        feeder.begin_anew()
        feeder.buffers.forget_pushes()
        pull_values(feeder)


def push_state(feeder: Feeder, state: Mapping[Any, Any]) -> None:
    """Give the chief's values and state to the servers, and the values to all. Collective.

    Newcomers and evaluators take the servers' values: what they begin with is older.
    """
    if feeder.session.takes_what_servers_have:
        feeder.forget_updaters()
        for bucket in feeder.buckets:
            bucket.table.updater = feeder.updater_for(bucket)
        pull_values(feeder)
        return
    _from_chief(feeder, lambda each: push_table_state(each.table, from_torch(each, state)))


def gather_state(feeder: Feeder) -> dict[Any, Any]:
    """Return the servers' state by parameter, as torch would have it."""
    found: dict[Any, Any] = {}
    for bucket in feeder.buckets:
        if not bucket.is_frozen:
            to_torch(bucket, pull_table_state(bucket.table), found)
    return found


def _from_chief(feeder: Feeder, push: Callable[[ServedBucket], object]) -> None:
    feeder.forget_updaters()
    for bucket in feeder.buckets:
        bucket.table.updater = feeder.updater_for(bucket)
        bucket.table.forget_residual()
        if is_chief():
            push(bucket)
    if is_chief():
        feeder.buffers.push()
        feeder.buffers.wait()
    collectives.barrier(name=f"values (ps optimizer {feeder.number})", group=feeder.session.group)
    pull_values(feeder)


def to_torch(bucket: ServedBucket, state: TableState, into: MutableMapping[Any, Any]) -> None:
    name = type(bucket.table.updater).__name__
    if not state.slots or (state.steps == 0 and name != "Adagrad"):
        return  # torch makes the state in the first step
    kind = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
    steps, scalars = _of_each(bucket, state)
    entries: list[dict[str, Any]] = [{} for _ in bucket.slots]
    if name not in _WITHOUT_STEP:
        for entry, n in zip(entries, steps, strict=True):
            entry["step"] = torch.tensor(float(n), dtype=kind)
    n_full = bucket.table.updater.n_full_slots
    for k, (key, values) in enumerate(state.slots.items()):
        if k < n_full:
            views = bucket.views(torch.from_numpy(values))
            for entry, view in zip(entries, views, strict=True):
                entry[key] = view.clone()  # keeps strides, shares nothing
        else:
            for entry, own in zip(entries, scalars, strict=True):
                entry[key] = torch.tensor(float(own[k - n_full]), dtype=kind)
    for slot, entry, n in zip(bucket.slots, entries, steps, strict=True):
        if n or name == "Adagrad":
            into[slot.parameter] = entry


def _of_each(bucket: ServedBucket, state: TableState) -> tuple[list[int], list[list[float]]]:
    """Return the number of steps of each parameter, and its scalars in the updater."""
    n_full = bucket.table.updater.n_full_slots
    common = [float(values[0]) for values in list(state.slots.values())[n_full:]]
    steps, scalars = [state.steps] * len(bucket.slots), [common] * len(bucket.slots)
    if state.segments:
        for k, n, own in zip(
            *(state.segments[each] for each in (IDS, STEPS, SCALARS)), strict=True
        ):
            steps[k], scalars[k] = int(n), own.tolist()
    return steps, scalars


def from_torch(bucket: ServedBucket, state: Mapping[Any, Any]) -> TableState:
    updater, values = bucket.table.updater, bucket.values()
    entries = [state.get(slot.parameter) or {} for slot in bucket.slots]
    fills = dict(zip(updater.slot_names, updater.slot_fill, strict=True))
    slots: dict[str, Any] = {}
    for k, (key, fill) in enumerate(fills.items()):
        if k >= updater.n_full_slots:
            known = [float(entry[key]) for entry in entries if key in entry]
            slots[key] = np.array([known[0] if known else fill], values.dtype)
            continue
        flat = torch.full((len(values),), fill, dtype=torch.from_numpy(values).dtype)
        for view, entry in zip(bucket.views(flat), entries, strict=True):
            if entry.get(key) is not None:
                view.copy_(entry[key])
        slots[key] = flat.numpy()
    steps = [_steps(bucket, entry) for entry in entries]
    segments = {}
    if bucket.has_segments:
        once = [key for k, key in enumerate(fills) if k >= updater.n_full_slots]
        scalars = [[float(entry.get(key, fills[key])) for key in once] for entry in entries]
        segments = {
            IDS: np.arange(len(entries)),
            STEPS: np.array(steps, np.int64),
            SCALARS: np.array(scalars, values.dtype).reshape(len(entries), len(once)),
        }
    return TableState(max(steps), values, slots, segments)


def unrounded_state(optimizer: Optimizer, loaded: Mapping[str, Any]) -> dict[Any, Any]:
    """Return the state of an optimizer that has loaded a state_dict().

    torch rounds the state of parameters of 16 bits to 16 bits; the servers' has 32.
    """
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    ids = (i for group in loaded["param_groups"] for i in group["params"])
    state = dict(optimizer.state)
    for p, i in zip(parameters, ids, strict=True):
        if p.dtype in IN_16_BITS and i in loaded["state"]:
            state[p] = loaded["state"][i]
    return state


def _steps(bucket: ServedBucket, entry: Mapping[str, Any]) -> int:
    if type(bucket.table.updater).__name__ in _WITHOUT_STEP:
        return int(entry.get("momentum_buffer") is not None)
    return int(entry.get("step", 0))


def model_state_dict(path: str | Path, *, optimizer: int | None = None) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers in the newest checkpoint of ps.save(), without MPI.

    For model.load_state_dict() of a plain model; tables of ps.table() and rows of embeddings are
    not in it, see ps.load_state_dict().

    Args:
        path: as given to ps.save().
        optimizer: 1 for the model whose optimizer was the first to be wrapped by
            ps.DistributedOptimizer(), and so on; None: all.

    Raises:
        ValueError: optimizer is None, and two have other values under one name; or the checkpoint
            has no optimizer of this number.
        FileNotFoundError: there is no checkpoint.
        BrokenFileError: none can be used; it names the files.
    """
    out: dict[str, torch.Tensor] = {}
    scope_of: dict[str, str] = {}
    parts = [each for each in read_parts(path) if each[0]]
    numbers = sorted({_number_in(scope) for scope, *_ in parts})
    if optimizer is not None and optimizer not in numbers:
        raise ValueError(
            f"ps.model_state_dict: optimizer is {optimizer!r}, and the checkpoint has "
            f"{', '.join(map(str, numbers)) or 'none'}"
        )
    for scope, name, dtype, array in parts:
        if optimizer not in (None, _number_in(scope)):
            continue
        value = torch.from_numpy(np.array(array))
        value = value.to(getattr(torch, dtype)) if dtype else value
        if name in out and not torch.equal(out[name], value):
            raise ValueError(
                f"ps.model_state_dict: {name} is in {scope_of[name]} and in {scope}. Pass "
                "optimizer=1 or another number"
            )
        out[name], scope_of[name] = value, scope
    return out


def _number_in(scope: str) -> int:
    return int(scope.rpartition(" ")[2])
