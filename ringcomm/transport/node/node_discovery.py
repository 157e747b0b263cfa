"""The ranks of a host find out which of them form a node, and begin to watch each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from ringcomm.transport.node.divide_host import node_of, separations
from ringcomm.transport.node.neighbours import Neighbour, Neighbours, Offer
from ringcomm.transport.node.pass_descriptors import Inbox, give


class Comm(Protocol):
    """The part of an mpi4py communicator that this module uses."""

    rank: int
    size: int

    def allgather(self, sendobj: Any) -> list[Any]: ...

    def Barrier(self) -> None: ...


@dataclass(frozen=True)
class Candidate:
    """The data that a rank of this host sends to the others."""

    rank: int  # its rank in the job
    offer: Offer  # descriptors for the others
    missing: dict[int, str] = field(default_factory=dict)  # unreachable rank -> why
    address: str = ""  # address of its Inbox; "" if it has none
    unsent: dict[int, str] = field(default_factory=dict)  # rank that did not get `offer` -> why


def meet(
    comm: Comm, rank: int, offer: Offer, neighbours: Neighbours
) -> tuple[list[int], list[str]]:
    """Find the ranks of this node, and watch them; collective over `comm`.

    MPI recognises a host by its name. The ranks of such a host may be in containers or sandboxes,
    and unable to open each other's descriptors. Then ranks hand descriptors over; ranks for which
    that fails, too, form nodes of their own.

    Args:
        comm: the ranks that MPI reports on this host.
        rank: this rank, in the job.
        offer: this rank's descriptors, for the others to open.
        neighbours: the object to which the other ranks of this node are added.

    Returns:
        The ranks of this node, this one included; and texts, on the first rank of the host only,
        that say for each further node why it is separate.

    Cost: two allgathers if every rank can open the descriptors of the others.
    """
    everyone = comm.allgather(Candidate(rank, offer))
    missing = _reach(everyone, rank, neighbours)
    inbox = _inbox_or_none(missing) if missing else None
    mine = Candidate(rank, offer, missing, "" if inbox is None else inbox.address)
    # Once this call returns, all ranks have opened the descriptors, so ranks may close them.
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
    """Watch the ranks whose descriptors this process can open; return the others, and why."""
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
    """Send descriptors to the ranks that lack them; take the ones that this rank lacks.

    In every round each rank sends to at most one other, so no inbox is ever full.
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
        comm.Barrier()  # now the descriptors are in the inboxes
        if source.rank in missing and inbox is not None:
            problem = _take(source, inbox, neighbours)
            if problem is None:
                del missing[source.rank]
            else:
                missing[source.rank] += f"; {problem}"
    return Candidate(mine.rank, mine.offer, missing, mine.address, unsent)


def _take(source: Candidate, inbox: Inbox, neighbours: Neighbours) -> str | None:
    """Take a rank's descriptors from the inbox, and watch that rank; return the problem, if any."""
    try:
        seen_pid, descriptors = inbox.take(source.offer.nonce)
        neighbours.add(source.rank, Neighbour.handed(source.offer, seen_pid, descriptors))
    except BlockingIOError:
        return "no descriptors were handed over"
    except (OSError, RuntimeError) as error:
        return f"the descriptors that were handed over are of no use: {error}"
    return None


def _reasons(everyone: list[Candidate]) -> dict[int, dict[int, str]]:
    """Return, for each rank, the ranks that it could not reach -> the reasons of both sides."""
    unsent = {(each.rank, to): why for each in everyone for to, why in each.unsent.items()}
    return {
        each.rank: {
            other: "; ".join(filter(None, (why, unsent.get((other, each.rank)))))
            for other, why in each.missing.items()
        }
        for each in everyone
    }
