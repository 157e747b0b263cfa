"""Floats as they are, and in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ringcomm import _core
from ringcomm.arrays.dtypes import DTYPES, DType
from ringcomm.codec.base import FramedCodec
from ringcomm.codec.frame import Bytes, Floats, Header, Kind
from ringcomm.errors import CodecError


class _Cast(FramedCodec):
    """Writes elements in the narrower of their own dtype and `wire`."""

    wire: ClassVar[DType]

    @classmethod
    def _wire_of(cls, dtype: DType) -> DType:
        return cls.wire if cls.wire.itemsize < dtype.itemsize else dtype

    @classmethod
    def payload_nbytes(cls, header: Header) -> int:
        """Return the length that follows from a header."""
        if header.parameter != 0:
            raise CodecError(
                f"{header.kind}.decode: its parameter is {header.parameter}, not 0. "
                "The buffer is damaged"
            )
        return header.count * cls._wire_of(header.dtype).itemsize

    def _write(self, payload: Bytes, x: Floats, header: Header, draw: int | None) -> None:
        del draw
        wire = self._wire_of(header.dtype)
        if wire is header.dtype:
            payload[:] = x.view(np.uint8)
        else:
            _core.convert(payload, x.view(np.uint8), wire.kernel, header.dtype.kernel)

    @classmethod
    def read(cls, payload: Bytes, header: Header, out: Floats) -> None:
        """Fill out."""
        wire = cls._wire_of(header.dtype)
        if wire is header.dtype:
            out.view(np.uint8)[:] = payload
        else:
            _core.convert(out.view(np.uint8), payload, header.dtype.kernel, wire.kernel)


@dataclass(frozen=True)
class Identity(_Cast):
    """Elements as they are, behind a header. Exact."""

    kind: ClassVar[Kind] = Kind.IDENTITY
    wire: ClassVar[DType] = DTYPES["float64"]


@dataclass(frozen=True)
class FP16(_Cast):
    """float16: 2 bytes per element, rounded once to 11 bits, ties to even.

    Magnitudes from 65520 on become infinite, below 2**-25 zero; inf and NaN stay. float16 stays as
    it is.
    """

    kind: ClassVar[Kind] = Kind.FP16
    wire: ClassVar[DType] = DTYPES["float16"]


@dataclass(frozen=True)
class BF16(_Cast):
    """bfloat16: 2 bytes per element, rounded once to 8 bits, ties to even; the range of float32.

    inf and NaN stay. float16, which is no wider and more precise, stays as it is.
    """

    kind: ClassVar[Kind] = Kind.BF16
    wire: ClassVar[DType] = DTYPES["bfloat16"]
