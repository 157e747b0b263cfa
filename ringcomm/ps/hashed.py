"""What a server does with its part of a hash table: all the partitions that it owns, a shard.

One request brings the keys of all of them; the C++ core finds the partition of each. Rounds are
those of the shard: every worker contributes once to each, with no keys if it has none for it.
"""

from __future__ import annotations

import bisect
import math
import secrets
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ringcomm import _core
from ringcomm.arrays.base import Bytes
from ringcomm.arrays.dtypes import DTYPES
from ringcomm.ps.dense import Traffic
from ringcomm.ps.initializers import from_json as initializer_of
from ringcomm.ps.initializers import table_number
from ringcomm.ps.messages import ASSIGN, ENCODED, HOLD, RELEASE, PushMeta
from ringcomm.ps.optim import Assign, Updater, from_json
from ringcomm.ps.policies import Admit, Evict
from ringcomm.ps.rounds import Rounds
from ringcomm.ps.row_holds import RowHolds
from ringcomm.ps.row_packing import decoded_rows
from ringcomm.ps.rows import row_spec
from ringcomm.ps.spec import Spec

if TYPE_CHECKING:
    from ringcomm.ps.frames import Header
    from ringcomm.ps.link import Delivery
    from ringcomm.ps.row_holds import MeasureAnswer

Array = NDArray[Any]
Keys = NDArray[np.uint64]
METADATA_ITEM: Final = np.dtype(
    [("stamp", "<u8"), ("time", "<f8"), ("pushes", "<u4"), ("steps", "<u4")]
)
REJECTED: Final = struct.Struct("<Q")  # meta of the reply to a push
_EVERYTHING: Final = 1 << 62


def now() -> float:
    """Return the time that rows are marked with: seconds since 1970."""
    return time.time()


def work_after_push(n_keys: int) -> int:
    """Return how many rows and partitions are looked at for eviction after a push of n_keys."""
    return 2 * n_keys + 1024


class Answer(Protocol):
    """Tells who pushed what became of it.

    Attributes:
        request: the push.
    """

    request: Delivery

    def __call__(self, is_applied: bool, version: int, rejected: int, why: bytes = b"", /) -> None:
        """Say whether it was applied, the version, how many keys were not admitted, and why not."""
        ...


class Contribution(NamedTuple):
    """A push that waits for its round, which does not end by itself if `is_held`."""

    weight: float
    hyper: NDArray[np.float64]
    keys: Keys
    rows: Array
    answer: Answer
    is_held: bool = False


