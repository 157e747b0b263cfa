"""Decoding what any codec wrote."""

from __future__ import annotations

from ringcomm.codec.base import FramedCodec
from ringcomm.codec.cast import BF16, FP16, Identity
from ringcomm.codec.frame import Buffer, Floats, open_buffer
from ringcomm.codec.int8 import Int8
from ringcomm.codec.topk import TopK

_CODECS: tuple[type[FramedCodec], ...] = (Identity, FP16, BF16, Int8, TopK)
_BY_KIND = {codec.kind: codec for codec in _CODECS}
_NBYTES = {codec.kind: codec.payload_nbytes for codec in _CODECS}


def decode(buffer: Buffer, out: Floats) -> Floats:
    """Return out, overwritten with what the buffer's codec makes of it. See Codec.decode().

    Raises:
        CodecError: no codec wrote the buffer, or not for out. Nothing was written.
    """
    header, payload = open_buffer(buffer, out, _NBYTES)
    _BY_KIND[header.kind].read(payload, header, out)
    return out
