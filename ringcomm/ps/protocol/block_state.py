"""Packs values of a dense block and the state of its updater as the body of a frame."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ringcomm.ps.partition_state import PartitionState

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes

Array = NDArray[Any]


def joined(arrays: list[Array], dtype: np.dtype[Any], segments: dict[str, Array]) -> Bytes:
    joined: Bytes = np.concatenate([np.asarray(each, dtype) for each in arrays]).view(np.uint8)
    return np.concatenate([joined, *PartitionState({}, segments).packed()]) if segments else joined


def split(
    body: Bytes, sizes: list[int], dtype: np.dtype[Any], name: str
) -> tuple[list[Array], dict[str, Array]]:
    """Read what joined() wrote: arrays of these sizes, and the segments. Raises ValueError."""
    nbytes = sum(sizes) * dtype.itemsize
    if body.nbytes < nbytes:
        raise ValueError(f"state[{name}]: {body.nbytes // dtype.itemsize} numbers came for {sizes}")
    flat, rest = body[:nbytes].view(dtype), body[nbytes:]
    segments = PartitionState.unpacked(rest.copy()).arrays if rest.nbytes else {}
    bounds = np.cumsum([0, *sizes])
    return [flat[a:b] for a, b in itertools.pairwise(bounds)], segments