class Shard:
    """The rows of one hash table on one server, and who pushed what.

    Args:
        spec: of the table.
        owners: server of each partition.
        index: of this server.
        workers: who contributes to rounds.

    Attributes:
        index: of the server.
        partitions: numbers of those that this server has.
        version: pushes that became updates, or rounds.
        applied: the last push of each rank: its incarnation and sequence; also of those that wait
            for their round.
        along: of partitions that came from other servers, or from a checkpoint: what was so there.
        stamp: of the last change; each change of rows has the next one.
        life: no other shard has this number, in any job.
        renewed: of partitions whose rows were replaced: the stamp of that.
    """

    def __init__(self, spec: Spec, owners: list[int], index: int, workers: Iterable[int]) -> None:
        self.spec, self.index = spec, index
        self.partitions = [part for part, owner in enumerate(owners) if owner == index]
        self.dim = spec.count
        self.dtype = np.dtype(spec.dtype)
        self.updater: Updater = from_json(spec.updater)
        policies = spec.policies
        admit, evict = policies["admit"], policies["evict"]
        rows = row_spec(
            self.dim,
            self.updater,
            table=table_number(spec.name),
            dtype=spec.dtype,
            init=initializer_of(spec.initial),
            admit=None if admit is None else Admit(**admit),
            evict=None if evict is None else Evict(**evict),
            n_partitions=spec.partitions,
        )
        self.rows = _core.Shard(rows, np.array(owners, np.uint32), index)
        self.can_evict = evict is not None
        self.version = 0
        self._at_version: dict[int, list[Callable[[], None]]] = {}
        self.stamp = 0
        self.life = secrets.randbits(63)
        self.renewed: dict[int, int] = {}
        self.traffic = Traffic()
        self.applied: dict[int, tuple[int, int]] = {}
        self.along: dict[int, dict[int, tuple[int, int]]] = {}
        self._along_last: dict[int, tuple[int, int]] = {}  # of them all: pushes are soon beyond it
        self._held: dict[int, int] = {}  # number of a snapshot -> version
        self.n_admitted = self.n_rejected = self.n_evicted = 0
        self.rounds: Rounds[Contribution] | None = None
        if spec.mode.has_rounds:
            k = spec.mode.bound if spec.mode.name == "first_of" else None
            self.rounds = Rounds(workers, k)
        self._holds = RowHolds()

    # --- push -----------------------------------------------------------------------------------
    def push(self, header: Header, meta: PushMeta, body: Bytes, answer: Answer) -> None:
        """Carry out a push, or keep it for its round.

        Raises:
            ValueError: it does not fit the table; nothing is changed.
        """
        worker, clock = header.origin, header.clock
        if meta.flags & RELEASE:
            self._require_rounds("release")
            self._holds.release(clock, meta, answer)
            self.advance()
            return
        keys, rows = self._new(header, *self._unpacked(meta, body))
        self._require_updater(meta)
        if meta.flags & ASSIGN:
            rejected = self._apply([(keys, rows, 1.0)], Assign().hyper, 1.0, code=Assign.code)
            self._note(body)
            answer(True, self.version, rejected)
        elif self.rounds is None:
            self._note_staleness(clock)
            rejected = self._apply([(keys, rows, 1.0)], meta.hyper, 1.0)
            self.version += 1
            self._note(body)
            answer(True, self.version, rejected)
        elif self.rounds.add(
            worker,
            clock,
            Contribution(meta.weight, meta.hyper, keys, rows, answer, bool(meta.flags & HOLD)),
        ):
            self.rounds.enter(worker, clock)  # it was asked before: see HashTable.push()
            self._note(body)
            self.advance()
        else:
            self.traffic.late += 1
            answer(False, self.version, 0)

    @property
    def is_ready(self) -> bool:
        """True: what a row begins with is known from the start."""
        return True

    def leave(self, worker: int) -> None:
        """Wait no more for a worker."""
        if self.rounds is not None:
            self.rounds.leave(worker)
            self.advance()

    def measure(self, number: int, answer: MeasureAnswer) -> None:
        """Answer how large the mean of a round is, once it is complete."""
        self._require_rounds("push")
        self._holds.measure(number, answer)
        self.advance()

    def advance(self) -> None:
        """Carry out the rounds that are complete, and may end."""
        while self.rounds is not None:
            self._holds.on_over(self.rounds.current)
            came = self.rounds.complete()
            if came is None:
                return
            may_end = self._holds.on_complete(self.rounds.current, came, self.dim)
            if not (may_end or self.rounds.have_left(worker for worker, _ in came)):
                return
            factor = self._holds.factor_of(self.rounds.current) if may_end else None
            if self.rounds.take() is None:
                return
            self._end_round([part for _, part in came], factor)

    def _end_round(self, parts: list[Contribution], factor: float | None) -> None:
        """Make an update of the mean of contributions, times a factor; None: of nothing."""
        is_plain = all(part.weight == parts[0].weight for part in parts)
        weights = [1.0 if is_plain else part.weight for part in parts]
        sources = [(p.keys, p.rows, w) for p, w in zip(parts, weights, strict=True) if p.weight]
        rejected, why = 0, b""
        if factor is None or not sources:
            why = b"empty" if factor is not None else b"skipped"
        else:
            divisor = sum(weights) / factor if factor else math.inf
            rejected = self._apply(sources, parts[0].hyper, divisor)
        self.version += 1
        for part in parts:
            part.answer(not why, self.version, rejected, why)
        for callback in self._at_version.pop(self.version, ()):
            callback()

    def give_back(self) -> list[Delivery]:
        """Return the requests about rounds that are not over, which are forgotten here."""
        if self.rounds is None:
            return []
        pending = self.rounds.pending()
        for _, worker, each in pending:
            incarnation, last = self.applied[worker]
            self.applied[worker] = (incarnation, min(last, each.answer.request.header.sequence - 1))
        self.rounds.resume(self.rounds.current, [])
        return [
            *(each.answer.request for _, _, each in pending),
            *self._holds.take(self.rounds.current),
        ]

    def at_version(self, version: int, callback: Callable[[], None]) -> None:
        """Let `callback` be called right after the update that makes it so many."""
        self._at_version.setdefault(version, []).append(callback)

    def _apply(
        self, sources: list[tuple[Keys, Array, float]], hyper: NDArray[np.float64],
        divisor: float, *, code: int | None = None,
    ) -> int:  # fmt: skip
        """Update rows; return how many keys were not admitted."""
        code = self.updater.code if code is None else code
        began, at = time.perf_counter(), now()
        _, rejected, admitted = self.rows.push(sources, code, hyper, divisor, at, self.stamp + 1)
        self.stamp += 1
        self.n_rejected += rejected
        self.n_admitted += admitted
        if self.can_evict:
            n = sum(len(keys) for keys, _, _ in sources)
            self._evict(at, work_after_push(n))
        self.traffic.apply_s += time.perf_counter() - began
        return rejected

    def _unpacked(self, meta: PushMeta, body: Bytes) -> tuple[Keys, Array]:
        name = self.spec.name
        if meta.dtype == ENCODED:
            return decoded_rows(body, meta.n, self.spec)
        if meta.dtype not in DTYPES or meta.dtype not in (self.spec.dtype, "float16", "bfloat16"):
            raise ValueError(f"push[{name}]: dtype {meta.dtype}, and the table has {self.dtype}")
        # The core knows bfloat16 by its bits.
        kind = np.dtype(np.uint16 if meta.dtype == "bfloat16" else meta.dtype)
        expected = meta.n * (8 + self.dim * kind.itemsize)
        if body.nbytes != expected:
            raise ValueError(
                f"push[{name}]: {body.nbytes} bytes came for {meta.n} rows of {self.dim} "
                f"{meta.dtype}, which have {expected} with their keys"
            )
        return body[: 8 * meta.n].view(np.uint64), body[8 * meta.n :].view(kind)

    def _new(self, header: Header, keys: Keys, rows: Array) -> tuple[Keys, Array]:
        """Return keys and rows without what was applied where their partitions were before."""
        rank, sent = header.origin, (header.incarnation, header.sequence)
        if sent > self._along_last.get(rank, (-1, 0)):
            return keys, rows
        parts = [
            part
            for part, told in self.along.items()
            if rank in told and told[rank][0] == sent[0] and told[rank] >= sent
        ]
        found = np.empty(len(keys), np.uint32)
        _core.partition_of(keys, self.spec.partitions, found)
        is_new = ~np.isin(found, parts)
        return keys[is_new], rows.reshape(len(keys), self.dim)[is_new].reshape(-1)

    def _require_rounds(self, what: str) -> None:
        if self.rounds is None:
            raise ValueError(
                f"{what}[{self.spec.name}]: a mean is held in a table with rounds, not in one with "
                f"mode {self.spec.mode}"
            )

    def _require_updater(self, meta: PushMeta) -> None:
        expected = len(self.updater.hyper)
        if not meta.flags & ASSIGN and len(meta.hyper) != expected:
            raise ValueError(
                f"push[{self.spec.name}]: {len(meta.hyper)} hyper-parameters, and "
                f"{type(self.updater).__name__} has {expected}"
            )

    def _note(self, body: Bytes) -> None:
        self.traffic.pushes += 1
        self.traffic.nbytes += body.nbytes

    def _note_staleness(self, clock: int) -> None:
        missed = max(0, self.version - clock)
        seen = self.traffic.staleness
        seen[missed] = seen.get(missed, 0) + 1

    def note_renewed(self, partition: int) -> None:
        """Take note that other rows are in a partition, and that others may be gone."""
        self.stamp += 1
        self.renewed[partition] = self.stamp

    # --- what is there --------------------------------------------------------------------------
    def pull(
        self,
        keys: Keys,
        out: Bytes,
        missing: int,
        places: NDArray[np.uint32] | None = None,
        *,
        held: int = 0,
    ) -> int:
        """Copy the rows of keys to `out`, each to its place if there are places.

        Args:
            keys: of this server.
            out: rows, one behind the other.
            missing: see messages.MISSING.
            places: which row of `out` each key's is.
            held: number of the snapshot that they are read of; 0: as they are.

        Returns:
            The version that they have.

        Raises:
            KeyError: a key has no row, and missing says "raise"; nothing was written. Or the
                snapshot is not held here.
            ValueError: a place is not in `out`, or a key is another server's.
        """
        if held and held not in self._held:
            raise KeyError(
                f"pull[{self.spec.name}]: the snapshot does not hold it. Open a table before "
                "ps.snapshot()"
            )
        self.rows.gather(keys, out.view(self.dtype), missing, places, held or None)
        self.traffic.pulls += 1
        self.traffic.nbytes += len(keys) * self.row_nbytes()
        return self._held.get(held, self.version)

    # --- partitions that move -------------------------------------------------------------------
    def own(self, part: int, n_keys: int) -> None:
        """Have a partition from now on, of which so many keys were asked where it was before."""
        self.rows.own(part)
        self.rows.add_keys(part, n_keys)
        if part not in self.partitions:
            bisect.insort(self.partitions, part)

    def disown(self, part: int) -> None:
        """Have a partition no longer, with its rows."""
        self.rows.disown(part)
        self.along.pop(part, None)
        if part in self.partitions:
            self.partitions.remove(part)

    def heat(self) -> list[int]:
        """Return the bytes of rows that were asked for so far, by partition of `partitions`."""
        nbytes = (self.rows.n_keys() * np.uint64(8 + self.row_nbytes()))[self.partitions]
        return [int(n) for n in nbytes]

    def note_along(self, part: int, rank: int, applied: tuple[int, int]) -> None:
        """Take note of a rank's last push to a partition where that was before."""
        along = self.along.setdefault(part, {})
        along[rank] = max(along.get(rank, (-1, 0)), applied)
        self._along_last[rank] = max(self._along_last.get(rank, (-1, 0)), applied)

    def hold(self, number: int) -> None:
        """Let pull(held=number) see all rows as they are now, until release(number)."""
        self.rows.hold(number)
        self._held[number] = self.version

    def release(self, number: int) -> None:
        """End a snapshot."""
        if self._held.pop(number, None) is not None:
            self.rows.release(number)

    def told(self) -> dict[str, Any]:
        """Return what ps.stats() says of it."""
        return asdict(self.traffic) | {
            "rows": len(self.rows),
            "row_nbytes": self.rows.nbytes,
            "partitions": len(self.partitions),
            "admitted": self.n_admitted,
            "rejected": self.n_rejected,
            "evicted": self.n_evicted,
        }

    def row_nbytes(self) -> int:
        """Return the bytes of the values of one row."""
        return self.dim * self.dtype.itemsize

    def metadata(self, keys: Keys) -> Array:
        """Return METADATA_ITEMs; of a key without a row, pushes 0 and time NaN."""
        n = len(keys)
        pushes, steps = np.empty(n, np.uint32), np.empty(n, np.uint32)
        times, stamps = np.empty(n), np.empty(n, np.uint64)
        self.rows.metadata(keys, pushes, steps, times, stamps)
        told = np.empty(n, METADATA_ITEM)
        told["stamp"], told["time"], told["pushes"], told["steps"] = stamps, times, pushes, steps
        return told

    def erase(self, keys: Keys) -> int:
        """Take rows out; return how many there were."""
        erased = self.rows.erase(keys, self.stamp + 1)
        self.stamp += 1
        return erased

    def evict(self) -> int:
        """Take out all that the policy says; return how many rows."""
        return self._evict(now(), _EVERYTHING) if self.can_evict else 0

    def _evict(self, at: float, max_work: int) -> int:
        evicted = self.rows.evict(at, self.stamp + 1, max_work)
        self.stamp += 1
        self.n_evicted += evicted
        return evicted
