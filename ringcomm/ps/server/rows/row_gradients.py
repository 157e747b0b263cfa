"""Gradients of rows: decodes them, and holds them until the mean of their round is released."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringcomm import _core
from ringcomm.arrays.base import Bytes
from ringcomm.arrays.dtypes import DTYPES
from ringcomm.ps.optim import Updater
from ringcomm.ps.protocol.frame_meta import ASSIGN, ENCODED, PLACE_NBYTES, PushMeta
from ringcomm.ps.protocol.row_compression import decoded_rows
from ringcomm.ps.table_spec import Spec

Array = NDArray[Any]
Keys = NDArray[np.uint64]
Source = tuple[Keys, Array, float, NDArray[np.uint32] | None]


class RowGradient(NamedTuple):
    """A push of rows, decoded; keys, rows and places are memory of the sender.

    Attributes:
        weight: of the gradient in the mean of a round.
        hyper: hyper-parameters of the updater.
        keys: flat.
        rows: flat.
        clock: of the request.
        places: which of the rows each key's is; None: they are in the order of the keys.
    """

    weight: float
    hyper: NDArray[np.float64]
    keys: Keys
    rows: Array
    clock: int
    places: NDArray[np.uint32] | None = None

    def source(self, weight: float) -> Source:
        """Return the gradient as _core.Shard.push() takes it."""
        return self.keys, self.rows, weight, self.places

    def picked(self, is_in: NDArray[np.bool_], dim: int) -> RowGradient:
        which = np.flatnonzero(is_in) if self.places is None else self.places[is_in]
        rows = self.rows.reshape(-1, dim)[which].reshape(-1)
        return self._replace(keys=self.keys[is_in], rows=rows, places=None)


def unpacked(
    meta: PushMeta, body: Bytes, spec: Spec, shared: Bytes | None
) -> tuple[Keys, Array, NDArray[np.uint32] | None]:
    """Return the keys, rows and places of a push; see RowGradient.

    Args:
        meta: of the request.
        body: of the request.
        spec: of the table.
        shared: memory that has the rows, if the body has only keys and perhaps places.

    Raises:
        ValueError: it does not fit the table.
    """
    name, dim = spec.name, spec.count
    if meta.dtype == ENCODED:
        return *decoded_rows(body, meta.n, spec), None
    if meta.dtype not in DTYPES or meta.dtype not in (spec.dtype, "float16", "bfloat16"):
        raise ValueError(f"push[{name}]: dtype {meta.dtype}, and the table has {spec.dtype}")
    # The core knows bfloat16 by its bits.
    kind = np.dtype(np.uint16 if meta.dtype == "bfloat16" else meta.dtype)
    keys, rest = body[: 8 * meta.n], body[8 * meta.n :]
    expected = meta.n * (8 + dim * kind.itemsize)
    is_right = body.nbytes == expected
    if shared is not None:
        is_right = keys.nbytes == 8 * meta.n and rest.nbytes in (0, PLACE_NBYTES * meta.n)
    if not is_right:
        raise ValueError(
            f"push[{name}]: {body.nbytes} bytes came for {meta.n} rows of {dim} "
            f"{meta.dtype}, which have {expected} with their keys"
        )
    if shared is None:
        return keys.view(np.uint64), rest.view(kind), None
    places = rest.view(np.uint32) if rest.nbytes else None
    return keys.view(np.uint64), shared.view(kind), places


def require_updater(meta: PushMeta, updater: Updater, spec: Spec) -> None:
    expected = len(updater.hyper)
    if not meta.flags & ASSIGN and len(meta.hyper) != expected:
        raise ValueError(
            f"push[{spec.name}]: {len(meta.hyper)} hyper-parameters, and "
            f"{type(updater).__name__} has {expected}"
        )


class HeldRows:
    """The gradients of which the mean of a round is made, in worker order.

    Args:
        n_partitions: of the table.
        dim: columns of a row.

    Attributes:
        gradients: empty if no mean is held; with rows in the order of the keys.
    """

    def __init__(self, n_partitions: int, dim: int) -> None:
        self._n_partitions, self._dim = n_partitions, dim
        self.gradients: list[RowGradient] = []

    def share_of(self, part: int) -> dict[str, Array]:
        """Return a partition's share of the mean that is held, as add() takes it."""
        arrays: dict[str, Array] = {}
        for k, each in enumerate(self.gradients):
            share = each.picked(self._is_in(part, each.keys), self._dim)
            arrays[f"held_keys{k}"], arrays[f"held_rows{k}"] = share.keys, share.rows
        return arrays

    def add(self, arrays: dict[str, Array]) -> None:
        """Hold a share of the mean besides the own one; gradients of the same workers."""
        for k, each in enumerate(self.gradients):
            keys = np.concatenate([each.keys, arrays[f"held_keys{k}"]])
            rows = np.concatenate([each.rows, arrays[f"held_rows{k}"]])
            self.gradients[k] = each._replace(keys=keys, rows=rows)

    def drop(self, part: int) -> None:
        for k, each in enumerate(self.gradients):
            self.gradients[k] = each.picked(~self._is_in(part, each.keys), self._dim)

    def _is_in(self, part: int, keys: Keys) -> NDArray[np.bool_]:
        found = np.empty(len(keys), np.uint32)
        _core.partition_of(keys, self._n_partitions, found)
        is_in: NDArray[np.bool_] = found == part
        return is_in


def squares_of_rows(parts: Sequence[RowGradient], dim: int) -> tuple[float, bool]:
    """Return the sum of squares of the mean of gradients of rows, and whether all is finite."""
    present = [part for part in parts if part.weight and len(part.keys)]
    if not present:
        return 0.0, True
    keys = np.concatenate([part.keys for part in present])
    rows = np.concatenate([_floats(part.rows, dim) * part.weight for part in present])
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    firsts = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
    with np.errstate(over="ignore", invalid="ignore"):  # inf and NaN are what is looked for
        sums = np.add.reduceat(rows[order], firsts, axis=0)
        sums /= sum(part.weight for part in parts)
        squares = float(np.square(sums).sum())
    return squares, math.isfinite(squares) or bool(np.isfinite(sums).all())


def _floats(rows: Array, dim: int) -> NDArray[np.float64]:
    """Return rows in float64; of 16 bits, uint16 stands for bfloat16."""
    if rows.dtype == np.uint16:
        rows = (rows.astype(np.uint32) << 16).view(np.float32)
    return rows.reshape(-1, dim).astype(np.float64)
