"""How the ranks of one host come to watch each other, and which of them make a node."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from ringcomm.transport.node.handover import Inbox, give
from ringcomm.transport.node.layout import node_of, separations
from ringcomm.transport.node.neighbours import Neighbour, Neighbours, Offer


class Comm(Protocol):
    """The part of an mpi4py communicator that is used here."""

    rank: int
    size: int

    def allgather(self, sendobj: Any) -> list[Any]:
        """Return what every rank passed."""
        ...

    def Barrier(self) -> None:
        """Return once all ranks have come."""
        ...


@dataclass(frozen=True)
class Candidate:
    """A rank of this host, by what it says of itself and of those that it has met."""

    rank: int  # in the job
    offer: Offer  # descriptors for the others
    missing: dict[int, str] = field(default_factory=dict)  # ranks out of its reach: why
    address: str = ""  # of its inbox; "": it needs none, or has none
    unsent: dict[int, str] = field(default_factory=dict)  # ranks that did not get its offer: why


def meet(
    comm: Comm, rank: int, offer: Offer, neighbours: Neighbours
) -> tuple[list[int], list[str]]:
    """Watch the ranks of this node; return them, with this one, and what keeps others apart.

    What MPI takes for one host, by its name, may be containers or sandboxes that may not open each
    other's descriptors. Then these are handed over; where that fails too, they are nodes of their
    own. Collective over `comm`: two allgathers where all goes well.

    Args:
        comm: the ranks that MPI says are on this host.
        rank: this rank, in the job.
        offer: what the others may open.
        neighbours: takes those that are met.

    Returns:
        The ranks of this node; and, on the first rank of the host, a text per node that is another.
    """
    everyone = comm.allgather(Candidate(rank, offer))
    missing = _reach(everyone, rank, neighbours)
    inbox = _inbox_or_none(missing) if missing else None
    mine = Candidate(rank, offer, missing, "" if inbox is None else inbox.address)
    # Nobody may close what he offers before all have opened it: this comes after, on every rank.
    everyone = comm.allgather(mine)
    if any(each.missing for each in everyone):
        everyone = comm.allgather(_hand_over(comm, everyone, inbox, neighbours))
    if inbox is not None:
        inbox.close()
    others = {each.rank for each in everyone}
    opened = {each.rank: others - {each.rank} - set(each.missing) for each in everyone}
    node = node_of(rank, opened)
    for other in set(neighbours.ranks).difference(node):
        neighbours.drop(other)
    return node, separations(opened, _reasons(everyone)) if comm.rank == 0 else []


def _reach(everyone: list[Candidate], rank: int, neighbours: Neighbours) -> dict[int, str]:
    """Meet those that this process may look into; return the others, and why."""
    missing = {}
    for each in everyone:
        if each.rank == rank:
            continue
        try:
            neighbours.add(each.rank, Neighbour.reached(each.offer))
        except (OSError, RuntimeError) as error:
            missing[each.rank] = str(error)
    return missing


def _inbox_or_none(missing: dict[int, str]) -> Inbox | None:
    try:
        return Inbox()
    except OSError as error:
        for rank, why in missing.items():
            missing[rank] = f"{why}; no socket to take descriptors: {error}"
        return None


def _hand_over(
    comm: Comm, everyone: list[Candidate], inbox: Inbox | None, neighbours: Neighbours
) -> Candidate:
    """Give the descriptors of this rank to those who miss it, and take those that it misses.

    In every round each rank gives to one, so that no inbox is ever full: nothing waits for room.
    """
    here = comm.rank
    mine = everyone[here]
    missing, unsent = dict(mine.missing), {}
    for distance in range(1, comm.size):
        to, source = (everyone[(here + step) % comm.size] for step in (distance, -distance))
        if mine.rank in to.missing and to.address:
            try:
                give(to.address, mine.offer.nonce, mine.offer.descriptors)
            except OSError as error:
                unsent[to.rank] = f"they could not be handed over: {error}"
        comm.Barrier()  # what was given is in the inbox now
        if source.rank in missing and inbox is not None:
            problem = _take(source, inbox, neighbours)
            if problem is None:
                del missing[source.rank]
            else:
                missing[source.rank] += f"; {problem}"
    return Candidate(mine.rank, mine.offer, missing, mine.address, unsent)


def _take(source: Candidate, inbox: Inbox, neighbours: Neighbours) -> str | None:
    """Meet a rank by what it has given; return why not."""
    try:
        seen_pid, descriptors = inbox.take(source.offer.nonce)
        neighbours.add(source.rank, Neighbour.handed(source.offer, seen_pid, descriptors))
    except BlockingIOError:
        return "nothing was handed over"
    except (OSError, RuntimeError) as error:
        return f"what was handed over is of no use: {error}"
    return None


def _reasons(everyone: list[Candidate]) -> dict[int, dict[int, str]]:
    """Return of each rank which it misses, and why, as both sides know it."""
    unsent = {(each.rank, to): why for each in everyone for to, why in each.unsent.items()}
    return {
        each.rank: {
            other: "; ".join(filter(None, (why, unsent.get((other, each.rank)))))
            for other, why in each.missing.items()
        }
        for each in everyone
    }
