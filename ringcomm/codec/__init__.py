"""Arrays in fewer bytes: what is sent instead of a gradient, and the array that comes of it.

    from ringcomm import codec
    buffer = codec.FP16().encode(x)             # uint8, with a header that says what it is
    codec.decode(buffer, out)                   # any codec's; never trusts the buffer

    residual = codec.Residual(codec.TopK(0.01)) # what is dropped goes with the next one
    buffer = residual.encode("fc.weight", gradient, lr=0.1)

numpy arrays in, bytes out; knows of no wire and of no torch. docs/compression.md has figures.
"""

from ringcomm.codec.base import Codec
from ringcomm.codec.cast import BF16, FP16, Identity
from ringcomm.codec.decoding import check, decode, decoded
from ringcomm.codec.frame import HEADER_NBYTES, Header, Kind, read_header
from ringcomm.codec.int8 import Int8, draw_number
from ringcomm.codec.residual import Residual
from ringcomm.codec.topk import TopK
from ringcomm.errors import CodecError

__all__ = [
    "BF16", "FP16", "HEADER_NBYTES", "Codec", "CodecError", "Header", "Identity", "Int8", "Kind",
    "Residual", "TopK", "check", "decode", "decoded", "draw_number", "read_header",
]  # fmt: skip
