"""Measures a case: checks the results, times batches of all engines in turn, and checks again.

A batch is one call that is not timed, and then timed calls back to back. The first call is slower:
ranks leave the barrier at different times, caches have the data of the previous engine, and threads
sleep. After the first call, each collective keeps its ranks together.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

import ringcomm as rc
from ringcomm.launch.bench import exact_inputs
from ringcomm.launch.bench.cases import BenchCase, bus_factor
from ringcomm.launch.bench.table import BenchRow

Array = NDArray[Any]
Call = Callable[[], Array | None]
MODES: Final = ("sync", "async", "named")
_POISON = 0xA5
_LATE_S = 2e-3
_BATCH_S = 1e-3  # 1000 times the cost of the clock and the loop
_MOST_CALLS = 1000
_FEWEST_BATCHES, _MOST_BATCHES = 5, 200


class Bind(Protocol):
    def __call__(self, case: BenchCase, send: Array, recv: Array) -> Call | None:
        """Return the call to time, which returns its result; None if the engine lacks the case.

        Args:
            case: the collective; the root is rank 0.
            send: shape (count,), this rank's argument. Scatter uses the root's alone.
            recv: shape (n,), memory for the result; `send` itself for the form in place.
        """


@dataclass(frozen=True)
class Contender:
    engine: str  # its name in the table
    buffers: str  # "registered" or "private"
    bind: Bind
    send: Array  # shape (bytes,), uint8, for the largest case
    recv: Array  # like send


def ringcomm_in(mode: str) -> Bind:
    """Return the engine ringcomm, in which each call out of place makes a new array.

    Args:
        mode: "sync" calls allreduce(x), "async" allreduce_async(x).wait(), "named" does
            the same with a name, so the ranks agree on the call only once.
    """
    number = itertools.count()

    def bind(case: BenchCase, send: Array, recv: Array) -> Call:
        form = ("" if mode == "sync" else "_async") + ("_" if recv is send else "")
        function = getattr(rc, case.collective + form)
        arguments: list[Any] = [] if case.collective == "barrier" else [send]
        arguments += [rc.Op(case.op)] if case.op else []
        if mode == "sync":
            return lambda: function(*arguments)
        name = f"bench {next(number)}" if mode == "named" else None
        return lambda: function(*arguments, name=name).wait()

    return bind


def memcpy(case: BenchCase, send: Array, recv: Array) -> Call | None:
    return None if recv is send or not case.count else lambda: np.copyto(recv, send)


@dataclass
class _Lane:
    """A contender in one form, bound to one case."""

    contender: Contender
    in_place: bool
    send: Array
    recv: Array
    call: Call
    wrong: int = 0

    @property
    def is_memcpy(self) -> bool:
        return self.contender.bind is memcpy


def measure(
    case: BenchCase,
    contenders: Sequence[Contender],
    *,
    forms: Sequence[bool] = (False, True),
    seconds: float = 2.0,
    batches: int | None = None,
) -> list[BenchRow]:
    """Return the rows of one case, the same on every rank. Collective.

    A contender whose result is wrong is not timed.

    Args:
        case: the collective.
        contenders: the engines, which take turns.
        forms: False: out of place; True: in place, if the collective has that form.
        seconds: about how long to measure.
        batches: number of batches of each contender and form; None: as many as `seconds` allow.
    """
    found = [_lane(case, each, in_place) for each in contenders for in_place in forms]
    lanes = [lane for lane in found if lane is not None]
    _check(case, lanes)
    sound = [lane for lane in lanes if lane.wrong == 0]
    for lane in sound:  # zeros: repeated sums in place stay finite
        lane.send.fill(0)
        lane.recv.fill(0)
    times = take_turns([lane.call for lane in sound], seconds, batches)
    _check(case, sound)
    timed = {id(lane): each for lane, each in zip(sound, times, strict=True)}
    return [_row(case, lane, timed.get(id(lane))) for lane in lanes]


def _lane(case: BenchCase, contender: Contender, in_place: bool) -> _Lane | None:
    if in_place and not case.how.has_in_place:
        return None
    is_whole = contender.bind is memcpy
    n_send = case.part if case.how.gives_part and not is_whole else case.count
    n_recv = case.part if case.how.takes_part and not is_whole else case.count
    send = contender.send[: n_send * case.dtype.itemsize].view(case.dtype)
    recv = send if in_place else contender.recv[: n_recv * case.dtype.itemsize].view(case.dtype)
    call = contender.bind(case, send, recv)
    return None if call is None else _Lane(contender, in_place, send, recv, call)


# --- correctness --------------------------------------------------------------------------------
def _check(case: BenchCase, lanes: Sequence[_Lane]) -> None:
    for lane in lanes:
        if not lane.is_memcpy:
            check = _wrong_ranks if case.collective == "barrier" else _wrong_elements
            rc.barrier()
            lane.wrong += sum(rc.allgather_object(check(case, lane)))


def _wrong_elements(case: BenchCase, lane: _Lane) -> int:
    lane.recv.view(np.uint8).fill(_POISON)
    exact_inputs.fill(lane.send, case, rc.rank())
    right = exact_inputs.expected(case, rc.rank())
    wrong = exact_inputs.count_wrong(lane.call(), right)
    if not lane.in_place:
        untouched = np.empty_like(lane.send)
        exact_inputs.fill(untouched, case, rc.rank())
        wrong += exact_inputs.count_wrong(lane.send, untouched)
    return wrong


def _wrong_ranks(case: BenchCase, lane: _Lane) -> int:
    """Return 1 if this rank left a barrier before the last rank entered it; 0 on several hosts."""
    if rc.rank() == case.size - 1:
        time.sleep(_LATE_S)  # so that the others have to wait
    entered = time.monotonic()
    lane.call()
    left = time.monotonic()
    return left < max(rc.allgather_object(entered)) and rc.local_size() == case.size


# --- time ---------------------------------------------------------------------------------------
def take_turns(
    calls: Sequence[Callable[[], object]], seconds: float, batches: int | None = None
) -> list[Array]:
    """Return an array of seconds for each of `calls`, shape (ranks, batches, calls). Collective."""
    with quiet():
        call_s = [max(rc.allgather_object(_pilot_s(call))) for call in calls]
        counts = [min(max(math.ceil(_BATCH_S / s), 1), _MOST_CALLS) for s in call_s]
        round_s = sum(s * (n + 1) for s, n in zip(call_s, counts, strict=True))
        affordable = int(seconds / max(round_s, 1e-9))
        batches = batches or min(max(affordable, _FEWEST_BATCHES), _MOST_BATCHES)
        stamps_s: list[list[list[float]]] = [[] for _ in calls]
        for number in range(batches):
            # The order alternates: else each engine would always follow the same other engine.
            order = range(len(calls))
            for each in order if number % 2 == 0 else reversed(order):
                rc.barrier()
                stamps_s[each].append(_batch(calls[each], counts[each]))
    return [np.array(rc.allgather_object(np.diff(each, axis=1))) for each in stamps_s]


def best_gbps(nbytes: int, times_s: Sequence[Array]) -> float:
    """Return the GB/s of the fastest batch of several calls that move `nbytes` each.

    times_s: as take_turns() returns them. The slowest rank of a batch counts, by its mean call.
    """
    return nbytes / min(float(t.mean(axis=2).max(axis=0).min()) for t in times_s) / 1e9


def _pilot_s(call: Callable[[], object]) -> float:
    """Return about how long a call takes, after some slower first calls."""
    rc.barrier()
    _batch(call, 2)
    stamps = _batch(call, 3)
    return max((stamps[-1] - stamps[0]) / 3, 1e-9)


def _batch(call: Callable[[], object], calls: int) -> list[float]:
    clock = time.perf_counter
    call()
    stamps = [clock()]
    for _ in range(calls):
        call()
        stamps.append(clock())
    return stamps


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Disable Python's garbage collector in a block."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _row(case: BenchCase, lane: _Lane, times_s: Array | None) -> BenchRow:
    what = (case.collective, case.op, case.dtype.name, case.nbytes, case.count)
    row = BenchRow(*what, lane.contender.engine, lane.contender.buffers, lane.in_place, lane.wrong)
    if times_s is None:
        return row
    batches_us, calls_us = (1e6 * t.max(axis=0) for t in (times_s.mean(axis=2), times_s))
    row.time_us = float(np.median(batches_us))
    row.call_p50_us = float(np.median(calls_us))
    row.p99_us = float(np.percentile(calls_us, 99, method="inverted_cdf"))
    row.calls = calls_us.size
    row.algbw_gbps = case.nbytes / row.time_us / 1e3
    factor = 1.0 if lane.is_memcpy else bus_factor(case.collective, case.size)
    row.busbw_gbps = row.algbw_gbps * factor
    return row
