"""The values of a checkpoint by name, or as safetensors; without servers, MPI or torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringcomm.atomic_files import replacing
from ringcomm.ps.checkpoint.arguments import folder_of, path_of
from ringcomm.ps.checkpoint.files import (
    Record,
    SavedCheckpoint,
    cut_values,
    first_usable,
    reading,
    specs_of,
)
from ringcomm.ps.checkpoint.load_plan import Named, array_of, labels_of, named_in
from ringcomm.ps.partition_state import PartitionState
from ringcomm.ps.table_spec import Spec


def load_state_dict(path: str | Path) -> dict[str, Any]:
    """Return the values of all tables of the newest checkpoint; without servers, MPI or torch.

    Args:
        path: as given to ps.save().

    Returns:
        name -> array. Parameters and buffers of a model have the names and shapes that they have
        there; if another optimizer, or a table, has the same name, "name (optimizer 2)". A table of
        ps.table() has its own name. Of a hash table, a dict of arrays with the rows of all
        partitions one behind the other: "keys", "values", and what else a row has. Buffers of
        bfloat16 are float32.

    Raises:
        FileNotFoundError: there is no checkpoint.
        BrokenFileError: none can be used; it names the files. If an older one can, a
            warning says so.
    """
    found = first_usable(folder_of("ps.load_state_dict", path), "ps.load_state_dict", _values_of)
    if found is None:
        raise FileNotFoundError(f"ps.load_state_dict: no complete checkpoint in {path}")
    return found


def read_parts(path: str | Path) -> list[tuple[str, str, str, NDArray[Any]]]:
    """Return scope, name, dtype and values of all dense values; see load_state_dict()."""
    found = first_usable(folder_of("ps.model_state_dict", path), "ps.model_state_dict", _parts_of)
    if found is None:
        raise FileNotFoundError(f"ps.model_state_dict: no complete checkpoint in {path}")
    return found


def _parts_of(checkpoint: SavedCheckpoint) -> list[tuple[str, str, str, NDArray[Any]]]:
    all_named = named_in(specs_of(checkpoint.manifest))
    read = reading(checkpoint.folder)
    return [
        (each.scope, each.part.name, each.part.dtype, _array(read, checkpoint, each))
        for each in all_named
        if each.spec.kind == "dense"
    ]


def _array(
    read: Callable[[Record], PartitionState], checkpoint: SavedCheckpoint, named: Named
) -> NDArray[Any]:
    records = checkpoint.records[named.table]
    return array_of(named.part, cut_values(read, named.spec, records, named.start, named.stop))


def _values_of(checkpoint: SavedCheckpoint) -> dict[str, Any]:
    read = reading(checkpoint.folder)
    out: dict[str, Any] = {}
    all_named = list(named_in(specs_of(checkpoint.manifest)))
    for label, each in zip(labels_of(all_named), all_named, strict=True):
        if each.spec.kind == "dense":
            out[label] = _array(read, checkpoint, each)
        else:
            states = [read(record) for record in checkpoint.records[each.table]]
            arrays = [state.arrays for state in states] or [_no_rows(each.spec)]
            out[label] = {n: np.concatenate([a[n] for a in arrays]) for n in arrays[0]}
    return out


def _no_rows(spec: Spec) -> dict[str, NDArray[Any]]:
    return {"keys": np.empty(0, np.uint64), "values": np.empty((0, spec.count), spec.dtype)}


def export_safetensors(path: str | Path, file: str | Path) -> list[str]:
    """Write the newest checkpoint of ps.save() to a file of safetensors; without MPI or torch.

    Values have the names that ps.load_state_dict() gives them; a hash table "user" is two arrays,
    "user.keys" in uint64 and "user.values". It needs the package safetensors.

    Args:
        path: as given to ps.save().
        file: that is written, or replaced.

    Returns:
        The names.

    Raises:
        ModuleNotFoundError: safetensors is not installed.
        FileNotFoundError: there is no checkpoint.
        BrokenFileError: none can be used; it names the files.
        TypeError, ValueError: a path names nothing; nothing was written.
    """
    target = path_of("ps.export_safetensors", file, "file").resolve()
    try:
        from safetensors.numpy import save
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "ps.export_safetensors needs safetensors: pip install safetensors", name=error.name
        ) from error
    flat: dict[str, np.ndarray[Any, Any]] = {}
    for name, value in load_state_dict(path_of("ps.export_safetensors", path)).items():
        if isinstance(value, dict):
            flat |= {f"{name}.{what}": value[what] for what in ("keys", "values") if what in value}
        else:
            flat[name] = value
    content = save(flat)
    with replacing(target) as out:
        out.write(content)
    return sorted(flat)
