"""Decoding, and checking, what any codec wrote."""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike

from ringcomm.codec.base import FramedCodec
from ringcomm.codec.cast import BF16, FP16, Identity
from ringcomm.codec.frame import Buffer, Floats, open_buffer, read_header, split_buffer
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
            f"{header.kind}.decode: the buffer holds {header.count} {header.dtype}, and {count} "
            f"{wanted} are wanted"
        )
    _BY_KIND[header.kind].check(payload, header)


def decoded(buffer: Buffer) -> Floats:
    """Return what a buffer's codec makes of it, as a new array. See decode()."""
    header = read_header(buffer)
    return decode(buffer, np.empty(header.count, header.dtype.name))


def decode(buffer: Buffer, out: Floats) -> Floats:
    """Return out, overwritten with what the buffer's codec makes of it. See Codec.decode().

    Raises:
        CodecError: no codec wrote the buffer, or not for out. Nothing was written.
    """
    header, payload = open_buffer(buffer, out, _NBYTES)
    _BY_KIND[header.kind].read(payload, header, out)
    return out
