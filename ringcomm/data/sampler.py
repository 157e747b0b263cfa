"""ShardedSampler: deals out the samples of each epoch to the ranks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Final

from ringcomm.data.epoch_order import (
    REMAINDERS,
    Indices,
    Phases,
    Remainder,
    batch_lengths,
    epoch_order,
    n_remaining,
    remaining,
    share_length,
    share_of,
)
from ringcomm.engine.api import collectives
from ringcomm.engine.api.init_rank_size import engine, is_initialized
from ringcomm.errors import MismatchError

State = dict[str, Any]
_SHOWN: Final = 60  # characters of an argument in an error


class ShardedSampler:
    """An iterable of the indices of this rank's samples: each iteration is the next epoch.

    All ranks together see each sample once per epoch, except for the remainder. An epoch that the
    program left with `break` counts as over. For torch's DataLoader, pass `sampler=sampler`, or
    `batch_sampler=sampler.batches(32)`, which has the same number of batches on every rank. Ranks
    must pass the same arguments. If all ranks of the job share the data, they compare the arguments
    in the first iteration, which is collective then.

        for epoch in range(sampler.epoch, 10):
            for x, y in DataLoader(data, batch_sampler=sampler.batches(32)):
                ...

    Args:
        data: the dataset, or the number of its samples.
        shuffle: use a different order in each epoch, a function of (seed, epoch) alone.
        seed: seed of the order, at least 0, the same on every rank.
        remainder: the treatment of the last samples if `size` does not divide their number. "drop"
            leaves out fewer than `size` samples, which change with the epoch if `shuffle`. "pad"
            repeats fewer than `size` samples. "uneven" leaves out and repeats none, and gives some
            ranks one sample more: see batches(), and set_samples() of DistributedOptimizer.
        rank: rank of this process among the processes that share the data; by default its rank in
            the job.
        size: number of processes that share the data; by default all ranks of the job.

    Attributes:
        epoch: the epoch under way, or else the next.

    Raises:
        ValueError: remainder is not known, a number is negative, or rank is not below size.
        TypeError: rank or size is missing, or data is a tuple or dict, whose len() does not count
            samples.
        NotInitializedError: init() has not run, and size is not given.

    The first iteration raises MismatchError, on every rank, if ranks have different arguments,
    batches, or epochs.

    Cost: 8 bytes per sample of the whole dataset on each rank, 24 during a shuffle.
    """

    def __init__(
        self,
        data: Sized | int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        remainder: Remainder = "drop",
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        if (rank is None) != (size is None):
            raise TypeError(f"ShardedSampler: pass both rank and size, or none; not {rank}, {size}")
        if isinstance(data, tuple | dict):
            raise TypeError("ShardedSampler: for several arrays, pass the number of rows: len(x)")
        self.n = len(data) if isinstance(data, Sized) else operator.index(data)
        self._is_for_job = rank is None
        self.rank = engine().rank if rank is None else operator.index(rank)
        self.size = engine().size if size is None else operator.index(size)
        self.shuffle, self.seed, self.remainder = bool(shuffle), operator.index(seed), remainder
        self._refuse_bad_arguments()
        self._epoch = 0  # of self._run, or else the next
        self._phases: Phases = ()
        self._run: EpochShare | None = None
        self._is_compared = False

    @property
    def epoch(self) -> int:
        """The epoch under way, or else the next."""
        run = self._run
        return self._epoch if run is None else run.epoch + run.is_over

    def __iter__(self) -> Iterator[int]:
        run = self.begin()  # at the first next(): DataLoader makes an iterator that it never uses
        for batch in run.take(lambda rank: [1] * self.length_of(rank), self.rank):
            yield from batch

    def __len__(self) -> int:
        """Return the number of this rank's samples in the epoch under way, or else in the next."""
        run = self._run
        if run is not None and not run.is_over:
            return len(run.share)
        return self.length_of(self.rank)

    def batches(self, batch_size: int, *, drop_last: bool = False) -> Batches:
        """Return an iterable of this rank's samples in batches, each a list of indices."""
        return Batches(self, batch_size, drop_last=drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iter(). Not needed if epochs follow each other.

        The epoch starts at its beginning, unless load_state_dict() has just resumed it.
        """
        epoch = _natural("epoch", epoch)
        if self._run is not None or epoch != self._epoch:
            self._set(epoch, ())

    def state_dict(self, consumed: int | None = None) -> State:
        """Return the position of this rank, as plain numbers; local.

        Args:
            consumed: number of samples of this epoch that this rank has trained on. By default, all
                that the sampler has dealt out, which are too many if a DataLoader has workers.
                rc.data.Loader counts by itself: use its state_dict().

        Raises:
            ValueError: consumed is more than this rank's samples, or negative.
        """
        if self._run is None and consumed:
            raise ValueError(
                f"state_dict(consumed={consumed}): no iteration over this sampler has begun, so no "
                "sample can have been trained on; leave consumed out"
            )
        taken = 0 if self._run is None else self._run.consumed(consumed)
        epoch, phases = self._epoch, self._phases
        if self._run is not None and taken >= len(self._run.share):
            epoch, phases, taken = self._run.epoch + 1, (), 0
        return {
            "epoch": epoch,
            "phases": [list(counts) for counts in phases],
            "taken": taken,
            "rank": self.rank,
            "size": self.size,
            **self._arguments_of_order,
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue where a run stopped, on any number of ranks: no sample is repeated or lost.

        Args:
            state: the state_dict() of any rank, if all ranks had consumed the same number of
                samples, as after a step with equal batches; else the list of all ranks' states.

        Raises:
            TypeError: state is not a dict or a list of dicts, or a number in it is not an int.
            ValueError: the state is for other data, seed or shuffling, or not from state_dict(), or
                states are missing.
        """
        states = [_whole(each) for each in ([state] if isinstance(state, Mapping) else state)]
        if not isinstance(state, Mapping):
            _require_complete(states)
        first = states[0]
        for what, value in self._arguments_of_order.items():
            if first[what] != value:
                raise ValueError(
                    f"ShardedSampler: the state has {what}={first[what]}, this sampler {value}: "
                    "the rest of the epoch would have other samples. Pass equal data and arguments"
                )
        epoch = min(each["epoch"] for each in states)
        # A rank that had finished the epoch is in the next epoch already.
        counts = [each["taken"] if each["epoch"] == epoch else self.n for each in states]
        if isinstance(state, Mapping):
            counts *= first["size"]
        known = next(each["phases"] for each in states if each["epoch"] == epoch)
        self._set(epoch, (*known, counts) if any(counts) else tuple(known))
        if self._phases and self.longest() == 0:
            self._set(epoch + 1, ())

    def elastic_position(self, n_batches: int | None = None) -> State:
        """Return the position of all ranks, which have consumed equally many batches; local.

        n_batches: how many, in the epoch under way; None: all that the sampler has dealt out.
        """
        run = self._run
        if run is None:
            return {"epoch": self._epoch, "phases": self._phases}
        n = run.n_dealt if n_batches is None else n_batches
        if n >= run.n_batches and (n or run.is_over):
            return {"epoch": run.epoch + 1, "phases": ()}
        counts = tuple(sum(run.lengths_of(rank)[:n]) for rank in range(self.size))
        return {"epoch": run.epoch, "phases": (*self._phases, counts) if n else self._phases}

    def set_elastic_position(self, position: Mapping[str, Any]) -> None:
        """Go on from an elastic_position(): the ranks of today share what is left of its epoch."""
        if self._is_for_job:
            self.rank, self.size = engine().rank, engine().size
        self._set(position["epoch"], position["phases"])
        self._is_compared = False
        if self._phases and self.longest() == 0:
            self._set(position["epoch"] + 1, ())

    @property
    def has_begun(self) -> bool:
        """True if an iteration of this sampler has begun `epoch`."""
        return self._run is not None

    @property
    def is_under_way(self) -> bool:
        """True if some, but not all, samples of an epoch have been dealt out."""
        return self._run is not None and self._run.taken > 0 and not self._run.is_over

    def begin(self, *, batch_size: int = 0, drop_last: bool = False) -> EpochShare:
        """Begin the next epoch, and return this rank's share of it. Collective the first time.

        Ranks compare the arguments, which are those of Batches; without batches, batch_size is 0.
        """
        if not self._is_compared:
            self._compare({"batch_size": batch_size, "drop_last": drop_last})
            self._is_compared = True
        if self._run is not None:
            self._set(self._run.epoch + 1, ())
        order = epoch_order(self.n, seed=self.seed, epoch=self._epoch, is_shuffled=self.shuffle)
        left = remaining(order, self._phases)
        share = share_of(left, order, self.rank, self.size, self.remainder)
        self._run = EpochShare(self._epoch, share)
        return self._run

    def longest(self) -> int:
        """Return the largest number of samples of any rank in the epoch under way, or the next."""
        return self.length_of(0)

    def length_of(self, rank: int) -> int:
        """Return the number of a rank's samples in the epoch under way, or else in the next."""
        is_over = self._run is not None and self._run.is_over
        left = n_remaining(self.n, () if is_over else self._phases)
        return share_length(left, rank, self.size, self.remainder)

    @property
    def _arguments_of_order(self) -> dict[str, Any]:
        """The arguments that determine the order of an epoch, besides its number."""
        return {"samples": self.n, "shuffle": self.shuffle, "seed": self.seed}

    def _compare(self, batching: Mapping[str, Any]) -> None:
        """Raise MismatchError on every rank if ranks have different arguments.

        Collective if the sampler is for all ranks of the job. If it is for other processes (rank=
        and size=), this does nothing, because the engine has no group of these processes.
        """
        if not is_initialized() or self.size == 1:
            return
        if (self.rank, self.size) != (engine().rank, engine().size):
            return
        phases = tuple(map(tuple, self._phases))
        mine = {"remainder": self.remainder, "epoch": self._epoch, "phases": phases}
        given = collectives.allgather_object(
            {**self._arguments_of_order, **mine, **batching}, name="arguments of ShardedSampler"
        )
        known = [(rank, each) for rank, each in enumerate(given) if each is not None]  # join()
        first, expected = known[0]
        for what, value in expected.items():
            for other, arguments in known:
                if arguments[what] != value:
                    raise MismatchError(
                        f"ShardedSampler: rank {first} has {_shown(what, value)}, rank {other} "
                        f"{_shown(what, arguments[what])}: samples would be used twice, or "
                        "never. Pass the same on every rank. If not all ranks of the job share "
                        "the data, pass rank= and size="
                    )

    def _set(self, epoch: int, phases: Phases) -> None:
        self._epoch, self._phases, self._run = epoch, phases, None

    def _refuse_bad_arguments(self) -> None:
        for what, value in (("number of samples", self.n), ("seed", self.seed)):
            _natural(what, value)
        if self.remainder not in REMAINDERS:
            raise ValueError(
                f"ShardedSampler: remainder must be {', '.join(REMAINDERS)}, not {self.remainder!r}"
            )
        if not 0 <= self.rank < self.size:
            raise ValueError(f"ShardedSampler: rank {self.rank} is not one of {self.size} ranks")


@dataclass(eq=False)
class EpochShare:
    """One iteration over a rank's share of an epoch."""

    epoch: int
    share: Indices
    taken: int = 0  # samples that have been dealt out
    n_dealt: int = 0  # batches that have been dealt out
    n_batches: int = 0  # of this rank
    is_over: bool = False
    lengths_of: Callable[[int], list[int]] = lambda rank: []  # of the batches of any rank

    def take(self, lengths_of: Callable[[int], list[int]], rank: int) -> Iterator[list[int]]:
        """Deal out the batches of a rank; lengths_of() returns the lengths of those of any rank."""
        lengths = lengths_of(rank)
        self.lengths_of, self.n_batches = lengths_of, len(lengths)
        for length in lengths:
            start, self.taken = self.taken, self.taken + length
            self.n_dealt += 1
            yield self.share[start : start + length].tolist()
        self.is_over = True

    def consumed(self, said: int | None) -> int:
        """Return `said`, the number of samples trained on; if None, the number dealt out."""
        if said is None:
            return len(self.share) if self.is_over else self.taken
        if not 0 <= said <= len(self.share):
            raise ValueError(
                f"state_dict({said}): this rank has {len(self.share)} samples in this epoch"
            )
        return said


class Batches:
    """A ShardedSampler's samples in batches: the same number on every rank, each a list of indices.

    Made by ShardedSampler.batches(); a `batch_sampler` for torch's DataLoader. The attributes
    sampler, batch_size and drop_last are the arguments.

    Args:
        sampler: the ShardedSampler, which deals out the samples, and counts epochs.
        batch_size: samples of each rank in a batch. The last batch may be smaller. With remainder=
            "uneven", batches of some ranks may have one sample less; a batch is empty only if its
            rank has fewer samples than there are batches, as may happen with batch_size=1.
        drop_last: leave out batches that are smaller than batch_size.

    Raises:
        ValueError: batch_size is less than 1.
    """

    def __init__(
        self, sampler: ShardedSampler, batch_size: int, *, drop_last: bool = False
    ) -> None:
        require_sampler("batches", sampler)
        self.sampler = sampler
        self.batch_size = operator.index(batch_size)
        self.drop_last = drop_last
        if self.batch_size < 1:
            raise ValueError(f"batches: batch_size is at least 1, not {batch_size}")

    def __iter__(self) -> Iterator[list[int]]:
        yield from self.begin()  # at the first next()

    def __len__(self) -> int:
        """Return the number of batches of the epoch under way, or else of the next."""
        return len(self._lengths(len(self.sampler)))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iter(); see ShardedSampler.set_epoch()."""
        self.sampler.set_epoch(epoch)

    def begin(self) -> Iterator[list[int]]:
        """Begin the next epoch now, and return its batches."""
        sampler = self.sampler
        run = sampler.begin(batch_size=self.batch_size, drop_last=self.drop_last)
        return run.take(lambda rank: self._lengths(sampler.length_of(rank)), sampler.rank)

    def _lengths(self, mine: int) -> list[int]:
        if self.drop_last:
            last_rank = self.sampler.length_of(self.sampler.size - 1)
            return [self.batch_size] * (last_rank // self.batch_size)
        return batch_lengths(mine, self.sampler.longest(), self.batch_size)


_KEYS: Final = ("epoch", "phases", "taken", "rank", "size", "samples", "shuffle", "seed")


def _whole(state: Any) -> State:
    """Return a state with its numbers as ints; raise if it is not from state_dict()."""
    if not isinstance(state, Mapping):
        raise TypeError(
            f"ShardedSampler: load_state_dict() takes what state_dict() returned, or a list of "
            f"such dicts, not a {type(state).__name__}"
        )
    missing = [key for key in _KEYS if key not in state]
    if missing:
        raise ValueError(
            f"ShardedSampler: the state has no {', '.join(missing)}; it has "
            f"{', '.join(map(str, state)) or 'nothing'}. Pass what state_dict() returned"
        )
    phases = state["phases"]
    is_dealt = isinstance(phases, list | tuple) and all(
        isinstance(counts, list | tuple) and counts and all(isinstance(n, int) for n in counts)
        for counts in phases
    )
    if not is_dealt:
        raise ValueError(
            f"ShardedSampler: the state has phases={phases!r}; they must be lists of numbers of "
            "samples, by rank"
        )
    numbers = ("epoch", "taken", "rank", "size")
    return {**state, **{what: _natural(f"state's {what}", state[what]) for what in numbers}}


def require_sampler(label: str, sampler: object) -> None:
    """Raise TypeError if `sampler` is not a ShardedSampler."""
    if not isinstance(sampler, ShardedSampler):
        raise TypeError(f"{label}: sampler must be a ringcomm.data.ShardedSampler, not {sampler!r}")


def _require_complete(states: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if these are not the states of all ranks of one job at one moment."""
    ranks = [each["rank"] for each in states]
    size = states[0]["size"] if states else 1
    if ranks != list(range(size)):
        raise ValueError(
            f"ShardedSampler: the list has states of ranks {ranks}, of a job of {size}: pass those "
            "of all ranks in order, or one alone"
        )
    first = states[0]
    base = min(each["epoch"] for each in states)
    for each in states:
        is_through = each["epoch"] == base + 1 and not each["taken"]
        if each["epoch"] != base and not is_through:
            raise ValueError(
                f"ShardedSampler: rank {first['rank']} is in epoch {first['epoch']}, rank "
                f"{each['rank']} in {each['epoch']}: the states are not of one moment"
            )
        for what in ("size", "samples", "shuffle", "seed"):
            if each[what] != first[what]:
                raise ValueError(
                    f"ShardedSampler: rank {first['rank']} has {what}={first[what]}, rank "
                    f"{each['rank']} {each[what]}: the states are not of one job"
                )


def _natural(what: str, value: int) -> int:
    try:
        value = operator.index(value)
    except TypeError as error:
        raise TypeError(f"ShardedSampler: the {what} is an int, not {value!r}") from error
    if value < 0:
        raise ValueError(f"ShardedSampler: the {what} is at least 0, not {value}")
    return value


def _shown(what: str, value: Any) -> str:
    return f"{what}={value}"[:_SHOWN] + "..." * (len(f"{what}={value}") > _SHOWN)
