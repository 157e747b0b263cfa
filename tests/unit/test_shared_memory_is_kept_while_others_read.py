"""What the ranks of a node share is neither freed nor overwritten while somebody may read it."""

import numpy as np
import pytest
from harness import run_ranks
from sample_values import total, whole_numbers

import ringcomm as rc

COUNT = 1_000_003
MIB = 1 << 20
MOST_SKEWED = (
    2044  # bytes behind the beginning of a page: what lies there has the lane that ends last
)


@pytest.fixture(autouse=True)
def on_one_node(monkeypatch):
    monkeypatch.setattr("harness.wire", "node")


def everyones(size, turn):
    return np.concatenate([whole_numbers(rank, COUNT, turn=turn) for rank in range(size)])


def slice_of_total(size, turn, rank):
    return np.array_split(total(size, COUNT, turn=turn), size)[rank]


CALLS = {
    "broadcast": lambda x: rc.broadcast(x, 0),
    "allgather": rc.allgather,
    "gather": lambda x: rc.gather(x, 0),
    "reduce": lambda x: rc.reduce(x, root=0),
    "reduce_scatter": rc.reduce_scatter,
    "allreduce": rc.allreduce,
}
EXPECTED = {
    "broadcast": lambda size, turn, rank: whole_numbers(0, COUNT, turn=turn),
    "allgather": lambda size, turn, rank: everyones(size, turn),
    "gather": lambda size, turn, rank: None if rank else everyones(size, turn),
    "reduce": lambda size, turn, rank: None if rank else total(size, COUNT, turn=turn),
    "reduce_scatter": slice_of_total,
    "allreduce": lambda size, turn, rank: total(size, COUNT, turn=turn),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("private", [(0, 1, 2), (0,), ()], ids=["all", "first", "none"])
def test_what_was_passed_may_be_overwritten_at_once(call, private):
    size = 3

    def body(rank):
        # Through a lane in the first turn; then others read what is private where it is.
        x = np.empty(COUNT, np.float32) if rank in private else rc.empty(COUNT, "float32")
        for turn in range(4):
            x[:] = whole_numbers(rank, COUNT, turn=turn)
            rc.barrier()
            result = CALLS[call](x)
            x[COUNT // 2 :] = -99  # the end first: who still reads is not there yet
            x[: COUNT // 2] = -99
            expected = EXPECTED[call](size, turn, rank)
            assert expected is None or np.array_equal(result, expected), turn

    run_ranks(size, body)


@pytest.mark.parametrize("size", [2, 3])
def test_what_passes_through_a_lane_stays_within_it(size):
    def body(rank):
        room = np.empty(4 * COUNT + 2 * 4096, np.uint8)
        start = (MOST_SKEWED - room.ctypes.data) % 4096
        x = room[start:][: 4 * COUNT].view(np.float32)
        x[:] = whole_numbers(rank, COUNT)
        rc.allreduce_(x)  # from now on there is a lane, and what follows lies behind it
        neighbours = [rc.empty(1 << 14, "uint8") for _ in range(8)]
        for number, each in enumerate(neighbours):
            each.fill(number + 1)
        for turn in range(3):
            x[:] = whole_numbers(rank, COUNT, turn=turn)
            rc.allreduce_(x)
            assert np.array_equal(x, total(size, COUNT, turn=turn))
        return all((each == number + 1).all() for number, each in enumerate(neighbours))

    assert all(run_ranks(size, body))


def test_what_is_given_back_to_the_system_takes_no_neighbour_along():
    """A page belongs to the system only once nothing in it is in use."""

    def body(rank):
        small = rc.empty(10, "uint8")  # in one page with the beginning of the next
        large = rc.empty(300 * MIB, "uint8")  # more than is kept for the next arrays
        behind = rc.empty(10, "uint8")
        small.fill(7)
        behind.fill(8)
        large[:: 32 * MIB] = 1
        del large
        assert rc.node_memory().kept == 0
        return small.tolist(), behind.tolist()

    assert run_ranks(2, body) == [([7] * 10, [8] * 10)] * 2


def test_lanes_are_used_again_only_when_all_have_read_them():
    """Many operations at once, of which some ranks are late, take each other's lanes."""
    n, count = 12, 300_001

    def body(rank):
        for turn in range(6):
            xs = [whole_numbers(rank, count, turn=(turn + k) % 8) for k in range(n)]
            handles = [rc.allreduce_async_(x, name=f"layer {k}") for k, x in enumerate(xs)]
            for handle in reversed(handles) if rank % 2 else handles:
                handle.wait()
            for k, x in enumerate(xs):
                assert np.array_equal(x, total(3, count, turn=(turn + k) % 8)), (turn, k)

    run_ranks(3, body)
