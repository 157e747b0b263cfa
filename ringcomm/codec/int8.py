"""Blocks of int8 with a scale each, rounded at random so that the mean is right."""

from __future__ import annotations

import hashlib
import operator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ringcomm import _core
from ringcomm.codec.base import FramedCodec
from ringcomm.codec.frame import HEADER_NBYTES, Bytes, Floats, Header, Kind, read_header
from ringcomm.errors import CodecError

_WORDS = 2**64  # seeds and draws


@dataclass(frozen=True)
class Int8(FramedCodec):
    """int8: 1 byte per element and 4 (float64: 8) per block, unbiased.

    Each block has the scale max|x| / 127, but at least the smallest normal number; x / scale is
    rounded up with the probability of its fraction, else down. So E[decode(encode(x))] is x, for
    every x, up to rounding to x's dtype and 2**-24 of the scale; the error is below one scale.
    Quantisation is that of QSGD (Alistarh et al. 2017, arXiv:1610.02132) by the maximum.

    A block that holds NaN or inf is decoded as NaN: nothing is hidden, and a loss scaler sees it.

    Random numbers are a function of (seed, draw, index): the same call gives the same bytes, on any
    processor; another draw others.

    Attributes:
        block: elements that share a scale, 1 to 2**32 - 1.
        seed: of the random numbers, 0 to 2**64 - 1. One for the job: ranks differ in their draws.
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
        """Return the length that follows from a header."""
        if header.parameter == 0:
            raise CodecError("Int8.decode: its blocks have 0 elements. The buffer is damaged")
        n_blocks = -(-header.count // header.parameter)
        return n_blocks * max(4, header.dtype.itemsize) + header.count

    def _write(self, payload: Bytes, x: Floats, header: Header, draw: int | None) -> None:
        if draw is None:
            raise ValueError(
                "Int8.encode: draw is missing. Pass a number of its own for every encoding, as "
                "codec.draw_number(rank, name, step) gives: with the same one again the errors are "
                "the same, and do not average out"
            )
        if not 0 <= draw < _WORDS:
            raise ValueError(f"Int8.encode: draw must be 0 to 2**64 - 1, not {draw}")
        code = header.dtype.kernel
        _core.encode_int8(payload, x.view(np.uint8), code, self.block, self.seed, draw)

    @classmethod
    def read(cls, payload: Bytes, header: Header, out: Floats) -> None:
        """Fill out."""
        _core.decode_int8(out.view(np.uint8), payload, header.dtype.kernel, header.parameter)


def take_blocks(buffer: Bytes, blocks: NDArray[np.int64] | slice) -> Bytes:
    """Return a buffer of some blocks, as they are, of one whose blocks are all whole."""
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
    """Return a number for encode(draw=): for other parts another one, the same in every process.

    Args:
        parts: what tells this encoding from all others of the job: rank, tensor, step.

    Returns:
        0 to 2**64 - 1. Of n different ones two are the same with a probability of n**2 / 2**65.
    """
    plain = [part if isinstance(part, str) else operator.index(part) for part in parts]
    digest = hashlib.blake2b(repr(plain).encode(errors="surrogatepass"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")
