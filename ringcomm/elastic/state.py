"""State that survives lost ranks: values of each rank, with its last commit."""

from __future__ import annotations

import copy
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np

from ringcomm.elastic.checksum import checksum_of
from ringcomm.elastic.commit_file import ABSENT, UNREAD, KeptFile, Origin
from ringcomm.engine.api import collectives
from ringcomm.engine.api.begin_next_view import (
    await_streams,
    require_all_live,
    stop_for_another_size,
)
from ringcomm.engine.api.init_rank_size import engine, rank
from ringcomm.engine.api.one_error_for_all import raise_together
from ringcomm.engine.control.live_parameters_and_callbacks import PROGRAM
from ringcomm.engine.core.current_engine import has_engine
from ringcomm.errors import (
    CommTimeoutError,
    MismatchError,
    NewViewInterrupt,
    PeerFailedError,
    RingcommError,
)


@runtime_checkable
class Positioned(Protocol):
    """A value of a state that has a position, such as a sampler, and keeps the rest to itself."""

    def elastic_position(self) -> Any:
        """Return the position, which is the same on all ranks; local."""
        ...

    def set_elastic_position(self, position: Any) -> None:
        """Go on from a position among the ranks of today, which may be fewer; local."""
        ...


class StateOf(NamedTuple):
    """What the state_dict() of a value was at a commit."""

    state: Any


_TORN = -1  # a commit was interrupted half-way
_NONE = -2  # this process has no part in the state of the job yet


class _Facts(NamedTuple):
    """What a rank tells the others at the begin of sync()."""

    n_commits: int
    is_saved: int
    path: int  # CRC-32 of the path of keep_in(), -1 without
    origin: int  # Origin.crc
    n_made: int  # Origin.n_made

    @property
    def commit(self) -> tuple[int, int]:
        """What tells who has the newest commit."""
        return self.n_commits, self.is_saved


class _Read(NamedTuple):
    """What the rank that reads the file of keep_in() tells the others."""

    refusal: str | None = None  # why the file cannot be used
    n_commits: int | None = None  # None: there is no file
    n_steps: int = 0
    origin: Origin = Origin(ABSENT)


