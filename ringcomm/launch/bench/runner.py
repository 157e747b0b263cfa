"""The measurement: check, then time batches of every engine in turn, then check again.

A batch is one call that is not recorded and then calls back to back, each with its own times. The
first takes what came before it: the skew with which the ranks left the barrier, the caches as the
previous engine left them, threads that sleep. After it a collective keeps its own ranks together.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringcomm.launch.bench import pattern
from ringcomm.launch.bench.bandwidth import COLLECTIVES, bus_factor, wire_bytes
from ringcomm.launch.bench.case import Case
from ringcomm.launch.bench.engines import Call, Engine, Meeting
from ringcomm.launch.bench.report import Row
from ringcomm.launch.bench.statistics import Summary, batches_within, calls_per_batch, summarize

Array = NDArray[Any]

# Bytes of a rank's memory per byte of the largest buffer: private ones for send and receive, a
# registered one, a result, what is expected, and as much again inside of the engines.
MEMORY_FACTOR = 8
_POISON = 0xA5
_LATE_S = 2e-3


@dataclass(frozen=True)
class Contender:
    """An engine and the memory that it works on.

    Attributes:
        engine: who.
        buffers: "registered" or "private".
        send, recv: shape (bytes,), uint8, as large as the largest case. Shared by contenders.
    """

    engine: Engine
    buffers: str
    send: Array
    recv: Array


@dataclass
class _Lane:
    """A contender in one form, ready for one case."""

    contender: Contender
    in_place: bool
    send: Array
    recv: Array
    call: Call
    wrong: int = 0
    calls: int = 0  # per batch
    stamps_s: list[list[float]] = field(default_factory=list)


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        seconds: for all lanes of a size together, about.
        batches: of each lane; None: as many as `seconds` allow.
    """

    seconds: float
    batches: int | None = None


def measure(
    case: Case,
    contenders: Sequence[Contender],
    memcpy: Contender,
    meeting: Meeting,
    effort: Effort,
    *,
    forms: Sequence[bool] = (False, True),
    link_bytes_s: float | None = None,
) -> list[Row]:
    """Return the rows of one case, on rank 0; [] on the others. Collective.

    Args:
        case: what to do.
        contenders: who does it; those that refuse are left out.
        memcpy: the yardstick, on private memory.
        meeting: where the ranks meet.
        effort: how long.
        forms: False: out of place, True: in place, where the collective has that form.
        link_bytes_s: what a host's link carries; None on one host.

    A lane whose result is wrong is not timed.
    """
    lanes = [
        _lane(case, each, in_place)
        for each in contenders
        if each.engine.refuses(case.collective, case.dtype, case.op) is None
        for in_place in forms
        if COLLECTIVES[case.collective].has_in_place or not in_place
    ]
    _check(case, lanes, meeting)
    sound = [lane for lane in lanes if lane.wrong == 0]
    yardstick = [_yardstick_lane(case, memcpy)] if case.nbytes else []
    _clear([*contenders, memcpy])
    _time([*sound, *yardstick], meeting, effort)
    _check(case, sound, meeting)
    rows = [_row(case, lane, meeting, link_bytes_s) for lane in [*lanes, *yardstick]]
    return [row for row in rows if row is not None]


def _lane(case: Case, contender: Contender, in_place: bool) -> _Lane:
    which = COLLECTIVES[case.collective]
    send = _part(contender.send, case, case.part if which.gives_part else case.count)
    n_recv = case.part if which.takes_part else case.count
    recv = send if in_place else _part(contender.recv, case, n_recv)
    call = contender.engine.bind(case.collective, case.op, send, recv)
    return _Lane(contender, in_place, send, recv, call)


def _part(memory: Array, case: Case, count: int) -> Array:
    return memory[: count * case.dtype.itemsize].view(case.dtype)


def _yardstick_lane(case: Case, memcpy: Contender) -> _Lane:
    send, recv = (_part(memory, case, case.count) for memory in (memcpy.send, memcpy.recv))
    call = memcpy.engine.bind(case.collective, case.op, send, recv)
    return _Lane(memcpy, False, send, recv, call)


# --- correctness --------------------------------------------------------------------------------
def _check(case: Case, lanes: Sequence[_Lane], meeting: Meeting) -> None:
    """Add the wrong elements of one call to each lane's; the same number on every rank."""
    for lane in lanes:
        check = _wrong_ranks if case.collective == "barrier" else _wrong_elements
        meeting.barrier()
        lane.wrong += meeting.total(check(case, lane, meeting))


