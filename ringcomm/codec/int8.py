"""Quantises blocks of elements to int8, with a scale for each block, and unbiased rounding."""

from __future__ import annotations

import hashlib
import operator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ringcomm._core import decode_int8, encode_int8
from ringcomm.codec.base import FramedCodec
from ringcomm.codec.encoded_header import HEADER_NBYTES, Bytes, Floats, Header, Kind, read_header
from ringcomm.errors import CodecError

_WORDS = 2**64  # number of seeds, and of draws


@dataclass(frozen=True)
class Int8(FramedCodec):
    """Quantises to int8: 1 byte per element and 4 (float64: 8) per block, unbiased.

    The scale of a block is max|x| / 127, at least the smallest normal number. x / scale is rounded
    up with probability frac(x / scale), else down. So E[decode(encode(x))] is x, up to rounding
    to x's dtype and 2**-24 of the scale, and each error is less than one scale. This is the
    quantisation of QSGD (Alistarh et al. 2017, arXiv:1610.02132), scaled by the maximum.

    If a block has NaN or inf, all its elements are decoded as NaN, so a loss scaler notices.

    The random numbers are a function of (seed, draw, index). The same call gives the same bytes on
    any processor; another draw gives other bytes.

    Attributes:
        block: number of elements that share a scale, 1 to 2**32 - 1.
        seed: seed of the random numbers, 0 to 2**64 - 1. Ranks may share it: their draws differ.
    """

    kind: ClassVar[Kind] = Kind.INT8
    block: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= operator.index(self.block) < 2**32:
            raise ValueError(f"Int8: block must be 1 to 2**32 - 1, not {self.block}")
        if not 0 <= operator.index(self.seed) < _WORDS:
            raise ValueError(f"Int8: seed must be 0 to 2**64 - 1, not {self.seed}")

    def _parameter(self, count: int) -> int:
        del count
        return self.block

    @classmethod
    def payload_nbytes(cls, header: Header) -> int:
        if header.parameter == 0:
            raise CodecError("Int8.decode: its blocks have 0 elements. The buffer is damaged")
        n_blocks = -(-header.count // header.parameter)
        return n_blocks * max(4, header.dtype.itemsize) + header.count

    def _write(self, payload: Bytes, x: Floats, header: Header, draw: int | None) -> None:
        if draw is None:
            raise ValueError(
                "Int8.encode: draw is missing. Pass a different number for every encoding, such as "
                "codec.draw_number(rank, name, step): if a number is used twice, the errors are "
                "the same both times, and do not average out"
            )
        if not 0 <= draw < _WORDS:
            raise ValueError(f"Int8.encode: draw must be 0 to 2**64 - 1, not {draw}")
        code = header.dtype.kernel
        encode_int8(payload, x.view(np.uint8), code, self.block, self.seed, draw)

    @classmethod
    def read(cls, payload: Bytes, header: Header, out: Floats) -> None:
        decode_int8(out.view(np.uint8), payload, header.dtype.kernel, header.parameter)


def take_blocks(buffer: Bytes, blocks: NDArray[np.int64] | slice) -> Bytes:
    """Return a buffer with some blocks of another buffer, in which every block must be full."""
    header = read_header(buffer)
    n_blocks = header.count // header.parameter
    scale_nbytes = max(4, header.dtype.itemsize)
    split = HEADER_NBYTES + n_blocks * scale_nbytes
    scales = buffer[HEADER_NBYTES:split].reshape(n_blocks, scale_nbytes)[blocks]
    codes = buffer[split:].reshape(n_blocks, header.parameter)[blocks]
    out = np.empty(HEADER_NBYTES + scales.size + codes.size, np.uint8)
    Header(header.kind, header.dtype, header.parameter, codes.size).write(out)
    out[HEADER_NBYTES:][: scales.size] = scales.reshape(-1)
    out[HEADER_NBYTES + scales.size :] = codes.reshape(-1)
    return out


def draw_number(*parts: int | str) -> int:
    """Return a number for encode(draw=), a function of `parts` that is the same in every process.

    Args:
        parts: values that identify this encoding in the job, such as rank, tensor and step.

    Returns:
        0 to 2**64 - 1. Among n numbers, two are equal with a probability of n**2 / 2**65.
    """
    plain = [part if isinstance(part, str) else operator.index(part) for part in parts]
    digest = hashlib.blake2b(repr(plain).encode(errors="surrogatepass"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")
