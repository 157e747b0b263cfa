"""Codecs that keep floats as they are, or cast them to 16 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ringcomm._core import convert
from ringcomm.arrays.dtypes import DTYPES, DType
from ringcomm.codec.base import FramedCodec
from ringcomm.codec.encoded_header import Bytes, Floats, Header, Kind
from ringcomm.errors import CodecError


class _Cast(FramedCodec):
    """Writes elements in the narrower of their own dtype and `wire`."""

    wire: ClassVar[DType]

    @classmethod
    def _wire_of(cls, dtype: DType) -> DType:
        return cls.wire if cls.wire.itemsize < dtype.itemsize else dtype

    @classmethod
    def payload_nbytes(cls, header: Header) -> int:
        if header.parameter != 0:
            raise CodecError(
                f"{header.kind}.decode: the parameter is {header.parameter}, not 0. "
                "The buffer is damaged"
            )
        return header.count * cls._wire_of(header.dtype).itemsize

    def _write(self, payload: Bytes, x: Floats, header: Header, draw: int | None) -> None:
        del draw
        wire = self._wire_of(header.dtype)
        if wire is header.dtype:
            payload[:] = x.view(np.uint8)
        else:
            convert(payload, x.view(np.uint8), wire.kernel, header.dtype.kernel)

    @classmethod
    def read(cls, payload: Bytes, header: Header, out: Floats) -> None:
        wire = cls._wire_of(header.dtype)
        if wire is header.dtype:
            out.view(np.uint8)[:] = payload
        else:
            convert(out.view(np.uint8), payload, header.dtype.kernel, wire.kernel)


@dataclass(frozen=True)
class Identity(_Cast):
    """Keeps the elements as they are. Exact."""

    kind: ClassVar[Kind] = Kind.IDENTITY
    wire: ClassVar[DType] = DTYPES["float64"]


@dataclass(frozen=True)
class FP16(_Cast):
    """Casts to float16: 2 bytes per element, 11 bits of precision, ties to even.

    Magnitudes of at least 65520 become infinite, those below 2**-25 zero; inf and NaN stay. float16
    elements stay as they are.
    """

    kind: ClassVar[Kind] = Kind.FP16
    wire: ClassVar[DType] = DTYPES["float16"]


@dataclass(frozen=True)
class BF16(_Cast):
    """Casts to bfloat16: 2 bytes per element, 8 bits of precision, ties to even; range of float32.

    inf and NaN stay. float16 elements, as short and more precise, stay as they are.
    """

    kind: ClassVar[Kind] = Kind.BF16
    wire: ClassVar[DType] = DTYPES["bfloat16"]
