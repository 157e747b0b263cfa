"""The shard of a server: all the partitions of one hash table that it owns.

One request brings the keys of all of them; the C++ core finds the partition of each. Rounds are
those of the shard: every worker contributes once to each, with no keys if it has none for it.
"""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from ringcomm import _core
from ringcomm.arrays.base import Bytes
from ringcomm.arrays.dtypes import DTYPES
from ringcomm.errors import RingcommError
from ringcomm.ps.initializers import Initializer, table_number, zeros
from ringcomm.ps.initializers import from_json as initializer_of
from ringcomm.ps.optim import Assign, Updater, from_json
from ringcomm.ps.protocol.frame_meta import INITIAL, PLACED, REJECTED, SQUARES, PushMeta
from ringcomm.ps.row_policies import Admit, Evict
from ringcomm.ps.server.dense.block import BlockTraffic
from ringcomm.ps.server.rows.row_gradients import (
    HeldRows,
    Keys,
    RowGradient,
    Source,
    require_updater,
    squares_of_rows,
    unpacked,
)
from ringcomm.ps.table_spec import Spec

if TYPE_CHECKING:
    from ringcomm.ps.protocol.frames import FrameHeader


# --- options for C++ ------------------------------------------------------------------------------
def row_spec(
    dim: int,
    updater: Updater,
    *,
    table: int = 0,
    dtype: str = "float32",
    init: Initializer | None = None,
    admit: Admit | None = None,
    evict: Evict | None = None,
) -> _core.RowSpec:
    """Return the options from which `_core.Shard` makes partitions.

    Args:
        dim: columns of a row.
        updater: its class, and those of its hyper-parameters that decide on state, are fixed.
        table: initializers.table_number(name).
        dtype: of values and state, float32 or float64.
        init: zeros() if not given.
        admit: every key at once if not given.
        evict: no row if not given.
    """
    admission: dict[str, Any] = {} if admit is None else admit.to_json()
    init = zeros() if init is None else init
    if evict is not None:
        admission |= {"ttl_s": evict.ttl_s, "is_lfu": evict.policy == "lfu"}
        admission |= {} if evict.max_rows is None else {"max_rows": evict.max_rows}
    return _core.RowSpec(
        dim=dim,
        dtype=DTYPES[np.dtype(dtype).name].kernel,
        code=updater.code,
        hyper=updater.hyper,
        init_code=init.code,
        init_parameters=init.packed,
        seed=init.seed,
        table=table,
        **admission,
    )


Array = NDArray[Any]
METADATA_ITEM: Final = np.dtype([("time", "<f8"), ("pushes", "<u4"), ("steps", "<u4")])
_EVERYTHING: Final = 1 << 62
_OUTSIDE_ROUNDS: Final = 1 << 63


def work_after_push(n_keys: int) -> int:
    """Return how many rows and partitions are looked at for eviction after a push of n_keys."""
    return 2 * n_keys + 1024


