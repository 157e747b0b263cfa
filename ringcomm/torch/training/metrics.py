"""Averages of a script's metrics over all ranks' samples."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.operations.objects import plan_allgather_object
from ringcomm.errors import MismatchError

_Report = tuple[float, dict[str, float]]  # number of samples, and metrics


def average_metrics(metrics: Mapping[str, Any], *, samples: float = 1.0) -> dict[str, float]:
    """Return the mean of each metric over all ranks, the same on every rank. Collective.

    Args:
        metrics: numbers by name: floats, ints, tensors or arrays of one element; the same names on
            every rank, in any order.
        samples: the number of samples whose mean this rank passes. A rank with 0 samples does not
            count: it may pass NaN, or no metrics. A rank in hvd.join() does not count, either.

    Returns:
        sum(samples * number) / sum(samples) by name, in the order of the first rank that has
        samples; NaN if no rank has samples.

    Raises:
        MismatchError: ranks pass different names, or some pass something that is refused.
        ValueError: samples is negative or not finite, or a value has more than one element.
    """

    def report() -> _Report:
        if not 0 <= samples < math.inf:
            raise ValueError(f"average_metrics: samples is finite and at least 0, not {samples}")
        if not isinstance(metrics, Mapping):
            raise TypeError(f"average_metrics: metrics must be numbers by name, not {metrics!r}")
        return float(samples), {name: _number(name, value) for name, value in metrics.items()}

    return _average(report)


def _average(report: Callable[[], _Report]) -> dict[str, float]:
    """Return the means over all ranks. If report() raises on some ranks, all learn of it."""
    plan = lambda g: plan_allgather_object(g, None, report())  # noqa: E731
    packed = engine().execute("allgather_object", None, plan, None)
    reports: list[_Report | None] = [pickle.loads(each) for each in packed]
    present = [(r, *report) for r, report in enumerate(reports) if report]  # None: in join()
    counting = [(r, n, numbers) for r, n, numbers in present if n]
    if not counting:
        return {name: math.nan for _, _, numbers in present for name in numbers}
    first, _, names = counting[0]
    for r, _, numbers in counting:
        if numbers.keys() != names.keys():
            raise MismatchError(
                f"average_metrics: rank {first} has {', '.join(names)}; rank {r} has "
                f"{', '.join(numbers)}. Pass the same names on every rank"
            )
    total = math.fsum(n for _, n, _ in counting)
    return {name: _sum(n * numbers[name] for _, n, numbers in counting) / total for name in names}


class Metrics:
    """Collects the metrics of this rank's batches, and averages them over all ranks' samples.

    metrics = hvd.Metrics()
    for x, y in loader:
        ...
        metrics.add(len(x), loss=loss, accuracy=hits / len(x))
    print(metrics.average())
    """

    def __init__(self) -> None:
        self._samples = 0.0
        self._sums: dict[str, Any] = {}

    def add(self, samples: float, /, **means: Any) -> None:
        """Add the metrics of one batch; local.

        Args:
            samples: number of samples in the batch; a batch of 0 samples does not count.
            means: mean of each metric over the batch, by name; the same names in each call. add()
                does not wait for the value of a tensor on a GPU; average() does.

        Raises:
            ValueError: samples is negative or not finite, or earlier calls had other names.
        """
        if not 0 <= samples < math.inf:
            raise ValueError(f"Metrics: samples is finite and at least 0, not {samples}")
        if self._sums and means.keys() != self._sums.keys():
            raise ValueError(
                f"Metrics: has {', '.join(self._sums)}, and add() got {', '.join(means)}"
            )
        for name, mean in means.items():
            plain = mean.detach().double() if hasattr(mean, "detach") else mean
            self._sums[name] = self._sums.get(name, 0.0) + (plain * samples if samples else 0.0)
        self._samples += samples

    def average(self) -> dict[str, float]:
        """Return the mean of each metric over all ranks' samples, and drop the metrics. Collective.

        Raises:
            MismatchError: ranks have different names.
        """
        samples, sums = self._samples, self._sums
        self._samples, self._sums = 0.0, {}

        def report() -> _Report:
            return float(samples), {
                name: _number(name, sums[name]) / samples for name in sums if samples
            }

        return _average(report)


def _number(name: str, value: Any) -> float:
    array = np.asarray(value.detach().cpu().double() if hasattr(value, "detach") else value)
    if array.size != 1:
        raise ValueError(f"{name} has the shape {array.shape}: pass a number, such as its mean")
    return float(array.reshape(()))


def _sum(numbers: Iterable[float]) -> float:
    """Return the sum, rounded once; NaN or infinity if one of the numbers is."""
    parts = list(numbers)
    return math.fsum(parts) if all(map(math.isfinite, parts)) else sum(parts)
