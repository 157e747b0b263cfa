"""The header of an encoded array, and the checks before any of it is used.

16 bytes, little-endian: kind, dtype, mark (2 bytes), parameter (4), count (8).
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
_MARK = 0x6372  # "rc": most buffers that no codec wrote lack it

_BY_NUMPY = {np.dtype(name): DTYPES[name] for name in ("float16", "float32", "float64")}
_BY_CODE = {dtype.kernel: dtype for dtype in _BY_NUMPY.values()}


class Kind(IntEnum):
    """Which codec wrote a buffer. Numbers never change their meaning."""

    IDENTITY = 1
    FP16 = 2
    BF16 = 3
    INT8 = 4
    TOPK = 5

    def __str__(self) -> str:
        return _NAMES[self]


# Said in every error, and too slow to be put together in every call.
_NAMES = {
    Kind.IDENTITY: "Identity",
    Kind.FP16: "FP16",
    Kind.BF16: "BF16",
    Kind.INT8: "Int8",
    Kind.TOPK: "TopK",
}
ENCODE = {kind: f"{name}.encode" for kind, name in _NAMES.items()}
DECODE = {kind: f"{name}.decode" for kind, name in _NAMES.items()}
_BY_NUMBER = {int(kind): kind for kind in Kind}


@dataclass(frozen=True, slots=True)
class Header:
    """The fields of a header."""

    kind: Kind
    dtype: DType  # of the array that was encoded
    parameter: int  # Int8: elements per block; TopK: elements sent; else 0
    count: int

    def write(self, buffer: Bytes) -> None:
        """Write it at the beginning of the buffer."""
        fields = (self.kind, self.dtype.kernel, _MARK, self.parameter, self.count)
        _FORMAT.pack_into(buffer.data, 0, *fields)

    def __str__(self) -> str:
        return f"{self.kind} of {self.count} {self.dtype}"


def read_header(buffer: Buffer) -> Header:
    """Return the header of a buffer; nothing else is checked. CodecError: no codec wrote it."""
    return _header_of(_as_bytes(buffer))


def _header_of(buffer: Bytes) -> Header:
    if buffer.size < HEADER_NBYTES:
        raise CodecError(
            f"decode: the buffer has {buffer.size} bytes, its header alone {HEADER_NBYTES}. "
            "Pass all that encode() returned"
        )
    kind, code, mark, parameter, count = _FORMAT.unpack_from(buffer.data)
    if mark != _MARK or kind not in _BY_NUMBER or code not in _BY_CODE:
        raise CodecError(
            f"decode: the buffer begins with {bytes(buffer[:4]).hex(' ')}, as none of encode() "
            "does. Pass what encode() returned, from its first byte"
        )
    return Header(_BY_NUMBER[kind], _BY_CODE[code], parameter, count)


def open_buffer(
    buffer: Buffer, out: Floats, known: Mapping[Kind, Callable[[Header], int]]
) -> tuple[Header, Bytes]:
    """Return the header and the payload of a buffer that fits out; see split_buffer()."""
    header, payload = split_buffer(buffer, known)
    _require_room(header, out)
    return header, payload


def split_buffer(
    buffer: Buffer, known: Mapping[Kind, Callable[[Header], int]]
) -> tuple[Header, Bytes]:
    """Return the header and the payload of a buffer; the payload is not checked.

    known: for each kind that is welcome, the length of the payload of such a header.
    """
    data = _as_bytes(buffer)
    header = _header_of(data)
    if header.kind not in known:
        wanted = ", ".join(map(str, known))
        raise CodecError(
            f"{wanted}.decode: the buffer was written by {header.kind}. "
            "Use codec.decode(), which takes any"
        )
    nbytes = HEADER_NBYTES + known[header.kind](header)
    if data.size != nbytes:
        raise CodecError(
            f"{header.kind}.decode: {header} take {nbytes} bytes, the buffer has {data.size}. "
            "It is damaged, or not whole"
        )
    return header, data[HEADER_NBYTES:]


def _require_room(header: Header, out: Floats) -> None:
    what = DECODE[header.kind]
    dtype = dtype_of(out, what)
    if not out.flags.writeable:
        raise ValueError(f"{what}: out is read-only. Pass an array that is not")
    if header.count != out.size or header.dtype is not dtype:
        raise CodecError(
            f"{what}: the buffer holds {header.count} {header.dtype}, out has {out.size} {dtype}. "
            "Pass an out of what was encoded"
        )


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
    """Return the dtype as the library knows it. Raises TypeError for one that is not encoded."""
    known = _BY_NUMPY.get(dtype)
    if known is None:
        raise TypeError(f"{what}: takes float16, float32 or float64, not {dtype}. Cast before")
    return known


def take_buffer(out: Bytes | None, nbytes: int, what: str) -> Bytes:
    """Return the first bytes of out, or new ones. Raises if it cannot hold as many."""
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
