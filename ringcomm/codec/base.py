"""The contract of all codecs, and their common base."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import DTypeLike

from ringcomm.arrays.dtypes import DType
from ringcomm.codec.encoded_header import (
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
    """Encodes an array in fewer bytes, and decodes it. Immutable: any thread may use it."""

    def encoded_nbytes(self, count: int, dtype: DTypeLike) -> int:
        """Return the exact number of bytes that encode() returns for `count` elements."""
        ...

    def encode(self, x: Floats, *, out: Bytes | None = None, draw: int | None = None) -> Bytes:
        """Return x in fewer bytes, after a header of 16 bytes with codec, dtype and count.

        Args:
            x: array of shape (count,), contiguous, float16, float32 or float64. It is only read.
            out: array of uint8, contiguous, at least encoded_nbytes() long, without overlap with x.
                encode() writes to its first bytes, and returns them.
            draw: seed of the random numbers for codecs that round at random, 0 to 2**64 - 1. Each
                encoding needs a number of its own; draw_number() makes such numbers.

        Returns:
            An array of uint8, shape (encoded_nbytes(count, x.dtype),).

        Raises:
            TypeError: x or out is not as described. Pass a torch tensor as x.numpy().
            ValueError: out is too short, or draw is missing or too large.
        """
        ...

    def decode(self, buffer: Buffer, out: Floats) -> Floats:
        """Return out, overwritten with the array that was encoded, or an approximation of it.

        Settings such as a block or a ratio come from the buffer's header, not from this codec.

        Args:
            buffer: the whole result of encode(), at any address; it need not be trustworthy.
            out: array of shape (count,), contiguous, writable, of the dtype of x, without overlap
                with buffer.

        Raises:
            CodecError: this codec did not write the buffer, it is damaged, or `out` has another
                count or dtype. Nothing was written.
        """
        ...


class FramedCodec(Codec, ABC):
    """Base of the codecs: writes the header, and checks arguments."""

    kind: ClassVar[Kind]

    def encoded_nbytes(self, count: int, dtype: DTypeLike) -> int:
        header = self._header(count, known_dtype(np.dtype(dtype)))
        return HEADER_NBYTES + self.payload_nbytes(header)

    def encode(self, x: Floats, *, out: Bytes | None = None, draw: int | None = None) -> Bytes:
        what = ENCODE[self.kind]
        dtype = dtype_of(x, what)
        header = self._header(x.size, dtype)
        buffer = take_buffer(out, HEADER_NBYTES + self.payload_nbytes(header), what)
        self._write(buffer[HEADER_NBYTES:], x, header, draw)
        header.write(buffer)
        return buffer

    def decode(self, buffer: Buffer, out: Floats) -> Floats:
        header, payload = open_buffer(buffer, out, {self.kind: self.payload_nbytes})
        self.read(payload, header, out)
        return out

    def _header(self, count: int, dtype: DType) -> Header:
        return Header(self.kind, dtype, self._parameter(count), count)

    def _parameter(self, count: int) -> int:
        """Return the header's parameter, for payload_nbytes() and read()."""
        del count
        return 0

    @classmethod
    @abstractmethod
    def payload_nbytes(cls, header: Header) -> int:
        """Return the length of the payload. Raises CodecError if the header is not valid."""

    @abstractmethod
    def _write(self, payload: Bytes, x: Floats, header: Header, draw: int | None) -> None:
        """Fill all of payload."""

    @classmethod
    def check(cls, payload: Bytes, header: Header) -> None:
        """Raise CodecError if read() would. The payload must be payload_nbytes() long."""
        del payload, header

    @classmethod
    @abstractmethod
    def read(cls, payload: Bytes, header: Header, out: Floats) -> None:
        """Fill all of out, or raise CodecError before writing."""