def _wrong_elements(case: Case, lane: _Lane, meeting: Meeting) -> int:
    rank, size = meeting.rank, meeting.size
    lane.recv.view(np.uint8).fill(_POISON)
    pattern.fill(lane.send, case.op, rank, size)
    right = pattern.expected(case, rank)
    result = lane.call()
    wrong = pattern.count_wrong(result, right)
    if not lane.in_place:
        untouched = np.empty_like(lane.send)
        pattern.fill(untouched, case.op, rank, size)
        wrong += pattern.count_wrong(lane.send, untouched)
    return wrong


def _wrong_ranks(case: Case, lane: _Lane, meeting: Meeting) -> int:
    """Return on rank 0 how many ranks left a barrier before the last one had entered it.

    Only on one host, where all read the same clock.
    """
    if meeting.rank == meeting.size - 1:
        time.sleep(_LATE_S)  # the others must be seen to wait
    entered = time.monotonic()
    lane.call()
    times = meeting.gather((entered, time.monotonic()))
    if times is None or len(meeting.leaders) > 1:
        return 0
    last = max(entered for entered, _ in times)
    return sum(left < last for _, left in times)


# --- time ---------------------------------------------------------------------------------------
def _clear(contenders: Sequence[Contender]) -> None:
    """Zero all buffers: sums of them stay finite for any number of calls in place."""
    for each in contenders:
        each.send.fill(0)
        each.recv.fill(0)


def _time(lanes: Sequence[_Lane], meeting: Meeting, effort: Effort) -> None:
    with quiet():
        round_s = 0.0
        for lane in lanes:
            call_s = meeting.highest(_pilot_s(lane, meeting))
            lane.calls = calls_per_batch(call_s)
            round_s += call_s * (lane.calls + 1)
        batches = effort.batches or batches_within(effort.seconds, round_s)
        for number in range(batches):
            # Back and forth: else an engine would always follow the same other one.
            for lane in lanes if number % 2 == 0 else reversed(lanes):
                meeting.barrier()
                lane.stamps_s.append(_batch(lane.call, lane.calls))


def _pilot_s(lane: _Lane, meeting: Meeting) -> float:
    """Return about how long a call takes; the first ones are slower."""
    meeting.barrier()
    _batch(lane.call, 2)
    stamps = _batch(lane.call, 3)
    return (stamps[-1] - stamps[0]) / 3


def _batch(call: Call, calls: int) -> list[float]:
    """Return when the first of `calls` began and when each of them ended."""
    clock = time.perf_counter
    call()
    stamps = [clock()]
    for _ in range(calls):
        call()
        stamps.append(clock())
    return stamps


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep Python's garbage collector out of the calls."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# --- rows ---------------------------------------------------------------------------------------
def _row(case: Case, lane: _Lane, meeting: Meeting, link_bytes_s: float | None) -> Row | None:
    times = meeting.gather(np.diff(np.array(lane.stamps_s), axis=1)) if lane.stamps_s else []
    if times is None or meeting.rank != 0:
        return None
    engine = lane.contender.engine.name
    timed = _timed(case, summarize(np.stack(times)), engine, meeting, link_bytes_s) if times else {}
    return Row(
        collective=case.collective,
        op=case.op,
        dtype=case.dtype.name,
        nbytes=case.nbytes,
        count=case.count,
        engine=engine,
        buffers=lane.contender.buffers,
        in_place=lane.in_place,
        wrong=lane.wrong,
        **timed,
    )


def _timed(
    case: Case, summary: Summary, engine: str, meeting: Meeting, link_bytes_s: float | None
) -> dict[str, Any]:
    hosts = len(meeting.leaders)
    is_memcpy = engine == "memcpy"
    algbw = case.nbytes / summary.time
    on_wire = wire_bytes(case.collective, case.nbytes, hosts=hosts, ranks=meeting.size)
    wire_share = None
    if link_bytes_s is not None and on_wire and not is_memcpy:
        wire_share = on_wire / summary.time / link_bytes_s
    return {
        "time_us": summary.time * 1e6,
        "call_p50_us": summary.call_p50 * 1e6,
        "p99_us": summary.call_p99 * 1e6,
        "calls": summary.calls,
        "algbw_gbps": algbw / 1e9,
        "busbw_gbps": algbw * (1 if is_memcpy else bus_factor(case.collective, meeting.size)) / 1e9,
        "wire_share": wire_share,
    }
