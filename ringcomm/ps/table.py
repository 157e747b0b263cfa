"""Dense tables: arrays that the servers own."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from ringcomm import _core
from ringcomm.ps.client import Ask
from ringcomm.ps.frames import Kind, Status
from ringcomm.ps.future import Future, Pushed
from ringcomm.ps.job import Session, is_chief, session
from ringcomm.ps.link import INLINE_MAX
from ringcomm.ps.messages import (
    ABSENT,
    ASSIGN,
    HOLD,
    INITIAL,
    READ_BLOCK,
    RELEASE,
    SKIP,
    SQUARES,
    WANT_COPY,
    PushMeta,
    packed_json,
)
from ringcomm.ps.optim import SGD, Updater
from ringcomm.ps.placement import View, cuts
from ringcomm.ps.rounds import Mode, mode_of
from ringcomm.ps.serving import LEADER
from ringcomm.ps.spec import Spec

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.link import Delivery

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
) -> Table:
    """Open a table; the first rank to open it makes it, the others must say the same of it.

    Args:
        name: of the table.
        shape: of its values.
        dtype: float32 or float64.
        updater: what a push does; SGD(0.01) if not given.
        mode: when pushes become updates: "async": each at arrival; "sync": the mean over all
            workers once they are there; ps.SSP(s), ps.FirstOf(k).
        init: what all values begin with, or an array, of which the chief's counts.
        block_nbytes: the most bytes of a block, the unit that is read and written as a whole.

    Raises:
        MismatchError: another rank opened it with something else.
        ValueError, TypeError: no such shape, dtype or mode.
        CommTimeoutError: no server answers.
    """
    current = session()
    shape = (shape,) if isinstance(shape, int) else tuple(int(n) for n in shape)
    kind = np.dtype(dtype)
    if kind not in (np.float32, np.float64):
        raise ValueError(f"table[{name}]: dtype is {kind}; it must be float32 or float64")
    if any(n < 0 for n in shape):
        raise ValueError(f"table[{name}]: shape is {shape}")
    if block_nbytes < kind.itemsize:
        raise ValueError(f"table[{name}]: block_nbytes is {block_nbytes}, less than one element")
    values = None if np.ndim(init) == 0 else np.asarray(init, kind)
    if values is not None and values.shape != shape:
        raise ValueError(f"table[{name}]: init has shape {values.shape}, the table {shape}")
    block = block_nbytes // kind.itemsize
    spec = Spec(
        name=name,
        kind="dense",
        dtype=kind.name,
        shape=shape,
        updater=(updater or SGD(0.01)).to_json(),
        mode=mode_of(mode),
        block=block,
        initial=float(np.asarray(init)) if values is None else "chief",
        partitions=len(cuts(int(np.prod(shape)), block)) - 1,
    )
    opened = Table(current, spec, updater or SGD(0.01), open_table(current, spec))
    if values is not None and is_chief():
        opened.push_initial(values).wait()
    return opened


def open_table(current: Session, spec: Spec) -> dict[str, Any]:
    """Return what the leader says of a table: its number and who owns what."""
    told: dict[str, Any] = {}

    def note(reply: Delivery) -> None:
        told.update(json.loads(reply.body.tobytes()))

    client = current.client
    future: Future[dict[str, Any]] = Future(
        client, f"table[{spec.name}]", 1, lambda: told, client.timestamp()
    )
    meta = packed_json(spec.to_json())
    client.ask([Ask(Kind.CREATE, server=LEADER, meta=meta, on_reply=note)], future)
    future.wait()
    note_owners(current, told)
    return told


def note_owners(current: Session, told: dict[str, Any]) -> None:
    """Take note of who owns the partitions of a table."""
    client = current.client
    changes = {(told["number"], i): (owner,) for i, owner in enumerate(told["owners"])}
    client.view = (client.view or View()).with_(changes)
    client.on_view = lambda text: note_owners(current, json.loads(text))


class Table:
    """A dense table, opened.

    Pushes and pulls return futures at once; see ringcomm.ps.future. Those of this process to one
    block are carried out in the order in which they are called.

    Attributes:
        name: of the table.
        shape: of its values.
        dtype: of its values.
        updater: with the hyper-parameters that travel with every push; set it to change them.
        number: of the table in messages.
        client: of this rank.
    """

    def __init__(
        self, current: Session, spec: Spec, updater: Updater, told: dict[str, Any]
    ) -> None:
        self.name = spec.name
        self.shape = spec.shape
        self.dtype = np.dtype(spec.dtype)
        self.updater = updater
        self._session = current
        self.client = current.client
        self._spec = spec
        self.number: int = told["number"]
        self._bounds = cuts(spec.count, spec.block)
        self._versions = [0] * spec.partitions
        self._rounds = [0] * spec.partitions  # that the next push is for
        self._lock = threading.Lock()

    @property
    def n_partitions(self) -> int:
        """How many slices there are."""
        return self._spec.partitions

    def bounds_of(self, part: int) -> tuple[int, int]:
        """Return the first element of a slice, and the one behind its last."""
        return self._bounds[part], self._bounds[part + 1]

    # --- push -----------------------------------------------------------------------------------
    def push(
        self,
        x: Array | None,
        *,
        where: slice | None = None,
        weight: float = 1.0,
        assign: bool = False,
        hold: bool = False,
    ) -> Future[Pushed]:
        """Send a gradient to the servers, which update the values with it.

        Args:
            x: shape of the table, or of what `where` selects; float16, bfloat16, or the table's
                dtype. It may be changed once this returns. None, in a table with rounds: this
                worker has none; it counts as zeros, and if nobody has one nothing changes.
            where: the elements of the flat table that x is for, with step 1; all by default.
            weight: of this contribution to the mean of a round, as a rule the number of samples; 0:
                it does not count, whatever it is.
            assign: x replaces the values.
            hold: the mean of the round becomes an update by release(); of a table with rounds.
                All workers must push alike.

        Returns:
            A future of Pushed.

        Raises:
            ValueError, TypeError: x does not fit; nothing was sent.
            CommTimeoutError: the servers are so far behind that no more may be sent.
        """
        start, stop = self._range(where)
        has_rounds = self._spec.mode.has_rounds
        if x is None:
            start = stop = 0
        flat = self._flat("push", () if x is None else x, stop - start)
        least = 0 if has_rounds else np.nextafter(0, 1)
        if not least <= weight < np.inf:
            raise ValueError(f"push[{self.name}]: weight is {weight}; it must be more than 0")
        if (x is None or hold) and (assign or not has_rounds):
            raise ValueError(
                f"push[{self.name}]: None and hold=True are for gradients of a table with rounds, "
                f"not for one with mode {self._spec.mode}, nor with assign=True"
            )
        flags = (ASSIGN if assign else 0) | (HOLD if hold else 0) | (ABSENT if x is None else 0)
        return self._push(flat, start, weight, flags, every_part=has_rounds)

    def release(self, factor: float | None) -> Future[Pushed]:
        """Let the mean of the round that this worker pushed last, with hold=True, be an update.

        What the first of the workers passes counts: all must pass the same.

        Args:
            factor: that the mean is multiplied by; None: the mean is dropped.
        """
        flags = RELEASE | (SKIP if factor is None else 0)
        nothing = np.empty(0, self.dtype)
        return self._push(nothing, 0, factor or 0.0, flags, every_part=True)

    def push_initial(self, values: Array) -> Future[Pushed]:
        """Send what the table begins with; the chief does."""
        return self._push(np.ascontiguousarray(values).reshape(-1), 0, 1.0, INITIAL)

    def _push(
        self, flat: Array, start: int, weight: float, flags: int, *, every_part: bool = False
    ) -> Future[Pushed]:
        is_update = not flags & (INITIAL | ASSIGN | RELEASE)
        hyper, name = self.updater.hyper, flat.dtype.name
        replies: dict[int, Delivery] = {}
        asks = []

        def noting(part: int) -> Callable[[Delivery], None]:
            return lambda reply: replies.update({part: reply})

        for part, first, last in self._parts(start, start + len(flat), every_part=every_part):
            own = self._bounds[part]
            piece = flat[first - start : last - start]
            meta = PushMeta(weight, first - own, last - first, name, flags, hyper).packed()
            asks.append(
                Ask(
                    Kind.PUSH,
                    (self.number, part),
                    clock=self._clock_of_push(part, flags, is_update=is_update),
                    meta=meta,
                    body=self.staged(piece.view(np.uint8), part),
                    on_reply=noting(part),
                )
            )

        def finish() -> Pushed:
            return _outcome([replies[part] for part in sorted(replies)], is_held=bool(flags & HOLD))

        client = self.client
        future = Future(client, f"push[{self.name}]", len(asks), finish, client.timestamp())
        client.ask(asks, future)
        return future

    def _clock_of_push(self, part: int, flags: int, *, is_update: bool) -> int:
        """Return the round that a push is for; without rounds, the version it was computed of."""
        if not self._spec.mode.has_rounds:
            return self._versions[part]
        with self._lock:
            number = self._rounds[part]
            self._rounds[part] += is_update
        return number - 1 if flags & RELEASE else number

    def staged(self, piece: Bytes, part: int) -> Bytes:
        """Return a copy where the owner of the partition can read it."""
        if piece.nbytes <= INLINE_MAX:
            return piece  # copied into the letter at once
        view = self.client.view
        assert view is not None
        owner = view.owner((self.number, part))
        if not self.client.shares_memory(owner):
            return piece.copy()
        memory = self._session.memory(piece.nbytes)
        memory[:] = piece
        return memory

    # --- pull -----------------------------------------------------------------------------------
    def pull(self, *, out: Array | None = None, where: slice | None = None) -> Future[Array]:
        """Fetch values from the servers.

        Own pushes are in them. In a table with rounds they are those after the round of the last
        push; with SSP(s) they have what every worker pushed up to s steps before.

        Args:
            out: filled and returned; shape and dtype of what is fetched, contiguous. Not to be
                read before the future is done. Memory of its own if not given.
            where: the elements of the flat table, with step 1; all by default.
        """
        start, stop = self._range(where)
        shape = self.shape if where is None else (stop - start,)
        if out is None:
            out = np.empty(shape, self.dtype)
        elif out.dtype != self.dtype or out.size != stop - start or not out.flags.c_contiguous:
            raise ValueError(
                f"pull[{self.name}]: out must be contiguous, of {self.dtype} and shape {shape}, "
                f"not {out.dtype} {out.shape}"
            )
        flat = out.reshape(-1)
        parts = list(self._parts(start, stop))
        asks = [self._ask_for(part, first, last, flat, start) for part, first, last in parts]
        client, result = self.client, out
        future = Future(client, f"pull[{self.name}]", len(asks), lambda: result, client.timestamp())
        client.ask(asks, future)
        return future

    def _ask_for(
        self, part: int, first: int, last: int, flat: Array, start: int, *, option: int = 0
    ) -> Ask:
        own = self._bounds[part]
        target = flat[first - start : last - start].view(np.uint8)
        offset = (first - own) * self.dtype.itemsize
        is_whole = first == own and last == self._bounds[part + 1]

        def note(reply: Delivery) -> Ask | None:
            version, body = reply.header.clock, reply.body
            if reply.header.option & READ_BLOCK:
                version = _core.read_block(body, target, offset)
                if version < 0:  # updates come faster than it can be read
                    return self._ask_for(part, first, last, flat, start, option=WANT_COPY)
            elif body is not target:
                target[:] = body[offset : offset + target.nbytes]
            self._versions[part] = version
            with self._lock:  # after rounds that went by without this worker
                self._rounds[part] = max(self._rounds[part], reply.header.clock)
            return None

        return Ask(
            Kind.PULL,
            (self.number, part),
            clock=self._wanted(part),
            option=option,
            place=self._session.snapshot,
            out=target if is_whole else None,
            on_reply=note,
        )

    def _wanted(self, part: int) -> int:
        mode = self._spec.mode
        if mode.name == "ssp":
            return max(0, self._session.clock - mode.bound)
        return self._rounds[part] if mode.has_rounds else 0

    def push_pull(
        self, x: Array, *, out: Array | None = None, weight: float = 1.0
    ) -> Future[Array]:
        """Push a gradient and fetch the values after it; see push() and pull()."""
        self.push(x, weight=weight)
        return self.pull(out=out)

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

    def _parts(self, start: int, stop: int, *, every_part: bool = False) -> Any:
        """Yield (partition, first, last) of those that a range touches; elements of the table."""
        for part in range(len(self._bounds) - 1):
            own, end = self._bounds[part], self._bounds[part + 1]
            first, last = max(start, own), min(stop, end)
            if first < last or (start == stop == own == end):
                yield part, first, last
            elif every_part:
                yield part, own, own

    def _flat(self, what: str, x: ArrayLike, count: int) -> Array:
        x = np.asarray(x, self.dtype if isinstance(x, tuple) else None)
        if x.size != count:
            raise ValueError(
                f"{what}[{self.name}]: {x.size} elements, shape {x.shape}, for {count} of a table "
                f"of shape {self.shape}"
            )
        if x.dtype != self.dtype and x.dtype.name not in ("float16", "bfloat16"):
            raise TypeError(
                f"{what}[{self.name}]: dtype {x.dtype}, and the table has {self.dtype}. Convert it"
            )
        return np.ascontiguousarray(x).reshape(-1)

    def __repr__(self) -> str:
        return f"<Table {self.name}: {self.dtype} {self.shape}, {self._spec.mode}>"


def _outcome(replies: Sequence[Delivery], *, is_held: bool) -> Pushed:
    """Return what became of a push, by the replies of its partitions in order."""
    whys = [reply.meta.decode() for reply in replies if reply.header.status == Status.LATE]
    version = min((reply.header.clock for reply in replies), default=0)
    why = "" if not whys else "late" if "late" in whys else whys[0]
    told = [SQUARES.unpack(reply.meta) for reply in replies] if is_held and not whys else []
    squares, is_finite = sum(each[0] for each in told), all(each[1] for each in told)
    return Pushed(not whys, why, version, squares=squares, is_finite=is_finite)
