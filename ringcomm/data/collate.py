"""Makes a batch of samples, and maps a function over the arrays of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringcomm.arrays import adapter_for


def stack(samples: Sequence[Any]) -> Any:
    """Return a batch of one or more samples of the same structure.

    Stacks numbers and numpy arrays into a numpy array with a new first dimension, and tensors into
    a tensor. Tuples, lists and dicts become one such object of batches. Others become a list.
    """
    first = samples[0]
    if isinstance(first, dict):
        return {key: stack([sample[key] for sample in samples]) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*map(stack, zip(*samples, strict=True)))
    if isinstance(first, tuple | list):
        return type(first)(map(stack, zip(*samples, strict=True)))
    if isinstance(first, bool | int | float | complex | np.generic | np.ndarray):
        return np.stack([np.asarray(sample) for sample in samples])
    try:
        adapter = adapter_for(first)
    except TypeError:
        return list(samples)
    batch = adapter.empty(first, (len(samples), *adapter.shape(first)))
    for place, sample in enumerate(samples):
        if sample.shape != first.shape:
            raise ValueError(
                f"cannot stack samples of shapes {tuple(first.shape)} and {tuple(sample.shape)}: "
                "pass collate="
            )
        batch[place] = sample
    return batch


def map_arrays(change: Callable[[Any], Any], batch: Any) -> Any:
    """Return the batch with change() applied to each array, and to each list without arrays."""
    if isinstance(batch, dict):
        return {key: map_arrays(change, value) for key, value in batch.items()}
    if isinstance(batch, tuple):
        values = [map_arrays(change, value) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else tuple(values)
    if isinstance(batch, list) and any(hasattr(value, "shape") for value in batch):
        return [map_arrays(change, value) for value in batch]
    return change(batch)
