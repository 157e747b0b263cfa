"""Chooses the algorithm of a collective. Pure: every rank makes the same choice.

The user's choice comes first, then the measurements on this topology (measured_times.py), then the
estimate of a model. The model counts rounds, messages, and bytes over the busiest wire and
through the busiest memory.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable
from math import ceil
from typing import Final, Literal, NamedTuple

from ringcomm.arrays.dtypes import DTYPES, DType
from ringcomm.collectives.measured_times import TimeTable
from ringcomm.collectives.message_patterns import WIRE_SEGMENT_NBYTES, circulant_hops, segment_count
from ringcomm.collectives.operators import SUM, Op
from ringcomm.collectives.ranks_by_host import describe, host_order, hosts


class Case(NamedTuple):
    """The properties of a collective call that the choice depends on."""

    collective: str  # "allreduce", "reduce_scatter" or "allgather"
    nbytes: int  # of the whole buffer
    dtype: DType
    nodes: tuple[int, ...]  # for each rank of the group, a number that identifies its host
    is_deterministic: bool = False  # elements are reduced in rank order
    shares_memory: bool = False  # all ranks of the group map each other's memory
    op: Op = SUM
    is_short: bool = False  # it fits in the messages by which the ranks agree


class Choice(NamedTuple):
    """An algorithm, and the reason for it.

    `why` is "forced" (by the user), "measured" or "estimated" (as the fastest), "only" (no other
    fits), "memory" (the ranks share memory, which is far faster than messages), or "short" (see
    Case; the algorithm is then "dissemination", which only such calls can use).
    """

    algorithm: str
    why: Literal["forced", "measured", "estimated", "only", "memory", "short"]
    seconds: dict[str, float]  # of each algorithm that fits, the fastest first
    unfit: dict[str, str]  # algorithm that does not fit -> why
    overruled: str = ""  # the algorithm that the user forced, if it does not fit
    is_measured: bool = False  # `seconds` are measured, not estimated


@functools.lru_cache(maxsize=4096)
def choose(case: Case, forced: str | None = None, table: TimeTable | None = None) -> Choice:
    """Return the algorithm for `case`, which must be the same on all ranks of the group.

    `forced` is the user's choice for this collective. `table` is used if it is for this layout.
    """
    reasons = {name: _unfit(name, case) for name in _EFFORTS}
    fit = [name for name, reason in reasons.items() if not reason]
    measured = {}
    if table is not None and table.layout == describe(case.nodes):
        rows = table.at(case.collective, case.nbytes).items()  # of float32
        measured = {name: s * _widening(name, case) for name, s in rows if name in fit}
    times = measured or {name: estimate(name, case) for name in fit}
    seconds = dict(sorted(times.items(), key=lambda item: item[1]))
    unfit = {name: reason for name, reason in reasons.items() if reason}
    if forced in fit:
        return Choice(forced, "forced", seconds, unfit, is_measured=bool(measured))
    overruled = forced or ""
    if case.shares_memory:
        return Choice("node", "memory", seconds, unfit, overruled, bool(measured))
    if case.is_short and not forced and len(case.nodes) > 1:
        return Choice("dissemination", "short", seconds, unfit, overruled, bool(measured))
    if len(fit) == 1:
        return Choice(fit[0], "only", seconds, unfit, overruled, bool(measured))
    how: Literal["measured", "estimated"] = "measured" if measured else "estimated"
    return Choice(next(iter(seconds)), how, seconds, unfit, overruled, bool(measured))


def estimate(algorithm: str, case: Case) -> float:
    """Return the seconds that an algorithm takes by the model; the algorithm must fit."""
    n_phases = 2 if case.collective == "allreduce" else 1
    effort = _EFFORTS[algorithm](case.nodes, case.nbytes)
    effort = effort._replace(wire=effort.wire * _widening(algorithm, case))
    is_reduced = case.collective != "allgather"
    reducing_s = is_reduced * effort.reduced * case.nbytes / REDUCE_BPS
    copying_s = 0.0
    if algorithm == "hierarchical" and case.collective == "reduce_scatter":
        # Python copies the chunks in another order.
        copying_s = PYTHON_S + len(case.nodes) * COPY_S + case.nbytes / MEMORY_BPS
    return n_phases * _sending_s(effort, case) + reducing_s + copying_s


@functools.lru_cache(maxsize=1024)
def across(nbytes: int, n_hosts: int) -> str:
    """Return the algorithm between the hosts of a hierarchical allreduce of `nbytes`.

    All columns together send the whole buffer over the wires, so `nbytes` is the buffer's size.
    """
    case = Case("allreduce", nbytes, DTYPES["float32"], tuple(range(n_hosts)))
    return min(("direct", "segmented"), key=lambda name: estimate(name, case))


# Constants for networks that nobody has measured: MPI within a host, 10 Gbit/s between hosts.
NODE_ROUND_S, WIRE_ROUND_S, MESSAGE_S = 5e-6, 30e-6, 2e-6
MEMORY_BPS, WIRE_BPS, REDUCE_BPS = 3e9, 1.2e9, 4e9
WHOLE = 1.5  # slowdown of long messages, which wait for a handshake (measured: 1.5 to 2.2)
PYTHON_S, COPY_S = 50e-6, 2e-6  # of an algorithm, and of a copy, that C++ does not carry out
CROWD = 0.01  # slowdown for each further rank that sends to the same rank (a guess)


class Effort(NamedTuple):
    """Cost of one phase, a reduce-scatter or an allgather; bytes as fractions of the buffer."""

    rounds: float  # one after the other
    messages: float  # number that a rank sends and receives
    wire: float  # bytes that leave the busiest host
    memory: float  # bytes that move within the busiest host
    reduced: float  # bytes that a rank reduces while its wire is idle, in a reduce-scatter


def _sending_s(effort: Effort, case: Case) -> float:
    round_s = WIRE_ROUND_S if len(set(case.nodes)) > 1 else NODE_ROUND_S
    bytes_s = case.nbytes * (effort.wire / WIRE_BPS + effort.memory / MEMORY_BPS)
    return effort.rounds * round_s + effort.messages * MESSAGE_S + bytes_s


def _ring(nodes: tuple[int, ...], nbytes: int) -> Effort:
    size = len(nodes)
    wire, memory = _once_round(nodes)
    wire *= _handshakes(nbytes / size)
    return Effort(size - 1, 2 * (size - 1), wire, memory, (size - 1) / size)


def _segmented(nodes: tuple[int, ...], nbytes: int) -> Effort:
    size = len(nodes)
    n_segments = segment_count(ceil(nbytes / size), nodes)
    ordered = tuple(nodes[rank] for rank in host_order(nodes))
    # Within a host, reducing overlaps with nothing: the same cores move the bytes.
    share = n_segments if len(set(nodes)) > 1 else 1
    messages = 2 * (size - 1) * n_segments
    return Effort(size - 1, messages, *_once_round(ordered), (size - 1) / size / share)


def _direct(nodes: tuple[int, ...], nbytes: int) -> Effort:
    size = len(nodes)
    n_segments = segment_count(ceil(nbytes / size), nodes)
    share = n_segments if len(set(nodes)) > 1 else 1
    locals_ = [len(host) for host in hosts(nodes)]
    return Effort(
        rounds=min(size - 1, 1),
        messages=2 * (size - 1) * n_segments,
        wire=max(n * (size - n) for n in locals_) / size * (1 + CROWD * (size - 2)),
        memory=max(n * (n - 1) for n in locals_) / size,
        reduced=1 / share,  # the sum is made in scratch memory, then copied
    )


def _circulant(nodes: tuple[int, ...], nbytes: int) -> Effort:
    size = len(nodes)
    hops = circulant_hops(size)
    wire, memory = _circulant_bytes(nodes)
    wire *= _handshakes(nbytes / 4)  # the two longest messages have most of the bytes
    # On average, every second message has two pieces.
    return Effort(len(hops), 3 * len(hops), wire, memory, (size - 1) / size)


def _hierarchical(nodes: tuple[int, ...], nbytes: int) -> Effort:
    n_ranks = [len(host) for host in hosts(nodes)]
    n_hosts, most, least = len(n_ranks), max(n_ranks), min(n_ranks)
    between = _EFFORTS[across(nbytes, n_hosts)](tuple(range(n_hosts)), nbytes)
    within = Effort(1, 2 * (most - 1), 0, most - 1, (most - 1) / least)
    return Effort(
        between.rounds + within.rounds * NODE_ROUND_S / WIRE_ROUND_S,
        between.messages + within.messages,
        between.wire,
        within.memory,
        between.reduced / least + within.reduced,
    )


def _widening(algorithm: str, case: Case) -> float:
    """Return by what factor more bytes are sent than of other dtypes of this many bytes.

    The sums of hosts are float32 in the first of two phases, which a reduce-scatter consists of.
    """
    if algorithm != "hierarchical" or not case.dtype.is_16bit_float:
        return 1.0
    return 1.5 if case.collective == "allreduce" else 2.0


def _node(nodes: tuple[int, ...], nbytes: int) -> Effort:
    del nbytes  # each phase moves the buffer through memory once, and all ranks share that work
    return Effort(0.2, 0, 0, 1 / len(nodes), 0)


_EFFORTS: Final[dict[str, Callable[[tuple[int, ...], int], Effort]]] = {
    "node": _node,
    "ring": _ring,
    "segmented": _segmented,
    "direct": _direct,
    "circulant": _circulant,
    "hierarchical": _hierarchical,
}


def _handshakes(nbytes: float) -> float:
    """Return the slowdown of messages of `nbytes`, compared with segments."""
    return WHOLE if nbytes > WIRE_SEGMENT_NBYTES else 1.0


def _once_round(nodes: tuple[int, ...]) -> tuple[float, float]:
    share = (len(nodes) - 1) / len(nodes)
    return _busiest(nodes, [(rank, (rank + 1) % len(nodes), share) for rank in range(len(nodes))])


@functools.lru_cache(maxsize=64)
def _circulant_bytes(nodes: tuple[int, ...]) -> tuple[float, float]:
    size = len(nodes)
    return _busiest(
        nodes,
        [
            (rank, (rank + hop.distance) % size, hop.n_chunks / size)
            for hop in circulant_hops(size)
            for rank in range(size)
        ],
    )


def _busiest(
    nodes: tuple[int, ...], messages: Iterable[tuple[int, int, float]]
) -> tuple[float, float]:
    """Return the largest share that leaves a host, and the largest that moves within a host.

    `messages` are (source, dest, share of the buffer).
    """
    out, inside = defaultdict[int, float](float), defaultdict[int, float](float)
    for source, dest, share in messages:
        if source != dest:
            (inside if nodes[source] == nodes[dest] else out)[nodes[source]] += share
    return max(out.values(), default=0.0), max(inside.values(), default=0.0)


def _unfit(algorithm: str, case: Case) -> str:
    """Return why `algorithm` does not fit the case, "" if it does."""
    adds_on_the_way = case.collective != "allgather" and algorithm not in ("node", "direct")
    is_hierarchical = algorithm == "hierarchical"
    is_widened = is_hierarchical and case.dtype.is_16bit_float
    n_ranks = [len(host) for host in hosts(case.nodes)]
    harm = f"round {case.dtype}" if case.dtype.is_16bit_float else f"divide {case.dtype}"
    reasons = {
        "not all ranks share one node's memory": algorithm == "node" and not case.shares_memory,
        f"it would {harm} at every rank, not once at the end": (
            adds_on_the_way and case.op.is_at_once(case.dtype) and not is_widened
        ),
        "it does not reduce in rank order": adds_on_the_way and case.is_deterministic,
        "it is for reductions alone": is_hierarchical and case.collective == "allgather",
        "all ranks are on one host": is_hierarchical and len(n_ranks) == 1,
        "no host has more than one rank": is_hierarchical and max(n_ranks) == 1,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")
