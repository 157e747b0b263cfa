"""Compresses rows of hash tables, each by itself, so that any rows can go together."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from ringcomm import _core, codec
from ringcomm.arrays.dtypes import DTYPES
from ringcomm.codec.int8 import take_blocks
from ringcomm.ps.compression import for_rows, is_finite, pull_codec, push_codec
from ringcomm.ps.protocol.frame_meta import ENCODED

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.codec.base import FramedCodec
    from ringcomm.ps.table_spec import Spec

Array = NDArray[Any]
_KEY: Final = 8  # bytes


class WireRows:
    """Rows of one push, as they travel.

    Args:
        rows: shape (n, dim); bfloat16 as uint16.
        dtype: of the rows, as in PushMeta.
        encoded: the rows as one Int8 buffer with a block per row; None: they are not encoded.

    Attributes:
        n: how many there are.
    """

    def __init__(self, rows: Array, dtype: str, encoded: Bytes | None = None) -> None:
        self.n = len(rows)
        self.dtype = dtype
        self._rows = rows
        self._encoded = encoded

    @property
    def plain(self) -> Bytes | None:
        return None if self._encoded is not None else self._rows.reshape(-1).view(np.uint8)

    @property
    def is_finite(self) -> bool:
        """True if no row that is not encoded has NaN or inf."""
        return self._encoded is not None or _core.all_finite(self._rows)

    def nbytes(self, n: int) -> int:
        dim, itemsize = self._rows.shape[1], self._rows.itemsize
        of_row: int = dim * itemsize if self._encoded is None else dim + max(4, itemsize)
        return n * of_row + (0 if self._encoded is None else codec.HEADER_NBYTES)

    def write(self, order: NDArray[np.int64] | None, out: Bytes) -> bool:
        """Write rows to what is nbytes() long; return False if some are not finite.

        Args:
            order: which; None: all.
            out: where.
        """
        if self._encoded is None:
            return _core.stage_rows(out, self._rows, self._rows.shape[1], order)
        out[:] = take_blocks(self._encoded, slice(None) if order is None else order)
        return True


class RowPacker:
    """Compresses the rows that a worker pushes to a hash table.

    Args:
        spec: of the table.
        sender: number of this worker, from which its random numbers are made.
    """

    def __init__(self, spec: Spec, sender: int) -> None:
        self._name, self._sender = spec.name, sender
        self._dtype, self._dtype_name = np.dtype(spec.dtype), spec.dtype
        self._codec = for_rows(push_codec(spec.compression), spec.count)
        self._numbers = itertools.count()

    def packed(self, rows: Array, *, is_exact: bool, is_strict: bool) -> WireRows:
        """Return rows as they travel.

        Args:
            rows: shape (n, dim), of the table's dtype or of 16 bits.
            is_exact: do not compress them.
            is_strict: NaN and inf are an error.

        Raises:
            ValueError: is_strict, and int8 would hide NaN or inf; else write() finds them.
        """
        if isinstance(self._codec, codec.Int8) and not is_exact:
            plain = rows.astype(self._dtype, copy=False)
            if is_strict and not is_finite(plain):
                raise not_finite(self._name, len(rows))
            draw = codec.draw_number("push", self._name, self._sender, next(self._numbers))
            return WireRows(plain, ENCODED, self._codec.encode(plain.reshape(-1), draw=draw))
        if rows.itemsize == 2 and rows.dtype != np.float16:
            return WireRows(rows.view(np.uint16), "bfloat16")
        if rows.itemsize == 2:
            return WireRows(rows, "float16")
        if is_exact or self._codec is None:
            return WireRows(rows, self._dtype_name)
        return _narrowed(self._codec, rows)


def _narrowed(wanted: FramedCodec | None, rows: Array) -> WireRows:
    if isinstance(wanted, codec.FP16):
        with np.errstate(over="ignore"):  # inf is looked for later
            return WireRows(rows.astype(np.float16), "float16")
    if isinstance(wanted, codec.BF16):
        bits = np.empty(rows.shape, np.uint16)
        to, own = DTYPES["bfloat16"].kernel, DTYPES[rows.dtype.name].kernel
        flat = rows.reshape(-1).view(np.uint8)
        _core.convert(bits.reshape(-1).view(np.uint8), flat, to, own)
        return WireRows(bits, "bfloat16")
    return WireRows(rows, rows.dtype.name)


def not_finite(name: str, n: int) -> ValueError:
    return ValueError(
        f"push[{name}]: NaN or inf among the {n} rows. Look where they come "
        'from, or open the table with nan="allow"'
    )


def decoded_rows(body: Bytes, n: int, spec: Spec) -> tuple[NDArray[np.uint64], Array]:
    """Return keys and rows of a push that is encoded. Raises CodecError."""
    keys, buffer = body[: _KEY * n], body[_KEY * n :]
    codec.check(buffer, n * spec.count, spec.dtype)
    return keys.view(np.uint64), codec.decoded(buffer)


def encoded_rows(rows: Array, spec: Spec, *parts: int) -> Bytes | None:
    """Return rows that a server has read as a pull gets them; None if pulls are not compressed.

    Args:
        rows: flat.
        spec: of the table.
        parts: numbers that identify this reply: int8 rounds by them.
    """
    wanted = for_rows(pull_codec(spec.compression), spec.count)
    if wanted is None:
        return None
    return wanted.encode(rows, draw=codec.draw_number("pull", spec.name, *parts))