class HostsUpdatedInterrupt(RuntimeError):
    """Training is to begin again from what there is now: all ranks raise it at the same point.

    elastic.run then calls the functions of register_reset_callbacks(), and `train`. ringcomm itself
    does not raise it.

    Attributes:
        skip_sync: True if all ranks have the same state, so that none need be sent.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("training is to begin again")
        self.skip_sync = skip_sync


class State(ABC):
    """State that is the same on all ranks after each commit. Derived classes hold the values.

    commit() copies the values, so that training can go back to them. After a loss, sync() gives
    all ranks the commit of those that have made the most. A step is thus applied on all ranks that
    are left or on none, if each rank commits after each step.
    """

    # The attributes that hold the copies of a commit, each a dict; (): keep_in() is not possible.
    COPIES: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self._file: KeptFile | None = None
        self._n_commits = 0
        self._is_saved = False
        self._reset_callbacks: list[Callable[[], None]] = []
        self._fewest_ranks = 1  # so many, the first ones, have all parts of the last commit

    @property
    def n_commits(self) -> int:
        """Number of commits that this rank has made or received."""
        return self._n_commits

    @property
    def has_commit(self) -> bool:
        """True if restore() can go back to a commit that is whole."""
        return self._is_saved and self._n_commits != _TORN

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Call these functions in each new view, on all ranks, after the state is restored.

        What they change in the state, such as a learning rate, is in the next commit.
        """
        self._reset_callbacks.extend(callbacks)

    def reset(self) -> None:  # noqa: B027 - a derived class may need nothing
        """Do what a derived class needs in each new view, before the reset callbacks."""

    def on_reset(self) -> None:
        """Call reset() and the functions of register_reset_callbacks()."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Copy the values; a later restore() returns to them. All ranks commit equally often.

        It costs one copy of all values, and waits for this rank's collectives on GPUs: results of
        one that fails are not kept. It is local, unless ranks have parts of the state, as with
        a DistributedOptimizer(shard_state=1): it then sends copies of them, and is collective.

        Raises errors, after the copy, as check_host_updates() does.
        """
        self._require_file_read()
        self._keep()
        self._keep_in_file()
        self.check_host_updates()

    def keep_in(self, path: str | os.PathLike[str], *, every: int = 1) -> None:
        """Keep every `every`-th commit in a file, for the case that all ranks are lost.

        Call it on all ranks with the same path, before the function with elastic.run. A job that
        is started again begins with the commit that is in the file, on any number of ranks; rank 0
        logs how many later ones are lost. A file that cannot be used, because it is damaged, or
        does not fit the program, is an error on all ranks before any has begun, and stays as it is.
        So is one that another user has written, or that every user can write or replace: reading
        it may run any code. What is written here, this user alone can read and write.

        Rank 0 writes in commit(), the file as a whole or not at all; other ranks may become rank 0,
        so all hosts must see the file. If it cannot be written, rank 0 logs that, and training goes
        on. What the job began with is kept as `path`.previous when it is first overwritten. Move
        the file away to begin anew.

        Raises:
            TypeError: the class has save() and restore() of its own, and does not say in COPIES
                what they use.
            ValueError: every is no number >= 1.
            RingcommError: the state has a commit already, or elastic.run has begun with it.
        """
        if not self.COPIES:
            raise TypeError(
                f"keep_in: {type(self).__name__} does not say in COPIES which of its attributes "
                "hold a commit"
            )
        if self._is_saved:
            raise RingcommError(
                f"keep_in: the state has had {self._n_commits} commits without {path}, so it is "
                "not known whether that holds a later one. Call it before the function with "
                "elastic.run, and before commit()"
            )
        self._file = KeptFile(path, every)

    def _require_file_read(self) -> None:
        if self._file is not None and self._file.origin.crc == UNREAD:
            raise RingcommError(
                f"commit: nobody has read what {self._file.path} holds, which a commit would "
                "overwrite. Train in a function with elastic.run, or call sync() of elastic.State "
                "first, which begin with it"
            )

    def _keep_in_file(self) -> None:
        if self._file is not None and (not has_engine() or rank() == 0):
            copies = {name: getattr(self, name) for name in self.COPIES}
            self._file.keep(self._n_commits, PROGRAM.n_steps, copies)

    def _begin_with_file(self, facts: list[_Facts], root: int) -> bool:
        """Let the root take over what the file of keep_in() holds, if it has not been read yet.

        All ranks learn of it before any may begin: of a commit, or why it cannot be used. Whoever
        reads the file may be lost at any moment; then the next root reads it. If another rank is
        lost, the same one reads it again: only the end of sync() sets `origin`. Collective.

        Returns:
            True if the root has its commit from the file now.
        """
        paths = [each.path for each in facts]
        if len(set(paths)) > 1:
            odd = next(r for r, path in enumerate(paths) if path != paths[0])
            given = collectives.allgather_object(
                None if self._file is None else self._file.given, name="elastic paths"
            )
            raise_together(
                MismatchError(
                    f"keep_in: rank 0 keeps commits in {given[0]}, and rank {odd} in {given[odd]}. "
                    "Each rank may become rank 0, so call it on all ranks with the same path"
                )
            )
        if self._file is None or facts[root].origin != UNREAD:
            return False
        read = self._read_file(self._file) if rank() == root else None
        read = collectives.broadcast_object(read, root, name="elastic file")
        if read.refusal is not None:
            raise_together(RingcommError(read.refusal))
        engine().control.go_on_from(read.n_steps)
        has_commit = read.n_commits is not None
        n_commits, is_saved = (read.n_commits, 1) if has_commit else facts[root].commit
        facts[root] = _Facts(n_commits, is_saved, facts[root].path, *read.origin)
        return has_commit

    def _read_file(self, file: KeptFile) -> _Read:
        """Take over what the file holds."""
        try:
            kept = file.load()
            if kept is None:
                return _Read(origin=Origin(ABSENT))
            self.save()
            for name in self.COPIES:
                mine = sorted(map(str, getattr(self, name)))
                found = sorted(map(str, kept.copies.get(name, {})))
                if mine != found:
                    raise file.refusal(f"keeps the values {found}, and the state has {mine}")
            if text := self._misfit(kept.copies):
                raise file.refusal(text)
        except RingcommError as error:
            return _Read(str(error))
        for name in self.COPIES:
            setattr(self, name, kept.copies[name])
        self._n_commits, self._is_saved = kept.n_commits, True
        return _Read(None, kept.n_commits, kept.n_steps, kept.origin)

    def _misfit(self, kept: dict[str, dict[str, Any]]) -> str | None:
        """Say what of the copies in a file the state cannot take, None if nothing is known of."""
        del kept
        return None

    def _restore_from_file(self, file: KeptFile) -> None:
        """Restore what a file has brought; an error of one rank is one of all. Collective."""
        mine = None
        try:
            self.restore()
        except (PeerFailedError, CommTimeoutError, NewViewInterrupt):
            raise
        except Exception as error:  # noqa: BLE001 - load_state_dict() may raise anything
            mine = error
        text = None if mine is None else f"{type(mine).__name__}: {mine}"
        texts = collectives.allgather_object(text, name="elastic restored")
        for r, each in enumerate(texts):
            if each is not None:
                what = f"keeps commit {self._n_commits}, which rank {r} cannot restore ({each})"
                refusal = file.refusal(what)
                refusal.__cause__ = mine
                raise_together(refusal)

    def check_host_updates(self) -> None:
        """Raise an error if the ranks of the job are to change, before an operation fails. Local.

        elastic.run catches it, and goes on with other ranks.

        Raises:
            PeerFailedError: this rank has heard that another one is lost.
            NewViewInterrupt: this is rank 0, and ranks are to join the job, or to leave it.
        """
        require_all_live()
        stop_for_another_size(self._fewest_ranks)

    def begin_again(self, *, skip_sync: bool) -> None:
        """Go on from the present values, after HostsUpdatedInterrupt; see there. Collective."""
        self._keep()
        if not skip_sync:
            self._sync_from_root_if_derived()
            self.sync()

    def resume(self) -> None:
        """Go on from the last commit, after a loss. Collective.

        A class that derives sync() decides itself what all ranks get. It is called after each rank
        has restored its own commit, and gets the values of rank 0 from the base class.
        """
        if type(self).sync is not State.sync:
            self._require_whole(self._n_commits)
            if self._is_saved:
                self.restore()
            self._sync_from_root_if_derived()
        self.sync()

    def _sync_from_root_if_derived(self) -> None:
        """Make sync() send the values of rank 0, as before the first commit. Collective.

        The ranks agree on the number of commits that they go on from, of which none is newer then.
        """
        if type(self).sync is State.sync:
            return
        mine = np.array([self._n_commits], np.int64)
        n_commits = int(collectives.allgather(mine, name="elastic commits of a sync()").max())
        if self._n_commits != _NONE:
            self._n_commits, self._is_saved = n_commits, False

    def forget_commits(self) -> None:
        """Forget what was committed: this process has no place, and others go on without it."""
        self._n_commits, self._is_saved = _NONE, False

    def _keep(self) -> None:
        await_streams()
        self.replicate(self._n_commits + 1)
        n, self._n_commits = self._n_commits, _TORN
        self.save()
        self._is_saved = True
        self._n_commits = n + 1

    def sync(self) -> None:
        """Give all ranks the last commit of the rank that has committed most. Collective.

        Before the first commit, all ranks get what the file of keep_in() holds, or without one the
        values of rank 0. If all ranks have committed equally often, each restores its own commit,
        and nothing is sent.

        What a rank has received is compared with what the others have; see verify().

        Raises:
            RingcommError: no rank has a whole commit, or all that had the state are lost; or the
                file of keep_in() cannot be used.
            MismatchError: the commits differ, or the paths of keep_in().
        """
        mine = np.array([self._facts], np.int64)
        gathered = collectives.allgather(mine, name="elastic commits").tolist()
        facts = [_Facts(*each) for each in gathered]
        commits = [each.commit for each in facts]
        root = commits.index(max(commits))
        n_commits, is_saved = commits[root]
        self._require_whole(n_commits)
        if n_commits == _NONE:
            raise RingcommError(
                "elastic: all ranks that had the state of the job are lost, before those that are "
                "left got it. Start the job again from a checkpoint"
            )
        is_from_file = self._begin_with_file(facts, root)
        best = commits[root] = n_commits, is_saved = facts[root].commit
        if not self._is_saved:
            self.save()
        is_alike = is_saved and all(each == best for each in commits)
        is_new = rank() != root and (commits[rank()] != best or not is_saved)
        before = {name: getattr(self, name) for name in self.COPIES}
        try:
            self.unite([each == best for each in commits])
            if not is_alike:
                self.receive(root, is_new=is_new)
                self.verify()
        except BaseException:  # if the root is lost now, all go on from what n_commits counts
            for name, copies in before.items():
                setattr(self, name, copies)
            if is_new and self._is_saved and not before:
                self._n_commits = _TORN  # nobody can tell what it has received
            raise
        self._n_commits, self._is_saved = n_commits, True
        if self._file is None:
            self.restore()
            return
        if not is_from_file:
            self.restore()
            self._file.origin = Origin(facts[root].origin, facts[root].n_made)
            return
        self._restore_from_file(self._file)
        self._file.origin = Origin(facts[root].origin, facts[root].n_made)
        if rank() == root:
            self._file.say_what_is_lost(n_commits)

    @property
    def _facts(self) -> _Facts:
        path, origin = -1, Origin()
        if self._file is not None:
            path, origin = zlib.crc32(os.fsencode(self._file.given)), self._file.origin
        return _Facts(self._n_commits, self._is_saved, path, *origin)

    def verify(self) -> None:
        """Compare the last commit of all ranks by a checksum. Collective; reads all values once.

        Call it after commit() to be sure that all ranks train on the same values.

        Raises:
            MismatchError: the commits differ; the text names the ranks.
        """
        mine = np.array([self.checksum()], np.int64)
        sums = collectives.allgather(mine, name="elastic checksums").tolist()
        odd = [each for each, total in enumerate(sums) if total != sums[0]]
        if odd:
            raise MismatchError(
                f"elastic: the commit of rank 0 has the checksum {sums[0]:08x}, and rank "
                f"{odd[0]}'s has {sums[odd[0]]:08x}; {len(odd)} ranks differ from rank 0. Find out "
                "which value of the state is not the same on all ranks, or not set in each step"
            )

    def checksum(self) -> int:
        """Return a checksum of the last commit; 0 if the class does not compare values."""
        return 0

    def unite(self, is_newest: Sequence[bool]) -> None:  # noqa: B027 - mostly there are none
        """Make the same of the parts of a commit that differ between ranks. Collective.

        Args:
            is_newest: by rank: its commit is the one that all ranks get.
        """

    def replicate(self, commit: int) -> None:  # noqa: B027 - mostly there are none
        """Send other ranks copies of the parts that this rank alone has. Collective if it has any.

        If it fails, the last commit stays as it is.

        Args:
            commit: number of the commit that follows.
        """

    def _require_whole(self, n_commits: int) -> None:
        if n_commits == _TORN:
            raise RingcommError(
                "elastic: each rank that is left was interrupted in commit(), so there is no state "
                "to go on from. Start the job again from a checkpoint"
            )

    @abstractmethod
    def save(self) -> None:
        """Copy all values."""

    @abstractmethod
    def restore(self) -> None:
        """Set all values to the copies."""

    @abstractmethod
    def receive(self, root: int, *, is_new: bool) -> None:
        """Replace the copies by those of the root, if `is_new` on this rank. Collective.

        If it fails half-way, the copies are those of before, or the root's.
        """


