"""Loader: batches of this rank's samples, made ready while it computes."""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np

from ringcomm import config
from ringcomm.data.collate import map_arrays, stack
from ringcomm.data.prefetch import LateError, prefetched
from ringcomm.data.sampler import Batches, ShardedSampler, State, require_sampler

_NAMED = 8  # samples that an error names


class Loader:
    """An iterable of batches: each time the next epoch of this rank's samples.

    Every rank gets as many batches. A batch is made ready by a thread while the one before is
    computed with. That is enough where samples are rows of arrays, or are read from files; for a
    dataset whose samples cost much Python, use torch's DataLoader with workers and
    batch_sampler=sampler.batches(n). A dataset that draws from a global random generator does so in
    that thread: pass prefetch=0, or let it have a generator of its own.

    Args:
        data: a tuple or dict of arrays (numpy, memory-mapped, torch) with as many rows, or one
            array: a batch has the same structure. Else a dataset: `len(data)` samples, `data[i]`,
            or `data.__getitems__([i, j])` if it has that.
        batch_size: samples of this rank in a batch.
        sampler: a ShardedSampler over the data; by default ShardedSampler(data), shuffled.
        optimizer: a DistributedOptimizer, whose set_samples() is called with the number of samples
            of each batch as it is handed out, so that batches of unequal sizes count by their
            samples. Where several batches make a step, the last one's number counts.
        collate: makes a batch of a list of samples of a dataset; by default numbers and arrays
            are stacked.
        prefetch: batches made ready ahead; 0: none, and no thread.
        drop_last: leave out batches that are smaller.

    Attributes:
        sampler: what deals out the samples.
        batches: the same in batches.

    Raises:
        TypeError: optimizer has no set_samples(), or data is none of the above.
        ValueError: arrays of different lengths, a sampler of other data, or a number out of range.

    What a dataset raises is raised at its batch, with a note of the samples; TimeoutError where a
    batch takes longer than RINGCOMM_TIMEOUT_S.
    """

    def __init__(
        self,
        data: Any,
        batch_size: int,
        *,
        sampler: ShardedSampler | None = None,
        optimizer: Any = None,
        collate: Callable[[list[Any]], Any] | None = None,
        prefetch: int = 2,
        drop_last: bool = False,
    ) -> None:
        n = _length(data)
        self.sampler = ShardedSampler(n) if sampler is None else sampler
        require_sampler("Loader", self.sampler)
        if self.sampler.n != n:
            raise ValueError(f"Loader: the data has {n} samples, the sampler {self.sampler.n}")
        if optimizer is not None and not hasattr(optimizer, "set_samples"):
            raise TypeError(
                f"Loader: optimizer is a DistributedOptimizer, not a plain "
                f"{type(optimizer).__name__}: wrap it first"
            )
        if collate is not None and not callable(collate):
            raise TypeError(f"Loader: collate must be a function, not {collate!r}")
        if operator.index(prefetch) < 0:
            raise ValueError(f"Loader: prefetch is at least 0, not {prefetch}")
        self.batches = Batches(self.sampler, batch_size, drop_last=drop_last)
        self._data, self._optimizer, self._prefetch = data, optimizer, prefetch
        self._collate = stack if collate is None else collate
        self._consumed: int | None = None  # of the epoch under way
        self._under_way: weakref.ref[Generator[Any, None, None]] | None = None  # not a cycle

    def __iter__(self) -> Iterator[Any]:
        earlier = None if self._under_way is None else self._under_way()
        if earlier is not None:
            earlier.close()
        epoch = self._epoch()
        self._under_way = weakref.ref(epoch)
        return epoch

    def __len__(self) -> int:
        """Return how many batches the epoch under way has, else the next."""
        return len(self.batches)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iter(); see ShardedSampler.set_epoch()."""
        self.sampler.set_epoch(epoch)

    def state_dict(self) -> State:
        """Return where this rank is: the batches that were handed out count as trained on."""
        return self.sampler.state_dict(self._consumed if self.sampler.has_begun else None)

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on where a run stopped; see ShardedSampler.load_state_dict()."""
        self.sampler.load_state_dict(state)
        self._consumed = None

    def _epoch(self) -> Generator[Any, None, None]:
        with contextlib.closing(self._loaded(self.batches.begin())) as loaded:
            self._consumed = consumed = 0
            for n, batch in loaded:
                self._consumed = consumed = consumed + n
                if self._optimizer is not None:
                    self._optimizer.set_samples(n)
                yield batch
        self._consumed = None

    def _loaded(self, batches: Iterator[list[int]]) -> Generator[tuple[int, Any], None, None]:
        if not self._prefetch:
            for indices in batches:  # map() would take a StopIteration of the dataset for its own
                yield self._load(indices)
            return
        timeout_s = config.settings().timeout_s
        try:
            yield from prefetched(
                self._load, batches, ahead=self._prefetch, timeout_s=timeout_s or None
            )
        except LateError as error:
            raise TimeoutError(
                f"Loader: {self._consumed} samples into epoch {self.sampler.epoch}, the dataset "
                f"has taken more than RINGCOMM_TIMEOUT_S={timeout_s:g} for the next batch"
            ) from error

    def _load(self, indices: list[int]) -> tuple[int, Any]:
        try:
            return len(indices), self._batch(indices)
        except Exception as error:
            named = ", ".join(map(str, indices[:_NAMED]))
            more = ", ..." if len(indices) > _NAMED else ""
            error.add_note(f"in Loader, at samples {named}{more}")
            raise

    def _batch(self, indices: list[int]) -> Any:
        data = self._data
        if _is_columns(data):
            rows = np.asarray(indices, np.int64)
            return map_arrays(lambda column: column[rows], data)
        if not indices:  # a dataset cannot say what its samples are like without one
            return map_arrays(lambda column: column[:0], self._batch([0]))
        if hasattr(data, "__getitems__"):
            return self._collate(data.__getitems__(indices))
        return self._collate([data[index] for index in indices])


def _is_columns(data: Any) -> bool:
    if isinstance(data, tuple) and data:
        return all(map(_is_array, data))
    if isinstance(data, dict) and data:
        return all(map(_is_array, data.values()))
    return _is_array(data)


def _is_array(data: Any) -> bool:
    return hasattr(data, "shape") and hasattr(data, "__getitem__")


def _length(data: Any) -> int:
    if _is_columns(data):
        columns = (
            data.values() if isinstance(data, dict) else data if isinstance(data, tuple) else [data]
        )
        lengths = [len(column) for column in columns]
        if len(set(lengths)) > 1:
            raise ValueError(f"Loader: the arrays have different lengths: {lengths}")
        return lengths[0]
    if not isinstance(data, Sized) or not hasattr(data, "__getitem__"):
        raise TypeError(
            f"Loader: data is a tuple or dict of arrays, or a dataset with len() and [i], not a "
            f"{type(data).__name__}"
        )
    return len(data)
