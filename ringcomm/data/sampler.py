"""ShardedSampler: deals out the samples of each epoch to the ranks."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator, Mapping, Sequence, Sized
from types import FrameType
from typing import Any, Final, Literal, get_args

from ringcomm.data.epoch_order import (
    REMAINDERS,
    EpochShare,
    Phases,
    Remainder,
    batch_lengths,
    epoch_order,
    n_dealt,
    n_remaining,
    remaining,
    share_length,
    share_of,
)
from ringcomm.data.sampler_state import State, natural, require_complete, whole_state
from ringcomm.engine.api import collectives
from ringcomm.engine.api.init_rank_size import engine, is_initialized
from ringcomm.engine.api.require_nobody_in_join import require_nobody_in_join
from ringcomm.errors import MismatchError

Constant = Literal["global", "local"]
_NO_BATCHES: Final = {"batch_size": 0, "drop_last": False, "constant": "global"}
_SHOWN: Final = 60  # characters of an argument in an error
_HERE: Final = {__name__, "torch.utils.data.sampler", "torch.utils.data.dataloader"}
_READ_AHEAD: Final = {"accelerate", "lightning", "pytorch_lightning", "torchdata"}


class ShardedSampler:
    """An iterable of the indices of this rank's samples: each iteration is the next epoch.

    All ranks together see each sample once per epoch, except for the remainder. An epoch that the
    program left with `break` counts as over. For torch's DataLoader, pass
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
        first_size: number of ranks with which the training began, in an elastic job.

    Raises:
        ValueError: remainder is not known, a number is negative, or rank is not below size.
        TypeError: rank or size is missing, or data is a tuple or dict, whose len() does not count
            samples.
        NotInitializedError: init() has not run, and size is not given.

    The first iteration raises MismatchError, on every rank, if ranks have different arguments,
    batches, or epochs, or if a rank is in join(): nobody would take its share. Later iterations
    raise it if a rank was in join() in the last backward() of a DistributedOptimizer.

    DataLoader(sampler=sampler) with remainder="uneven" raises ValueError, on every rank: ranks
    could have different numbers of batches, and wait for each other after the last. Samplers with
    rank= and size= are not checked.

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
        if not (isinstance(data, Sized) or hasattr(data, "__index__")):
            raise TypeError(
                f"ShardedSampler: a {type(data).__name__} has no len(), so no samples can be "
                "dealt out by number. Let each rank take its own part of a stream, such as "
                "itertools.islice(stream, rank, None, size)"
            )
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
        self.first_size = self.size

    @property
    def epoch(self) -> int:
        """The epoch under way, or else the next."""
        run = self._run
        return self._epoch if run is None else run.epoch + run.is_over

    def __iter__(self) -> Iterator[int]:
        batch_size = _batch_size_of_torch(sys._getframe(1))
        if self.remainder != "uneven" or not self._is_for_job:
            batch_size = None
        return self._samples(batch_size)

    def _samples(self, refused_batch_size: int | None) -> Iterator[int]:
        run = self.begin()  # at the first next(): DataLoader makes an iterator that it never uses
        run.is_trained_on = _takes_when_asked(sys._getframe(1))
        if refused_batch_size is not None:  # ranks have compared their arguments: all raise this
            raise ValueError(
                'ShardedSampler: with remainder="uneven", DataLoader(data, '
                f"{refused_batch_size}, sampler=sampler) could have one batch more on some ranks, "
                "which would then wait for the others. Write DataLoader(data, batch_sampler="
                f'sampler.batches({refused_batch_size})), or pass remainder="drop"'
            )
        for batch in run.take(lambda rank: [1] * self.length_of(rank), self.rank):
            yield from batch

    def __len__(self) -> int:
        """Return the number of this rank's samples in the epoch under way, or else in the next."""
        run = self._run
        if run is not None and not run.is_over:
            return len(run.share)
        return self.length_of(self.rank)

    def batches(
        self, batch_size: int, *, drop_last: bool = False, constant: Constant = "global"
    ) -> Batches:
        """Return an iterable of this rank's samples in batches, each a list of indices."""
        return Batches(self, batch_size, drop_last=drop_last, constant=constant)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iter(). Not needed if epochs follow each other.

        The epoch starts at its beginning, unless load_state_dict() has just resumed it.
        """
        epoch = natural("epoch", epoch)
        if self._run is not None or epoch != self._epoch:
            self._set(epoch, ())

    def state_dict(self, consumed: int | None = None) -> State:
        """Return the position of this rank, as plain numbers; local.

        Args:
            consumed: number of samples of this epoch that this rank has trained on. By default, all
                that the sampler has dealt out, which are too many if a DataLoader has workers, or
                if the program itself reads ahead.
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
        states = [whole_state(each) for each in ([state] if isinstance(state, Mapping) else state)]
        if not isinstance(state, Mapping):
            require_complete(states)
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
        epoch, phases = self._epoch, self._phases
        if run is not None:
            n = run.n_dealt if n_batches is None else n_batches
            if n >= run.n_batches and (n or run.is_over):
                epoch, phases = run.epoch + 1, ()
            elif n:
                counts = tuple(sum(run.lengths_of(rank)[:n]) for rank in range(self.size))
                phases = (*phases, counts)
        return {"epoch": epoch, "phases": phases, "first_size": self.first_size}

    def set_elastic_position(self, position: Mapping[str, Any]) -> None:
        """Go on from an elastic_position(): the ranks of today share what is left of its epoch."""
        if self._is_for_job:
            self.rank, self.size = engine().rank, engine().size
        self.first_size = position["first_size"]
        self._set(position["epoch"], position["phases"])
        self._is_compared = False
        if self._phases and self.longest() == 0:
            self._set(position["epoch"] + 1, ())

    @property
    def has_begun(self) -> bool:
        """True if an iteration of this sampler has begun `epoch`."""
        return self._run is not None

    @property
    def is_ahead(self) -> bool:
        """True if some, but not all, samples of an epoch have been dealt out, maybe too early."""
        run = self._run
        return run is not None and run.taken > 0 and not (run.is_over or run.is_trained_on)

    def begin(self, batching: Mapping[str, Any] = _NO_BATCHES) -> EpochShare:
        """Begin the next epoch, and return this rank's share of it. Collective the first time.

        Ranks compare `batching`, the arguments of Batches.
        """
        if not self._is_compared:
            self._compare(batching)
            self._is_compared = True
        elif self._shares_with_job and (absent := engine().seen_in_join):
            _require_nobody_in_join([None if r in absent else r for r in range(self.size)])
        if self._run is not None:
            self._set(self._run.epoch + 1, ())
        order = epoch_order(self.n, seed=self.seed, epoch=self._epoch, is_shuffled=self.shuffle)
        left = remaining(order, self._phases)
        share = share_of(left, order, self.rank, self.size, self.remainder)
        self._run = EpochShare(self._epoch, share)
        return self._run

    def note_reader(self, reader: FrameType) -> None:
        """Note who takes the batches of the epoch under way."""
        assert self._run is not None
        self._run.is_trained_on = _takes_when_asked(reader)

    def longest(self) -> int:
        """Return the largest number of samples of any rank in the epoch under way, or the next."""
        return self.length_of(0)

    def length_of(self, rank: int) -> int:
        """Return the number of a rank's samples in the epoch under way, or else in the next."""
        return share_length(self._n_left, rank, self.size, self.remainder)

    def n_dealt(self) -> int:
        """Return the number of samples of all ranks in the epoch under way, or else in the next."""
        return n_dealt(self._n_left, self.size, self.remainder)

    @property
    def _n_left(self) -> int:
        is_over = self._run is not None and self._run.is_over
        return n_remaining(self.n, () if is_over else self._phases)

    @property
    def _arguments_of_order(self) -> dict[str, Any]:
        return {"samples": self.n, "shuffle": self.shuffle, "seed": self.seed}

    @property
    def _shares_with_job(self) -> bool:
        if not is_initialized() or self.size == 1:
            return False
        return (self.rank, self.size) == (engine().rank, engine().size)

    def _compare(self, batching: Mapping[str, Any]) -> None:
        """Raise MismatchError on every rank if ranks have different arguments.

        Collective if the sampler is for all ranks of the job. If it is for other processes (rank=
        and size=), this does nothing, because the engine has no group of these processes.
        """
        if not self._shares_with_job:
            return
        phases = tuple(map(tuple, self._phases))
        mine = {"remainder": self.remainder, "epoch": self._epoch, "phases": phases}
        given = collectives.allgather_object(
            {**self._arguments_of_order, **mine, **batching}, name="arguments of ShardedSampler"
        )
        _require_nobody_in_join(given)
        for what, value in given[0].items():
            for other, arguments in enumerate(given):
                if arguments[what] != value:
                    raise MismatchError(
                        f"ShardedSampler: rank 0 has {_shown(what, value)}, rank {other} "
                        f"{_shown(what, arguments[what])}: samples would be used twice, or "
                        "never. Pass the same on every rank. If not all ranks of the job share "
                        "the data, pass rank= and size="
                    )

    def _set(self, epoch: int, phases: Phases) -> None:
        self._epoch, self._phases, self._run = epoch, phases, None

    def _refuse_bad_arguments(self) -> None:
        for what, value in (("number of samples", self.n), ("seed", self.seed)):
            natural(what, value)
        if self.remainder not in REMAINDERS:
            raise ValueError(
                f"ShardedSampler: remainder must be {', '.join(REMAINDERS)}, not {self.remainder!r}"
            )
        if not 0 <= self.rank < self.size:
            raise ValueError(f"ShardedSampler: rank {self.rank} is not one of {self.size} ranks")


