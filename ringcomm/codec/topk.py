"""The few largest elements, the others as zero."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ringcomm import _core
from ringcomm.codec.base import FramedCodec
from ringcomm.codec.frame import Bytes, Floats, Header, Kind
from ringcomm.errors import CodecError

_INDEX_NBYTES = 4


@dataclass(frozen=True)
class TopK(FramedCodec):
    """The k elements of the largest magnitude, exactly; the others are decoded as 0.

    k = ceil(ratio * count), computed exactly of the decimal that was written (0.07 of 100 is 7),
    hence at least 1. Of equal magnitudes the lower index is sent. NaN counts as larger than inf, so
    whatever is not finite is sent first. 4 bytes and an element for each that is sent.

    What is dropped is lost, and training with it fails: send through a Residual.

    Attributes:
        ratio: above 0, at most 1.
    """

    kind: ClassVar[Kind] = Kind.TOPK
    ratio: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"TopK: ratio must be above 0 and at most 1, not {self.ratio}")

    def _parameter(self, count: int) -> int:
        if count >= 2**32:
            raise ValueError(f"TopK: takes fewer than 2**32 elements, not {count}. Split the array")
        return _k(float(self.ratio), count)

    @classmethod
    def payload_nbytes(cls, header: Header) -> int:
        """Return the length that follows from a header."""
        return header.parameter * (header.dtype.itemsize + _INDEX_NBYTES)

    def _write(self, payload: Bytes, x: Floats, header: Header, draw: int | None) -> None:
        del draw
        indices = np.empty(header.parameter, np.uint32)
        _core.top_k(indices, x.view(np.uint8), x.itemsize)
        values = x[indices].view(np.uint8)
        payload[: values.size] = values
        payload[values.size :] = indices.view(np.uint8)

    @classmethod
    def check(cls, payload: Bytes, header: Header) -> None:
        """Raise CodecError unless indices ascend and are less than the number of elements."""
        count, indices = header.count, _indices(payload, header)
        if header.parameter == 0 and count != 0:
            raise CodecError(f"TopK.decode: 0 of {count} elements. The buffer is damaged")
        if indices.size and not (indices[-1] < count and (indices[1:] > indices[:-1]).all()):
            raise CodecError(
                f"TopK.decode: indices do not ascend, or reach beyond the {count} elements. "
                "The buffer is damaged"
            )

    @classmethod
    def read(cls, payload: Bytes, header: Header, out: Floats) -> None:
        """Fill out; see check()."""
        cls.check(payload, header)
        indices = _indices(payload, header)
        split = header.parameter * out.itemsize
        out.fill(0)
        out[indices] = payload[:split].view(out.dtype)


def _indices(payload: Bytes, header: Header) -> NDArray[np.uint32]:
    return payload[header.parameter * header.dtype.itemsize :].view(np.uint32)


@lru_cache(maxsize=4096)
def _k(ratio: float, count: int) -> int:
    from fractions import Fraction  # which imports decimal

    return math.ceil(Fraction(repr(ratio)) * count)
