"""Compares what ranks have wrapped, once, before the first gradient is sent."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ringcomm.collectives.op import BOR
from ringcomm.engine.api import collectives
from ringcomm.engine.core.group import Group
from ringcomm.errors import MismatchError
from ringcomm.torch.backward.complement import is_alike, with_complement


@dataclass(frozen=True)
class OptimizerSummary:
    """An optimizer, as far as ranks must agree on it: names and texts of parameters, settings."""

    parameters: tuple[tuple[str, str], ...]
    settings: tuple[tuple[str, str], ...]

    def digest(self) -> bytes:
        """Return bytes that differ where summaries differ."""
        return hashlib.blake2b(repr(self).encode(), digest_size=16).digest()


class ConsistencyCheck:
    """The comparison of all ranks' summaries and digests of weights, under way. Collective."""

    def __init__(
        self, mine: OptimizerSummary, name: str, group: Group, weights: bytes = b""
    ) -> None:
        self._mine = mine
        self._group = group
        self._name = name
        digest = with_complement(mine.digest())
        self._cut = len(digest)
        message = np.array(list(digest + with_complement(weights)), np.uint8)
        self.handle = collectives.allreduce_async_(message, BOR, name=name, group=group)

    def require_alike(self) -> None:
        """Raise MismatchError, on every rank and with the first difference, if there is any."""
        if not is_alike(self.handle.wait().tobytes()[: self._cut]):
            summaries = collectives.allgather_object(
                self._mine, name=f"{self._name}, in full", group=self._group
            )
            raise MismatchError(explain(summaries))

    def combined_weights(self) -> bytes:
        """Return the digests of all ranks' weights, each with its complement, by BOR."""
        combined: bytes = self.handle.wait().tobytes()[self._cut :]
        return combined


def explain(summaries: Sequence[OptimizerSummary | None]) -> str:
    """Return in what the summaries of ranks differ; None: of one in join(). Pure."""
    known = {rank: each for rank, each in enumerate(summaries) if each is not None}
    counts = [f"{len(each.parameters)} parameters" for each in known.values()]
    if len(set(counts)) > 1:
        return _text(known, counts, "Wrap the same model on every rank")
    for each in zip(*(summary.parameters for summary in known.values()), strict=True):
        if len(set(each)) > 1:
            values = [f"{name} {what}" for name, what in each]
            return _text(known, values, "Wrap the same parameters in the same order on every rank")
    for each in zip(*(summary.settings for summary in known.values()), strict=True):
        if len(set(each)) > 1:
            values = [f"{what}={value}" for what, value in each]
            return _text(known, values, "Set the same on every rank")
    raise AssertionError("the summaries agree")


def _text(ranks: Iterable[int], values: Sequence[str], advice: str) -> str:
    (first, mine), *others = zip(ranks, values, strict=True)
    rank, value = next(other for other in others if other[1] != mine)
    return f"DistributedOptimizer: rank {first} has {mine}, rank {rank} has {value}. {advice}"
