"""Loader: loads batches of this rank's samples while the rank computes."""

from __future__ import annotations

import contextlib
import operator
import queue
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import chain, pairwise, repeat
from typing import Any, TypeVar

import numpy as np

from ringcomm.arrays import adapter_for
from ringcomm.config import read_settings
from ringcomm.data.sampler import Batches, Constant, ShardedSampler, require_sampler
from ringcomm.data.sampler_state import State

# --- results that are made ahead ------------------------------------------------------------------
T = TypeVar("T")
R = TypeVar("R")
_END = object()
_END_S = 5.0  # seconds to wait for a load() that is under way when the generator is closed


class LateError(Exception):
    pass


def prefetched(
    load: Callable[[T], R], items: Iterable[T], *, ahead: int, timeout_s: float | None
) -> Generator[R, None, None]:
    """Yield load(item) for each item, in order; a thread keeps up to `ahead` results ready.

    Raises an error of `items` or load() in place of the result, and LateError if a result takes
    longer than timeout_s. Closing the generator ends the thread.
    """
    room = threading.Semaphore(ahead)
    results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
    is_closed = threading.Event()

    def work() -> None:
        try:
            for item in items:
                room.acquire()
                if is_closed.is_set():
                    return
                results.put((load(item), None))
            results.put((_END, None))
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            results.put((None, error))

    thread = threading.Thread(target=work, name="ringcomm-loader", daemon=True)
    thread.start()
    try:
        while True:
            try:
                result, error = results.get(timeout=timeout_s)
            except queue.Empty:
                raise LateError from None
            if error is not None:
                raise error
            if result is _END:
                return
            room.release()
            yield result
    finally:
        is_closed.set()
        room.release()
        with contextlib.suppress(RuntimeError):  # the interpreter is exiting
            thread.join(_END_S)


# --- batches of samples ---------------------------------------------------------------------------
def stack(samples: Sequence[Any]) -> Any:
    """Return a batch of one or more samples of the same structure.

    Stacks numbers and numpy arrays into a numpy array with a new first dimension, and tensors into
    a tensor. Tuples, lists and dicts become one such object of batches. Others become a list.
    """
    first = samples[0]
    if isinstance(first, dict):
        return {key: stack([sample[key] for sample in samples]) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*map(stack, zip(*samples, strict=True)))
    if isinstance(first, tuple | list):
        return type(first)(map(stack, zip(*samples, strict=True)))
    if isinstance(first, bool | int | float | complex | np.generic | np.ndarray):
        return np.stack([np.asarray(sample) for sample in samples])
    try:
        adapter = adapter_for(first)
    except TypeError:
        return list(samples)
    batch = adapter.empty(first, (len(samples), *adapter.shape(first)))
    for place, sample in enumerate(samples):
        if sample.shape != first.shape:
            raise ValueError(
                f"cannot stack samples of shapes {tuple(first.shape)} and {tuple(sample.shape)}: "
                "pass collate="
            )
        batch[place] = sample
    return batch


