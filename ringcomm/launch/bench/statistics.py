"""From the times of every rank to the few numbers of a row. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BATCH_S = 1e-3  # 1000 times what reading the clock and turning the loop cost
_MOST_CALLS = 1000
_FEWEST_BATCHES = 5
_MOST_BATCHES = 200


@dataclass(frozen=True)
class Summary:
    """What the calls of one kind took, each told by its slowest rank.

    Attributes:
        time: median over batches of a batch's mean call.
        call_p50: median over single calls.
        call_p99: 99th percentile over single calls; below 100 calls it is the longest.
        calls: how many single calls these are made from.
    """

    time: float
    call_p50: float
    call_p99: float
    calls: int


def summarize(times: NDArray[Any]) -> Summary:
    """Return the summary of `times`, shape (ranks, batches, calls), in their unit."""
    batches = times.mean(axis=2).max(axis=0)
    calls = times.max(axis=0).ravel()
    return Summary(
        percentile(batches, 50), percentile(calls, 50), percentile(calls, 99), calls.size
    )


def percentile(values: NDArray[Any], percent: float) -> float:
    """Return the least of `values` that at least `percent` of a hundred do not exceed."""
    position = math.ceil(len(values) * percent / 100)
    return float(np.sort(values)[max(position, 1) - 1])


def calls_per_batch(call_s: float) -> int:
    """Return how many calls of `call_s` seconds make a batch that a clock can judge."""
    return min(max(math.ceil(_BATCH_S / max(call_s, 1e-9)), 1), _MOST_CALLS)


def batches_within(budget_s: float, round_s: float) -> int:
    """Return how many rounds, one batch of every kind each, to do in about `budget_s` seconds."""
    return min(max(int(budget_s / max(round_s, 1e-9)), _FEWEST_BATCHES), _MOST_BATCHES)
