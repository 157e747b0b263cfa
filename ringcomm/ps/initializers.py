"""Initial values of the rows of a hash table, before the first update.

They are a pure function of (seed, table, key): the same bits in any order, on any server, on any
machine, whether the row was touched before or not. So rows need neither be stored nor sent until
they are updated.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SEEDS = 1 << 64


@dataclass(frozen=True)
class Initializer:
    """Initial values of new rows: zeros(), constant(), uniform(), normal(), truncated_normal().

    Attributes:
        code: the number of the distribution in the C++ core.
        parameters: its parameters there.
        seed: 64 bits; tables differ by their names, also with the same seed.
    """

    code: int
    parameters: tuple[float, ...]
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.seed < _SEEDS:
            raise ValueError(f"seed: {self.seed} is not in [0, 2^64)")
        if not all(map(math.isfinite, self.parameters)):
            raise ValueError(f"an initializer has finite parameters, not {self.parameters}")

    @property
    def packed(self) -> NDArray[np.float64]:
        """The parameters as the C++ core takes them."""
        return np.array(self.parameters, np.float64)

    def to_json(self) -> dict[str, Any]:
        """Return JSON from which from_json() makes this initializer again."""
        return {"code": self.code, "parameters": list(self.parameters), "seed": self.seed}


def from_json(data: dict[str, Any]) -> Initializer:
    """Return the initializer that to_json() was called on."""
    return Initializer(int(data["code"]), tuple(map(float, data["parameters"])), int(data["seed"]))


def zeros() -> Initializer:
    """Rows of 0."""
    return constant(0.0)


def constant(value: float) -> Initializer:
    """Rows of one value."""
    return Initializer(0, (float(value),))


def uniform(low: float = -0.05, high: float = 0.05, *, seed: int = 0) -> Initializer:
    """Values spread evenly over [low, high]; high itself only where rounding ends there."""
    if not low <= high:
        raise ValueError(f"uniform: low {low} is more than high {high}")
    return Initializer(1, (float(low), float(high)), seed)


def normal(mean: float = 0.0, std: float = 0.01, *, seed: int = 0) -> Initializer:
    """Normally distributed values."""
    _require_std(std)
    return Initializer(2, (float(mean), float(std)), seed)


def truncated_normal(
    mean: float = 0.0,
    std: float = 0.01,
    low: float | None = None,
    high: float | None = None,
    *,
    seed: int = 0,
) -> Initializer:
    """Normally distributed values, of which those outside [low, high] are not taken.

    Args:
        mean: of the distribution before it is cut.
        std: of the distribution before it is cut.
        low: mean - 2 * std if not given.
        high: mean + 2 * std if not given.
        seed: 64 bits.
    """
    _require_std(std)
    low = mean - 2 * std if low is None else low
    high = mean + 2 * std if high is None else high
    if std == 0:
        return constant(min(max(mean, low), high))
    below_low, below_high = (_normal_cdf((x - mean) / std) for x in (low, high))
    if not below_low < below_high:
        raise ValueError(f"truncated_normal: nothing lies between {low} and {high}")
    parameters = (mean, std, low, high, below_low, below_high)
    return Initializer(3, tuple(map(float, parameters)), seed)


def _normal_cdf(x: float) -> float:
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


def _require_std(std: float) -> None:
    if not std >= 0:
        raise ValueError(f"std: {std} is less than 0")


def table_number(name: str) -> int:
    """Return the number that stands for a table's name in its rows' values: 64 bits of a hash."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