class ObjectState(State):
    """State of any objects that can be pickled, as attributes: ObjectState(epoch=0, lr=0.1).

    commit() copies with copy.deepcopy(). Of a value with state_dict() and load_state_dict(), such
    as a schedule of learning rates, it copies the state_dict(); restore() loads it into the value,
    which keeps its optimizer. Of a ShardedSampler or Loader of ringcomm.data, it keeps the
    position: after a loss, the ranks that are left share the rest of the epoch, each sample once.
    """

    COPIES: ClassVar[tuple[str, ...]] = ("_saved",)

    def __init__(self, **values: Any) -> None:
        super().__init__()
        self._names = tuple(values)
        self._saved: dict[str, Any] = {}
        for name, value in values.items():
            if hasattr(type(self), name) or name.startswith("_"):
                raise ValueError(f"{type(self).__name__}: the name {name!r} is taken; use another")
            setattr(self, name, value)

    def save(self) -> None:
        """Copy all values."""
        self._saved = {name: _kept(getattr(self, name)) for name in self._names}

    def restore(self) -> None:
        """Set all attributes to copies of the saved values."""
        for name, saved in self._saved.items():
            value = getattr(self, name)
            if isinstance(value, Positioned):
                value.set_elastic_position(saved)
            elif isinstance(saved, StateOf):
                if not _has_state_dict(value):
                    raise RingcommError(
                        f"{type(self).__name__}: the job has committed the state_dict() of {name}, "
                        f"and here it is {value!r}, which cannot load it. Make it before "
                        "the state, on every rank"
                    )
                value.load_state_dict(copy.deepcopy(saved.state))
            else:
                setattr(self, name, copy.deepcopy(saved))

    def _misfit(self, kept: dict[str, dict[str, Any]]) -> str | None:
        for name, found in kept.get("_saved", {}).items():
            if isinstance(self._saved.get(name), StateOf) and not isinstance(found, StateOf):
                return (
                    f"keeps {name} as {type(found).__name__}, and here it is "
                    f"{type(getattr(self, name)).__name__}, which needs a state_dict()"
                )
        return None

    def checksum(self) -> int:
        """Return a checksum of numbers, texts and arrays; other objects are not compared."""
        return checksum_of(self._saved)

    def receive(self, root: int, *, is_new: bool) -> None:
        """See State.receive()."""
        values = collectives.broadcast_object(self._saved, root, name="elastic objects")
        if is_new:
            self._saved = values