class Shard:
    """The rows of one hash table on one server, and the last push of each worker.

    Args:
        spec: of the table.
        owners: server of each partition.
        index: of this server.
        now: returns the time that rows are marked with: seconds since 1970.

    Attributes:
        now: see above.
        index: of the server.
        partitions: numbers of those that this server has.
        version: pushes that became updates, or rounds.
        along: of partitions that came from other servers, or from a checkpoint: what was so there.
        stamp: of the last change; each change of rows has the next one.
        held: what the mean of a round is made of that waits for its release.
        rounds_before: of jobs that this one goes on from; chances of new keys go on with them.
        n_outside: changes outside rounds, which have chances by their number; never fewer than
            those of a checkpoint, or of a server from which a partition came.
        lets_in, unchanged: see ringcomm.ps.server.values.Values.
    """

    lets_in: ClassVar[bool] = True
    unchanged: ClassVar[bytes] = REJECTED.pack(0)

    def __init__(self, spec: Spec, owners: list[int], index: int, now: Callable[[], float]) -> None:
        self.now = now
        self.spec, self.index = spec, index
        self.partitions = [part for part, owner in enumerate(owners) if owner == index]
        self.dim = spec.count
        self.dtype = np.dtype(spec.dtype)
        self.updater: Updater = from_json(spec.updater)
        policies = spec.policies
        admit, evict = policies["admit"], policies["evict"]
        self._evicts = None if evict is None else Evict(**evict)
        rows = row_spec(
            self.dim,
            self.updater,
            table=table_number(spec.name),
            dtype=spec.dtype,
            init=initializer_of(spec.initial),
            admit=None if admit is None else Admit(**admit),
            evict=self._evicts,
        )
        self.rows = _core.Shard(rows, np.array(owners, np.uint32), index)
        self.can_evict = self._evicts is not None
        self.version = 0
        self.stamp = self.rounds_before = self.n_outside = 0
        self.traffic = BlockTraffic()
        self.along: dict[int, dict[int, int]] = {}
        self._along_last: dict[int, int] = {}  # of them all: pushes are soon beyond it
        self._snapshots: dict[int, int] = {}  # number -> version
        self.n_admitted = self.n_rejected = self.n_evicted = 0
        self.held = HeldRows(spec.partitions, self.dim)

    # --- pushes, as the core decides; see Values ------------------------------------------------
    def decoded(
        self, header: FrameHeader, meta: PushMeta, body: Bytes, view: Callable[[int, int], Bytes]
    ) -> RowGradient:
        if meta.flags & INITIAL:
            raise ValueError(f"push[{self.spec.name}]: rows have no values of the chief")
        shared = self._placed(meta, body, view)
        keys, rows, places = unpacked(meta, body, self.spec, shared)
        if shared is not None:
            self.traffic.nbytes += len(keys) * self.row_nbytes()
        require_updater(meta, self.updater, self.spec)
        gradient = RowGradient(meta.weight, meta.hyper, keys, rows, header.clock, places)
        return self._new(header, gradient)

    def _placed(
        self, meta: PushMeta, body: Bytes, view: Callable[[int, int], Bytes]
    ) -> Bytes | None:
        """Return the rows of a push in the client's memory; None if its body has them."""
        if not meta.flags & PLACED:
            return None
        places = body[8 * meta.n :].view(np.uint32)
        n_rows = int(places.max()) + 1 if places.size else meta.n
        itemsize = 2 if meta.dtype in ("float16", "bfloat16") else self.dtype.itemsize
        return view(meta.start, n_rows * self.dim * itemsize)

    def factor(self, meta: PushMeta) -> float:
        if not self.spec.mode.has_rounds:
            raise ValueError(
                f"release[{self.spec.name}]: a mean is held in a table with rounds, not in one "
                f"with mode {self.spec.mode}"
            )
        return meta.weight

    def note_push(self, body: Bytes) -> None:
        self.traffic.pushes += 1
        self.traffic.nbytes += body.nbytes

    def note_late(self) -> None:
        self.traffic.late += 1

    def apply(self, gradient: RowGradient) -> bytes:
        missed = max(0, self.version - gradient.clock)
        seen = self.traffic.staleness
        seen[missed] = seen.get(missed, 0) + 1
        rejected = self._apply([gradient.source(1.0)], gradient.hyper, 1.0)
        self.version += 1
        return REJECTED.pack(rejected)

    def write(self, gradient: RowGradient) -> bytes:
        hyper = Assign().hyper
        return REJECTED.pack(self._apply([gradient.source(1.0)], hyper, 1.0, code=Assign.code))

    def hold(self, gradients: list[RowGradient]) -> bytes:
        self.held.gradients = [
            each.picked(np.ones(len(each.keys), np.bool_), self.dim) for each in gradients
        ]
        return SQUARES.pack(*squares_of_rows(self.held.gradients, self.dim))

    def end(
        self, number: int, gradients: list[RowGradient], factor: float | None, *, drops: bool
    ) -> tuple[bytes, bytes]:
        if not gradients:
            gradients, self.held.gradients = self.held.gradients, []
        is_plain = all(each.weight == gradients[0].weight for each in gradients)
        weights = [1.0 if is_plain else each.weight for each in gradients]
        pairs = zip(gradients, weights, strict=True)
        sources = [each.source(w) for each, w in pairs if each.weight]
        rejected, why = 0, b"skipped" if drops else b"" if sources else b"empty"
        if not why:
            factor = 1.0 if factor is None else factor
            divisor = sum(weights) / factor if factor else math.inf
            rejected = self._apply(sources, gradients[0].hyper, divisor, number=number)
        self.version = number
        return why, REJECTED.pack(rejected)

    def _apply(
        self, sources: list[Source], hyper: NDArray[np.float64],
        divisor: float, *, code: int | None = None, number: int | None = None,
    ) -> int:  # fmt: skip
        """Update rows, in a round with its number; return how many keys were not admitted."""
        code = self.updater.code if code is None else code
        began, at = time.perf_counter(), self.now()
        stamp = self.stamp + 1
        if number is None:
            draw = _OUTSIDE_ROUNDS + self.n_outside + 1
        else:  # alike on all servers
            draw = number + self.rounds_before
        try:
            _, rejected, admitted = self.rows.push(sources, code, hyper, divisor, at, stamp, draw)
        except MemoryError as error:  # nothing has changed
            raise MemoryError(
                f"{error}: server {self.index} has {len(self.rows)} rows of the table, in "
                f"{self.rows.nbytes} bytes, and {sum(len(keys) for keys, *_ in sources)} keys came"
            ) from error
        self.stamp = stamp
        self.n_outside += number is None
        self.n_rejected += rejected
        self.n_admitted += admitted
        if self.can_evict:
            self._evict_after(sum(len(keys) for keys, *_ in sources), at)
        self.traffic.apply_s += time.perf_counter() - began
        return rejected

    def _evict_after(self, n_keys: int, at: float) -> None:
        """Evict what is due after a push. Raises RingcommError: it was applied nevertheless."""
        try:
            self._evict(at, work_after_push(n_keys))
        except MemoryError as error:
            raise RingcommError(
                f"push[{self.spec.name}]: server {self.index} has applied it, but has no memory to "
                f"find which of {len(self.rows)} rows to evict ({error}). The next push tries "
                "again. Use more servers on other machines, or a smaller ps.Evict(max_rows=)"
            ) from error

    def _new(self, header: FrameHeader, gradient: RowGradient) -> RowGradient:
        """Return a push without what was applied where its partitions were before."""
        rank, sent = header.origin, header.sequence
        if sent > self._along_last.get(rank, 0):
            return gradient
        parts = [part for part, last in self.along.items() if last.get(rank, 0) >= sent]
        found = np.empty(len(gradient.keys), np.uint32)
        _core.partition_of(gradient.keys, self.spec.partitions, found)
        return gradient.picked(~np.isin(found, parts), self.dim)

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
        if held and held not in self._snapshots:
            raise KeyError(
                f"pull[{self.spec.name}]: the snapshot does not hold it. Open a table before "
                "ps.snapshot()"
            )
        self.rows.gather(keys, out.view(self.dtype), missing, places, held or None)
        self.traffic.pulls += 1
        self.traffic.nbytes += len(keys) * self.row_nbytes()
        return self._snapshots.get(held, self.version)

    def is_capped_on_few(self, n_servers: int) -> bool:
        """Return True if the table is to stay on few servers, so that its max_rows is exact."""
        return self._evicts is not None and self._evicts.n_servers(n_servers) < n_servers

    # --- partitions that move -------------------------------------------------------------------
    def own(self, part: int, n_keys: int) -> None:
        """Add a partition, of which so many keys were asked where it was before."""
        self.rows.own(part)
        self.rows.add_keys(part, n_keys)
        if part not in self.partitions:
            bisect.insort(self.partitions, part)

    def disown(self, part: int) -> None:
        self.rows.disown(part)
        self.along.pop(part, None)
        if part in self.partitions:
            self.partitions.remove(part)

    def heat(self) -> list[int]:
        """Return the bytes of rows that were asked for so far, by partition of `partitions`."""
        nbytes = (self.rows.n_keys() * np.uint64(8 + self.row_nbytes()))[self.partitions]
        return [int(n) for n in nbytes]

    def note_along(self, part: int, rank: int, applied: int) -> None:
        """Take note of a rank's last push to a partition where that was before."""
        along = self.along.setdefault(part, {})
        along[rank] = max(along.get(rank, 0), applied)
        self._along_last[rank] = max(self._along_last.get(rank, 0), applied)

    def snapshot(self, number: int) -> None:
        """Keep all rows as they are now, for pull(held=number), until release(number)."""
        self.rows.hold(number)
        self._snapshots[number] = self.version

    def release(self, number: int) -> None:
        if self._snapshots.pop(number, None) is not None:
            self.rows.release(number)

    def stats(self) -> dict[str, Any]:
        return asdict(self.traffic) | {
            "rows": len(self.rows),
            "row_nbytes": self.rows.nbytes,
            "partitions": len(self.partitions),
            "admitted": self.n_admitted,
            "rejected": self.n_rejected,
            "evicted": self.n_evicted,
        }

    def row_nbytes(self) -> int:
        return self.dim * self.dtype.itemsize

    def metadata(self, keys: Keys) -> Array:
        """Return METADATA_ITEMs; of a key without a row, pushes 0 and time NaN."""
        n = len(keys)
        pushes, steps, times = np.empty(n, np.uint32), np.empty(n, np.uint32), np.empty(n)
        self.rows.metadata(keys, pushes, steps, times)
        items = np.empty(n, METADATA_ITEM)
        items["time"], items["pushes"], items["steps"] = times, pushes, steps
        return items

    def erase(self, keys: Keys) -> int:
        erased = self.rows.erase(keys, self.stamp + 1)
        self.stamp += 1
        return erased

    def evict(self) -> int:
        return self._evict(self.now(), _EVERYTHING) if self.can_evict else 0

    def _evict(self, at: float, max_work: int) -> int:
        evicted = self.rows.evict(at, self.stamp + 1, max_work)
        self.stamp += 1
        self.n_evicted += evicted
        return evicted
