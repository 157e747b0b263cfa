"""Decodes and checks the buffers of any codec."""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike

from ringcomm.codec.base import FramedCodec
from ringcomm.codec.cast import BF16, FP16, Identity
from ringcomm.codec.encoded_header import Buffer, Floats, open_buffer, split_buffer
from ringcomm.codec.int8 import Int8
from ringcomm.codec.topk import TopK
from ringcomm.errors import CodecError

_CODECS: tuple[type[FramedCodec], ...] = (Identity, FP16, BF16, Int8, TopK)
_BY_KIND = {codec.kind: codec for codec in _CODECS}
_NBYTES = {codec.kind: codec.payload_nbytes for codec in _CODECS}


def check(buffer: Buffer, count: int, dtype: DTypeLike) -> None:
    """Raise CodecError unless decode() would fill an array of `count` elements of this dtype."""
    header, payload = split_buffer(buffer, _NBYTES)
    wanted = np.dtype(dtype).name
    if header.count != count or header.dtype.name != wanted:
        raise CodecError(
            f"{header.kind}.decode: the buffer holds {header.count} {header.dtype}, but "
            f"{count} {wanted} are wanted"
        )
    _BY_KIND[header.kind].check(payload, header)


def decoded(buffer: Buffer) -> Floats:
    """Return the decoded array as a new array. Raises as decode() does."""
    header, payload = split_buffer(buffer, _NBYTES)
    out = np.empty(header.count, header.dtype.name)
    _BY_KIND[header.kind].read(payload, header, out)
    return out


def decode(buffer: Buffer, out: Floats) -> Floats:
    """Return out, overwritten with the decoded array. Accepts the buffer of any codec.

    Args:
        buffer: the whole result of encode(), at any address; it need not be trustworthy.
        out: array of shape (count,), contiguous, writable, of the dtype that was encoded, without
            overlap with buffer.

    Raises:
        CodecError: no codec wrote the buffer, it is damaged, or `out` has another count or dtype.
            Nothing was written.
    """
    header, payload = open_buffer(buffer, out, _NBYTES)
    _BY_KIND[header.kind].read(payload, header, out)
    return out
