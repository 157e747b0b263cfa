"""What the codecs of the GPU compute, in numpy: the kernels give these very bits. Pure.

An array is cut into blocks of `block` elements, the last of which may be shorter. All is computed
in float32, in this order, and rounded at every operation:

    sum = x + residual                                        x alone, if there is no residual
    scale = max(max|sum| / most, 2**-126)                     of each block
    scale = the float32 below, if scale * most overflows
    code = nearest(sum / scale)                               a byte per element
    residual = sum - value(code) * scale
    decoded = value(code) * scale

A block whose sums hold NaN or inf has the scale NaN and codes of 0, and is decoded as NaN; its
residual stays as it was. So nothing is lost: all that was decoded, plus the residual, is all that
was given, up to rounding, as in ringcomm.codec.Residual.

"Int8": most is 127, value(code) is the int8. The bytes are those of ringcomm.codec.Int8 for the
float32 sums: rounded up with the probability of the fraction, by the random numbers of (seed, draw,
index).

"E4M3": most is 448, codes are float8_e4m3fn: 4 bits of exponent, 3 of fraction, NaN at 0x7f and
0xff, no inf (Micikevicius et al. 2022, arXiv:2209.05433). nearest() rounds to nearest, ties to
even; what rounding made larger than 448 becomes 448. Zeros keep their sign.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from ringcomm import _core
from ringcomm.arrays.dtypes import DTYPES

Code = Literal["Int8", "E4M3"]
Floats = NDArray[Any]  # float16, bfloat16 or float32
MOST: Final = {"Int8": 127, "E4M3": 448}
_FLOAT32 = DTYPES["float32"].kernel
_SMALLEST = np.float32(2**-126)


@dataclass(frozen=True)
class Encoded:
    """An array in fewer bytes.

    Attributes:
        scales: float32, one per block.
        codes: uint8, one per element.
    """

    scales: NDArray[np.float32]
    codes: NDArray[np.uint8]


def quantise(
    x: Floats,
    residual: NDArray[np.float32] | None,
    *,
    code: Code,
    block: int = 256,
    seed: int = 0,
    draw: int = 0,
) -> Encoded:
    """Return x plus the residual, encoded.

    Args:
        x: shape (count,).
        residual: shape (count,), what earlier calls dropped; updated in place. None: there is none.
        code: "Int8" or "E4M3".
        block: elements that share a scale, 1 or more.
        seed: of the random numbers of "Int8", 0 to 2**64 - 1.
        draw: which of them, a number of its own for every call.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        sums = x.astype(np.float32) if residual is None else x.astype(np.float32) + residual
        encode = _encode_int8 if code == "Int8" else _encode_e4m3
        encoded = encode(sums, block, seed, draw)
        if residual is not None:
            dropped = sums - dequantise(encoded, code=code, block=block)
            is_number = ~np.isnan(_per_element(encoded.scales, block, x.size))
            residual[is_number] = dropped[is_number]
    return encoded


def dequantise(encoded: Encoded, *, code: Code, block: int = 256) -> NDArray[np.float32]:
    """Return what was encoded, or near it."""
    scales = _per_element(encoded.scales, block, encoded.codes.size)
    values = encoded.codes.view(np.int8) if code == "Int8" else E4M3[encoded.codes]
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(np.float32) * scales


def nearest_e4m3(parts: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return the codes nearest to numbers, ties to the even code; numbers beyond 448 become it."""
    magnitudes = np.minimum(np.abs(parts), np.float32(MOST["E4M3"]))
    _, exponents = np.frexp(magnitudes)  # magnitudes are in [2**(e - 1), 2**e)
    steps = np.ldexp(np.float32(1), np.maximum(exponents - 1, -6) - 3)
    rounded = np.rint(magnitudes / steps) * steps
    codes: NDArray[np.intp] = np.searchsorted(E4M3[:127], rounded)
    return codes.astype(np.uint8) | np.where(np.signbit(parts), np.uint8(128), np.uint8(0))


def _values_of_e4m3() -> NDArray[np.float32]:
    code = np.arange(128)
    exponent, fraction = code >> 3, code & 7
    magnitude = np.where(
        exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent - 10.0)
    )
    magnitude[127] = np.nan
    return np.concatenate([magnitude, -magnitude]).astype(np.float32)


E4M3: Final = _values_of_e4m3()  # the value of each code


def _encode_int8(sums: NDArray[np.float32], block: int, seed: int, draw: int) -> Encoded:
    n_blocks = -(-sums.size // block)
    payload = np.empty(4 * n_blocks + sums.size, np.uint8)
    _core.encode_int8(payload, sums.view(np.uint8), _FLOAT32, block, seed, draw)
    return Encoded(payload[: 4 * n_blocks].view(np.float32), payload[4 * n_blocks :])


def _encode_e4m3(sums: NDArray[np.float32], block: int, seed: int, draw: int) -> Encoded:
    del seed, draw
    scales = _scales(sums, block, MOST["E4M3"])
    per_element = _per_element(scales, block, sums.size)
    is_number = ~np.isnan(per_element)
    codes = np.zeros(sums.size, np.uint8)
    codes[is_number] = nearest_e4m3(sums[is_number] / per_element[is_number])
    return Encoded(scales, codes)


def _scales(sums: NDArray[np.float32], block: int, most: int) -> NDArray[np.float32]:
    starts = np.arange(0, sums.size, block)
    largest = np.maximum.reduceat(np.abs(sums), starts) if sums.size else sums[:0]
    scales = np.maximum(largest / np.float32(most), _SMALLEST)
    scales = np.where(np.isinf(scales * np.float32(most)), np.nextafter(scales, 0), scales)
    return np.where(np.isfinite(largest), scales, np.float32(np.nan)).astype(np.float32)


def _per_element(scales: NDArray[np.float32], block: int, count: int) -> NDArray[np.float32]:
    return np.repeat(scales, block)[:count]