def _kept(value: Any) -> Any:
    if isinstance(value, Positioned):
        return value.elastic_position()
    return copy.deepcopy(StateOf(value.state_dict()) if _has_state_dict(value) else value)


def _has_state_dict(value: Any) -> bool:
    """Return True of a schedule, for instance, which refers to an optimizer: no copy would do."""
    is_object = not isinstance(value, type)
    return is_object and hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


class ArrayState(ObjectState):
    """State of numpy arrays and of other objects: ArrayState(step=0, weights=w).

    The arrays of the arguments are kept: commit() copies each into memory of its own, and
    restore() writes into the array itself. Set elements, as in `state.weights[:] = w`; an
    attribute that is set to another array is an error. Other values are handled as by ObjectState.

    Raises:
        TypeError: an array has elements that are objects.
    """

    COPIES: ClassVar[tuple[str, ...]] = ("_saved", "_copies")

    def __init__(self, **values: Any) -> None:
        arrays = {name: each for name, each in values.items() if isinstance(each, np.ndarray)}
        for name, array in arrays.items():
            if array.dtype.hasobject:
                raise TypeError(f"ArrayState: {name} holds objects; pass them as values")
        super().__init__(**values)
        self._names = tuple(name for name in values if name not in arrays)
        self._arrays = arrays
        self._copies: dict[str, np.ndarray[Any, Any]] = {}

    def save(self) -> None:
        """Copy all values."""
        super().save()
        for name, array in self._arrays.items():
            if getattr(self, name) is not array:
                raise RingcommError(
                    f"ArrayState: {name} was set to another array. Write into the array: "
                    f"state.{name}[:] = ..."
                )
            if name in self._copies:
                np.copyto(self._copies[name], array)
            else:
                self._copies[name] = array.copy()

    def _misfit(self, kept: dict[str, dict[str, Any]]) -> str | None:
        for name, found in kept["_copies"].items():
            mine = self._copies[name]
            if not isinstance(found, np.ndarray):
                return f"keeps {name} as {type(found).__name__}, and here it is an array"
            if (found.shape, found.dtype) != (mine.shape, mine.dtype):
                return (
                    f"keeps {name} as {found.dtype} {found.shape}, and here it is {mine.dtype} "
                    f"{mine.shape}"
                )
        return super()._misfit(kept)

    def restore(self) -> None:
        """Write the copies into the arrays, and set the other values."""
        super().restore()
        for name, copied in self._copies.items():
            array = self._arrays[name]
            np.copyto(array, copied)
            setattr(self, name, array)

    def checksum(self) -> int:
        """See ObjectState.checksum()."""
        return checksum_of(self._copies, super().checksum())

    def receive(self, root: int, *, is_new: bool) -> None:
        """See State.receive()."""
        mine = self._copies or {name: array.copy() for name, array in self._arrays.items()}
        handles = {
            name: collectives.broadcast_async(each, root, name=f"elastic array {name}")
            for name, each in mine.items()
        }
        super().receive(root, is_new=is_new)  # meanwhile
        received = {name: handle.wait() for name, handle in handles.items()}
        if is_new:
            self._copies = received
