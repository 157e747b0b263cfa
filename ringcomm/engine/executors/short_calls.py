"""Short calls: blocking collectives that are made again, which take one call of C++.

A plan, a task and a coroutine would cost more than a step, in which all short payloads move. Longer
ones between hosts are moved by the schedule that was recorded. So the first two calls of a kind,
dtype, shape, operator, root and name are carried out by their plan. The second one is remembered
as a KnownCall, and the next ones look that up. (Of a name, the very first call agrees on it, and
does not count.) If ranks disagree, one is late, or another rank brings other rows than before, a
known call becomes a task like any other.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from ringcomm._core import KnownCall, KnownCopy, KnownReduction
from ringcomm.arrays import adapter_for
from ringcomm.arrays.base import Bytes, Flat
from ringcomm.collectives.operators import ReductionOptions
from ringcomm.collectives.recording import CannotRecord, record_call
from ringcomm.engine.core.call import Call
from ringcomm.engine.core.current_engine import engine
from ringcomm.engine.core.engine import Engine
from ringcomm.engine.core.group import BlockingCalls, Group
from ringcomm.engine.core.ledger import Ticket
from ringcomm.engine.core.plan import Plan
from ringcomm.engine.operations.allgather_and_gather import (
    plan_allgather,
    plan_gather,
    plan_gather_into,
)
from ringcomm.engine.operations.allreduce import plan_allreduce
from ringcomm.engine.operations.alltoall import plan_alltoall
from ringcomm.engine.operations.barrier import plan_barrier
from ringcomm.engine.operations.broadcast import plan_broadcast
from ringcomm.engine.operations.into_array import (
    plan_allgather_into,
    plan_alltoall_into,
    plan_reduce_scatter_into,
)
from ringcomm.engine.operations.reduce import plan_reduce
from ringcomm.engine.operations.reduce_scatter import plan_reduce_scatter
from ringcomm.engine.operations.scalars import array_of, is_scalar, number_from
from ringcomm.engine.operations.scan import combine_scan, plan_exscan, plan_scan
from ringcomm.engine.operations.scatter import plan_scatter
from ringcomm.engine.progress.task import Task
from ringcomm.transport.channel import Channel
from ringcomm.transport.node.steps import NodeExchange, NodeReduction, Team
from ringcomm.transport.wire_team import WireTeam

_MAX_KNOWN: Final = 4096
_MADE_ONCE: Final = "made once"


class _Asked(NamedTuple):
    """The arguments of run()."""

    kind: str
    name: str | None
    x: Any
    op: Any
    root: Any
    into: Any
    more: Any

    @property
    def options(self) -> ReductionOptions:
        return ReductionOptions(self.op)


# How each kind of call is planned.
_PLANS: Final[dict[str, Callable[[Group, _Asked], Plan[Any]]]] = {
    "allreduce": lambda g, a: plan_allreduce(g, a.name, a.x, a.options, is_borrowed=True),
    "allreduce_": lambda g, a: plan_allreduce(g, a.name, a.x, a.options, in_place=True),
    "reduce": lambda g, a: plan_reduce(g, a.name, a.x, a.options, a.root, is_borrowed=True),
    "reduce_": lambda g, a: plan_reduce(
        g, a.name, a.x, a.options, a.root, in_place=True, is_borrowed=True
    ),
    "reduce_scatter": lambda g, a: plan_reduce_scatter(g, a.name, a.x, a.options, is_borrowed=True),
    "reduce_scatter_": lambda g, a: plan_reduce_scatter(g, a.name, a.x, a.options, in_place=True),
    "reduce_scatter_into": lambda g, a: plan_reduce_scatter_into(g, a.name, a.into, a.x, a.options),
    "scan": lambda g, a: plan_scan(g, a.name, a.x, a.options, is_borrowed=True),
    "exscan": lambda g, a: plan_exscan(g, a.name, a.x, a.options, is_borrowed=True),
    "allgather": lambda g, a: plan_allgather(g, a.name, a.x),
    "allgather_into": lambda g, a: plan_allgather_into(g, a.name, a.into, a.x),
    "gather": lambda g, a: plan_gather(g, a.name, a.x, a.root),
    "gather_into": lambda g, a: plan_gather_into(g, a.name, a.into, a.x, a.root, a.more),
    "scatter": lambda g, a: plan_scatter(g, a.name, a.x, a.root),
    "scatter_into": lambda g, a: plan_scatter(g, a.name, a.x, a.root, a.more, a.into),
    "alltoall": lambda g, a: plan_alltoall(g, a.name, a.x, None, return_splits=False),
    "alltoall_into": lambda g, a: plan_alltoall_into(
        g, a.name, a.into, a.x, received=a.more[0], sent=a.more[1]
    ),
    "broadcast": lambda g, a: plan_broadcast(g, a.name, a.x, a.root, is_borrowed=True),
    "broadcast_": lambda g, a: plan_broadcast(g, a.name, a.x, a.root, in_place=True),
    "barrier": lambda g, a: plan_barrier(g, a.name),
}
_CHOOSING: Final = (  # by what the others show
    "allgather", "gather", "gather_into", "scatter", "scatter_into", "alltoall", "alltoall_into",
)  # fmt: skip


@dataclass(slots=True)
class _Known:
    """A call as it was carried out before. No named tuple: reading its attributes takes longer.

    Attributes:
        shows_x: other ranks read this rank's x.
        writes_x: x, or rows of it, get the result.
        rows: those rows; None: all.
        make: makes a new array that gets the result; None: nothing new does.
        returns_x: the result is x.
        after: makes the result of a scan of x, and of what the step has copied; None: of others.
    """

    in_cpp: KnownCall
    call: Call
    nbytes: int
    shows_x: bool
    writes_x: bool
    rows: slice | None
    make: Callable[[], Any] | None
    returns_x: bool
    after: Callable[[Any, Any], Any] | None = None


class ShortCalls:
    """The blocking collectives of one group, whose ranks meet in `team`."""

    def __init__(self, engine: Engine, group: Group, team: Team) -> None:
        self._engine = weakref.ref(engine)
        self._group = weakref.ref(group)  # weak: the group refers to this object
        self._ledger = group.ledger_for(engine)
        self._team, self._n_slots = team, team.n_slots
        self._index = group.index
        self._known: dict[Any, _Known | str | None] = {}
        self._in_place: dict[Any, _Known] = {}  # of the unnamed allreduce_: they need one buffer

    def allreduce_(self, x: Any, op: Any) -> bool:
        """Carry out an unnamed allreduce_ and return True, if such a call was made before.

        Else only return False: run() can do it. This is what run() does, without all that an
        allreduce_ does not have. Raises the errors of rc.allreduce_().
        """
        is_numpy = type(x) is np.ndarray
        try:
            known = self._in_place[x.dtype, x.shape, op]
        except (KeyError, AttributeError, TypeError):
            return False
        engine = self._engine()
        source = (x if x.flags.carray else None) if is_numpy else address_of(x)
        if source is None or engine is None:
            return False
        place = task = None
        try:
            place = engine.take_place(self._ledger, self._team)
            if place is None:
                return False
            step = known.in_cpp.run_in_place(place % self._n_slots, source)
            if step is None:
                self._team.end_turn(place)
            else:
                asked = _Asked("allreduce_", None, x, op, 0, None, None)
                group, plan, _ = self._rest(known, asked, x)
                task = engine.adopt(self._ledger.unnamed(place), step, plan, group)
                engine.completion.result_of(task)
        except BaseException as error:
            self._break_unless_over(engine, error, task, known, place)
            raise
        if not is_numpy:
            adapter_for(x).written(x)
        return True

    def run(  # noqa: PLR0917 - CPython calls what has keyword-only arguments more slowly
        self,
        kind: str,
        x: Any = None,
        op: Any = None,
        root: Any = 0,
        name: str | None = None,
        timeout_s: float | None = None,
        into: Any = None,
        more: Any = None,
    ) -> Any:
        """Carry out a collective, and return its result.

        Args:
            kind: name of the collective.
            x: this rank's array; None: it passes none.
            op: operator of a reduction.
            root: of a collective that has one.
            name: that the user gave to the operation, if any.
            timeout_s: deadline; None: RINGCOMM_TIMEOUT_S.
            into: array that gets the result of a collective whose name ends in _into.
            more: what else its plan takes; see _PLANS.

        Raises the errors of the collective.
        """
        try:
            # A number of numpy has the dtype and shape of an array of no dimension, but no memory.
            key: Any = (
                (kind, op, root) if x is None else (kind, x.dtype, x.shape or type(x), op, root)
            )
            if name is not None:
                key = (*key, name)
            if into is not None:
                key = (*key, into.dtype, into.shape)
            if more is not None:
                key = (*key, more)
            known = self._known[key]
        except KeyError:
            if is_scalar(x):
                return self._of_number(_Asked(kind, name, x, op, root, into, more), timeout_s)
            is_lasting = name is None or self._ledger.knows(name)
            if is_lasting and len(self._known) < _MAX_KNOWN:
                self._known[key] = _MADE_ONCE
            return self._by_plan(_Asked(kind, name, x, op, root, into, more), timeout_s)
        except (AttributeError, TypeError):  # no array, or what cannot be a key
            if is_scalar(x):
                return self._of_number(_Asked(kind, name, x, op, root, into, more), timeout_s)
            return self._by_plan(_Asked(kind, name, x, op, root, into, more), timeout_s)
        if type(known) is not _Known or type(root) is not int:
            to_learn = key if known is _MADE_ONCE else None
            return self._by_plan(_Asked(kind, name, x, op, root, into, more), timeout_s, to_learn)
        source = target = out = None
        writes_x = known.writes_x
        if writes_x or known.shows_x:
            source = x if type(x) is np.ndarray and x.flags.carray else _buffer(x, writes_x)
            if source is None:
                return self._by_plan(_Asked(kind, name, x, op, root, into, more), timeout_s)
            if writes_x and known.rows is None:
                target, out = source, x
            if not known.shows_x:
                source = None
        if into is not None:
            out, target = into, _buffer(into, True)
            if target is None or _overlap(x, into):
                return self._by_plan(_Asked(kind, name, x, op, root, into, more), timeout_s)
        elif known.make is not None:
            out = known.make()
            target = out if type(out) is np.ndarray else out.data_ptr()
        elif known.rows is not None:
            out = x[known.rows]
            target = out if type(out) is np.ndarray else out.data_ptr()
        elif known.returns_x:
            out = x
        engine = self._engine()
        if engine is None:
            return self._by_plan(_Asked(kind, name, x, op, root, into, more), timeout_s)
        place: Any = None  # a number; with a name, a Ticket
        task = None
        try:
            if name is None:
                place = engine.take_place(self._ledger, self._team)
            else:
                place = engine.take_name(self._ledger, name)
            if place is not None:
                slot = place % self._n_slots if name is None else self._slot_of(place)
                step = known.in_cpp.run(slot, source, target)
                if step is None:
                    if name is None:
                        self._team.end_turn(place)
                    else:
                        self._ledger.finish(place)
                else:
                    group, plan, anew = self._rest(
                        known, _Asked(kind, name, x, op, root, into, more), out
                    )
                    ticket = self._ledger.unnamed(place) if name is None else place
                    task = engine.adopt(ticket, step, plan, group, timeout_s=timeout_s)
                    out = engine.completion.result_of(task)
                    if anew is not None and _has_chosen(anew):
                        self._known[key] = _known_of(self._team, plan, x, out, is_in_place=False)
        except BaseException as error:
            self._break_unless_over(engine, error, task, known, place)
            raise
        if place is None:  # it needs a task, or its turn has not come
            return self._by_plan(_Asked(kind, name, x, op, root, into, more), timeout_s)
        if into is not None or (writes_x and type(x) is not np.ndarray):
            changed = x if into is None else into
            adapter_for(changed).written(changed)
        return out if known.after is None else known.after(x, out)

    @staticmethod
    def _break_unless_over(
        engine: Engine, error: BaseException, task: Task | None, known: _Known, place: Any
    ) -> None:
        """Note the error of a call. `place`: its number; with a name, a Ticket."""
        if task is None or not task.is_over:  # other ranks wait for this operation
            number = place if type(place) is int else 0
            label = "an operation" if place is None else known.call.label(number)
            engine.completion.break_engine(error, label)

    def _slot_of(self, ticket: Ticket) -> int:
        stream = self._ledger.proposal(ticket)
        slot = self._team.slot(stream, self._ledger.slot(ticket, stream))
        assert slot is not None  # all names that are agreed on have one
        return slot

    def _of_number(self, asked: _Asked, timeout_s: float | None) -> Any:
        kind, name, x, op, root, *_ = asked
        try:
            array = array_of(x, kind)
        except Exception:  # noqa: BLE001 - the plan raises it, so that the other ranks learn of it
            return self._by_plan(asked, timeout_s)
        result = self.run(kind, array, op, root, timeout_s=timeout_s, name=name)
        return result if array.ndim else number_from(result, x)

    def is_root(self, root: Any) -> bool:
        """Return True if this rank is the root, or may be, as `root` is no int."""
        return type(root) is not int or root == self._index

    def _rest(
        self, known: _Known, asked: _Asked, out: Any
    ) -> tuple[Group, Plan[Any], Plan[Any] | None]:
        """Return the plan of what is left of a step, and a plan of the whole if others may differ.

        The step fills `out`, unless it is to choose: then the plan of the whole does so.
        """
        group = self._group()
        assert group is not None
        anew = _PLANS[asked.kind](group, asked) if asked.kind in _CHOOSING else None

        def finish(t: Channel | None, _kept: Any = asked.x) -> Any:
            if anew is None or not _has_chosen(anew):
                return out
            assert anew.finish is not None
            return anew.finish(t)

        left = Plan(known.call, known.nbytes, _never_run, None, finish)
        if anew is not None:
            left.step, left.rest, left.run = anew.step, anew.rest, anew.run
            left.acts_through_channel = anew.acts_through_channel
        return group, left, anew

    def _by_plan(self, asked: _Asked, timeout_s: float | None, key: Any = None) -> Any:
        """Carry out a call by its plan, and remember it under the key, unless that is None."""
        kind = asked.kind
        plans: list[Plan[Any]] = []

        def make(group: Group) -> Plan[Any]:
            plans.append(_PLANS[kind](group, asked))
            return plans[0]

        current = self._engine() or engine()
        result = current.execute(kind, asked.name, make, self._group(), timeout_s=timeout_s)
        if key is not None and plans and not _is_within(asked.x, asked.into):
            known = self._known[key] = _known_of(
                self._team, plans[0], asked.x, result, is_in_place=kind.endswith("_")
            )
            is_simple = kind == "allreduce_" and asked.name is None
            if is_simple and known is not None and known.shows_x and known.writes_x:
                self._in_place[asked.x.dtype, asked.x.shape, asked.op] = known
        return result


def short_calls_of(group: Group) -> BlockingCalls | None:
    """Return the short calls of a group; None if its ranks take no steps."""
    if group.short_calls is None and group.takes_steps is not None:
        group.short_calls = ShortCalls(engine(), group, group.takes_steps)
    return group.short_calls


def _has_chosen(plan: Plan[Any]) -> bool:
    return isinstance(plan.step, NodeExchange) and plan.step.has_chosen


def _known_of(
    team: Team, plan: Plan[Any], x: Any, result: Any, *, is_in_place: bool
) -> _Known | None:
    """Return the call that has been carried out by a plan; None if only a plan can do it."""
    step = plan.step
    if step is None or not (is_plain(x) and is_plain(result)):
        return None
    if isinstance(step, NodeExchange) and not step.has_chosen:
        return None  # nobody has told what there is to pull
    if plan.has_run is not None:
        return _known_schedule(team, plan, x, result, is_in_place=is_in_place)
    if not team.fits(plan.nbytes):
        return None
    common = team.team, plan.call.fingerprint ^ team.digest
    in_cpp: KnownCall
    if plan.call.kind in ("scan", "exscan"):
        return _known_scan(team, plan, x, result)
    if isinstance(step, NodeReduction):
        has_target, shows_x = step.target is not None, True
        in_cpp = KnownReduction(
            *common, step.source.nbytes, step.bounds, step.to, step.root, step.op, step.dtype,
            step.divisor, team.moment_s,
        )  # fmt: skip
    else:
        shows_x = step.shown.nbytes > 0
        header, expected = b"", []
        parts = _parts_of(step.pulls, result)
        has_target = bool(parts)
        if isinstance(step, NodeExchange):
            header, expected = step.header, step.shown_by_all
        in_cpp = KnownCopy(*common, (header, step.shown.nbytes), parts, expected, team.moment_s)
    rows = _rows_of(result, x) if is_in_place and result is not x else None
    return _Known(
        in_cpp, plan.call, plan.nbytes, shows_x, is_in_place and (has_target or rows is not None),
        rows, None if is_in_place or result is None else _maker_of(result),
        returns_x=is_in_place and rows is None,
    )  # fmt: skip


def _known_schedule(
    team: Team, plan: Plan[Any], x: Any, result: Any, *, is_in_place: bool
) -> _Known | None:
    """Return a call whose payload its plan has moved by messages; None if C++ cannot do so."""
    step, t = plan.step, plan.has_run
    assert step is not None
    assert t is not None
    if not plan.acts_through_channel or not isinstance(team, WireTeam):
        return None
    try:
        recorded = record_call(plan.run, t, _bytes_of(x), _bytes_of)
    except CannotRecord:
        return None
    header, expected = b"", []
    if isinstance(step, NodeExchange):
        header, expected = step.header, step.shown_by_all
    shown = step.source if isinstance(step, NodeReduction) else step.shown
    nbytes = max(plan.nbytes, 0 if result is None else result.nbytes)
    in_cpp = team.known_schedule(
        plan.call.fingerprint,
        (header, shown.nbytes),
        expected,
        (recorded.schedule, [t.members[peer] for peer in recorded.peers]),
        nbytes,
    )
    is_x = is_in_place and result is x
    rows = _rows_of(result, x) if is_in_place and not is_x else None
    return _Known(
        in_cpp, plan.call, plan.nbytes, x is not None and not (is_x and recorded.writes_x),
        is_in_place and recorded.writes_x, rows,
        None if is_in_place or result is None else _maker_of(result), returns_x=is_x,
    )  # fmt: skip


def _bytes_of(x: Any) -> Bytes | None:
    return None if x is None else adapter_for(x).flat(x).bytes


def _known_scan(team: Team, plan: Plan[Any], x: Any, result: Any) -> _Known:
    """Return a scan as a copy of what the ranks before this one show, which is then combined."""
    assert plan.step is not None
    assert plan.call.reduction is not None
    op, is_exclusive, rank = plan.call.reduction.op, plan.call.kind == "exscan", team.team.index
    nbytes, adapter, make = plan.nbytes, adapter_for(x), _maker_of(result)

    def after(x: Any, copied: Any) -> Any:
        out, theirs = make(), []
        mine = adapter.flat(x)
        if copied is not None:
            theirs = [Flat(each, mine.dtype) for each in copied.reshape(rank, nbytes)]
        combine_scan(adapter.flat(out), theirs, mine, op, is_exclusive=is_exclusive)
        return out

    parts = [(r, 0, nbytes, r * nbytes) for r in range(rank)] if nbytes else []
    in_cpp = KnownCopy(
        team.team, plan.call.fingerprint ^ team.digest, (b"", nbytes), parts, [], team.moment_s
    )
    scratch = partial(np.empty, rank * nbytes, np.uint8) if rank else None
    return _Known(
        in_cpp, plan.call, nbytes, nbytes > 0, False, None, scratch, returns_x=False, after=after
    )


def _parts_of(
    pulls: Sequence[tuple[int, int, Bytes]], result: Any
) -> list[tuple[int, int, int, int]]:
    """Return (rank, offset in what it shows, bytes, offset in the result) of each pull."""
    if not pulls:
        return []
    begin = adapter_for(result).flat(result).bytes.ctypes.data
    return [
        (rank, offset, into.nbytes, into.ctypes.data - begin)
        for rank, offset, into in pulls
        if into.nbytes
    ]


def _rows_of(part: Any, x: Any) -> slice:
    adapter = adapter_for(x)
    shift = adapter.flat(part).bytes.ctypes.data - adapter.flat(x).bytes.ctypes.data
    nbytes = adapter.flat(x).bytes.nbytes
    first = shift * len(x) // nbytes if nbytes else 0
    return slice(first, first + len(part))


def _maker_of(result: Any) -> Callable[[], Any]:
    """Return a function that makes an array like the result, without its values."""
    if type(result) is np.ndarray:
        return partial(np.empty, result.shape, result.dtype)
    return partial(sys.modules["torch"].empty, tuple(result.shape), dtype=result.dtype)


def is_plain(x: Any) -> bool:
    """Return True if a short call can pass x to C++: it is None, or an array in host memory."""
    if x is None:
        return True
    if _buffer(x, False) is None:
        return False
    try:
        memoryview(x if type(x) is np.ndarray else b"")  # type: ignore[arg-type]  # raises for bfloat16, which is no buffer
    except (ValueError, BufferError):
        return False
    return True


def _buffer(x: Any, is_writable: bool) -> Any:
    """Return x, or its address if it is a tensor, for C++; None if it needs a copy."""
    if type(x) is not np.ndarray:
        return address_of(x)
    flags = x.flags
    if flags.carray or (not is_writable and flags.c_contiguous and flags.aligned):
        return x
    return None


def _is_within(x: Any, into: Any) -> bool:
    """Return True if the plan of a call has made use of the memory that x and `into` share."""
    return into is not None and is_plain(x) and is_plain(into) and _overlap(x, into)


def _overlap(x: Any, y: Any) -> bool:
    if x is None:
        return False
    begin, other = (
        each.ctypes.data if type(each) is np.ndarray else each.data_ptr() for each in (x, y)
    )
    return bool(begin < other + y.nbytes and other < begin + x.nbytes)


async def _never_run(_: Channel) -> Any:
    raise AssertionError("a step has begun already")


def address_of(x: Any) -> int | None:
    """Return the address of a tensor that needs no copy, else None."""
    torch = sys.modules.get("torch")
    if (
        torch is None
        or type(x) not in (torch.Tensor, torch.nn.Parameter)
        or x.layout is not torch.strided
        or not x.is_cpu
        or not x.is_contiguous()
        or x.is_conj()
        or x.is_neg()
    ):
        return None
    address: int = x.data_ptr()
    if not address or address % x.element_size():
        return None
    storage = x.untyped_storage()  # resize_() may have freed the part that x is in
    return address if address + x.nbytes <= storage.data_ptr() + storage.nbytes() else None
