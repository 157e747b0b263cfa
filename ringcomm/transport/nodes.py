"""Which ranks make a node: decided from who can open whose status page. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping


def node_of(rank: int, opened: Mapping[int, Collection[int]]) -> list[int]:
    """Return the ranks of this rank's node in ascending order, itself among them.

    Every member can open the page of every other. Ranks that were shown the same `opened` come to
    the same nodes: in the order of ranks, each joins the first node that it fits into.

    Args:
        rank: one of the keys.
        opened: of each rank that MPI says may share memory: whose pages it could open.
    """
    nodes: list[list[int]] = []
    for newcomer in sorted(opened):
        for node in nodes:
            if all(newcomer in opened[each] and each in opened[newcomer] for each in node):
                node.append(newcomer)
                break
        else:
            nodes.append([newcomer])
    return next(node for node in nodes if rank in node)
