"""ps.model_state_dict(): a model out of a checkpoint of the servers, in plain torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from ringcomm.ps.checkpoint.read_without_servers import read_parts


def model_state_dict(path: str | Path, *, optimizer: int | None = None) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers in the newest checkpoint of ps.save(), without MPI.

    For model.load_state_dict() of a plain model; tables of ps.table() and rows of embeddings are
    not in it, see ps.load_state_dict().

    Args:
        path: as given to ps.save().
        optimizer: 1 for the model whose optimizer was the first to be wrapped by
            ps.DistributedOptimizer(), and so on; None: all.

    Raises:
        ValueError: optimizer is None, and two have other values under one name.
        FileNotFoundError: there is no checkpoint.
        BrokenFileError: none can be used; it names the files.
    """
    out: dict[str, torch.Tensor] = {}
    scope_of: dict[str, str] = {}
    for scope, name, dtype, array in read_parts(path):
        if not scope or optimizer not in (None, int(scope.rpartition(" ")[2])):
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
