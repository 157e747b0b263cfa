"""A node is those ranks each of which can open the status pages of all others."""

import itertools

from ringcomm.transport.node.divide_host import node_of


def nodes_of(opened):
    return [node_of(rank, opened) for rank in opened]


def test_ranks_that_see_each_other_are_one_node():
    assert node_of(5, {r: {2, 5, 7} - {r} for r in (7, 2, 5)}) == [2, 5, 7]


def test_a_rank_that_nobody_sees_is_a_node_of_its_own():
    opened = {0: set(), 1: {2}, 2: {1}}
    assert nodes_of(opened) == [[0], [1, 2], [1, 2]]


def test_to_be_seen_without_seeing_is_not_enough():
    opened = {0: {1, 2}, 1: {0, 2}, 2: {0}}  # 2 may not look into 1
    assert nodes_of(opened) == [[0, 1], [0, 1], [2]]


def test_two_containers_are_two_nodes():
    opened = {0: {2}, 1: {3}, 2: {0}, 3: {1}}
    assert nodes_of(opened) == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_whoever_sees_whom_nodes_are_disjoint_and_all_in_one_see_each_other():
    for bits in range(0, 1 << 12, 7):
        pairs = itertools.permutations(range(4), 2)
        require_nodes({pair for i, pair in enumerate(pairs) if bits >> i & 1})


def require_nodes(seen):
    """Fail if the nodes are wrong where only these pairs of ranks see each other."""
    opened = {r: {to for frm, to in seen if frm == r} for r in range(4)}
    for rank, node in enumerate(nodes_of(opened)):
        assert rank in node, seen
        assert all(node_of(other, opened) == node for other in node), seen
        assert all(pair in seen for pair in itertools.permutations(node, 2)), seen
