"""Compares the optimizers of all ranks once, before the first gradient is sent."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ringcomm.collectives.operators import BOR
from ringcomm.engine.api import collectives
from ringcomm.engine.core.group import Group
from ringcomm.errors import MismatchError
from ringcomm.torch.backward.equality import is_alike, with_complement


@dataclass(frozen=True)
class OptimizerSummary:
    """Names and descriptions of parameters and settings, which must be the same on all ranks."""

    parameters: tuple[tuple[str, str], ...]
    settings: tuple[tuple[str, str], ...]


class ConsistencyCheck:
    """A comparison of summaries, and of digests of the weights, in progress. Collective."""

    def __init__(
        self, mine: OptimizerSummary, name: str, group: Group, weights: bytes = b""
    ) -> None:
        self._mine, self._name, self._group = mine, name, group
        digest = with_complement(hashlib.blake2b(repr(mine).encode(), digest_size=16).digest())
        self._cut = len(digest)
        message = np.array(list(digest + with_complement(weights)), np.uint8)
        self.handle = collectives.allreduce_async_(message, BOR, name=name, group=group)

    def wait(self) -> bytes:
        """Return the BOR of all ranks' digests of weights and their complements.

        Raises:
            MismatchError: on every rank: the summaries differ; the text names one difference.
        """
        combined: bytes = self.handle.wait().tobytes()
        if not is_alike(combined[: self._cut]):
            summaries = collectives.allgather_object(
                self._mine, name=f"{self._name}, in full", group=self._group
            )
            raise MismatchError(explain(summaries))
        return combined[self._cut :]


def explain(summaries: Sequence[OptimizerSummary | None]) -> str:
    """Return how the ranks' summaries differ; a rank in join() has None. Pure."""
    known = {rank: each for rank, each in enumerate(summaries) if each is not None}
    all_parameters = zip(*(each.parameters for each in known.values()), strict=False)
    all_settings = zip(*(each.settings for each in known.values()), strict=True)
    comparisons = [
        (
            [f"{len(each.parameters)} parameters" for each in known.values()],
            "Wrap the same model on every rank",
        ),
        *(
            (
                [f"{name} {text}" for name, text in each],
                "Wrap the same parameters in the same order on every rank",
            )
            for each in all_parameters
        ),
        *(
            ([f"{name}={value}" for name, value in each], "Set the same on every rank")
            for each in all_settings
        ),
    ]
    values, advice = next((texts, advice) for texts, advice in comparisons if len(set(texts)) > 1)
    (first, mine), *others = zip(known, values, strict=True)
    rank, value = next(other for other in others if other[1] != mine)
    return f"DistributedOptimizer: rank {first} has {mine}, rank {rank} has {value}. {advice}"
