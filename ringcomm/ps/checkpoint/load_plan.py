"""Maps values of a checkpoint to values of open tables, by their names. Pure.

A dense table holds one array, or parts with names of their own: parameters of a model share tables,
and another layer may make them share others. Rows of a hash table go together.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringcomm.ps.table_spec import Part, Spec

Array = NDArray[Any]


class Named(NamedTuple):
    """Values that have a name.

    Attributes:
        table: number of the table.
        spec: of it.
        part: name and form.
        start: where they begin in the flat table.
    """

    table: int
    spec: Spec
    part: Part
    start: int

    @property
    def scope(self) -> str:
        """The scope of the name, within which names are unique."""
        return self.spec.scope

    @property
    def stop(self) -> int:
        return self.start + count_of(self.part)

    @property
    def full_name(self) -> str:
        return f"{self.part.name} ({self.scope})" if self.scope else self.part.name


class Piece(NamedTuple):
    """Elements of an open dense table that a checkpoint has.

    Attributes:
        start: first of them in the open table.
        stop: behind the last.
        table: number of the saved table.
        source: first of them there.
    """

    start: int
    stop: int
    table: int
    source: int


class LoadPlan(NamedTuple):
    """The values that ps.load() takes, and their places in the checkpoint.

    Attributes:
        pieces: of open dense tables, by number.
        rows: number of an open hash table -> of the saved one.
        missing: names of open values that the checkpoint has not.
        unlike: why values are not taken that it has under their name.
        unused: names of its values that are not open.
    """

    pieces: dict[int, list[Piece]]
    rows: dict[int, int]
    missing: list[str]
    unlike: list[str]
    unused: list[str]


def count_of(part: Part) -> int:
    return math.prod(part.shape) * (2 if part.dtype.startswith("complex") else 1)


def named_in(specs: Mapping[int, Spec]) -> Iterator[Named]:
    """Yield all values of tables that have names; a table without parts has one."""
    for number, spec in specs.items():
        if spec.kind == "hash" or not spec.parts:
            yield Named(number, spec, Part(spec.name, spec.shape), 0)
            continue
        start = 0
        for part in spec.parts:
            yield Named(number, spec, part, start)
            start += count_of(part)


def labels_of(all_named: Collection[Named]) -> list[str]:
    """Return a key for each: its name, and whose it is if another has the same one."""
    counts = Counter(each.part.name for each in all_named)
    return [each.part.name if counts[each.part.name] == 1 else each.full_name for each in all_named]


def array_of(part: Part, flat: Array) -> Array:
    """Return a part of a flat table in its own shape and dtype; bfloat16 stays float32."""
    if part.dtype.startswith("complex"):
        flat = np.ascontiguousarray(flat).view(part.dtype)
    elif part.dtype not in ("", "bfloat16"):
        flat = flat.astype(part.dtype)
    if not part.order:
        return flat.reshape(part.shape)
    in_memory = flat.reshape([part.shape[axis] for axis in part.order])
    return np.ascontiguousarray(in_memory.transpose(np.argsort(part.order)))


def plan_load(saved: Mapping[int, Spec], opened: Mapping[int, Spec]) -> LoadPlan:
    """Return what is taken from where.

    The same name of the same scope counts; if there is none, the only one with that name.
    """
    sources = list(named_in(saved))
    by_full_name = {each.full_name: each for each in sources}
    counts = Counter(each.part.name for each in sources)
    by_name = {each.part.name: each for each in sources if counts[each.part.name] == 1}
    plan, used = LoadPlan({}, {}, [], [], []), set()
    targets = list(named_in(opened))
    for target, label in zip(targets, labels_of(targets), strict=True):
        source = by_full_name.get(target.full_name) or by_name.get(target.part.name)
        if source is None:
            plan.missing.append(label)
            continue
        used.add(source.full_name)
        why = _difference(source, target)
        if why:
            plan.unlike.append(f"{label}: {why}")
        elif target.spec.kind == "hash":
            plan.rows[target.table] = source.table
        else:
            piece = Piece(target.start, target.stop, source.table, source.start)
            plan.pieces.setdefault(target.table, []).append(piece)
    plan.unused.extend(each.full_name for each in sources if each.full_name not in used)
    return plan


def _difference(source: Named, target: Named) -> str:
    pairs: list[tuple[str, object, object]] = [
        ("kind", source.spec.kind, target.spec.kind),
        ("shape", source.part.shape, target.part.shape),
        ("order of axes in memory", source.part.order, target.part.order),
    ]
    if source.spec.kind == "hash":  # keys go to partitions by their number
        pairs.append(("number of partitions", source.spec.partitions, target.spec.partitions))
    for what, there, here in pairs:
        if there != here:
            return f"{what} is {there} in the checkpoint, and {here} where it is open"
    return ""
