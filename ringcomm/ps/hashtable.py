"""Hash tables: rows by 64-bit key, made when they are first pushed to; a client's side."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from ringcomm.codec import Codec
from ringcomm.errors import MismatchError
from ringcomm.ps.client import Ask
from ringcomm.ps.compression import is_finite, spec_of
from ringcomm.ps.deltas import RowDelta, Stamp, pull_row_delta
from ringcomm.ps.entering import ask_entry
from ringcomm.ps.frames import Kind, Status
from ringcomm.ps.future import Future, Pushed, behind
from ringcomm.ps.hashed import REJECTED
from ringcomm.ps.initializers import Initializer, zeros
from ringcomm.ps.job import Session, session
from ringcomm.ps.keys import Portion, keys_of, last_of_each, portions, rows_of
from ringcomm.ps.messages import ASSIGN, HOLD, MISSING, SPARSE, PushMeta
from ringcomm.ps.opened import (
    Opened,
    dtype_of,
    label_of_new,
    open_at_leader,
    opened_once,
    require_array,
    require_weight,
    updater_of,
)
from ringcomm.ps.optim import Updater
from ringcomm.ps.placement import HASH_PARTITIONS
from ringcomm.ps.policies import Admit, Evict
from ringcomm.ps.rounds import Mode, mode_of
from ringcomm.ps.row_calls import Owners, Piece, calls_of
from ringcomm.ps.row_measures import Mean, RowMeasures
from ringcomm.ps.row_packing import RowPacker, WireRows, not_finite
from ringcomm.ps.row_pieces import Pulling, Staging, keys_and_rows, regrouped
from ringcomm.ps.row_upkeep import Metadata, Upkeep
from ringcomm.ps.spec import Spec

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.link import Delivery

Array = NDArray[Any]
_COLUMNS_MAX = 1 << 24  # 64 MiB of float32


def hashtable(
    name: str,
    dim: int,
    *,
    dtype: DTypeLike = "float32",
    updater: Updater | None = None,
    mode: str | Mode = "async",
    init: Initializer | None = None,
    admit: Admit | None = None,
    evict: Evict | None = None,
    nan: Literal["raise", "allow"] = "raise",
    compression: str | Codec | None = None,
    pull_compression: str | Codec | None = None,
) -> HashTable:
    """Open a hash table; the first rank to open it makes it, the others must say the same of it.

    A process that has opened it already gets the same object.

    Args:
        name: of the table.
        dim: columns of a row.
        dtype: float32 or float64.
        updater: what a push does to a row; SGD(0.01) if not given.
        mode: as for ps.table(). A round is one of the table: every worker pushes once per round,
            if need be with no keys.
        init: what a new row holds; zeros if not given.
        admit: which keys are given a row; all if not given.
        evict: which rows are dropped; none if not given.
        nan: "raise": a push with NaN or inf in it is a ValueError; "allow": it goes through.
        compression: what gradients are sent in: "fp16", "bf16", or "int8" with a scale per row,
            rounded at random; or such a codec. Rows that are assigned go as they are.
        pull_compression: what rows are sent in when they are pulled. The servers' stay exact.

    Raises:
        MismatchError: another rank, or an earlier call, opened it with something else.
        ValueError: no such dim, dtype, mode, nan or compression.
        CommTimeoutError: no server answers.
    """
    current = session()
    label = label_of_new("hashtable", name)
    kind = dtype_of(label, dtype)
    if isinstance(dim, bool) or int(dim) != dim or not 1 <= dim <= _COLUMNS_MAX:
        raise ValueError(f"{label}: dim is {dim!r}; a row has 1 to {_COLUMNS_MAX} columns")
    if nan not in ("raise", "allow"):
        raise ValueError(f'{label}: nan is {nan!r}; it must be "raise" or "allow"')
    updater = updater_of(label, updater)
    init = zeros() if init is None else init
    for what, value, kinds in (
        ("init", init, Initializer),
        ("admit", admit, Admit | None),
        ("evict", evict, Evict | None),
    ):
        if not isinstance(value, kinds):
            raise TypeError(f"{label}: {what} is {value!r}; see ps.hashtable() for what it may be")
    spec = Spec(
        name=name,
        kind="hash",
        dtype=kind.name,
        shape=(int(dim),),
        updater=updater.to_json(),
        mode=mode_of(mode),
        block=0,
        initial=init.to_json(),
        partitions=HASH_PARTITIONS,
        policies={
            "admit": None if admit is None else admit.to_json(),
            "evict": None if evict is None else asdict(evict),
        },
        compression=spec_of(label, compression, pull_compression, is_dense=False),
    )
    is_strict = nan == "raise"
    opened = opened_once(
        current,
        spec,
        lambda: HashTable(current, spec, updater, open_at_leader(current, spec), is_strict),
    )
    opened.require_nan(nan)
    return opened


class HashTable(Opened):
    """A hash table, opened.

    Keys are integers in [0, 2^64), of any integer dtype, in an array of any shape, in any order, as
    often as they come. What belongs to them has the shape of the keys with `dim` behind it. Calls
    return futures at once; see ringcomm.ps.future. Those of this process are carried out in the
    order in which they are made.

    Attributes:
        name: of the table.
        dim: columns of a row.
        dtype: of its values.
        number: of the table in messages.
    """

    def __init__(
        self, current: Session, spec: Spec, updater: Updater, told: dict[str, Any], is_strict: bool
    ) -> None:
        super().__init__(current, spec, updater, told)
        self.dim = spec.count
        self._calls = calls_of(current.client, told)
        self._staging = Staging(current)
        self._upkeep = Upkeep(current, self._calls, spec.name, told["number"])
        self._measures = RowMeasures(
            self._calls, spec.name, told["number"], current.client.n_servers
        )
        self._is_strict = is_strict
        self._packer = RowPacker(spec, current.group.index)
        self._versions: defaultdict[int, int] = defaultdict(int)
        self._n_pushed = 0
        self._held = -1  # number of the round that was pushed last with hold=True

    def require_nan(self, nan: str) -> None:
        """Raise MismatchError if this process opens it again with another `nan`."""
        mine = "raise" if self._is_strict else "allow"
        if nan != mine:
            raise MismatchError(
                f"hashtable[{self.name}]: this process opened it with nan={mine!r}, and opens it "
                f"with nan={nan!r} now. Open it alike everywhere"
            )

    @property
    def mode(self) -> Mode:
        """When pushes become updates."""
        return self._spec.mode

    # --- push -----------------------------------------------------------------------------------
    def require_finite(self, rows: Array) -> None:
        """Raise ValueError if rows have NaN or inf that the table does not allow."""
        if self._is_strict and not is_finite(rows):
            raise not_finite(self.name, len(rows))

    def push(
        self,
        keys: ArrayLike,
        rows: Array,
        *,
        weight: float = 1.0,
        assign: bool = False,
        hold: bool = False,
    ) -> Future[Pushed]:
        """Send gradients to the servers, which update the rows of the keys with them.

        A key that stands in it more than once is updated once, with the sum of its gradients. Keys
        without a row are given one if the table's policy admits them; what belongs to others is
        dropped.

        Args:
            keys: see the class.
            rows: shape of the keys, then dim; float16, bfloat16, or the table's dtype. It may be
                changed once this returns.
            weight: of this contribution to the mean of a round; 0: it does not count.
            assign: rows replace what is there, at once, and are no part of a round. Of a key that
                stands in it more than once the last counts.
            hold: the round ends by release(), and the future is done then; measure() tells how
                large the mean is. Of a table with rounds; all workers must push alike. Rows may
                have NaN, and are sent at once, whatever is under way. The mean is dropped if all
                have left whose rows it is of.

        Returns:
            A future of Pushed. Its `rejected` counts the keys that were not admitted; in a table
            with rounds, those of the whole round.

        With ps.FirstOf(k) it waits for a server's answer, whether this worker is among the k, and
        sends the rows only then.

        Raises:
            ValueError, TypeError: keys or rows do not fit, or have NaN; nothing was sent.
            CommTimeoutError: the servers are so far behind that no more may be sent, or that one
                has not answered.
        """
        label = f"push[{self.name}]"
        flat, shape = keys_of(label, keys)
        values = rows_of(label, rows, (*shape, self.dim), self.dtype)
        has_rounds = self._spec.mode.has_rounds and not assign
        require_weight(label, weight, may_be_0=has_rounds)
        if hold and not has_rounds:
            raise ValueError(
                f"{label}: hold=True is for gradients of a table with rounds, not for one with "
                f"mode {self._spec.mode}, nor with assign=True"
            )
        if assign:
            flat, values = last_of_each(flat, values)
        elif weight == 0:
            flat, values = flat[:0], values[:0]
        is_strict = self._is_strict and not hold
        everyone = range(self.client.n_servers) if has_rounds else ()
        flags = SPARSE | (ASSIGN if assign else 0) | (HOLD if hold else 0)
        hyper = self._updater.hyper
        outcome = _Outcome()
        number = -1
        first = [self._packer.packed(values, is_exact=assign, is_strict=is_strict)]

        def split(owners: Owners, back: list[Piece]) -> list[Piece]:
            nonlocal number
            if back:
                own_keys, wire = keys_and_rows(back, self._spec)
            else:
                own_keys, wire = flat, first.pop()
            found = portions(own_keys, owners, everyone)
            staged = [self._staged(each, wire, is_strict=is_strict) for each in found]
            if number < 0:  # nothing can go wrong any more
                number, late_at = self._draw(label, has_rounds=has_rounds, assign=assign)
                if late_at is not None:
                    outcome.note_late(late_at)
                    return []
            return [asked(own, body, wire.dtype) for own, body in staged]

        def asked(own: Portion, body: Bytes, dtype: str) -> Piece:
            server = own.server
            clock = number if has_rounds else self._versions[server]
            meta = PushMeta(weight, 0, len(own.keys), dtype, flags, hyper)

            return Piece(own, Ask(
                Kind.PUSH, server=server, table=self.number, clock=clock, meta=meta.packed(),
                body=body, on_reply=outcome.note,
            ))  # fmt: skip

        future = self._calls.begin(
            label,
            split,
            outcome.pushed,
            lambda: self._give_back(number, assign=assign),
            needs_credit=not hold,
        )
        if hold:
            self._held = number
        return future

    def _draw(self, label: str, *, has_rounds: bool, assign: bool) -> tuple[int, int | None]:
        """Return the number of a push, and after how many rounds it comes if it is late."""
        with self._lock:
            number, self._n_pushed = self._n_pushed, self._n_pushed + (not assign)
        if not has_rounds or self._spec.mode.name != "first_of":
            return number, None
        try:
            answer = ask_entry(self.client, label, self.number, number).wait()
        except BaseException:
            self._give_back(number, assign=assign)
            raise
        return number, None if answer.is_in else answer.rounds

    def _give_back(self, number: int, *, assign: bool) -> None:
        """Let the next push have a number of which nothing was sent."""
        with self._lock:
            if not assign and self._n_pushed == number + 1:
                self._n_pushed = number

    def measure(self) -> Future[Mean]:
        """Return how large the mean of the round is that this worker pushed last with hold=True.

        Once the round is complete: on all servers, all workers have pushed, or as many as it takes.
        """
        return self._measures.measure(self._held)

    def release(self, factor: float | None) -> Future[None]:
        """Let the mean of the round that this worker pushed last, with hold=True, be an update.

        What the first of the workers passes counts: all must pass the same.

        Args:
            factor: that the mean is multiplied by, at least 0; None: the mean is dropped.
        """
        return self._measures.release(self._held, factor)

    def _staged(
        self, portion: Portion, rows: WireRows, *, is_strict: bool
    ) -> tuple[Portion, Bytes]:
        """Return a portion, and its keys and rows where the server can read them."""
        own, body, behind = self._staging.keyed(portion, rows.nbytes(len(portion.keys)))
        if not rows.write(portion.order, behind) and is_strict:
            raise not_finite(self.name, rows.n)
        return own, body

    # --- pull -----------------------------------------------------------------------------------
    def pull(
        self,
        keys: ArrayLike,
        *,
        missing: Literal["init", "zero", "raise"] = "init",
        out: Array | None = None,
        exact: bool = False,
    ) -> Future[Array]:
        """Fetch the rows of keys.

        Own pushes are in them, as for ps.Table.pull(); within ps.snapshot() they are as they were
        then. A pull makes no rows.

        Args:
            keys: see the class.
            missing: what is told of a key without a row: "init", what its row would begin with;
                "zero"; or "raise", a KeyError.
            out: filled and returned; shape of the keys, then dim, contiguous. Not to be read before
                the future is done. Memory of its own if not given.
            exact: as the servers have them, in spite of pull_compression=.
        """
        flat, shape = keys_of(f"pull[{self.name}]", keys)
        if missing not in MISSING:
            raise ValueError(
                f"pull[{self.name}]: missing is {missing!r}; it must be one of {', '.join(MISSING)}"
            )
        shape = (*shape, self.dim)
        if out is not None:
            self._require_out(out, shape)
        flat_out = None if out is None else out.reshape(-1).view(np.uint8)
        pulling = Pulling(self._session, self._spec, len(flat), flat_out, is_exact=exact)
        wanted, number = self._wanted(), MISSING.index(missing)

        def split(owners: Owners, back: list[Piece]) -> list[Piece]:
            asked = regrouped(flat, back, owners)
            if not back:
                pulling.begin(asked)
            pieces = [pulling.piece(each, self.number, number, wanted) for each in asked]
            for piece in pieces:
                piece.ask.on_reply = lambda reply, piece=piece: note(piece, reply)
            return pieces

        def note(piece: Piece, reply: Delivery) -> None:
            self._note_version(piece.portion.server, reply.header.clock)
            pulling.take(piece, reply)

        def finish() -> Array:
            rows = pulling.memory.view(self.dtype).reshape(shape)
            if out is None:
                return rows
            if pulling.memory is not flat_out:
                out[...] = rows
            return out

        return self._calls.begin(f"pull[{self.name}]", split, finish)

    def _note_version(self, server: int, version: int) -> None:
        """Take note of how many pushes, or rounds, are in what was pulled from a server."""
        with self._lock:
            self._versions[server] = max(self._versions[server], version)
            if self._spec.mode.has_rounds:  # after rounds that went by without this worker
                self._n_pushed = max(self._n_pushed, version)

    def _require_out(self, out: Array, shape: tuple[int, ...]) -> None:
        require_array(f"pull[{self.name}]", out)
        is_fit = out.dtype == self.dtype and out.shape == shape
        if not (is_fit and out.flags.c_contiguous and out.flags.writeable):
            raise ValueError(
                f"pull[{self.name}]: out must be contiguous and writeable, of {self.dtype} and "
                f"shape {shape}, not {out.dtype} {out.shape}"
            )

    def _wanted(self) -> int:
        mode = self._spec.mode
        if mode.name == "ssp":
            return max(0, self._session.clock - mode.bound)
        return self._n_pushed if mode.has_rounds else 0

    def push_pull(
        self, keys: ArrayLike, rows: Array, *, out: Array | None = None, weight: float = 1.0
    ) -> Future[Array]:
        """Push gradients and fetch the rows after it; see push() and pull().

        Raises:
            ValueError, TypeError, CommTimeoutError: see push(); nothing was sent. What keeps the
                rows from being fetched after it is raised by the future.
        """
        if out is not None:
            self._require_out(out, (*np.shape(keys), self.dim))
        push = self.push(keys, rows, weight=weight)
        return behind(push, lambda: self.pull(keys, out=out))

    def changed(self, *, since: Stamp | int = 0) -> Future[RowDelta]:
        """Fetch the rows that have changed, and tell which are gone, since an earlier look.

        Own pushes are in it, as for pull(). A row that changes meanwhile comes now, or the next
        time; so do those of a partition that is moving to another server.

        Args:
            since: 0, for all rows, or the `stamp` of an earlier result. One of another job is
                worth 0.
        """
        if self._session.snapshot:
            raise ValueError(f"changed[{self.name}]: not within ps.snapshot()")
        return pull_row_delta(
            self.client,
            self.name,
            since,
            number=self.number,
            clock=self._wanted(),
            n_partitions=self._spec.partitions,
            note_version=self._note_version,
        )

    # --- rows -----------------------------------------------------------------------------------
    def erase(self, keys: ArrayLike) -> Future[int]:
        """Take rows out, at once; return how many there were. They begin anew when they return."""
        return self._upkeep.erase(keys)

    def evict(self) -> Future[int]:
        """Take out at once all rows that the policy says; return how many.

        Servers do it by themselves, a little with every push; a row that nobody pushes to may be
        read for a while after its time.
        """
        return self._upkeep.evict()

    def n_rows(self) -> Future[int]:
        """Return how many keys have a row."""
        return self._upkeep.n_rows()

    def __len__(self) -> int:
        return self.n_rows().wait()

    def __bool__(self) -> bool:
        return True  # not a question to the servers

    def metadata(self, keys: ArrayLike) -> Future[Metadata]:
        """Return what servers know of the rows of keys."""
        return self._upkeep.metadata(keys)

    def __repr__(self) -> str:
        return f"<HashTable {self.name}: {self.dtype} rows of {self.dim}, {self._spec.mode}>"


class _Outcome:
    """What became of the parts of a push."""

    def __init__(self) -> None:
        self._rejected = 0
        self._versions: list[int] = []
        self._whys: set[str] = set()

    def note(self, reply: Delivery) -> None:
        if reply.header.status == Status.LATE:
            self._whys.add(reply.meta[REJECTED.size :].decode() or "late")
        self._rejected += REJECTED.unpack_from(reply.meta)[0]
        self._versions.append(reply.header.clock)

    def note_late(self, version: int) -> None:
        self._whys.add("late")
        self._versions.append(version)

    def pushed(self) -> Pushed:
        why = "late" if "late" in self._whys else min(self._whys, default="")
        return Pushed(not why, why, min(self._versions, default=0), self._rejected)
