"""ps.export_safetensors(): the values of a checkpoint as a file that other programs read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ringcomm.atomic_files import replacing
from ringcomm.ps.checkpoint.check_checkpoint_arguments import path_of
from ringcomm.ps.checkpoint.read_without_servers import load_state_dict


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
