"""The header of an encoded array, and the checks of buffers and arrays.

The header has 16 bytes, little-endian: kind, dtype, mark (2 bytes), parameter (4), count (8).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringcomm.arrays.dtypes import DTYPES, DType
from ringcomm.errors import CodecError

Bytes = NDArray[np.uint8]
Floats = NDArray[Any]  # float16, float32 or float64
Buffer = bytes | bytearray | memoryview | Bytes

_FORMAT = struct.Struct("<BBHIQ")
HEADER_NBYTES = _FORMAT.size
_MARK = 0x6372  # "rc": without it, no codec wrote the buffer

_BY_NUMPY = {np.dtype(name): DTYPES[name] for name in ("float16", "float32", "float64")}
_BY_CODE = {dtype.kernel: dtype for dtype in _BY_NUMPY.values()}


class Kind(IntEnum):
    """The codec that wrote a buffer. The numbers are part of the format, and never change."""

    IDENTITY = 1
    FP16 = 2
    BF16 = 3
    INT8 = 4
    TOPK = 5

    def __str__(self) -> str:
        return _NAMES[self]


_NAMES = dict(zip(Kind, ("Identity", "FP16", "BF16", "Int8", "TopK"), strict=True))
# Labels of errors; making them in each call would be too slow.
ENCODE = {kind: f"{name}.encode" for kind, name in _NAMES.items()}
DECODE = {kind: f"{name}.decode" for kind, name in _NAMES.items()}
_BY_NUMBER = {int(kind): kind for kind in Kind}


@dataclass(frozen=True, slots=True)
class Header:
    """The header of an encoded array."""

    kind: Kind
    dtype: DType  # of the array that was encoded
    parameter: int  # Int8: elements per block; TopK: elements sent; else 0
    count: int

    def write(self, buffer: Bytes) -> None:
        """Write the header at the beginning of the buffer."""
        fields = (self.kind, self.dtype.kernel, _MARK, self.parameter, self.count)
        _FORMAT.pack_into(buffer.data, 0, *fields)

    def __str__(self) -> str:
        return f"{self.kind} of {self.count} {self.dtype}"


def read_header(buffer: Buffer) -> Header:
    """Return the header of a buffer, without a check of the rest.

    Raises CodecError if no codec wrote the buffer.
    """
    data = _as_bytes(buffer)
    if data.size < HEADER_NBYTES:
        raise CodecError(
            f"decode: the buffer has {data.size} bytes, a header alone {HEADER_NBYTES}. "
            "Pass the whole result of encode()"
        )
    kind, code, mark, parameter, count = _FORMAT.unpack_from(data.data)
    if mark != _MARK or kind not in _BY_NUMBER or code not in _BY_CODE:
        raise CodecError(
            f"decode: the buffer begins with {bytes(data[:4]).hex(' ')}, as no result of "
            "encode() does. Pass the whole result of encode()"
        )
    return Header(_BY_NUMBER[kind], _BY_CODE[code], parameter, count)


def open_buffer(
    buffer: Buffer, out: Floats, known: Mapping[Kind, Callable[[Header], int]]
) -> tuple[Header, Bytes]:
    """Return the header and the payload of a buffer. Raises if they do not fit `out`."""
    header, payload = split_buffer(buffer, known)
    what = DECODE[header.kind]
    dtype = dtype_of(out, what)
    if not out.flags.writeable:
        raise ValueError(f"{what}: out is read-only. Pass a writable array")
    if header.count != out.size or header.dtype is not dtype:
        raise CodecError(
            f"{what}: the buffer holds {header.count} {header.dtype}, out has {out.size} {dtype}. "
            "Pass an out of the count and dtype of the buffer"
        )
    return header, payload


def split_buffer(
    buffer: Buffer, known: Mapping[Kind, Callable[[Header], int]]
) -> tuple[Header, Bytes]:
    """Return the header and the payload of a buffer. Checks the payload's length alone.

    `known` has, for each kind that is accepted, a function that returns the payload's length.
    """
    data = _as_bytes(buffer)
    header = read_header(data)
    if header.kind not in known:
        wanted = ", ".join(map(str, known))
        raise CodecError(
            f"{wanted}.decode: the buffer was written by {header.kind}. "
            "Use codec.decode(), which accepts any codec"
        )
    nbytes = HEADER_NBYTES + known[header.kind](header)
    if data.size != nbytes:
        raise CodecError(
            f"{header.kind}.decode: {header} take {nbytes} bytes, the buffer has {data.size}. "
            "It is damaged, or not whole"
        )
    return header, data[HEADER_NBYTES:]


def _as_bytes(buffer: Buffer) -> Bytes:
    if isinstance(buffer, np.ndarray) and buffer.dtype == np.uint8 and buffer.ndim == 1:
        return np.ascontiguousarray(buffer)
    view = buffer.data if isinstance(buffer, np.ndarray) else memoryview(buffer)
    if not view.c_contiguous:
        raise TypeError("decode: the buffer is not contiguous. Pass what encode() returned")
    return np.frombuffer(view.cast("B"), np.uint8) if view.nbytes else np.empty(0, np.uint8)


def dtype_of(x: Floats, what: str) -> DType:
    """Return x's dtype. Raises TypeError for anything but contiguous floats in one dimension."""
    if not isinstance(x, np.ndarray) or hasattr(x, "mask"):  # a mask would be lost
        raise TypeError(f"{what}: takes numpy arrays, not {type(x).__name__}")
    if x.ndim != 1 or not x.flags.c_contiguous or not x.flags.aligned:
        raise TypeError(
            f"{what}: takes contiguous arrays of one dimension, not shape {x.shape} with strides "
            f"{x.strides}. Pass np.ascontiguousarray(x).reshape(-1)"
        )
    return known_dtype(x.dtype, what)


def known_dtype(dtype: np.dtype[Any], what: str = "codec") -> DType:
    known = _BY_NUMPY.get(dtype)
    if known is None:
        raise TypeError(f"{what}: takes float16, float32 or float64, not {dtype}. Cast before")
    return known


def take_buffer(out: Bytes | None, nbytes: int, what: str) -> Bytes:
    """Return the first nbytes of out, or of a new array. Raises if out does not fit."""
    if out is None:
        return np.empty(nbytes, np.uint8)
    if not isinstance(out, np.ndarray) or out.dtype != np.uint8 or out.ndim != 1:
        raise TypeError(f"{what}: out must be an array of uint8 of one dimension")
    if not out.flags.c_contiguous or not out.flags.writeable:
        raise TypeError(f"{what}: out must be contiguous and writable")
    if out.size < nbytes:
        raise ValueError(
            f"{what}: out has {out.size} bytes, {nbytes} are needed. See encoded_nbytes()"
        )
    return out[:nbytes]
