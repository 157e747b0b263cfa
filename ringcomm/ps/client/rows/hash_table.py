"""ps.hashtable() and HashTable: rows by 64-bit key, made by the first push to them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from ringcomm.codec import Codec
from ringcomm.errors import MismatchError
from ringcomm.integers import is_integer
from ringcomm.ps.client.arguments import (
    dtype_of,
    factor_of,
    label_of,
    require_out,
    require_weight,
    updater_of,
)
from ringcomm.ps.client.future import Future, Pushed, pull_after
from ringcomm.ps.client.rows.keys import keys_of, last_of_each, rows_of
from ringcomm.ps.client.rows.maintenance import Maintenance, Metadata
from ringcomm.ps.client.rows.pulls import RowPull
from ringcomm.ps.client.rows.pushes import RowContribution, RowPushes
from ringcomm.ps.client.rows.row_calls import RowCalls
from ringcomm.ps.client.table_base import TableBase, open_once
from ringcomm.ps.compression import is_finite, spec_of
from ringcomm.ps.initializers import Initializer, zeros
from ringcomm.ps.optim import Updater
from ringcomm.ps.placement import partitions
from ringcomm.ps.protocol.frame_meta import MISSING
from ringcomm.ps.protocol.row_compression import RowPacker, not_finite
from ringcomm.ps.row_policies import Admit, Evict
from ringcomm.ps.session import Session, session
from ringcomm.ps.table_spec import Spec
from ringcomm.ps.update_modes import Mode, mode_of

Array = NDArray[Any]
_ROWS_NBYTES_MAX: Final = 1 << 47  # of an address space
_COLUMNS_MAX: Final = 1 << 24  # 64 MiB of float32


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
    """Open a hash table. The first rank creates it; the others must pass the same arguments.

    A process that has opened it already gets the same object.

    Args:
        name: of the table.
        dim: columns of a row.
        dtype: float32 or float64.
        updater: what a push does to a row; SGD(0.01) if not given.
        mode: as for ps.table(). A round is one of the table: every worker pushes once per round,
            if need be with no keys.
        init: the first values of a new row; zeros if not given.
        admit: which keys are given a row; all if not given.
        evict: which rows are dropped; none if not given.
        nan: "raise": a push with NaN or inf in it is a ValueError; "allow": it goes through.
        compression: of gradients: "fp16", "bf16", or "int8" with a scale per row, rounded at
            random; or such a codec. Rows that are assigned are not compressed.
        pull_compression: of rows that are pulled. The servers' own stay exact.

    Raises:
        MismatchError: another rank, or an earlier call, opened it with something else.
        ValueError: no such dim, dtype, mode, nan or compression.
        CommTimeoutError: no server answers.
    """
    current = session()
    label = label_of("hashtable", name)
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
        partitions=partitions.HASH_PARTITIONS,
        policies={
            "admit": None if admit is None else admit.to_json(),
            "evict": None if evict is None else asdict(evict),
        },
        compression=spec_of(label, compression, pull_compression, is_dense=False),
    )
    table = open_once(
        current, spec, lambda created: HashTable(current, spec, updater, created, nan == "raise")
    )
    table.require_nan(nan)
    return table


class HashTable(TableBase):
    """A hash table that this rank has opened.

    Keys are integers in [0, 2^64), of any integer dtype, in an array of any shape, in any order; a
    key may occur more than once. Arrays of rows have the shape of the keys with `dim` behind it.
    Calls return futures at once. Those of this process are carried out in the order in which they
    are made.

    Attributes:
        name: of the table.
        dim: columns of a row.
        dtype: of its values.
        number: of the table in messages.
        client: of this rank.
    """

    asking = ("_pushes", "_calls", "_maintenance")
    _pushes: RowPushes

    def __init__(
        self, current: Session, spec: Spec, updater: Updater, created: dict[str, Any],
        is_strict: bool,
    ) -> None:  # fmt: skip
        super().__init__(current, spec, updater, created)
        self.dim = spec.count
        self._packer = RowPacker(spec, current.group.index)
        self._is_strict = is_strict
        self._open(created)

    def _open(self, created: dict[str, Any]) -> None:
        self.number = created["number"]
        current, spec = self._session, self._spec
        self._calls = RowCalls(current.client, created)
        self._pushes = RowPushes(current, spec, self.number, self._calls)
        self._maintenance = Maintenance(current, self._calls, spec.name, self.number)

    def reopen(self, created: dict[str, Any]) -> None:
        """See TableBase."""
        self.client.forget_table(self.number)
        self._open(created)

    def require_nan(self, nan: str) -> None:
        """Raise MismatchError if this process opens it again with another `nan`."""
        mine = "raise" if self._is_strict else "allow"
        if nan != mine:
            raise MismatchError(
                f"hashtable[{self.name}]: this process opened it with nan={mine!r}, and opens it "
                f"with nan={nan!r} now. Open it alike everywhere"
            )

    def is_on(self, server: int) -> bool:
        """See TableBase."""
        return self._calls.are_on(server)

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
        copy: bool = True,
    ) -> Future[Pushed]:
        """Send gradients to the servers, which update the rows of the keys with them.

        A key that occurs more than once is updated once, with the sum of its gradients. Keys
        without a row are given one if the table's policy admits them; gradients of others are
        dropped.

        Args:
            keys: see the class.
            rows: shape of the keys, then dim; float16, bfloat16, or the table's dtype.
            weight: of this contribution to the mean of a round; 0: it does not count.
            assign: rows replace those at the servers, at once, and are no part of a round. If a key
                occurs more than once, its last row counts.
            hold: the mean of the round becomes an update only by release(); in a table with rounds.
                The future says how large the mean is. All workers must push alike. Rows may have
                NaN, and are sent at once, whatever is under way. The mean is dropped if all workers
                have left whose rows are in it.
            copy: if True, `rows` may be changed once this returns. If False, servers on this node
                read rows() where they are, and they may be changed once the future is done; rows in
                other memory, or for other nodes, and rows that are compressed, are still copied.

        Returns:
            A future of Pushed. Its `rejected` counts the keys that were not admitted; in a table
            with rounds, those of the whole round; with hold, the future of release() has it.

        With ps.FirstOf(k) it waits for a server's decision whether this worker is among the k, and
        sends the rows only then.

        Raises:
            ValueError, TypeError: keys or rows do not fit, or have NaN; nothing was sent.
            CommTimeoutError: the servers are so far behind that no more may be sent, or one has not
                answered.
        """
        label = f"push[{self.name}]"
        flat, shape = keys_of(label, keys)
        values = rows_of(label, rows, (*shape, self.dim), self.dtype)
        if not isinstance(copy, bool):
            raise TypeError(f"{label}: copy is {copy!r}; it must be True or False")
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
        wire_rows = self._packer.packed(values, is_exact=assign, is_strict=is_strict)
        plain = None if copy else wire_rows.plain
        is_shared = plain is not None and self.client.link.holds(plain)
        push = RowContribution(flat, wire_rows, weight, assign, hold, is_strict, is_shared)
        return self._pushes.push(push, self._updater)

    def rows(self, n: int) -> Array:
        """Return memory for n rows, shape (n, dim), that servers on this node read and write.

        Its values are arbitrary. Use it again for every step: push(copy=False) sends such rows
        without a copy, and pull(out=) fetches rows into it without one.

        Raises:
            ValueError: n is no such number.
        """
        n_rows = int(n) if is_integer(n) else -1
        nbytes = n_rows * self.dim * self.dtype.itemsize
        if not 0 <= nbytes < _ROWS_NBYTES_MAX:
            raise ValueError(
                f"rows[{self.name}]: n is {n!r}; it must be an integer, 0 at least, and rows of "
                f"{self.dim} {self.dtype} together must have less than {_ROWS_NBYTES_MAX} bytes"
            )
        return self._session.memory(nbytes).view(self.dtype).reshape(n_rows, self.dim)

    def release(self, factor: float | None) -> Future[Pushed]:
        """Make an update of the mean of the round that this worker pushed last, with hold=True.

        What the first of the workers passes counts: all must pass the same.

        Args:
            factor: that the mean is multiplied by, at least 0; None: the mean is dropped.
        """
        weight = factor_of(f"release[{self.name}]", factor)
        return self._pushes.release(weight, is_skip=factor is None, updater=self._updater)

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
            missing: the result for a key without a row: "init", the values that its row would begin
                with; "zero"; or "raise", a KeyError.
            out: filled and returned; shape of the keys, then dim, contiguous. It must not be read
                before the future is done. If not given, a new array.
            exact: as the servers have them, in spite of pull_compression=.
        """
        if missing not in MISSING:
            raise ValueError(
                f"pull[{self.name}]: missing is {missing!r}; it must be one of {', '.join(MISSING)}"
            )
        missing_number = MISSING.index(missing)
        return self.prepared_pull(keys, out, missing=missing_number, is_exact=exact).begin()

    def prepared_pull(
        self, keys: ArrayLike, out: Array | None = None, *, missing: int = 0,
        is_exact: bool = False, ahead: int = 0,
    ) -> RowPull:  # fmt: skip
        """Return a pull of which nothing has been sent; see pull(), and RowPushes for `ahead`."""
        label = f"pull[{self.name}]"
        flat, shape = keys_of(label, keys)
        shape = (*shape, self.dim)
        if out is not None:
            require_out(label, out, self.dtype, shape, may_be_flat=False)
        if not (ahead or self._spec.mode.has_rounds):
            self._pushes.note_used(flat)  # rows that are fetched ahead may be older than these
        return RowPull(
            self._session, self._spec, self._calls, self._pushes, keys=flat, shape=shape, out=out,
            missing=missing, is_exact=is_exact, ahead=ahead,
        )  # fmt: skip

    def push_pull(
        self, keys: ArrayLike, rows: Array, *, out: Array | None = None, weight: float = 1.0
    ) -> Future[Array]:
        """Push gradients and fetch the rows after it; see push() and pull().

        Raises:
            ValueError, TypeError, CommTimeoutError: see push(); nothing was sent. Errors of the
                pull are raised by the future.
        """
        if out is not None:
            shape = (*np.shape(keys), self.dim)
            require_out(f"pull[{self.name}]", out, self.dtype, shape, may_be_flat=False)
        push = self.push(keys, rows, weight=weight)
        return pull_after(push, lambda: self.pull(keys, out=out))

    # --- rows -----------------------------------------------------------------------------------
    def erase(self, keys: ArrayLike) -> Future[int]:
        """Remove the rows of keys; return how many there were. A key may get a new row later."""
        self._pushes.note_used(None)
        return self._maintenance.erase(keys)

    def evict(self) -> Future[int]:
        """Remove at once all rows that the policy drops; return how many.

        Servers do it by themselves, a little with every push; a row that gets no push may be read
        for a while after its time.
        """
        self._pushes.note_used(None)
        return self._maintenance.evict()

    def n_rows(self) -> Future[int]:
        """Return how many keys have a row."""
        return self._maintenance.n_rows()

    def note_replaced(self) -> None:
        """Take note that a checkpoint may have replaced all rows."""
        self._pushes.note_used(None)

    def __len__(self) -> int:
        return self.n_rows().wait()

    def __bool__(self) -> bool:
        return True  # not a question to the servers

    def metadata(self, keys: ArrayLike) -> Future[Metadata]:
        """Return the statistics of the rows of keys."""
        return self._maintenance.metadata(keys)

    def __repr__(self) -> str:
        return f"<HashTable {self.name}: {self.dtype} rows of {self.dim}, {self._spec.mode}>"
