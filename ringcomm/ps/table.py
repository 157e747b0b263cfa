"""Dense tables: arrays that the servers own."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, overload

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from ringcomm import _core, codec
from ringcomm.arrays.base import lengths_of
from ringcomm.codec import Codec
from ringcomm.ps.calls import call
from ringcomm.ps.client import Ask
from ringcomm.ps.compression import spec_of
from ringcomm.ps.deltas import Delta, Stamp, pull_delta
from ringcomm.ps.entering import Entering, Push
from ringcomm.ps.frames import Kind
from ringcomm.ps.future import Future, Pushed, behind
from ringcomm.ps.job import Session, is_chief, session
from ringcomm.ps.keys import is_16bit
from ringcomm.ps.link import INLINE_MAX
from ringcomm.ps.messages import (
    ABSENT,
    ASSIGN,
    ENCODED,
    ENCODED_BODY,
    HOLD,
    INITIAL,
    KNOWN_BLOCK,
    PLACE,
    READ_BLOCK,
    RELEASE,
    SKIP,
    WANT_COPY,
    WANT_EXACT,
    PushMeta,
    stamp_of,
)
from ringcomm.ps.opened import (
    Opened,
    dtype_of,
    factor_of,
    label_of_new,
    open_at_leader,
    opened_once,
    require_array,
    require_weight,
    updater_of,
)
from ringcomm.ps.optim import Assign, Updater
from ringcomm.ps.packing import Note, Packer, rate_of
from ringcomm.ps.placement import cuts
from ringcomm.ps.pushing import PlainPush, Pushing
from ringcomm.ps.rounds import Mode, mode_of
from ringcomm.ps.segments import MOST, elements_in, packed_mask
from ringcomm.ps.spec import Spec

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.link import Delivery

BLOCK_NBYTES: Final = 4 << 20
_BLOCKS_MAX: Final = 1 << 20  # every rank has a list of them
_METAS_MAX: Final = 1024
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
) -> Table:
    """Open a table; the first rank to open it makes it, the others must say the same of it.

    A process that has opened it already gets the same object, and its values stay as they are.

    Args:
        name: of the table.
        shape: of its values.
        dtype: float32 or float64.
        updater: what a push does; SGD(0.01) if not given.
        mode: when pushes become updates: "async": each at arrival; "sync": the mean over all
            workers once they are there; ps.SSP(s); ps.FirstOf(k): the mean over the first k that
            have pushed, the same k for all blocks.
        init: what all values begin with, or an array, of which the chief's counts.
        block_nbytes: the most bytes of a block, the unit that is read and written as a whole.
        compression: what gradients are sent in: "fp16", "bf16", "int8", or one of ringcomm's
            codecs; of codec.TopK(0.01) the largest hundredth of each block. Values that are
            assigned go as they are.
        error_feedback: what compression drops stays with the worker that pushed, and goes with its
            next push. None: with TopK, which needs it.
        pull_compression: what values are sent in, but for snapshots; not TopK. The servers'
            own stay exact.
        segments: first elements, ascending from 0, of parts that may have no gradient by
            themselves, such as parameters that share a table; see Table.push(absent=).

    Raises:
        MismatchError: another rank, or an earlier call, opened it with something else.
        ValueError, TypeError: no such shape, dtype, mode or compression.
        CommTimeoutError: no server answers.
    """
    current = session()
    label = label_of_new("table", name)
    shape = lengths_of(label, shape)
    kind = dtype_of(label, dtype)
    count = math.prod(shape)
    block = _block_of(label, block_nbytes, kind.itemsize, count)
    updater = updater_of(label, updater)
    values = None if np.ndim(init) == 0 else np.asarray(init, kind)
    if values is not None and values.shape != shape:
        raise ValueError(f"table[{name}]: init has shape {values.shape}, the table {shape}")
    _require_segments(name, segments, count)
    spec = Spec(
        name=name,
        kind="dense",
        dtype=kind.name,
        shape=shape,
        updater=updater.to_json(),
        mode=mode_of(mode),
        block=block,
        initial=float(np.asarray(init)) if values is None else "chief",
        partitions=len(cuts(count, block)) - 1,
        compression=spec_of(label, compression, pull_compression, error_feedback=error_feedback),
        segments=tuple(map(int, segments)),
    )

    def open_it() -> Table:
        opened = Table(current, spec, updater, open_at_leader(current, spec))
        if values is not None and is_chief():
            opened.push_initial(values).wait()
        return opened

    return opened_once(current, spec, open_it)


def _block_of(label: str, block_nbytes: int, itemsize: int, count: int) -> int:
    """Return the most elements of a block."""
    if operator.index(block_nbytes) < itemsize:
        raise ValueError(f"{label}: block_nbytes is {block_nbytes}, less than one element")
    block = operator.index(block_nbytes) // itemsize
    if count > block * _BLOCKS_MAX:
        raise ValueError(
            f"{label}: {count} elements are more than {_BLOCKS_MAX} blocks of block_nbytes="
            f"{block_nbytes}. Pass a larger block_nbytes, or a smaller shape"
        )
    return block


def _require_segments(name: str, segments: Sequence[int], count: int) -> None:
    if len(segments) > MOST:
        raise ValueError(f"table[{name}]: {len(segments)} segments; {MOST} are the most")
    bounds = [*segments, count] if len(segments) else [0]
    if bounds[0] != 0 or any(a > b for a, b in pairwise(bounds)):
        raise ValueError(
            f"table[{name}]: segments are {list(segments)[:10]}; they must begin with 0, ascend, "
            f"and lie within {count} elements"
        )


class Table(Opened):
    """A dense table, opened.

    Pushes and pulls return futures at once; see ringcomm.ps.future. Those of this process to one
    block are carried out in the order in which they are called.

    Attributes:
        name: of the table.
        shape: of its values.
        dtype: of its values.
        number: of the table in messages.
        client: of this rank.
        entering: of ps.FirstOf(k): which rounds this worker is in; None in other modes.
    """

    def __init__(
        self, current: Session, spec: Spec, updater: Updater, told: dict[str, Any]
    ) -> None:
        super().__init__(current, spec, updater, told)
        self.entering: Entering | None = None
        if spec.mode.name == "first_of":
            self.share_rounds(Entering(current.client))
        self.shape = spec.shape
        self._bounds = cuts(spec.count, spec.block)
        self._versions = [0] * spec.partitions
        self._rounds = [0] * spec.partitions  # that the next push is for; see entering
        self._blocks: dict[int, tuple[int, Bytes]] = {}  # those that this node maps: epoch, memory
        self._packer = Packer.of(spec, current.group.index)
        self._has_values = spec.initial != "chief"
        self.push_label = f"push[{spec.name}]"
        self._known_metas: tuple[Updater, dict[Any, bytes]] = (updater, {})
        self._room_kept: Bytes | None = None
        self._is_plain = spec.partitions == 1 and self._packer is None and not spec.mode.has_rounds

    def share_rounds(self, entering: Entering) -> None:
        """Let a gradient count in this table where it counts in others, and nowhere else.

        On all workers, and before anything is pushed. Who has pushed to all tables calls enter().
        """
        entering.add(self.number)
        self.entering = entering

    @property
    def n_partitions(self) -> int:
        """How many slices there are."""
        return self._spec.partitions

    def bounds_of(self, part: int) -> tuple[int, int]:
        """Return the first element of a slice, and the one behind its last."""
        if not 0 <= part < self.n_partitions:
            raise IndexError(f"table[{self.name}]: no slice {part}; it has {self.n_partitions}")
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
        scale: float = 1.0,
        absent: Sequence[int] = (),
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
                All workers must push alike. It is dropped if all have left whose gradients it is
                of.
            scale: by which x has been multiplied, as release() is going to undo; error feedback
                must know it.
            absent: numbers of the segments for which this worker has no gradient; x is 0 there. One
                for which nobody has any stays as it is, with all that belongs to it.

        Returns:
            A future of Pushed.

        Raises:
            ValueError, TypeError: x does not fit, or has NaN or inf and goes as int8 (what is held
                may have); nothing was sent.
            CommTimeoutError: the servers are so far behind that no more may be sent.
        """
        is_all = x is not None and where is None and weight == 1
        if is_all and self._is_plain and not (assign or hold or len(absent)):
            assert x is not None
            return self._push_plain(self._flat("push", x, self._spec.count))
        start, stop = self._range(where)
        has_rounds = self._spec.mode.has_rounds
        if x is None:
            start = stop = 0
        flat = self._flat("push", () if x is None else x, stop - start)
        require_weight(f"push[{self.name}]", weight, may_be_0=has_rounds)
        if (x is None or hold) and (assign or not has_rounds):
            raise ValueError(
                f"push[{self.name}]: None and hold=True are for gradients of a table with rounds, "
                f"not for one with mode {self._spec.mode}, nor with assign=True"
            )
        n_segments = len(self._spec.segments)
        is_known = all(0 <= k < n_segments for k in absent)
        if len(absent) and (where is not None or assign or not is_known):
            raise ValueError(
                f"push[{self.name}]: absent is {list(absent)[:10]}, of {n_segments} segments: it "
                "is for gradients of a whole table"
            )
        flags = (ASSIGN if assign else 0) | (HOLD if hold else 0) | (ABSENT if x is None else 0)
        if self._packer is None or x is None or assign:
            future = self._push(flat, start, weight, flags, every_part=has_rounds, absent=absent)
            if assign:
                self.forget_residual()
            return future
        if weight == 0:  # what does not count must not take along what is kept
            flat, start, flags = flat[:0], 0, flags | ABSENT
        else:
            is_looked_at = hold or isinstance(self.updater, Assign)  # the mean, before it counts
            flat = self._packer.prepared(flat, self._spec, may_have_nan=is_looked_at)
        return self._push(
            flat, start, weight, flags, every_part=has_rounds, scale=scale, absent=absent
        )

    def release(self, factor: float | None) -> Future[Pushed]:
        """Let the mean of the round that this worker pushed last, with hold=True, be an update.

        What the first of the workers passes counts: all must pass the same. It waits for the mean
        where that is not there yet.

        Args:
            factor: that the mean is multiplied by, at least 0; None: the mean is dropped.
        """
        if not self._spec.mode.has_rounds:
            raise ValueError(
                f"release[{self.name}]: it is for a table with rounds, not for one with mode "
                f"{self._spec.mode}"
            )
        weight = factor_of(f"release[{self.name}]", factor, may_be_nan=True)
        flags = RELEASE | (SKIP if factor is None else 0)
        if factor is None:
            self.take_back()
        nothing = np.empty(0, self.dtype)
        return self._push(nothing, 0, weight, flags, every_part=True)

    def take_back(self) -> None:
        """Let error feedback know that this worker's last push became no update.

        By itself it knows of those that were late, and of release(None).
        """
        if self._packer is not None:
            self._packer.take_all_back()

    def forget_residual(self) -> None:
        """Drop what error feedback keeps: the values were replaced by somebody else."""
        if self._packer is not None:
            self._packer.forget()

    @property
    def residual(self) -> Array:
        """What compression has dropped of this worker's pushes and is going to send, in memory of
        its own: shape of the table, as a gradient at the learning rate of now.
        """
        flat = np.zeros(self._spec.count, self.dtype)
        if self._packer is not None:
            self._packer.write_residual(flat, self._bounds, rate_of(self.updater, 1.0))
        return flat.reshape(self.shape)

    def push_initial(self, values: Array) -> Future[Pushed]:
        """Send what the table begins with; the chief does."""
        return self._push(np.ascontiguousarray(values).reshape(-1), 0, 1.0, INITIAL)

    def _push(
        self, flat: Array, start: int, weight: float, flags: int, *, every_part: bool = False,
        scale: float = 1.0, absent: Sequence[int] = (),
    ) -> Future[Pushed]:  # fmt: skip
        is_update = not flags & (INITIAL | ASSIGN | RELEASE)
        parts = list(self._parts(start, start + len(flat), every_part=every_part))
        client, pack, entering = self.client, None, self.entering if is_update else None
        n, is_held = len(parts) + (entering is not None), bool(flags & HOLD)
        future = Pushing(client, self.push_label, n, client.timestamp(), is_held=is_held)
        entry = Push(future, self.number, [part for part, _, _ in parts])
        hurry = None if entering is None else partial(entering.hurry, entry)
        if is_update and self._packer is not None and len(flat):
            rooms = self._rooms(self._packer, parts)  # all that may fail, before residuals change
            first_ask = Ask(Kind.PUSH, (self.number, min(rooms)), body=rooms[min(rooms)])
            client.admit(first_ask, self.push_label, hurry)
            pack = self._packer.packing(
                rate_of(self.updater, scale), rooms, partial(self._absent_in, absent)
            )
        asks, mask = [], packed_mask(len(self._spec.segments), absent)
        for part, first, last in parts:
            own = self._bounds[part]
            piece = flat[first - start : last - start]
            note: Note = future.note_of(part)
            on_ack: Callable[[int], object] | None = future.note_of(part)
            if pack is not None and len(piece):
                (body, note), name, on_ack = pack(part, piece, note), ENCODED, None
            else:
                body, name = self.staged(piece.view(np.uint8), part), _name_of(flat.dtype)
            asks.append(
                Ask(
                    Kind.PUSH,
                    (self.number, part),
                    clock_of=(
                        partial(self._clock_of_push, part, flags, is_update=is_update)
                        if entering is None
                        else partial(entering.number, entry)
                    ),
                    meta=self._explained((weight, flags, mask, name, first - own, last - first)),
                    body=body,
                    on_reply=note,
                    on_ack=on_ack,
                )
            )
        client.ask(asks, future, is_admitted=pack is not None, before_wait=hurry)
        if entering is not None:
            entering.sent(entry)
        return future

    def _rooms(self, packer: Packer, parts: Sequence[tuple[int, int, int]]) -> dict[int, Bytes]:
        """Return memory for what is encoded of each part that has elements."""
        return {
            part: self._room(packer.codec.encoded_nbytes(last - first, self.dtype), part)
            for part, first, last in parts
            if first < last
        }

    def _absent_in(self, absent: Sequence[int], part: int) -> list[slice]:
        """Return where segments lie in a block."""
        spec = self._spec
        return elements_in(spec.segments, spec.count, absent, *self.bounds_of(part))

    def _push_plain(self, flat: Array) -> Future[Pushed]:
        """Push a gradient of all, to a table of one block without rounds: most are such."""
        meta = self._explained((1.0, 0, b"", _name_of(flat.dtype), 0, len(flat)))
        if flat.nbytes <= INLINE_MAX:
            body = np.frombuffer(flat.tobytes(), np.uint8)
        else:
            body = self._kept_room(flat.nbytes)
            body.view(flat.dtype)[:] = flat
        push = PlainPush(self, self._versions[0], meta, body)
        self.client.push(push)
        return push

    def keep_room(self, room: Bytes) -> None:
        """Keep the memory of a push that has been answered for the next: new pages cost time."""
        if room.nbytes > INLINE_MAX:
            self._room_kept = room

    def _kept_room(self, nbytes: int) -> Bytes:
        with self._lock:
            room, self._room_kept = self._room_kept, None
        return room if room is not None and room.nbytes == nbytes else self._room(nbytes, 0)

    def _explained(self, push: tuple[float, int, bytes, str, int, int]) -> bytes:
        """Return what explains a push to a block; most are like one before.

        Args:
            push: weight, flags, mask, dtype, and its first element and how many there are.
        """
        updater = self.updater
        known = self._known_metas
        if known[0] is not updater or len(known[1]) > _METAS_MAX:
            known = self._known_metas = (updater, {})
        meta = known[1].get(push)
        if meta is None:
            weight, flags, mask, dtype, start, n = push
            meta = PushMeta(weight, start, n, dtype, flags, updater.hyper, mask).packed()
            known[1][push] = meta
        return meta

    def _clock_of_push(self, part: int, flags: int, *, is_update: bool) -> int:
        """Return the round that a push is for; without rounds, the version it was computed of."""
        if not self._spec.mode.has_rounds:
            return self._versions[part]
        if self.entering is not None:
            return self.entering.last_of(self.number)
        with self._lock:
            number = self._rounds[part]
            self._rounds[part] += is_update
        return number - 1 if flags & RELEASE else number

    def staged(self, piece: Bytes, part: int) -> Bytes:
        """Return a copy where the owner of the partition can read it."""
        if piece.nbytes <= INLINE_MAX:
            return piece.copy()  # what is sent now may have to be sent again
        memory = self._room(piece.nbytes, part)
        memory[:] = piece
        return memory

    def _room(self, nbytes: int, part: int) -> Bytes:
        """Return memory where the owner of the partition can read it, if it is to be read there."""
        view = self.client.view
        assert view is not None
        if nbytes <= INLINE_MAX or not self.client.shares_memory(view.owner((self.number, part))):
            return np.empty(nbytes, np.uint8)
        return self._session.memory(nbytes)

    # --- pull -----------------------------------------------------------------------------------
    @overload
    def pull(
        self, *, out: Array | None = None, where: slice | None = None, exact: bool = False
    ) -> Future[Array]: ...

    @overload
    def pull(
        self, *, out: Array | None = None, since: Stamp | int, exact: bool = False
    ) -> Future[Delta]: ...

    def pull(
        self,
        *,
        out: Array | None = None,
        where: slice | None = None,
        since: Stamp | int | None = None,
        exact: bool = False,
    ) -> Future[Array] | Future[Delta]:
        """Fetch values from the servers; of all blocks, or of those that have changed.

        Own pushes are in them. In a table with rounds they are those after the round of the last
        push; with SSP(s) they have what every worker pushed up to s steps before.

        Args:
            out: filled and returned; shape and dtype of what is fetched, contiguous. Not to be
                read before the future is done. Memory of its own if not given.
            where: the elements of the flat table, with step 1; all by default.
            since: 0, or the `stamp` of an earlier result: fetch the blocks alone that have changed
                since. The result is a Delta: its blocks, and the next stamp. What has not changed
                is left alone in `out`. A block comes, too, if it was restored, or has moved to
                another server; a stamp of another job is worth 0.
            exact: as the servers have them, in spite of pull_compression=. With `since` they
                always come so.
        """
        if since is not None and (where is not None or self._session.snapshot):
            raise ValueError(
                f"pull[{self.name}]: since= is for whole tables, without where=, and not within "
                "ps.snapshot()"
            )
        start, stop = self._range(where)
        shape = self.shape if where is None else (stop - start,)
        if out is None and since is not None:
            return pull_delta(self, since, None)
        if out is None:
            out = np.empty(shape, self.dtype)
        else:
            self._require_out(out, shape)
        flat = out.reshape(-1)
        if since is not None:
            return pull_delta(self, since, flat)
        may_read = exact or not self._spec.compression.get("pull")
        asks = [
            self._ask_for(part, first, last, flat, start, option=WANT_EXACT if exact else 0)
            for part, first, last in self._parts(start, stop)
            if not (may_read and self._read(part, first, last, flat, start))
        ]
        client, result = self.client, out
        future = Future(client, f"pull[{self.name}]", len(asks), lambda: result, client.timestamp())
        client.ask(asks, future)
        return future

    def _read(self, part: int, first: int, last: int, flat: Array, start: int) -> bool:
        """Read values where the server has them; False if it must be asked.

        Only where nothing of this rank is under way: what it has pushed is in the values then.
        """
        known = self._blocks.get(part)
        if known is None or self._session.snapshot:
            return False
        (epoch, memory), client, partition = known, self.client, (self.number, part)
        if client.has_nothing_under_way(partition) != epoch:
            return False
        target = flat[first - start : last - start].view(np.uint8)
        offset = (first - self._bounds[part]) * self.dtype.itemsize
        clock = _core.read_open_block(memory, target, offset, self.wanted(part))
        # It may have moved meanwhile, and its memory be something else's.
        if clock < 0 or client.has_nothing_under_way(partition) != epoch:
            return False
        self.note_version(part, clock, clock)
        client.listen()
        return True

    def _note_block(self, part: int, reply: Delivery) -> None:
        """Remember where a block is."""
        if self._spec.mode.name == "ssp":
            return  # who may read depends on what the server knows of others
        if reply.header.option & READ_BLOCK:
            memory = reply.body
        else:
            memory = self.client.memory_of(reply.source, *PLACE.unpack(reply.meta))
        self._blocks[part] = reply.header.view, memory

    def _ask_for(
        self, part: int, first: int, last: int, flat: Array, start: int, *, option: int = 0
    ) -> Ask:
        own = self._bounds[part]
        target = flat[first - start : last - start].view(np.uint8)
        offset = (first - own) * self.dtype.itemsize
        is_whole = first == own and last == self._bounds[part + 1]

        def note(reply: Delivery) -> Ask | None:
            version, body = reply.header.clock, reply.body
            if reply.header.option & ENCODED_BODY:
                if is_whole:
                    codec.decode(body, flat[first - start : last - start])
                else:
                    target[:] = codec.decoded(body)[first - own : last - own].view(np.uint8)
            elif reply.header.option & READ_BLOCK:
                stamp = _core.read_block(body, target, offset)
                version += stamp - stamp_of(reply.meta)  # updates since the reply was written
                if stamp < 0:  # updates come faster than it can be read
                    again = option | WANT_COPY
                    return self._ask_for(part, first, last, flat, start, option=again)
            elif body is not target:
                target[:] = body[offset : offset + target.nbytes]
            if reply.header.option & (READ_BLOCK | KNOWN_BLOCK):
                self._note_block(part, reply)
            self.note_version(part, version, reply.header.clock)
            return None

        return Ask(
            Kind.PULL,
            (self.number, part),
            clock=self.wanted(part),
            option=option,
            place=self._session.snapshot,
            out=target if is_whole and not self._spec.compression.get("pull") else None,
            on_reply=note,
        )

    def note_version(self, part: int, version: int, rounds: int) -> None:
        """Take note of how many updates, or rounds, are in what was pulled."""
        self._versions[part] = version
        if not self._spec.mode.has_rounds:
            return
        if self.entering is not None:
            self.entering.saw(self.number, rounds)
            return
        with self._lock:  # after rounds that went by without this worker
            self._rounds[part] = max(self._rounds[part], rounds)

    def wanted(self, part: int) -> int:
        """Return how much must be in a block that this process pulls: rounds, or clock."""
        mode = self._spec.mode
        if mode.name == "ssp":
            return max(0, self._session.clock - mode.bound)
        if self.entering is not None:
            return self.entering.round_of(self.number)
        return self._rounds[part] if mode.has_rounds else 0

    def push_pull(
        self, x: Array, *, out: Array | None = None, weight: float = 1.0
    ) -> Future[Array]:
        """Push a gradient and fetch the values after it; see push() and pull().

        Raises:
            ValueError, TypeError, CommTimeoutError: see push(); nothing was sent. What keeps the
                values from being fetched after it is raised by the future.
        """
        if out is not None:
            self._require_out(out, self.shape)
        push = self.push(x, weight=weight)
        return behind(push, lambda: self.pull(out=out))

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
        self._await_values()
        return call(self._session, self, name, arguments)

    def _await_values(self) -> None:
        """Return once the values are there that the chief sends."""
        if self._has_values:
            return
        asks = []
        for part in range(self.n_partitions):
            own, end = self.bounds_of(part)
            n = min(1, end - own)
            ask = self._ask_for(part, own, own + n, np.empty(n, self.dtype), own)
            ask.clock = 0  # whatever the rounds
            asks.append(ask)
        label, client = f"table[{self.name}]", self.client
        future: Future[None] = Future(client, label, len(asks), lambda: None, client.timestamp())
        client.ask(asks, future)
        future.wait()
        self._has_values = True

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

    def _require_out(self, out: Array, shape: tuple[int, ...]) -> None:
        require_array(f"pull[{self.name}]", out)
        if not _is_fit(out, self.dtype, shape):
            raise ValueError(
                f"pull[{self.name}]: out must be contiguous and writeable, of {self.dtype} and "
                f"shape {shape}, or flat, not {out.dtype} {out.shape}"
            )

    def _flat(self, what: str, x: ArrayLike, count: int) -> Array:
        x = np.asarray(x, self.dtype if isinstance(x, tuple) else None)
        is_whole = count == self._spec.count and x.shape == self.shape
        if not is_whole and x.shape != (count,):
            raise ValueError(
                f"{what}[{self.name}]: {x.size} elements, shape {x.shape}, for {count} of a table "
                f"of shape {self.shape}: pass that shape, or flat"
            )
        if x.dtype != self.dtype and not is_16bit(x.dtype):
            raise TypeError(
                f"{what}[{self.name}]: dtype {x.dtype}, and the table has {self.dtype}. Convert it"
            )
        return x.reshape(-1) if x.flags.c_contiguous else np.ascontiguousarray(x).reshape(-1)

    def __repr__(self) -> str:
        return f"<Table {self.name}: {self.dtype} {self.shape}, {self._spec.mode}>"


def _is_fit(out: Array, dtype: np.dtype[Any], shape: tuple[int, ...]) -> bool:
    """Return True if what is pulled can be written there."""
    is_shape = out.shape == shape or out.shape == (int(np.prod(shape)),)
    return out.dtype == dtype and is_shape and out.flags.c_contiguous and out.flags.writeable


@lru_cache
def _name_of(dtype: np.dtype[Any]) -> str:
    """Return its name, which numpy takes 3 us to find."""
    return dtype.name
