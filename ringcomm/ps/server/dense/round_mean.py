"""Gradients of a dense partition, the mean of those of a round, and its norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringcomm import codec
from ringcomm.ps.protocol.frame_meta import SQUARES

Array = NDArray[Any]
_QUIET: Final = np.errstate(over="ignore", invalid="ignore")  # inf and NaN are no news here


class Gradient(NamedTuple):
    """A push, decoded.

    Attributes:
        weight: of it in a mean.
        hyper: hyper-parameters that came with it.
        within: the elements of the block that it is of.
        values: the gradient, or values to assign; memory of who pushed. Bytes, if it is encoded: it
            stays so until its round, for that may be much less memory. None: there is none.
        mask: which segments of the table have a gradient; empty: all.
        clock: version that it was computed of.
    """

    weight: float
    hyper: NDArray[np.float64]
    within: slice
    values: Array | None
    mask: bytes
    clock: int


class Shares(NamedTuple):
    """The gradients and weights of which the mean of a round is made.

    Attributes:
        grads: in the order in which they are summed.
        weights: of each; empty: all 1.
        divisor: of the sum.
    """

    grads: list[Array]
    weights: list[float]
    divisor: float

    @_QUIET
    def mean(self, dtype: np.dtype[Any]) -> Array:
        """Return the mean in a dtype, summed in it too."""
        weights = map(dtype.type, self.weights)
        shares = [g.astype(dtype, copy=False) for g in self.grads]
        shares = [g * w for g, w in zip(shares, weights, strict=True)] if self.weights else shares
        out: Array = shares[0] + shares[1] if shares[1:] else shares[0].copy()
        for share in shares[2:]:
            out += share
        out /= dtype.type(self.divisor)
        return out


def shares_of(parts: Sequence[Gradient]) -> Shares | None:
    """Return the gradients and weights of a mean, in the order given.

    A worker without a gradient counts as zeros. None if none has one, or the sum of weights is 0.
    """
    # The mean over an empty batch is NaN, which a weight of 0 would not cancel.
    present = [
        (part.weight, opened(part.values))
        for part in parts
        if part.values is not None and part.weight
    ]
    if not present:
        return None
    grads = [grad for _, grad in present]
    if all(part.weight == parts[0].weight for part in parts):
        return Shares(grads, [], len(parts))
    # By a power of two, which changes no digit: so that no weight leaves the range of float32.
    scale = -math.frexp(max(part.weight for part in parts))[1]
    weights = [math.ldexp(weight, scale) for weight, _ in present]
    return Shares(grads, weights, sum(math.ldexp(part.weight, scale) for part in parts))


def bits(grad: Array) -> Array:
    """Return a gradient as C++ takes it, which knows bfloat16 by its bits."""
    is_bfloat16 = grad.dtype.itemsize == 2 and grad.dtype.name == "bfloat16"  # a name takes 3 us
    return grad.view(np.uint16) if is_bfloat16 else grad


def opened(grad: Array) -> Array:
    """Return a gradient as floats; bytes are what a codec wrote."""
    return codec.decoded(grad) if grad.dtype == np.uint8 else grad


@_QUIET
def scale(mean: Array, factor: float) -> None:
    mean *= mean.dtype.type(factor)


@_QUIET
def packed_squares(mean: Array | None) -> bytes:
    if mean is None:
        return SQUARES.pack(0.0, True)
    total = float(np.square(mean, dtype=np.float64).sum())
    return SQUARES.pack(total, math.isfinite(total) or bool(np.isfinite(mean).all()))
