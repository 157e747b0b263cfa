"""Policies of a hash table: which keys get a row, and which rows are evicted."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_MOST_COUNTS: Final = (1 << 32) - 1
_ROWS_PER_SERVER: Final = 160_000


@dataclass(frozen=True)
class Admit:
    """Keys are given a row when they are pushed often enough, or by chance.

    Until then they read as new rows do, and what is pushed to them is dropped and counted as
    rejected. Pulls count for nothing.

    Attributes:
        min_count: pushes that a key must stand in, the one that admits it included. A push counts a
            key once, however often the key stands in it.
        probability: with which each push of a key admits it (instead of min_count). In a table
            with rounds it is a function of seed, table, key and round, on any number of servers.
        max_candidates: keys of one partition (a table has 1024) that are counted at a time, 26-51
            bytes each. Counts are exact until there are more; then they are all halved, and keys
            that were seen once are forgotten. So a key is never admitted too early.
    """

    min_count: int = 1
    probability: float = 1.0
    max_candidates: int = 16_384

    def __post_init__(self) -> None:
        if not 1 <= self.min_count <= _MOST_COUNTS:
            raise ValueError(f"Admit: min_count is {self.min_count}, and must be 1 or more")
        if not 0 < self.probability <= 1:
            raise ValueError(f"Admit: probability is {self.probability}, and must lie in (0, 1]")
        if self.min_count > 1 and self.probability < 1:
            raise ValueError("Admit: by min_count or by probability, not by both")
        if self.max_candidates < 1:
            raise ValueError(
                f"Admit: max_candidates is {self.max_candidates}, and must be 1 or more"
            )

    def to_json(self) -> dict[str, Any]:
        """Return the keyword arguments that make this again."""
        return asdict(self)


@dataclass(frozen=True)
class Evict:
    """Rows are dropped when nobody pushed to them for long, or when there are too many.

    A key that comes back begins as a new row: fresh values, fresh optimizer state.

    Attributes:
        ttl: seconds, or a number with a unit: "90s", "15m", "12h", "7d", "2w". None: for ever.
        max_rows: of the whole table, which never has more. While fewer keys are in use, none of
            them is dropped: exactly so for up to 8192 rows, and to within 1 % for more. None: as
            many as come.
        policy: who goes first above max_rows: "lru", the rows whose last push is the longest ago,
            or "lfu", those with the fewest pushes (among equals, the longest ago).
    """

    ttl: float | str | None = None
    max_rows: int | None = None
    policy: Literal["lru", "lfu"] = "lru"

    def __post_init__(self) -> None:
        if self.ttl is None and self.max_rows is None:
            raise ValueError("Evict: give ttl, max_rows or both")
        if not self.ttl_s > 0:
            raise ValueError(f"Evict: ttl is {self.ttl!r}, and must be more than 0")
        if self.max_rows is not None and self.max_rows < 1:
            raise ValueError(f"Evict: max_rows is {self.max_rows}, and must be 1 or more")
        if self.policy not in ("lru", "lfu"):
            raise ValueError(f'Evict: policy is {self.policy!r}, and must be "lru" or "lfu"')

    @property
    def ttl_s(self) -> float:
        """The time to live in seconds; inf for ever."""
        return math.inf if self.ttl is None else seconds(self.ttl)

    def n_servers(self, n: int) -> int:
        """Return how many of n servers share a table.

        Each has its share of max_rows. By chance it gets more keys in use than that, and drops
        some: 1 % of 160,000 are four standard deviations of their number.
        """
        return n if self.max_rows is None else max(1, min(n, self.max_rows // _ROWS_PER_SERVER))

    def to_json(self) -> dict[str, Any]:
        """Return the keyword arguments that make this again."""
        return asdict(self)


def seconds(duration: float | str) -> float:
    """Return a duration, a number of seconds or "7d", in seconds.

    Raises:
        ValueError: it is neither.
    """
    if not isinstance(duration, str):
        return float(duration)
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([smhdw]?)\s*", duration)
    if match is None:
        raise ValueError(f"{duration!r} is no duration: give seconds, or one of 90s, 15m, 7d, 2w")
    return float(match[1]) * _UNITS[match[2] or "s"]
