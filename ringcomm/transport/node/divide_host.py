"""Divides the ranks of a host into nodes, by the status pages that they can open. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import product


def node_of(rank: int, opened: Mapping[int, Collection[int]]) -> list[int]:
    """Return the ranks of this rank's node in ascending order, this rank included.

    `opened[r]` holds the ranks whose pages rank r could open, for each rank r of the host.
    """
    return next(node for node in _nodes_of(opened) if rank in node)


def _nodes_of(opened: Mapping[int, Collection[int]]) -> list[list[int]]:
    """Return all nodes. In ascending order, each rank joins the first node that it can join.

    The members of a node can open each other's pages. The same `opened` gives the same nodes.
    """
    nodes: list[list[int]] = []
    for newcomer in sorted(opened):
        for node in nodes:
            if all(newcomer in opened[each] and each in opened[newcomer] for each in node):
                node.append(newcomer)
                break
        else:
            nodes.append([newcomer])
    return nodes


def separations(
    opened: Mapping[int, Collection[int]], why: Mapping[int, Mapping[int, str]]
) -> list[str]:
    """Return, for each node but the first, a text that says why it is separate, and the cost.

    `why[r]` has the reason for each rank whose page rank r could not open.
    """
    first, *others = _nodes_of(opened)
    texts = []
    for node in others:
        pairs = [*product(first, node), *product(node, first)]
        who, whom, reason = next((a, b, why[a][b]) for a, b in pairs if b in why[a])
        ranks = f"rank{'s' * (len(node) > 1)} {', '.join(map(str, node))}"
        texts.append(
            f"rank {who} cannot share memory with rank {whom} ({reason}). So {ranks} of this host "
            "and the others exchange messages, which are several times slower, and learn of each "
            "other's deaths from MPI or at RINGCOMM_TIMEOUT_S alone. Ranks in containers need one "
            "pid and one network namespace (--pid=host --network=host)"
        )
    return texts