class Batches:
    """A ShardedSampler's samples in batches: the same number on every rank, each a list of indices.

    Made by ShardedSampler.batches(); a `batch_sampler` for torch's DataLoader. The attributes
    sampler, batch_size, drop_last and constant are the arguments.

    Args:
        sampler: the ShardedSampler, which deals out the samples, and counts epochs.
        batch_size: samples of each rank in a batch. The last batch may be smaller. With remainder=
            "uneven", batches of some ranks may have one sample less; a batch is empty only if its
            rank has fewer samples than there are batches, as may happen with batch_size=1.
        drop_last: leave out a last step with fewer samples than the others.
        constant: what stays the same in an elastic job when the number of ranks changes. "global":
            the samples of a step, over all ranks; the ranks' batches are then unequal if the
            number of ranks does not divide them, so weigh gradients with the lengths of batches.
            "local": batch_size; then scale the learning rate.

    Raises:
        ValueError: batch_size is less than 1, or constant is not known.
    """

    def __init__(
        self,
        sampler: ShardedSampler,
        batch_size: int,
        *,
        drop_last: bool = False,
        constant: Constant = "global",
    ) -> None:
        require_sampler("batches", sampler)
        self.sampler = sampler
        self.batch_size = operator.index(batch_size)
        self.drop_last, self.constant = drop_last, constant
        if self.batch_size < 1:
            raise ValueError(f"batches: batch_size is at least 1, not {batch_size}")
        if constant not in get_args(Constant):
            raise ValueError(
                f"batches: constant is {' or '.join(get_args(Constant))}, not {constant!r}"
            )

    def __iter__(self) -> Iterator[list[int]]:
        batches = self.begin()  # at the first next()
        self.sampler.note_reader(sys._getframe(1))
        yield from batches

    def __len__(self) -> int:
        """Return the number of batches of the epoch under way, or else of the next."""
        return len(self._lengths(self.sampler.n_dealt(), self.sampler.rank))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iter(); see ShardedSampler.set_epoch()."""
        self.sampler.set_epoch(epoch)

    def begin(self) -> Iterator[list[int]]:
        """Begin the next epoch now, and return its batches."""
        sampler = self.sampler
        batching = {each: getattr(self, each) for each in _NO_BATCHES}
        run = sampler.begin(batching)
        n = sampler.n_dealt()  # once all have been dealt out, it is that of the next epoch
        return run.take(lambda rank: self._lengths(n, rank), sampler.rank)

    @property
    def samples_per_step(self) -> int:
        """Number of samples of a step, over all ranks."""
        sampler = self.sampler
        is_global = self.constant == "global"
        return self.batch_size * (sampler.first_size if is_global else sampler.size)

    def _lengths(self, n: int, rank: int) -> list[int]:
        sampler, per_step = self.sampler, self.samples_per_step
        if self.drop_last:
            n = n // per_step * per_step
        return batch_lengths(n, rank, sampler.size, per_step)


def require_sampler(label: str, sampler: object) -> None:
    if not isinstance(sampler, ShardedSampler):
        raise TypeError(f"{label}: sampler must be a ringcomm.data.ShardedSampler, not {sampler!r}")


def _batch_size_of_torch(caller: FrameType) -> int | None:
    """Return the batch size if torch's BatchSampler iterates, as in DataLoader(sampler=).

    Nothing else tells a sampler that batches are made of its samples.
    """
    if caller.f_globals.get("__name__") != "torch.utils.data.sampler":
        return None
    return getattr(caller.f_locals.get("self"), "batch_size", None)


def _takes_when_asked(reader: FrameType | None) -> bool:
    """Return True if a DataLoader without workers takes a batch when the program wants one.

    Then what was taken at the end of a step has been trained on. Frameworks may read ahead of it.
    """
    is_torchs = False
    while reader is not None and (name := reader.f_globals.get("__name__")) in _HERE:
        if type(reader.f_locals.get("self")).__name__ == "_MultiProcessingDataLoaderIter":
            return False
        is_torchs |= name == "torch.utils.data.dataloader"
        reader = reader.f_back
    program = "" if reader is None else reader.f_globals.get("__name__", "")
    return is_torchs and program.partition(".")[0] not in _READ_AHEAD


def _require_nobody_in_join(by_rank: Sequence[object]) -> None:
    require_nobody_in_join(
        "ShardedSampler",
        by_rank,
        range(len(by_rank)),
        must="take its share of the samples",
        advice=(
            "Iterate before the first rank calls join(), or after join() has returned; or use a "
            "rc.data.WorkQueue, which deals out all samples to the ranks that ask"
        ),
    )


def _shown(what: str, value: Any) -> str:
    return f"{what}={value}"[:_SHOWN] + "..." * (len(f"{what}={value}") > _SHOWN)
