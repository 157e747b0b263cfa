"""The state of a partition as bytes, for files and for other servers; cut anew if bounds differ."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from ringcomm.ps.optim import Updater, from_json
from ringcomm.ps.segments import merged

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.table_spec import Spec

Array = NDArray[Any]
_HEAD: Final = struct.Struct("<8sQ")
_MAGIC: Final = b"ringps01"
_LINE: Final = 64


@dataclass(frozen=True)
class PartitionState:
    """The values of a partition, and the state of its updater.

    Attributes:
        meta: numbers and texts; of a dense one "start", "stop" and "steps".
        arrays: by name, contiguous; of a dense one "values", "slot0", "slot1" and so on.
    """

    meta: dict[str, Any]
    arrays: dict[str, Array] = field(default_factory=dict)

    def packed(self) -> list[Bytes]:
        """Return the bytes that unpacked() reads, in pieces; the arrays are not copied."""
        at, entries = 0, []
        for name, array in self.arrays.items():
            entries.append([name, array.dtype.str, array.shape, at])
            at += _padded(array.nbytes)
        head = json.dumps({"meta": self.meta, "arrays": entries}).encode()
        pieces = [np.frombuffer(_HEAD.pack(_MAGIC, len(head)) + head, np.uint8)]
        for array in self.arrays.values():
            pieces.append(_gap(pieces[-1].nbytes))
            pieces.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        return pieces

    @classmethod
    def unpacked(cls, data: Bytes) -> PartitionState:
        """Read it; the arrays are views of `data`.

        Raises:
            ValueError: it is no state, or its end is missing.
        """
        if data.nbytes < _HEAD.size:
            raise ValueError(f"{data.nbytes} bytes are no partition")
        magic, n_head = _HEAD.unpack_from(data.data)
        start = _HEAD.size + n_head
        if magic != _MAGIC or start > data.nbytes:
            raise ValueError("these bytes are no partition")
        head = json.loads(data[_HEAD.size : start].tobytes())
        base, arrays = _padded(start), {}
        for name, kind, shape, at in head["arrays"]:
            dtype = np.dtype(kind)
            nbytes = dtype.itemsize * int(np.prod(shape))
            if base + at + nbytes > data.nbytes and nbytes:
                raise ValueError(f"a partition of {data.nbytes} bytes ends inside {name}")
            arrays[name] = data[base + at :][:nbytes].view(dtype).reshape(shape)
        return cls(head["meta"], arrays)


def recut(spec: Spec, start: int, stop: int, pieces: Sequence[PartitionState]) -> PartitionState:
    """Return elements [start, stop) of a dense table out of slices that were cut otherwise.

    Numbers that a block has once, its steps and NAdam's mu_product, are those of the slice with the
    most steps: too few would blow up what Adam divides by its bias correction.

    Args:
        spec: of the table.
        start: first element.
        stop: behind the last one.
        pieces: whose slices cover the range.

    Raises:
        ValueError: they do not.
    """
    touched = [each for each in pieces if _overlap(each, start, stop) or _is_empty(start, stop)]
    covered = sum(_overlap(each, start, stop) for each in touched)
    if not touched or covered != stop - start:
        raise ValueError(f"table[{spec.name}]: {covered} of elements {start} to {stop} are there")
    oldest = max(touched, key=lambda each: int(each.meta["steps"]))
    names = ["values", *slots_by_element(from_json(spec.updater))]
    arrays = {name: array.copy() for name, array in oldest.arrays.items()}
    for name in names:
        if name not in arrays:
            continue
        whole = np.empty(stop - start, arrays[name].dtype)
        for each in touched:
            own, end = each.meta["start"], each.meta["stop"]
            first, last = max(start, own), min(stop, end)
            if first < last:
                whole[first - start : last - start] = each.arrays[name][first - own : last - own]
        arrays[name] = whole
    arrays |= merged([each.arrays for each in touched])
    return PartitionState({**oldest.meta, "start": start, "stop": stop}, arrays)


def slots_by_element(updater: Updater) -> list[str]:
    slots = updater.new_slots((2,))
    return [f"slot{k}" for k, slot in enumerate(slots) if slot.size == 2]


def _overlap(state: PartitionState, start: int, stop: int) -> int:
    return max(0, min(stop, int(state.meta["stop"])) - max(start, int(state.meta["start"])))


def _is_empty(start: int, stop: int) -> bool:
    return start == stop


def _padded(n: int) -> int:
    return n + -n % _LINE


def _gap(n: int) -> Bytes:
    return np.zeros(-n % _LINE, np.uint8)
