"""The schedules are pure: play them with sets instead of numbers."""

import math

import pytest

from ringcomm.collectives import message_patterns

SIZES = [1, 2, 3, 4, 7, 8, 16, 33]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [0, 1, 5, 1000])
def test_chunks_tile_the_buffer_and_first_ones_take_the_rest(size, count):
    parts = message_patterns.chunks(count, size)
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(count))
    lengths = [part.stop - part.start for part in parts]
    assert lengths == [count // size + (rank < count % size) for rank in range(size)]


@pytest.mark.parametrize("size", SIZES)
def test_after_reduce_scatter_rank_r_owns_chunk_r(size):
    held = [[{rank} for _ in range(size)] for rank in range(size)]  # held[rank][chunk]: whose parts
    steps = [list(message_patterns.reduce_scatter_steps(rank, size)) for rank in range(size)]
    for now in zip(*steps, strict=True):
        sent = [set(held[rank][now[rank].send]) for rank in range(size)]
        for rank in range(size):
            left = (rank - 1) % size
            assert now[left].send == now[rank].receive
            assert held[rank][now[rank].receive].isdisjoint(sent[left])  # nothing is added twice
            held[rank][now[rank].receive] |= sent[left]
    assert all(held[rank][rank] == set(range(size)) for rank in range(size))


@pytest.mark.parametrize("size", SIZES)
def test_allgather_brings_every_chunk_to_every_rank(size):
    held = [{rank} for rank in range(size)]
    steps = [list(message_patterns.allgather_steps(rank, size)) for rank in range(size)]
    for now in zip(*steps, strict=True):
        for rank in range(size):
            assert now[rank].send in held[rank]
            assert now[(rank - 1) % size].send == now[rank].receive
        for rank in range(size):
            held[rank].add(now[rank].receive)
    assert all(chunks == set(range(size)) for chunks in held)


@pytest.mark.parametrize("size", range(1, 18))
def test_circulant_adds_every_part_once_in_log_rounds_and_least_volume(size):
    held = [[{rank} for _ in range(size)] for rank in range(size)]  # held[rank][chunk]: whose parts
    hops = message_patterns.circulant_hops(size)
    for distance, n_chunks in hops:
        sent = [[set(chunk) for chunk in chunks] for chunks in held]
        for rank in range(size):
            source = (rank - distance) % size
            for chunk in (
                c for run in message_patterns.cyclic_runs(rank, n_chunks, size) for c in run
            ):
                assert held[rank][chunk].isdisjoint(sent[source][chunk])  # nothing is added twice
                held[rank][chunk] |= sent[source][chunk]
    assert all(held[rank][rank] == set(range(size)) for rank in range(size))
    assert len(hops) == (math.ceil(math.log2(size)) if size > 1 else 0)
    assert sum(n_chunks for _, n_chunks in hops) == size - 1


@pytest.mark.parametrize(
    ("first", "n", "expected"),
    [
        (0, 3, [range(3)]),
        (2, 3, [range(2, 5)]),
        (3, 4, [range(3, 5), range(2)]),
        (-1, 1, [range(4, 5)]),
    ],
)
def test_cyclic_runs_break_where_the_numbers_start_again(first, n, expected):
    assert message_patterns.cyclic_runs(first, n, 5) == expected


@pytest.mark.parametrize("size", SIZES)
def test_shifted_pairs_meet_everybody_once_and_nobody_two_at_a_time(size):
    rounds = list(zip(*(message_patterns.shifted_pairs(r, size) for r in range(size)), strict=True))
    for now in rounds:
        assert sorted(dest for dest, _ in now) == list(range(size))
        assert all(now[dest][1] == rank for rank, (dest, _) in enumerate(now))
    assert len(rounds) == size - 1
    assert {dest for now in rounds for dest in [now[0][0]]} == set(range(1, size))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("root", [0, 1, -1])
def test_tree_reaches_everybody_once_in_log_rounds(size, root):
    root %= size
    nodes = [message_patterns.binomial_tree(rank, size, root) for rank in range(size)]
    assert nodes[root][0] is None
    for rank, (parent, children) in enumerate(nodes):
        assert all(nodes[child][0] == rank for child in children)
        assert parent is None or rank in nodes[parent][1]
    reached, rounds = {root: 0}, 0
    frontier = [root]
    while frontier:
        rank = frontier.pop()
        for turn, child in enumerate(nodes[rank][1], start=1):
            assert child not in reached
            reached[child] = reached[rank] + turn
            frontier.append(child)
    rounds = max(reached.values())
    assert sorted(reached) == list(range(size))
    assert rounds == (math.ceil(math.log2(size)) if size > 1 else 0)


@pytest.mark.parametrize("size", SIZES)
def test_dissemination_lets_everybody_hear_of_everybody_in_log_rounds(size):
    heard = [{rank} for rank in range(size)]
    steps = [list(message_patterns.dissemination_steps(rank, size)) for rank in range(size)]
    assert len(steps[0]) == (math.ceil(math.log2(size)) if size > 1 else 0)
    for now in zip(*steps, strict=True):
        assert all(now[dest][1] == rank for rank, (dest, _) in enumerate(now))
        heard = [heard[rank] | heard[now[rank][1]] for rank in range(size)]
    assert all(ranks == set(range(size)) for ranks in heard)


def test_consecutive_lays_parts_end_to_end():
    assert message_patterns.consecutive([2, 0, 3]) == [slice(0, 2), slice(2, 2), slice(2, 5)]


@pytest.mark.parametrize(
    ("nbytes", "nodes", "n"),
    [(0, (0, 1), 1), (60 << 10, (0, 1), 1), ((60 << 10) + 1, (0, 1), 2), (1 << 20, (0, 0), 1)],
)
def test_segments_over_a_wire_stay_below_the_handshake(nbytes, nodes, n):
    assert message_patterns.segment_count(nbytes, nodes) == n
