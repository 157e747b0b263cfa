"""ps.table() and Table: dense tables, arrays that the servers own."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from ringcomm.arrays.base import lengths_of
from ringcomm.codec import Codec
from ringcomm.ps.client.arguments import (
    block_of,
    dtype_of,
    factor_of,
    flat_of,
    initial_of,
    label_of,
    require_numbers,
    require_out,
    require_parts,
    require_segments,
    require_weight,
    updater_of,
)
from ringcomm.ps.client.dense.blocks import Blocks
from ringcomm.ps.client.dense.compression import Packer, rate_of
from ringcomm.ps.client.dense.function_calls import call_function
from ringcomm.ps.client.dense.pulls import DensePulls
from ringcomm.ps.client.dense.pushes import Contribution, DensePushes
from ringcomm.ps.client.first_of import FirstOfRounds
from ringcomm.ps.client.future import Future, Pushed, pull_after
from ringcomm.ps.client.table_base import TableBase, open_once
from ringcomm.ps.compression import spec_of
from ringcomm.ps.optim import Assign, Updater
from ringcomm.ps.placement.partitions import cuts
from ringcomm.ps.protocol.frame_meta import ABSENT, ASSIGN, HOLD, INITIAL, RELEASE, SKIP
from ringcomm.ps.session import Session, acts_as_chief, session
from ringcomm.ps.table_spec import Part, Spec
from ringcomm.ps.update_modes import Mode, mode_of

BLOCK_NBYTES: Final = 4 << 20
Array = NDArray[Any]


def table(
    name: str,
    shape: int | Sequence[int],
    dtype: DTypeLike = "float32",
    *,
    updater: Updater | None = None,
    mode: str | Mode = "async",
    init: float | Array = 0.0,
    block_nbytes: int = BLOCK_NBYTES,
    compression: str | Codec | None = None,
    error_feedback: bool | None = None,
    pull_compression: str | Codec | None = None,
    segments: Sequence[int] = (),
    parts: Sequence[Part] = (),
    scope: str = "",
) -> Table:
    """Open a table. The first rank to open it creates it; the others must pass the same arguments.

    A process that has opened it already gets the same object, and its values stay as they are.

    Args:
        name: of the table.
        shape: of its values.
        dtype: float32 or float64.
        updater: what a push does; SGD(0.01) if not given.
        mode: when pushes become updates: "async": each at arrival; "sync": the mean over all
            workers once they are there; ps.SSP(s); ps.FirstOf(k): the mean over the first k that
            have pushed, the same k for all blocks.
        init: the first value of all elements, or an array, of which the chief's counts. NaN is an
            error, unless the updater is Assign().
        block_nbytes: the most bytes of a block, the unit that is read and written as a whole.
        compression: of gradients: "fp16", "bf16", "int8", or one of ringcomm's codecs;
            codec.TopK(0.01) sends the largest hundredth of each block. Values that are assigned
            are not compressed.
        error_feedback: what compression drops stays with the worker that pushed, and goes with its
            next push. None: with TopK, which needs it.
        pull_compression: of values, but for snapshots; not TopK. The servers' own values stay
            exact.
        segments: first elements, ascending from 0, of parts that may have no gradient by
            themselves, such as parameters that share a table; see Table.push(absent=).
        parts: arrays with names of their own that lie in a flat table, one behind the other, by
            which checkpoints are read.
        scope: whose names these are, such as "optimizer 1".

    Raises:
        MismatchError: another rank, or an earlier call, opened it with something else.
        ValueError, TypeError: no such shape, dtype, mode or compression.
        CommTimeoutError: no server answers.
    """
    current = session()
    label = label_of("table", name)
    shape = lengths_of(label, shape)
    kind = dtype_of(label, dtype)
    count = math.prod(shape)
    block = block_of(label, block_nbytes, kind.itemsize, count)
    updater = updater_of(label, updater)
    initial = initial_of(label, init, kind, shape)
    values = initial if isinstance(initial, np.ndarray) else None
    if not isinstance(updater, Assign) and (values is None or acts_as_chief()):
        require_numbers(label, initial)
    require_segments(label, segments, count)
    require_parts(label, parts)
    spec = Spec(
        name=name,
        kind="dense",
        dtype=kind.name,
        shape=shape,
        updater=updater.to_json(),
        mode=mode_of(mode),
        block=block,
        initial=initial if values is None else "chief",
        partitions=len(cuts(count, block)) - 1,
        compression=spec_of(label, compression, pull_compression, error_feedback=error_feedback),
        segments=tuple(map(int, segments)),
        parts=tuple(parts),
        scope=scope,
    )

    def make(created: dict[str, Any]) -> Table:
        return Table(current, spec, updater, created, values)

    opened = open_once(current, spec, make)
    if values is not None and acts_as_chief():
        opened.begin()
    return opened


class Table(TableBase):
    """A dense table that this rank has opened.

    Pushes and pulls return futures at once. Those of this process to one block are carried out in
    the order in which they are called.

    Attributes:
        name: of the table.
        shape: of its values.
        dtype: of its values.
        number: of the table in messages.
        client: of this rank.
        blocks: the parts of the table.
    """

    asking = ("_pushes", "_pulls")
    _pushes: DensePushes

    def __init__(
        self, current: Session, spec: Spec, updater: Updater, created: dict[str, Any],
        values: Array | None,
    ) -> None:  # fmt: skip
        super().__init__(current, spec, updater, created)
        self._first_values = values if acts_as_chief() else None
        if values is not None and self._first_values is None and current.may_be_chief:
            self._first_values = values.copy()  # for as long as the chief may die before it
        self.shape = spec.shape
        self._packer = Packer.of(spec, current.group.index)
        self._open(created)
        self._is_plain = spec.partitions == 1 and self._packer is None and not spec.mode.has_rounds
        if spec.mode.name == "first_of":
            self.share_rounds(FirstOfRounds(current.client))

    def _open(self, created: dict[str, Any]) -> None:
        self.number = created["number"]
        self._first_push: Future[Pushed] | None = None
        self.blocks = Blocks(self._session, self._spec, created)
        self._pushes = DensePushes(self.blocks, self._packer)
        self._pulls = DensePulls(self.blocks)

    def reopen(self, created: dict[str, Any]) -> None:
        """See TableBase."""
        rounds = self.first_of
        self.client.forget_table(self.number)
        self.forget_residual()
        self._open(created)
        if rounds is not None:
            self.share_rounds(rounds)

    @property
    def first_of(self) -> FirstOfRounds | None:
        """See TableBase."""
        return self.blocks.first_of

    def share_rounds(self, rounds: FirstOfRounds) -> None:
        """Count a gradient in this table exactly if it counts in others with these rounds.

        On all workers, and before anything is pushed. The caller has to call rounds.enter() after
        it has pushed to all tables.
        """
        rounds.add(self.number, self._session.begins.get(self.number, 0))
        self.blocks.first_of = rounds

    def is_on(self, server: int) -> bool:
        """See TableBase."""
        owners = (self.client.owner((self.number, part)) for part in range(self.n_partitions))
        return server in owners

    @property
    def mode(self) -> Mode:
        """When pushes become updates."""
        return self._spec.mode

    @property
    def n_partitions(self) -> int:
        """Number of slices."""
        return self._spec.partitions

    def bounds_of(self, part: int) -> tuple[int, int]:
        """Return the first element of a slice, and the one behind its last."""
        return self.blocks.bounds_of(part)

    # --- push -----------------------------------------------------------------------------------
    def push(
        self,
        x: Array | None,
        *,
        where: slice | None = None,
        weight: float = 1.0,
        assign: bool = False,
        hold: bool = False,
        scale: float = 1.0,
        absent: Sequence[int] = (),
    ) -> Future[Pushed]:
        """Send a gradient to the servers, which update the values with it.

        Args:
            x: shape of the table, or of what `where` selects; float16, bfloat16, or the table's
                dtype. It may be changed once this returns. None, in a table with rounds: this
                worker has none; it counts as zeros, and if no worker has one nothing changes.
            where: the elements of the flat table that x is for, with step 1; all by default.
            weight: of this contribution to the mean of a round, as a rule the number of samples; 0:
                it does not count, whatever it is.
            assign: x replaces the values.
            hold: the mean of the round becomes an update only by release(); in a table with rounds.
                All workers must push alike. It is dropped if all workers have left whose gradients
                are in it.
            scale: the factor of x that release() is going to undo; error feedback must know it.
            absent: numbers of the segments for which this worker has no gradient; x is 0 there. A
                segment for which no worker has one stays as it is, with its updater's state.

        Returns:
            A future of Pushed.

        Raises:
            ValueError, TypeError: x does not fit, or has NaN or inf and goes as int8 (with hold it
                may have); nothing was sent.
            CommTimeoutError: the servers are so far behind that no more may be sent.
        """
        is_all = x is not None and where is None and weight == 1
        if is_all and self._is_plain and not (assign or hold or len(absent)):
            assert x is not None
            return self._pushes.push_plain(self._flat(x, self._spec.count), self._updater)
        start, stop = self._range(where)
        has_rounds = self._spec.mode.has_rounds
        if x is None:
            start = stop = 0
        values = self._flat(() if x is None else x, stop - start)
        label = f"push[{self.name}]"
        require_weight(label, weight, may_be_0=has_rounds)
        if (x is None or hold) and (assign or not has_rounds):
            raise ValueError(
                f"{label}: None and hold=True are for gradients of a table with rounds, "
                f"not for one with mode {self._spec.mode}, nor with assign=True"
            )
        n_segments = len(self._spec.segments)
        is_known = all(0 <= k < n_segments for k in absent)
        if len(absent) and (where is not None or assign or not is_known):
            raise ValueError(
                f"{label}: absent is {list(absent)[:10]}, of {n_segments} segments: it "
                "is for gradients of a whole table"
            )
        flags = (ASSIGN if assign else 0) | (HOLD if hold else 0) | (ABSENT if x is None else 0)
        if self._packer is None or x is None or assign:
            scale = 1.0
        elif weight == 0:  # what does not count must not take along what is kept
            values, start, flags = values[:0], 0, flags | ABSENT
        else:
            is_checked = hold or isinstance(self.updater, Assign)  # the mean, before it counts
            values = self._packer.prepared(values, self._spec, may_have_nan=is_checked)
        push = Contribution(values, start, weight, flags, scale, absent)
        if self._packer is not None and flags & ABSENT:
            self._packer.send_nothing()
        future = self._pushes.push(push, self._updater)
        if assign:
            self.forget_residual()
        return future

    def release(self, factor: float | None) -> Future[Pushed]:
        """Make an update of the mean of the round that this worker pushed last, with hold=True.

        What the first of the workers passes counts: all must pass the same. If the mean is not
        there yet this waits for it.

        Args:
            factor: that the mean is multiplied by, at least 0; None: the mean is dropped.
        """
        label = f"release[{self.name}]"
        if not self._spec.mode.has_rounds:
            raise ValueError(
                f"{label}: it is for a table with rounds, not for one with mode {self._spec.mode}"
            )
        weight = factor_of(label, factor, may_be_nan=True)
        flags = RELEASE | (SKIP if factor is None else 0)
        if factor is None:
            self.take_back()
        nothing = np.empty(0, self.dtype)
        return self._pushes.push(Contribution(nothing, 0, weight, flags), self._updater)

    def begin(self) -> None:
        """See TableBase."""
        values = self._first_values
        if values is None:
            return
        if self._first_push is None:  # else a wait for it was too short
            self._first_push = self.push_initial(values)
        self._first_push.wait()
        self._first_values = self._first_push = None

    def push_initial(self, values: Array) -> Future[Pushed]:
        """Send the first values of the table, from the chief."""
        flat = np.ascontiguousarray(values).reshape(-1)
        return self._pushes.push(Contribution(flat, flags=INITIAL), self._updater)

    # --- error feedback -------------------------------------------------------------------------
    def take_back(self) -> None:
        """Report to error feedback that this worker's last push became no update.

        By itself it knows of pushes that were late, and of release(None).
        """
        if self._packer is not None:
            self._packer.take_all_back()

    def forget_residual(self) -> None:
        """Drop what error feedback keeps: another rank has replaced the values."""
        if self._packer is not None:
            self._packer.forget()

    @property
    def residual(self) -> Array:
        """The part of this worker's pushes that compression has dropped and will send: a new array.

        It has the table's shape, and is a gradient at the present learning rate.
        """
        flat = np.zeros(self._spec.count, self.dtype)
        if self._packer is not None:
            self._packer.write_residual(flat, self.blocks.bounds, rate_of(self.updater, 1.0))
        return flat.reshape(self.shape)

    # --- pull -----------------------------------------------------------------------------------
    def pull(
        self, *, out: Array | None = None, where: slice | None = None, exact: bool = False
    ) -> Future[Array]:
        """Fetch values from the servers.

        Own pushes are in them. In a table with rounds they are those after the round of the last
        push; with SSP(s) they have what every worker pushed up to s steps before.

        Args:
            out: filled and returned; shape and dtype of what is fetched, contiguous. It must not be
                read before the future is done. If not given, a new array.
            where: the elements of the flat table, with step 1; all by default.
            exact: as the servers have them, in spite of pull_compression=.
        """
        start, stop = self._range(where)
        shape = self.shape if where is None else (stop - start,)
        if out is None:
            out = np.empty(shape, self.dtype)
        else:
            require_out(f"pull[{self.name}]", out, self.dtype, shape, may_be_flat=True)
        pulled = self._pulls.pull(out, start, stop, exact=exact)
        if self._first_values is not None and where is None:
            pulled.then(self._forget_first_values)
        return pulled

    def _forget_first_values(self, pulled: Future[Array]) -> None:
        with contextlib.suppress(Exception):  # raised where the pull is waited for
            pulled.result()
            self._first_values = None

    def push_pull(
        self, x: Array, *, out: Array | None = None, weight: float = 1.0
    ) -> Future[Array]:
        """Push a gradient and fetch the values after it; see push() and pull().

        Raises:
            ValueError, TypeError, CommTimeoutError: see push(); nothing was sent. Errors of the
                pull are raised by the future.
        """
        if out is not None:
            require_out(f"pull[{self.name}]", out, self.dtype, self.shape, may_be_flat=True)
        push = self.push(x, weight=weight)
        return pull_after(push, lambda: self.pull(out=out))

    # --- functions ------------------------------------------------------------------------------
    def call(self, name: str, /, **arguments: Any) -> Future[list[Any]]:
        """Run a function on every block, at the server that has it.

        As with a push: each block changes as a whole, once, in the order of this process's calls,
        and a block that it changes has had an update. In a table with rounds it runs when it
        arrives, between two rounds: before the one that own pushes may be waiting for.

        Args:
            name: of a function that is marked @ps.function on all ranks.
            arguments: passed to it: numbers, texts, arrays, lists and dicts of them.

        Returns:
            A future of what it returned, by block; see bounds_of().

        Raises:
            KeyError: a server has no such function; nothing was sent.
            TypeError: an argument cannot be sent; nothing was sent.
            RingcommError, by the future: it raised an error on a block, which it has not changed;
                other blocks may be. The text has the error.
        """
        self._pulls.wait_for_values()
        return call_function(self.blocks, name, arguments)

    # --- arguments ------------------------------------------------------------------------------
    def _range(self, where: slice | None) -> tuple[int, int]:
        if where is None:
            return 0, self._spec.count
        if not isinstance(where, slice) or where.step not in (None, 1):
            raise ValueError(
                f"table[{self.name}]: where must be a slice with step 1, not {where!r}"
            )
        start, stop, _ = where.indices(self._spec.count)
        if start > stop:
            raise ValueError(f"table[{self.name}]: where is {where!r}, which ends before it begins")
        return start, stop

    def _flat(self, x: ArrayLike, count: int) -> Array:
        return flat_of(x, count, self._spec, self.dtype)

    def __repr__(self) -> str:
        return f"<Table {self.name}: {self.dtype} {self.shape}, {self._spec.mode}>"
