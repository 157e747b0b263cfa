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
    return next(node for node in nodes_of(opened) if rank in node)


def nodes_of(opened: Mapping[int, Collection[int]]) -> list[list[int]]:
    """Return all nodes, see node_of()."""
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
    """Return a text for each node beyond the first: who could not reach whom, and what it costs.

    Args:
        opened: see node_of().
        why: of each rank: whom it could not reach, and the reason.
    """
    first, *others = nodes_of(opened)
    return [_separation(first, node, why) for node in others]


def _separation(first: list[int], node: list[int], why: Mapping[int, Mapping[int, str]]) -> str:
    pairs = [(a, b) for a in first for b in node] + [(b, a) for a in first for b in node]
    who, whom, reason = next((a, b, why[a][b]) for a, b in pairs if b in why[a])
    ranks = f"rank{'s' * (len(node) > 1)} {', '.join(map(str, node))}"
    return (
        f"rank {who} cannot share memory with rank {whom} ({reason}). So {ranks} of this host and "
        "the others exchange messages, which are several times slower, and learn of each other's "
        "deaths from MPI or at RINGCOMM_TIMEOUT_S alone. Ranks in containers need one pid and one "
        "network namespace (--pid=host --network=host)"
    )
