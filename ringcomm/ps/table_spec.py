"""The spec of a table: its shape, mode, updater and so on, compared between ranks that open it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from ringcomm.errors import MismatchError
from ringcomm.ps.update_modes import Mode


@dataclass(frozen=True)
class Spec:
    """A table, dense or hashed.

    Attributes:
        name: of the table, alike on all ranks.
        kind: "dense" or "hash".
        dtype: of the values: float32 or float64.
        shape: of a dense table; of a hash table (dim,).
        updater: to_json() of it.
        mode: how pushes become updates.
        block: the most elements of a slice; 0 for a hash table.
        initial: of a hash table: to_json() of its initializer; of a dense one "chief" (its values
            are pushed) or a number.
        policies: of a hash table: admission and eviction.
        partitions: how many there are.
        compression: of pushes and pulls, see ringcomm.ps.compression; empty: none.
        segments: of a dense table: first elements of what has a gradient, or none, by itself; see
            ringcomm.ps.parameters_sharing_a_dense_table.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    updater: Any
    mode: Mode
    block: int
    initial: Any
    partitions: int
    policies: dict[str, Any] = field(default_factory=dict)
    compression: dict[str, Any] = field(default_factory=dict)
    segments: tuple[int, ...] = ()

    @cached_property
    def count(self) -> int:
        """Elements of a dense table, or of a row."""
        return math.prod(self.shape)

    def to_json(self) -> dict[str, Any]:
        """Return the spec as of_json() reads it."""
        return asdict(self)

    @classmethod
    def of_json(cls, data: dict[str, Any]) -> Spec:
        """Return the spec that to_json() wrote."""
        mode = Mode(**data["mode"])
        tuples = {key: tuple(data.get(key, ())) for key in ("shape", "segments")}
        return cls(**{**data, **tuples, "mode": mode})

    def require_same(self, other: Spec, rank: int) -> None:
        """Raise MismatchError if the spec of another rank differs."""
        mine, theirs = self.to_json(), other.to_json()
        for key, value in mine.items():
            if json.dumps(value) != json.dumps(theirs[key]):
                raise MismatchError(
                    f"table[{self.name}]: it has {key}={value!r}, and rank {rank} opens it with "
                    f"{key}={theirs[key]!r}. Open it alike everywhere, or give it another name"
                )
