"""Encodes arrays in fewer bytes, and decodes them.

    from ringcomm import codec
    buffer = codec.FP16().encode(x)             # uint8; a header names codec, dtype and count
    codec.decode(buffer, out)                   # takes the buffer of any codec, and checks it

    residual = codec.Residual(codec.TopK(0.01)) # adds the dropped values to the next gradient
    buffer = residual.encode("fc.weight", gradient, lr=0.1)

Encodes numpy arrays, and sends nothing. docs/compression.md has sizes and speeds.
"""

from ringcomm.codec.base import Codec
from ringcomm.codec.cast import BF16, FP16, Identity
from ringcomm.codec.decoding import check, decode, decoded
from ringcomm.codec.encoded_header import HEADER_NBYTES, Header, Kind, read_header
from ringcomm.codec.int8 import Int8, draw_number
from ringcomm.codec.residual import Residual
from ringcomm.codec.topk import TopK
from ringcomm.errors import CodecError

__all__ = [
    "BF16", "FP16", "HEADER_NBYTES", "Codec", "CodecError", "Header", "Identity", "Int8", "Kind",
    "Residual", "TopK", "check", "decode", "decoded", "draw_number", "read_header",
]  # fmt: skip
