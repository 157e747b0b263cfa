"""The global random generators of this process: torch's for the CPU, numpy's and Python's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Return their states, as plain numbers and texts, which any format can hold."""
    version, words, gauss = random.getstate()
    of_numpy = np.random.get_state(legacy=False)
    assert isinstance(of_numpy, dict)
    return {
        "python": [version, list(words), gauss],
        "numpy": {**of_numpy, "state": _with_key(of_numpy["state"], list)},
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Set them to what random_state() returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    of_numpy = state["numpy"]
    np.random.set_state({**of_numpy, "state": _with_key(of_numpy["state"], np.uint32)})
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))


def _with_key(state: dict[str, Any], kind: type) -> dict[str, Any]:
    key = np.asarray(state["key"], np.uint32)
    return {**state, "key": key.tolist() if kind is list else key}
