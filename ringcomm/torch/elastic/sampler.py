"""Horovod's ElasticSampler: the samples that are not recorded yet are dealt to the ranks of today.

ringcomm.data has samplers that need no record_batch().
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch.utils.data

from ringcomm.data.epoch_order import share_length, to_deal
from ringcomm.engine.api.init_rank_size import rank, size

Stretches = tuple[tuple[int, int], ...]  # of places: each from the first to before the second


@dataclass(frozen=True)
class Position:
    """The samples of an epoch that one rank has recorded.

    Attributes:
        epoch: number of the epoch.
        done: samples that were recorded before the rest was dealt; the same on all ranks.
        rank: the rank that recorded.
        size: number of ranks to which the rest was dealt.
        places: recorded places in the share of that rank.
        others: recorded samples that are not in the share.
    """

    epoch: int = 0
    done: frozenset[int] = frozenset()
    rank: int = 0
    size: int = 1
    places: Stretches = ()
    others: frozenset[int] = frozenset()

    @property
    def _common(self) -> tuple[object, ...]:
        """Values that ranks share if they have recorded the same batches of their shares."""
        return self.done, self.size, self.places, self.others


@dataclass(frozen=True)
class Deal:
    """Deals the samples of a dataset to ranks, for one epoch. Pure."""

    n: int
    shuffle: bool
    seed: int

    def shares(self, position: Position) -> list[list[int]]:
        """Return the share of each rank; all are equally long, so a few samples may come twice."""
        rest = [index for index in range(self.n) if index not in position.done]
        if self.shuffle:
            random.Random(self.seed + position.epoch).shuffle(rest)
        order = np.array(rest, np.int64)
        padded = to_deal(order, order, position.size, "pad").tolist()
        return [padded[r :: position.size] for r in range(position.size)]

    def recorded(self, position: Position, ranks: Iterable[int]) -> frozenset[int]:
        """Return all recorded samples, if these ranks have recorded the places of `position`."""
        shares = self.shares(position) if position.places else []
        return position.done.union(
            position.others,
            *(shares[r][start:stop] for r in ranks for start, stop in position.places),
        )

    def united(self, positions: Sequence[Position], is_newest: Sequence[bool]) -> Position:
        """Return the position from which all ranks go on.

        If the ranks whose commit is the newest have recorded the same places, then so had the lost
        ones: all ranks commit after the same batches. Otherwise the samples count that the ranks
        of today have recorded, and those of lost ranks come again.
        """
        newest = [p for p, is_it in zip(positions, is_newest, strict=True) if is_it]
        first = newest[0]
        done = [self.recorded(p, [p.rank]) for p in positions if p.epoch == first.epoch]
        if not first.others and all(p._common == first._common for p in newest):
            done.append(self.recorded(first, range(first.size)))
        return Position(first.epoch, frozenset().union(*done))


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Sampler whose epoch goes on after a loss, as a value of a TorchState or an ObjectState.

    Each rank gets equally many samples, so a few samples come twice if the number of ranks does not
    divide that of samples. Call record_batch() or record_indices() after a batch, and set_epoch()
    at the end of an epoch. After a loss, the samples that no committed record has are dealt to the
    ranks that are left.

    A sample of a lost rank counts as recorded if that rank had recorded the same batches as the
    others, which is so if all ranks call record_batch() and commit() alike. If not, it comes again,
    as all samples of lost ranks do in Horovod.

    Args:
        dataset: a dataset, of which only the length is used; the same on all ranks.
        shuffle: True: shuffle the samples, by `seed` and the number of the epoch.
        seed: the same on all ranks.

    Attributes:
        epoch: number of the epoch.
        num_replicas: number of ranks to which the rest of the epoch is dealt.
        rank: this rank.
        num_samples: number of samples of each rank in the rest of the epoch.
        total_size: num_replicas * num_samples.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self._position = Position()
        self._share: list[int] | None = None
        self._go_on_from(self._position)

    @property
    def epoch(self) -> int:
        """Number of the epoch."""
        return self._position.epoch

    @property
    def processed_indices(self) -> frozenset[int]:
        """The samples of this epoch that this rank knows to be recorded."""
        return self._deal.recorded(self._position, [self.rank])

    @property
    def processed_num(self) -> int:
        """Number of samples of this epoch that are recorded, if all ranks record as this one."""
        at = self._position
        here = sum(stop - start for start, stop in at.places)
        return len(at.done) + len(at.others) + here * self.num_replicas

    @property
    def remaining_indices(self) -> list[int]:
        """The samples that were dealt: those that were not recorded at the last reset()."""
        return [index for index in range(len(self.dataset)) if index not in self._position.done]

    @property
    def indices(self) -> list[int]:
        """The share of this rank, in order."""
        if self._share is None:
            self._share = self._deal.shares(self._position)[self.rank]
        return self._share

    def set_epoch(self, epoch: int) -> None:
        """Forget all records, and begin this epoch. Call it at the end of the one before."""
        self._go_on_from(Position(epoch))

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record batch number `batch_idx` since iter() was called; local."""
        start = batch_idx * batch_size
        self._record(start, min(start + batch_size, self.num_samples))

    def record_indices(self, indices: Iterable[int]) -> None:
        """Record these samples; local."""
        for index in indices:
            place = self._place_of.get(int(index))
            if place is None:
                others = self._position.others | {int(index)}
                self._position = replace(self._position, others=others)
            else:
                self._record(place, place + 1)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return the samples of batch number `batch_idx` of this rank."""
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the samples that this rank knows to be recorded."""
        return {"epoch": self.epoch, "processed_indices": set(self.processed_indices)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from state_dict(), which is the same on all ranks."""
        self._go_on_from(Position(state_dict["epoch"], frozenset(state_dict["processed_indices"])))

    def reset(self) -> None:
        """Deal the samples that this rank does not know to be recorded to the ranks of today."""
        self._go_on_from(Position(self.epoch, self.processed_indices))

    def __iter__(self) -> Iterator[int]:
        return iter(list(self.indices))

    def __len__(self) -> int:
        return self.num_samples

    # --- for the state ----------------------------------------------------------------------------
    @property
    def position(self) -> Position:
        """The samples that this rank has recorded."""
        return self._position

    @position.setter
    def position(self, position: Position) -> None:
        """Return to a position of this rank, or go on from one that united() has made."""
        if position.places and (position.rank, position.size) == (rank(), size()):
            self._go_on_from(position)
        else:
            self._go_on_from(
                Position(position.epoch, self._deal.recorded(position, [position.rank]))
            )

    def united(self, positions: Sequence[Position], is_newest: Sequence[bool]) -> Position:
        """Return the position from which all ranks go on; see Deal.united()."""
        return self._deal.united(positions, is_newest)

    @property
    def _deal(self) -> Deal:
        return Deal(len(self.dataset), self.shuffle, self.seed)

    @functools.cached_property
    def _place_of(self) -> dict[int, int]:
        return {index: place for place, index in reversed(list(enumerate(self.indices)))}

    def _go_on_from(self, position: Position) -> None:
        self.num_replicas, self.rank = size(), rank()
        self._position = replace(position, rank=self.rank, size=self.num_replicas)
        self._share = None
        self.__dict__.pop("_place_of", None)
        n_left = len(self.dataset) - len(position.done)
        self.num_samples = share_length(n_left, self.rank, self.num_replicas, "pad")
        self.total_size = self.num_samples * self.num_replicas

    def _record(self, start: int, stop: int) -> None:
        if start < stop:
            places = _with(self._position.places, start, stop)
            self._position = replace(self._position, places=places)


def _with(stretches: Stretches, start: int, stop: int) -> Stretches:
    """Add a stretch; those that touch become one."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted([*stretches, (start, stop)]):
        if merged and first <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return tuple(merged)
