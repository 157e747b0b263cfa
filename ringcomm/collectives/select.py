"""Choice of the algorithm of a collective. Pure: every rank comes to the same choice.

What the user forces comes first, then what was measured on this topology (table.py), then the
estimate of a model: rounds, messages, and bytes over the busiest wire and through the busiest
memory.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import ceil
from typing import Final, Literal, NamedTuple

from ringcomm.arrays.dtypes import DTYPES, DType
from ringcomm.collectives.layout import describe, host_order, hosts
from ringcomm.collectives.schedule import WIRE_SEGMENT_NBYTES, circulant_hops, segment_count
from ringcomm.collectives.table import Table


@dataclass(frozen=True)
class Case:
    """A collective to be carried out, as far as the choice depends on it."""

    collective: str  # "allreduce", "reduce_scatter" or "allgather"
    nbytes: int  # of the whole buffer
    dtype: DType
    nodes: tuple[int, ...]  # of each rank of the group: a number that tells its host from others
    is_deterministic: bool = False  # elements are reduced in rank order
    shares_memory: bool = False  # all ranks of the group map each other's memory


@dataclass(frozen=True)
class Choice:
    """An algorithm, and why: the user forced it, it is the fastest, or nothing else fits.

    "memory": the ranks share memory, which nothing else comes near.
    """

    algorithm: str
    why: Literal["forced", "measured", "estimated", "only", "memory"]
    seconds: dict[str, float]  # of each algorithm that fits, the fastest first
    unfit: dict[str, str]  # why the others do not fit
    overruled: str = ""  # the algorithm that the user wanted although it does not fit
    is_measured: bool = False  # `seconds` are not an estimate


@functools.lru_cache(maxsize=4096)
def choose(case: Case, forced: str | None = None, table: Table | None = None) -> Choice:
    """Return the algorithm for `case`.

    Args:
        case: the same on all ranks of the group.
        forced: what the user wants for this collective.
        table: what was measured; it counts for groups of its own layout only.
    """
    reasons = {name: _unfit(name, case) for name in _EFFORTS}
    fit = [name for name, reason in reasons.items() if not reason]
    measured = {}
    if table is not None and table.layout == describe(case.nodes):
        measured = {n: s for n, s in table.at(case.collective, case.nbytes).items() if n in fit}
    times = measured or {name: estimate(name, case) for name in fit}
    seconds = dict(sorted(times.items(), key=lambda item: item[1]))
    unfit = {name: reason for name, reason in reasons.items() if reason}
    if forced in fit:
        return Choice(forced, "forced", seconds, unfit, is_measured=bool(measured))
    overruled = forced or ""
    if case.shares_memory:
        return Choice("node", "memory", seconds, unfit, overruled, bool(measured))
    if len(fit) == 1:
        return Choice(fit[0], "only", seconds, unfit, overruled, bool(measured))
    how: Literal["measured", "estimated"] = "measured" if measured else "estimated"
    return Choice(next(iter(seconds)), how, seconds, unfit, overruled, bool(measured))


def estimate(algorithm: str, case: Case) -> float:
    """Return the seconds that the model gives an algorithm that fits."""
    n_phases = 2 if case.collective == "allreduce" else 1
    effort = _EFFORTS[algorithm](case.nodes, case.nbytes)
    is_reduced = case.collective != "allgather"
    return n_phases * _moving(effort, case) + is_reduced * effort.reduced * case.nbytes / REDUCE_BPS


@functools.lru_cache(maxsize=1024)
def across(nbytes: int, n_hosts: int) -> str:
    """Return the algorithm between the hosts of a hierarchical allreduce of `nbytes`.

    The columns share the wires, so what counts is the size of the whole.
    """
    case = Case("allreduce", nbytes, DTYPES["float32"], tuple(range(n_hosts)))
    return min(("direct", "segmented"), key=lambda name: estimate(name, case))


# A prior for what nobody has measured: MPI within a host, and 10 Gbit/s between hosts.
NODE_ROUND_S, WIRE_ROUND_S, MESSAGE_S = 5e-6, 30e-6, 2e-6
MEMORY_BPS, WIRE_BPS, REDUCE_BPS = 3e9, 1.2e9, 4e9
WHOLE = 1.5  # the wire rests while a long message waits for its handshake (measured: 1.5 to 2.2)
CROWD = 0.01  # each further rank that sends to one at a time slows its wire (a guess)


class Effort(NamedTuple):
    """Cost of one phase, a reduce-scatter or an allgather; bytes as fractions of the buffer."""

    rounds: float  # that wait for each other
    messages: float  # that a rank sends and receives
    wire: float  # bytes that leave the busiest host
    memory: float  # bytes that move within the busiest host
    reduced: float  # bytes that a rank reduces while its wire rests; in a reduce-scatter only


def _moving(effort: Effort, case: Case) -> float:
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
    # Within a host nothing rests while a segment is reduced: the processors move the bytes, too.
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
        reduced=1 / share,  # the sum is made in scratch, and copied
    )


def _circulant(nodes: tuple[int, ...], nbytes: int) -> Effort:
    size = len(nodes)
    hops = circulant_hops(size)
    wire, memory = _circulant_bytes(nodes)
    wire *= _handshakes(nbytes / 4)  # most of it goes in the two longest messages
    # Every second message is in two pieces, on average.
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


def _node(nodes: tuple[int, ...], nbytes: int) -> Effort:
    del nbytes  # two ways through memory, one in each phase, shared by all ranks
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
    """Return by how much messages of `nbytes` take longer than their segments would."""
    return WHOLE if nbytes > WIRE_SEGMENT_NBYTES else 1.0


def _once_round(nodes: tuple[int, ...]) -> tuple[float, float]:
    """Return (wire, memory) of a ring over `nodes`."""
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
    """Return the most that leaves a host, and the most that moves within one."""
    out, inside = defaultdict[int, float](float), defaultdict[int, float](float)
    for source, dest, share in messages:
        if source != dest:
            (inside if nodes[source] == nodes[dest] else out)[nodes[source]] += share
    return max(out.values(), default=0.0), max(inside.values(), default=0.0)


def _unfit(algorithm: str, case: Case) -> str:
    """Return why `algorithm` cannot do it, "" if it can."""
    if algorithm == "node":
        return "" if case.shares_memory else "not all ranks share one node's memory"
    if case.collective != "allgather" and algorithm != "direct":
        if case.dtype.is_16bit_float:
            return (
                f"it would round {case.dtype} at every stop, where all ranks' sum is rounded once"
            )
        if case.is_deterministic:
            return "it does not reduce in rank order"
    if algorithm == "hierarchical":
        return _unfit_for_two_dimensions(case)
    return ""


def _unfit_for_two_dimensions(case: Case) -> str:
    if case.collective != "allreduce":
        return "it is for allreduce alone"
    n_ranks = [len(host) for host in hosts(case.nodes)]
    if len(n_ranks) == 1:
        return "all ranks are on one host"
    return "no host has more than one rank" if max(n_ranks) == 1 else ""
