"""Between torch's state of an optimizer and what the servers keep beside the values."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from typing import Any, Final

import numpy as np
import torch

from ringcomm.ps.states import TableState
from ringcomm.torch.ps.buckets import Bucket

_log: Final = logging.getLogger("ringcomm")
_WITHOUT_STEP: Final = ("SGD",)  # torch counts no steps for it


def to_torch(bucket: Bucket, state: TableState, into: MutableMapping[Any, Any]) -> None:
    """Write the state of a table to state[parameter] of its parameters, as torch would have it."""
    name = type(bucket.table.updater).__name__
    if not state.slots or (state.steps == 0 and name != "Adagrad"):
        return  # torch makes it in the first step
    kind = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
    entries: list[dict[str, Any]] = [{} for _ in bucket.slots]
    for entry in entries:
        if name not in _WITHOUT_STEP:
            entry["step"] = torch.tensor(float(state.steps), dtype=kind)
    for key, values in state.slots.items():
        if len(values) == len(state.values) and key != "mu_product":
            views = bucket.views(torch.from_numpy(values))
            for entry, view in zip(entries, views, strict=True):
                entry[key] = view.clone()  # keeps strides, shares nothing
        else:
            for entry in entries:
                entry[key] = torch.tensor(float(values[0]), dtype=kind)
    for slot, entry in zip(bucket.slots, entries, strict=True):
        into[slot.parameter] = entry


def from_torch(bucket: Bucket, state: Mapping[Any, Any]) -> TableState:
    """Return what the servers are to keep for a bucket, by torch's state of its parameters."""
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
    return TableState(_steps(bucket, entries), values, slots)


def _steps(bucket: Bucket, entries: list[Mapping[str, Any]]) -> int:
    if type(bucket.table.updater).__name__ in _WITHOUT_STEP:
        return int(any(entry.get("momentum_buffer") is not None for entry in entries))
    steps = {int(entry["step"]) for entry in entries if "step" in entry}
    if len(steps) > 1:
        _log.warning(
            "DistributedOptimizer: parameters from %s on have made %s steps; on the servers they "
            "share a table, and go on as if all had made %d",
            bucket.slots[0].name,
            sorted(steps),
            max(steps),
        )
    return max(steps, default=0)
