"""The spec of a table: its shape, mode, updater and so on, compared between ranks that open it."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from ringcomm.errors import MismatchError
from ringcomm.ps.protocol.frame_meta import plain
from ringcomm.ps.update_modes import Mode


class Part(NamedTuple):
    """An array within a flat dense table, such as one of the parameters that share it.

    Attributes:
        name: of it, in a model.
        shape: likewise.
        order: its axes in the order in which its elements lie, the slowest first; empty: 0, 1, 2...
        dtype: of it, as torch names it; empty: that of the table.
    """

    name: str
    shape: tuple[int, ...]
    order: tuple[int, ...] = ()
    dtype: str = ""


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
            ringcomm.ps.segments.
        parts: of a dense table: arrays with names, one behind the other; empty: it is one array.
        scope: whose names these are, such as "optimizer 1".
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
    parts: tuple[Part, ...] = ()
    scope: str = ""

    @cached_property
    def count(self) -> int:
        """Elements of a dense table, or of a row."""
        return math.prod(self.shape)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, data: dict[str, Any]) -> Spec:
        mode = Mode(**data["mode"])
        tuples = {key: tuple(data.get(key, ())) for key in ("shape", "segments")}
        parts = tuple(
            Part(name, tuple(shape), tuple(order), dtype)
            for name, shape, order, dtype in data.get("parts", ())
        )
        return cls(**{**data, **tuples, "parts": parts, "mode": mode})

    def require_same(self, other: Spec, rank: int) -> None:
        mine, theirs = self.to_json(), other.to_json()
        for key, value in mine.items():
            if _text(value) == _text(theirs[key]):
                continue
            what, a, b = _in_words(self.kind, key, value, theirs[key])
            hint = " (of arrays, the chief's counts)" if what == "init" else ""
            raise MismatchError(
                f"table[{self.name}]: it has {what}={a}, and rank {rank} opens it with {what}={b}. "
                f"Open it alike everywhere{hint}, or give it another name"
            )


def _text(value: Any) -> str:
    return json.dumps(value, default=plain)


def _in_words(kind: str, key: str, mine: Any, theirs: Any) -> tuple[str, str, str]:
    """Return how an error names a field of two specs and shows both values."""
    if key == "parts":  # perhaps thousands: the first that differ
        pairs = itertools.zip_longest(mine, theirs)
        mine, theirs = next((a, b) for a, b in pairs if _text(a) != _text(b))
    if key == "initial" and kind == "dense":
        mine, theirs = ("an array" if each == "chief" else repr(each) for each in (mine, theirs))
        return "init", mine, theirs
    if key == "updater":
        return key, _of_updater(mine, theirs), _of_updater(theirs, mine)
    return key, repr(mine), repr(theirs)


def _of_updater(mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Return its name, with what differs from another of the same name."""
    is_same = mine["updater"] == theirs["updater"]
    odd = (f"{k}={v!r}" for k, v in mine.items() if is_same and _text(v) != _text(theirs[k]))
    return f"{mine['updater']}({', '.join(odd)})"
