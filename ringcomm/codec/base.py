"""The contract of all codecs, and what they have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import DTypeLike

from ringcomm.arrays.dtypes import DType
from ringcomm.codec.frame import (
    ENCODE,
    HEADER_NBYTES,
    Buffer,
    Bytes,
    Floats,
    Header,
    Kind,
    dtype_of,
    known_dtype,
    open_buffer,
    take_buffer,
)


class Codec(Protocol):
    """Turns an array into fewer bytes and back. Frozen and without state: any thread may use it."""

    def encoded_nbytes(self, count: int, dtype: DTypeLike) -> int:
        """Return the exact length of what encode() returns for such an array, in bytes."""
        ...

    def encode(self, x: Floats, *, out: Bytes | None = None, draw: int | None = None) -> Bytes:
        """Return x in fewer bytes, behind a header of 16 bytes that says what it is.

        Args:
            x: shape (count,), contiguous, float16, float32 or float64. Only read.
            out: uint8, contiguous, at least encoded_nbytes() long, apart from x; its first bytes
                are written and returned.
            draw: for codecs that round at random: which random numbers, 0 to 2**64 - 1. One of its
                own for every encoding; draw_number() makes them.

        Returns:
            uint8, shape (encoded_nbytes(count, x.dtype),).

        Raises:
            TypeError: x or out is of another kind; torch tensors go in as x.numpy().
            ValueError: out is too short, or draw is missing or too large.
        """
        ...

    def decode(self, buffer: Buffer, out: Floats) -> Floats:
        """Return out, overwritten with what encode() of this codec was given, or near it.

        Settings (a block, a ratio) come from the buffer's header, not from this codec.

        Args:
            buffer: exactly what encode() returned, at any address; it may come from anywhere.
            out: shape (count,), contiguous, writable, of the dtype of x, apart from buffer.

        Raises:
            CodecError: the buffer is not one, or not for out. Nothing was written.
        """
        ...


class FramedCodec(Codec, ABC):
    """Base of the codecs: the header, and the checks."""

    kind: ClassVar[Kind]

    def encoded_nbytes(self, count: int, dtype: DTypeLike) -> int:  # noqa: D102 - inherits it
        header = self._header(count, known_dtype(np.dtype(dtype)))
        return HEADER_NBYTES + self.payload_nbytes(header)

    def encode(  # noqa: D102
        self, x: Floats, *, out: Bytes | None = None, draw: int | None = None
    ) -> Bytes:
        what = ENCODE[self.kind]
        dtype = dtype_of(x, what)
        header = self._header(x.size, dtype)
        buffer = take_buffer(out, HEADER_NBYTES + self.payload_nbytes(header), what)
        self._write(buffer[HEADER_NBYTES:], x, header, draw)
        header.write(buffer)
        return buffer

    def decode(self, buffer: Buffer, out: Floats) -> Floats:  # noqa: D102
        header, payload = open_buffer(buffer, out, {self.kind: self.payload_nbytes})
        self.read(payload, header, out)
        return out

    def _header(self, count: int, dtype: DType) -> Header:
        return Header(self.kind, dtype, self._parameter(count), count)

    def _parameter(self, count: int) -> int:
        """Return what payload_nbytes() and read() must know besides dtype and count."""
        del count
        return 0

    @classmethod
    @abstractmethod
    def payload_nbytes(cls, header: Header) -> int:
        """Return the length that follows from a header. Raises CodecError if it makes no sense."""

    @abstractmethod
    def _write(self, payload: Bytes, x: Floats, header: Header, draw: int | None) -> None:
        """Fill all of payload."""

    @classmethod
    def check(cls, payload: Bytes, header: Header) -> None:
        """Raise CodecError if read() would, for a payload of the length of its header."""
        del payload, header

    @classmethod
    @abstractmethod
    def read(cls, payload: Bytes, header: Header, out: Floats) -> None:
        """Fill all of out, or raise CodecError before anything is written."""