def map_arrays(change: Callable[[Any], Any], batch: Any) -> Any:
    """Return the batch with change() applied to each array, and to each list without arrays."""
    if isinstance(batch, dict):
        return {key: map_arrays(change, value) for key, value in batch.items()}
    if isinstance(batch, tuple):
        values = [map_arrays(change, value) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else tuple(values)
    if isinstance(batch, list) and any(hasattr(value, "shape") for value in batch):
        return [map_arrays(change, value) for value in batch]
    return change(batch)


_NAMED = 8  # samples that an error names


class Loader:
    """An iterable of batches: each iteration is the next epoch of this rank's samples.

    Every rank gets the same number of batches. While the rank computes with one batch, a thread
    loads the next one. A thread is enough for rows of arrays, and for samples that come from files.
    For a dataset that runs much Python per sample, use torch's DataLoader with workers and
    batch_sampler=sampler.batches(n).

    A dataset that uses a global random generator would draw from it in that thread. Pass
    prefetch=0, or give the dataset a generator of its own.

    Args:
        data: a tuple or dict of arrays (numpy, memory-mapped, torch) with the same number of rows,
            or one array; a batch has the same structure. Or a dataset with len(data) and data[i];
            if it has data.__getitems__([i, j]), this is used instead.
        batch_size: number of this rank's samples in a batch.
        sampler: a ShardedSampler over the data; by default ShardedSampler(data), shuffled.
        optimizer: a DistributedOptimizer. The loader calls its set_samples() with the size of each
            batch, so that ranks with smaller batches weigh less. If a step has several batches, the
            size of the last one counts.
        collate: function that makes a batch of a list of samples of a dataset; by default, numbers
            and arrays are stacked.
        prefetch: number of batches to load ahead; with 0 there is no thread.
        drop_last: leave out a last step with fewer samples than the others.
        constant: "global" or "local". When an elastic job changes its number of ranks, "global"
            keeps the number of samples per step, "local" keeps batch_size; see Batches.

    Attributes:
        sampler: the ShardedSampler.
        batches: the sampler's samples, in batches.

    Raises:
        TypeError: optimizer has no set_samples(), or data is none of the above.
        ValueError: arrays have different lengths, the sampler is for other data, or a number is out
            of range.

    An iteration raises the error of a dataset in place of the batch, with a note that names the
    samples. It raises TimeoutError if a batch takes longer than RINGCOMM_TIMEOUT_S.
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
        constant: Constant = "global",
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
        self.batches = Batches(self.sampler, batch_size, drop_last=drop_last, constant=constant)
        self._data, self._optimizer, self._prefetch = data, optimizer, prefetch
        self._collate = stack if collate is None else collate
        self._consumed: int | None = None  # samples, in the epoch under way
        self._n_batches: int | None = None  # batches that have these samples
        self._under_way: weakref.ref[Generator[Any, None, None]] | None = None  # no cycle

    def __iter__(self) -> Iterator[Any]:
        return self.iterate()

    def iterate(self, on_next: Callable[[Any], object] | None = None) -> Iterator[Any]:
        """Return iter(self), but call on_next() before each batch, with the batch that follows."""
        earlier = None if self._under_way is None else self._under_way()
        if earlier is not None:
            earlier.close()
        epoch = self._epoch(on_next)
        self._under_way = weakref.ref(epoch)
        return epoch

    def __len__(self) -> int:
        """Return the number of batches of the epoch under way, or else of the next epoch."""
        return len(self.batches)

    @property
    def needs_weights(self) -> bool:
        """True if ranks have batches of different sizes, and no optimizer knows the sizes."""
        is_unequal = self.batches.samples_per_step % self.sampler.size > 0
        return is_unequal and self._optimizer is None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iter(); see ShardedSampler.set_epoch()."""
        self.sampler.set_epoch(epoch)

    def state_dict(self) -> State:
        """Return the position of this rank. Batches that it has received count as trained on."""
        return self.sampler.state_dict(self._consumed if self.sampler.has_begun else None)

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue where a run stopped; see ShardedSampler.load_state_dict()."""
        self.sampler.load_state_dict(state)
        self._consumed = self._n_batches = None

    def elastic_position(self) -> State:
        """Return the position of all ranks; see ShardedSampler.elastic_position()."""
        return self.sampler.elastic_position(self._n_batches)

    def set_elastic_position(self, position: Mapping[str, Any]) -> None:
        """Go on from a position; see ShardedSampler.set_elastic_position()."""
        self.sampler.set_elastic_position(position)
        self._consumed = self._n_batches = None

    def _epoch(self, on_next: Callable[[Any], object] | None) -> Generator[Any, None, None]:
        with contextlib.closing(self._loaded(self.batches.begin())) as loaded:
            self._consumed = consumed = 0
            self._n_batches = n_batches = 0
            ahead: Iterator[Any] = chain(loaded, [None])
            for (n, batch), after in pairwise(ahead) if on_next else zip(loaded, repeat(None)):
                self._consumed = consumed = consumed + n
                self._n_batches = n_batches = n_batches + 1
                if self._optimizer is not None:
                    self._optimizer.set_samples(n)
                if on_next and after:
                    on_next(after[1])
                yield batch
        self._consumed = self._n_batches = None

    def _loaded(self, batches: Iterator[list[int]]) -> Generator[tuple[int, Any], None, None]:
        if not self._prefetch:
            for indices in batches:  # map() would end at a StopIteration of the dataset
                yield self._load(indices)
            return
        timeout_s = read_settings().timeout_s
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
        if _columns(data):
            rows = np.asarray(indices, np.int64)
            return map_arrays(lambda column: column[rows], data)
        if not indices:  # a sample shows the structure of the empty batch
            return map_arrays(lambda column: column[:0], self._batch([0]))
        if hasattr(data, "__getitems__"):
            return self._collate(data.__getitems__(indices))
        return self._collate([data[index] for index in indices])


def _columns(data: Any) -> list[Any]:
    """Return the arrays of `data`, or [] if it is a dataset."""
    if isinstance(data, dict):
        data = tuple(data.values())
    columns = data if isinstance(data, tuple) else (data,)
    is_array = [hasattr(each, "shape") and hasattr(each, "__getitem__") for each in columns]
    return list(columns) if all(is_array) else []


def _length(data: Any) -> int:
    if columns := _columns(data):
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
