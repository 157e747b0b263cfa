"""Sends the few largest elements; the others are decoded as 0."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ringcomm._core import top_k
from ringcomm.codec.base import FramedCodec
from ringcomm.codec.encoded_header import Bytes, Floats, Header, Kind
from ringcomm.errors import CodecError

_INDEX_NBYTES = 4
_COUNT_LIMIT = 2**32


@dataclass(frozen=True)
class TopK(FramedCodec):
    """Sends the k elements of the largest magnitude, exactly; the others are decoded as 0.

    k is ceil(ratio * count), at least 1, of the ratio's decimal digits: 0.07 of 100 is 7. Of equal
    magnitudes, those with lower indices are sent. NaN is larger than inf, which is larger than all
    numbers. An element is sent in the bytes of its dtype, and 4 bytes for its index.

    Training fails if the dropped elements are lost: use a Residual.

    Attributes:
        ratio: share of the elements that are sent, above 0, at most 1.
    """

    kind: ClassVar[Kind] = Kind.TOPK
    ratio: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"TopK: ratio must be above 0 and at most 1, not {self.ratio}")

    def _parameter(self, count: int) -> int:
        if count >= _COUNT_LIMIT:
            raise ValueError(f"TopK: takes fewer than 2**32 elements, not {count}. Split the array")
        return _k(float(self.ratio), count)

    @classmethod
    def payload_nbytes(cls, header: Header) -> int:
        if header.count >= _COUNT_LIMIT:
            raise CodecError(f"TopK.decode: it has {header.count} elements. The buffer is damaged")
        return header.parameter * (header.dtype.itemsize + _INDEX_NBYTES)

    def _write(self, payload: Bytes, x: Floats, header: Header, draw: int | None) -> None:
        del draw
        indices = np.empty(header.parameter, np.uint32)
        top_k(indices, x.view(np.uint8), x.itemsize)
        values = x[indices].view(np.uint8)
        payload[: values.size] = values
        payload[values.size :] = indices.view(np.uint8)

    @classmethod
    def check(cls, payload: Bytes, header: Header) -> None:
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
        cls.check(payload, header)
        indices = _indices(payload, header)
        split = header.parameter * out.itemsize
        out.fill(0)
        out[indices] = payload[:split].view(out.dtype)


def _indices(payload: Bytes, header: Header) -> NDArray[np.uint32]:
    return payload[header.parameter * header.dtype.itemsize :].view(np.uint32)


@lru_cache(maxsize=4096)
def _k(ratio: float, count: int) -> int:
    from fractions import Fraction  # here, because it imports decimal

    return math.ceil(Fraction(repr(ratio)) * count)
