"""The global random generators of this process: torch's for the CPU, numpy's and Python's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Return the states of the generators as numbers and texts, which any file format can hold."""
    version, words, gauss = random.getstate()
    of_numpy = np.random.get_state(legacy=False)
    assert isinstance(of_numpy, dict)
    state = of_numpy["state"]
    return {
        "python": [version, list(words), gauss],
        "numpy": {**of_numpy, "state": {**state, "key": state["key"].tolist()}},
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))
