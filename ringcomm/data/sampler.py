"""ShardedSampler: the samples of each epoch, dealt out to the ranks."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any, Final

from ringcomm.data.alike import require_alike
from ringcomm.data.order import (
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
from ringcomm.engine.api.world import engine

State = dict[str, Any]


class ShardedSampler:
    """The indices of this rank's samples: an iterable that is another epoch each time.

    All ranks together see each sample once per epoch, but for the remainder. Each iteration is an
    epoch: the one that follows the last, whether that was gone through or left by `break`. As
    `sampler=` of torch's DataLoader it deals out samples, as `batch_sampler=sampler.batches(32)`
    batches, of which every rank gets as many. Ranks must pass the same arguments. They compare them
    in the first iteration, which is collective therefore, if those that share the data are all
    ranks of the job; otherwise nothing is sent.

        for epoch in range(sampler.epoch, 10):
            for x, y in DataLoader(data, batch_sampler=sampler.batches(32)):
                ...

    Args:
        data: the dataset, or how many samples it has.
        shuffle: another order in each epoch, a function of (seed, epoch) alone.
        seed: at least 0, the same on every rank.
        remainder: what becomes of the samples that do not go round. "drop": fewer than `size` are
            left out, others in each epoch if it shuffles. "pad": as few are seen twice, so that
            none is left out. "uneven": none is left out or repeated, and some ranks have one
            sample more: see batches(), and set_samples() of DistributedOptimizer.
        rank: of this process within those that share the data; by default, of all.
        size: how many share the data; by default, all ranks.

    Attributes:
        epoch: the one under way, else the next.

    Raises:
        ValueError: no such remainder, or a negative number, or rank not below size.
        TypeError: rank without size, or data is a tuple or dict, whose length is not its samples'.
        NotInitializedError: init() has not run, and size is not given.

    The first iteration raises MismatchError, on every rank, if ranks have different arguments,
    batches, or epochs.

    Cost: 8 bytes per sample of the whole dataset on each rank, 24 while it shuffles.
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
            raise TypeError("ShardedSampler: of several arrays, pass the number of rows: len(x)")
        self.n = len(data) if isinstance(data, Sized) else operator.index(data)
        self.rank = engine().rank if rank is None else operator.index(rank)
        self.size = engine().size if size is None else operator.index(size)
        self.shuffle, self.seed, self.remainder = bool(shuffle), operator.index(seed), remainder
        self._refuse_bad_arguments()
        self._epoch = 0  # of the next run
        self._phases: Phases = ()
        self._run: EpochShare | None = None
        self._is_compared = False

    @property
    def epoch(self) -> int:
        """The epoch under way, else the next."""
        run = self._run
        return self._epoch if run is None else run.epoch + run.is_over

    def __iter__(self) -> Iterator[int]:
        run = self.begin()  # at the first next(): DataLoader makes an iterator that it never uses
        for batch in run.take([1] * len(run.share)):
            yield from batch

    def __len__(self) -> int:
        """Return how many samples this rank has in the epoch under way, else in the next."""
        run = self._run
        if run is not None and not run.is_over:
            return len(run.share)
        return self.length_of(self.rank)

    def batches(self, batch_size: int, *, drop_last: bool = False) -> Batches:
        """Return an iterable of this rank's samples in batches, each a list of indices."""
        return Batches(self, batch_size, drop_last=drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iter(). Not needed where epochs follow each other.

        It starts at its beginning, unless it is the one that load_state_dict() has just resumed.
        """
        epoch = _natural("epoch", epoch)
        if self._run is not None or epoch != self._epoch:
            self._set(epoch, ())

    def state_dict(self, consumed: int | None = None) -> State:
        """Return where this rank is, as plain numbers; local.

        Args:
            consumed: how many of its samples this rank has trained on in this epoch; by default
                what was handed out, which with a DataLoader that has workers is ahead of that.
                rc.data.Loader keeps count itself: use its state_dict().
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
        """Go on where a run stopped, on any number of ranks: no sample is repeated or lost.

        Args:
            state: what state_dict() returned on any rank, if all had consumed as many samples, as
                they have at the end of a step with equal batches; else the list of all ranks'.

        Raises:
            ValueError: it is of other data, seed or shuffling, or states are missing, or it is
                not what state_dict() returns.
        """
        states = [_whole(each) for each in ([state] if isinstance(state, Mapping) else state)]
        if not isinstance(state, Mapping):
            _require_complete(states)
        first = states[0]
        for what, value in self._arguments_of_order.items():
            if first[what] != value:
                raise ValueError(
                    f"ShardedSampler: the state has {what}={first[what]}, this sampler {value}: "
                    "the rest of its epoch would be other samples. Use the same data and arguments"
                )
        epoch = min(each["epoch"] for each in states)
        # A rank that was through with it is in the next epoch already.
        counts = [each["taken"] if each["epoch"] == epoch else self.n for each in states]
        if isinstance(state, Mapping):
            counts *= first["size"]
        known = next(each["phases"] for each in states if each["epoch"] == epoch)
        self._set(epoch, (*known, counts) if any(counts) else tuple(known))
        if self._phases and self.longest() == 0:
            self._set(epoch + 1, ())

    @property
    def has_begun(self) -> bool:
        """True if `epoch` was begun by an iteration of this sampler."""
        return self._run is not None

    @property
    def is_under_way(self) -> bool:
        """True once some samples of an epoch have been handed out, until all have."""
        return self._run is not None and self._run.taken > 0 and not self._run.is_over

    def begin(self, *, batch_size: int = 0, drop_last: bool = False) -> EpochShare:
        """Begin the next epoch, and return this rank's part of it. Collective the first time.

        Args:
            batch_size: of the batches in which it will be handed out; 0: none.
            drop_last: of these batches.
        """
        if not self._is_compared:
            self._compare({"batch_size": batch_size, "drop_last": drop_last})
        if self._run is not None:
            self._set(self._run.epoch + 1, ())
        order = epoch_order(self.n, seed=self.seed, epoch=self._epoch, is_shuffled=self.shuffle)
        left = remaining(order, self._phases)
        share = share_of(left, order, self.rank, self.size, self.remainder)
        self._run = EpochShare(self._epoch, share)
        return self._run

    def longest(self) -> int:
        """Return how many samples the rank with most has in the epoch under way, else the next."""
        return self.length_of(0)

    def length_of(self, rank: int) -> int:
        """Return how many samples a rank has in the epoch under way, else in the next."""
        is_over = self._run is not None and self._run.is_over
        left = n_remaining(self.n, () if is_over else self._phases)
        return share_length(left, rank, self.size, self.remainder)

    @property
    def _arguments_of_order(self) -> dict[str, Any]:
        """All that the order of an epoch is a function of."""
        return {"samples": self.n, "shuffle": self.shuffle, "seed": self.seed}

    def _compare(self, batching: Mapping[str, Any]) -> None:
        phases = tuple(map(tuple, self._phases))
        mine = {"remainder": self.remainder, "epoch": self._epoch, "phases": phases}
        require_alike({**self._arguments_of_order, **mine, **batching}, self.rank, self.size)
        self._is_compared = True

    def _set(self, epoch: int, phases: Phases) -> None:
        self._epoch, self._phases, self._run = epoch, phases, None

    def _refuse_bad_arguments(self) -> None:
        for what, value in (("number of samples", self.n), ("seed", self.seed)):
            _natural(what, value)
        if self.remainder not in REMAINDERS:
            raise ValueError(
                f"ShardedSampler: remainder is {', '.join(REMAINDERS)}, not {self.remainder!r}"
            )
        if not 0 <= self.rank < self.size:
            raise ValueError(f"ShardedSampler: rank {self.rank} is not one of {self.size} ranks")


class EpochShare:
    """One iteration over a rank's share of an epoch; `taken` samples have been handed out."""

    def __init__(self, epoch: int, share: Indices) -> None:
        self.epoch = epoch
        self.share = share
        self.taken = 0
        self.is_over = False

    def take(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Hand out batches of these lengths."""
        for length in lengths:
            start, self.taken = self.taken, self.taken + length
            yield self.share[start : start + length].tolist()
        self.is_over = True

    def consumed(self, said: int | None) -> int:
        """Return how many samples were trained on, if that was said, else were handed out."""
        if said is None:
            return len(self.share) if self.is_over else self.taken
        if not 0 <= said <= len(self.share):
            raise ValueError(
                f"state_dict({said}): this rank has {len(self.share)} samples in this epoch"
            )
        return said


class Batches:
    """A ShardedSampler's samples in batches: as many on every rank, each a list of indices.

    Made by ShardedSampler.batches(); a `batch_sampler` for torch's DataLoader.

    Args:
        sampler: what is dealt out; it keeps count of epochs.
        batch_size: of each rank; the last batch may be smaller. With remainder="uneven" it may
            have one sample less on some ranks; it is empty only where a rank has fewer samples
            than others have batches, which batch_size=1 can bring about.
        drop_last: leave out batches that are smaller.

    Attributes:
        sampler: as passed.
        batch_size: as passed.
        drop_last: as passed.

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
        """Return how many batches the epoch under way has, else the next; as many on each rank."""
        return len(self._lengths(len(self.sampler)))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iter(); see ShardedSampler.set_epoch()."""
        self.sampler.set_epoch(epoch)

    def begin(self) -> Iterator[list[int]]:
        """Begin the next epoch now, and return its batches."""
        run = self.sampler.begin(batch_size=self.batch_size, drop_last=self.drop_last)
        return run.take(self._lengths(len(run.share)))

    def _lengths(self, mine: int) -> list[int]:
        if self.drop_last:
            last_rank = self.sampler.length_of(self.sampler.size - 1)
            return [self.batch_size] * (last_rank // self.batch_size)
        return batch_lengths(mine, self.sampler.longest(), self.batch_size)


_KEYS: Final = ("epoch", "phases", "taken", "rank", "size", "samples", "shuffle", "seed")


def _whole(state: Any) -> State:
    """Return a state, its numbers as ints; refuse what is none."""
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
    """Raise TypeError if this is no ShardedSampler."""
    if not isinstance(sampler, ShardedSampler):
        raise TypeError(f"{label}: sampler must be a ringcomm.data.ShardedSampler, not {sampler!r}")


def _require_complete(states: Sequence[Mapping[str, Any]]) -> None:
    """Refuse states that are not those of all ranks of one job at one moment."""
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
