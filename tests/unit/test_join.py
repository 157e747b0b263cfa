"""join(): ranks with less work than others take part in what those do, and change nothing."""

import threading

import numpy as np
import pytest
from harness import outcomes, run_ranks

import ringcomm as rc
from ringcomm.config import Settings

pytestmark = pytest.mark.usefixtures("wire")

SIZES = [2, 3, 4, 7]
DTYPES = ["float16", "float32", "int8", "uint16", "int64", "bool"]


def others_work(size, work, *, joined=None):
    """Let all but the last rank run work(rank), then all join; return results and the last."""
    joined = {size - 1} if joined is None else joined

    def body(rank):
        result = None if rank in joined else work(rank)
        return result, rc.join()

    results = run_ranks(size, body)
    lasts = {last for _, last in results}
    assert len(lasts) == 1
    return [result for result, _ in results], lasts.pop()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", [None, "x"])
def test_an_allreduce_goes_on_without_those_who_joined(size, name):
    def work(rank):
        return [rc.allreduce(np.full(5, rank + k, np.int64), name=name).tolist() for k in range(20)]

    results, last = others_work(size, work)
    expected = [[sum(r + k for r in range(size - 1))] * 5 for k in range(20)]
    assert results[:-1] == [expected] * (size - 1)
    assert last != size - 1


@pytest.mark.parametrize("op", list(rc.Op))
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_operator_sees_a_rank_that_joined(op, dtype):
    values = np.array([[3, 5, 2], [2, 7, 6]]).astype(dtype)

    def work(rank):
        try:
            return rc.allreduce(values[rank], op)
        except TypeError:
            return None  # an operator without a meaning for this dtype

    pair = run_ranks(2, work)
    trio, _ = others_work(3, work)
    if pair[0] is None:
        assert trio == [None] * 3
        return
    share = 2 / 3 if op is rc.AVERAGE else 1
    total = run_ranks(2, lambda r: rc.allreduce(values[r], rc.SUM) if share != 1 else pair[r])[0]
    expected = np.trunc(total / 3) if share != 1 and dtype[0] in "iu" else total * share
    expected = (total / 3 if share != 1 and dtype[0] == "f" else expected).astype(dtype)
    assert np.allclose(trio[0].astype(float), expected.astype(float), rtol=1e-3)
    assert np.array_equal(trio[0], trio[1])


@pytest.mark.parametrize("size", SIZES)
def test_every_collective_goes_on(size):
    def work(rank):
        n = size - 1
        x = np.arange(4.0) + rank
        total = sum(np.arange(4.0) + r for r in range(n))
        mine = slice(
            *np.cumsum([0, *[4 // size + (r < 4 % size) for r in range(size)]])[rank : rank + 2]
        )
        assert np.array_equal(rc.allreduce_(x.copy()), total)
        assert np.array_equal(rc.reduce_scatter(x), total[mine])
        assert np.array_equal(rc.allgather(x[None]), [np.arange(4.0) + r for r in range(n)])
        assert np.array_equal(rc.broadcast(x, 0), np.arange(4.0))
        gathered = rc.gather(x[None], 0)
        assert gathered is None if rank else gathered.shape == (n, 4)
        reduced = rc.reduce(x, root=0)
        assert reduced is None if rank else np.array_equal(reduced, total)
        sent = np.repeat(rank, n)
        assert rc.alltoall(sent, splits=[1] * n + [0]).tolist() == list(range(n))
        assert rc.broadcast_object({"a": rank}, 0) == {"a": 0}
        assert rc.allgather_object(rank) == [*range(n), None]
        assert rc.gather_object(rank) == (None if rank else [*range(n), None])
        assert rc.scatter_object([*"abcdefghij"[:size]]) == "abcdefghij"[rank]
        several = rc.grouped_allreduce([x, np.array([rank])])
        assert np.array_equal(several[0], total)
        assert [len(each) for each in rc.grouped_allgather([x, x[:1]])] == [4 * n, n]
        assert np.array_equal(rc.grouped_reduce_scatter([x])[0], total[mine])
        assert rc.grouped_allreduce_([]) == rc.grouped_allgather([]) == []
        rc.barrier()
        return True

    results, _ = others_work(size, work)
    assert results == [True] * (size - 1) + [None]


@pytest.mark.parametrize("size", SIZES)
def test_operations_that_were_begun_before_are_joined_too(size):
    begun = threading.Barrier(size)

    def body(rank):
        if rank == 0:
            begun.wait(120)
            return rc.join()
        handles = [rc.allreduce_async(np.array([rank]), name=f"n{k}") for k in range(5)]
        handles += [rc.allreduce_async(np.array([rank])) for _ in range(20)]
        begun.wait(120)
        last = rc.join()
        assert {int(h.wait()[0]) for h in handles} == {sum(range(size))}
        return last

    assert len(set(run_ranks(size, body))) == 1


@pytest.mark.parametrize("size", SIZES)
def test_ranks_count_alike_after_a_join(size):
    def body(rank):
        sums = []
        for round_ in range(4):
            for k in range((rank + round_) % size * 3):
                rc.allreduce(np.ones(3), name="even" if k % 2 else None)
            rc.join()
            sums.append(rc.allreduce(np.array([rank])).item())
            sums.append(rc.allreduce(np.array([rank]), name="even").item())
        return sums

    assert run_ranks(size, body) == [[sum(range(size))] * 8] * size


def test_a_group_goes_on_without_its_member_that_joined():
    def body(rank):
        group = rc.Group([2, 0])
        result = rc.allreduce(np.array([5]), group=group).item() if rank == 0 else None
        rc.join()
        return result

    assert run_ranks(3, body) == [5, None, None]


def test_the_last_to_join_is_the_one_that_had_work():
    for last in range(3):
        _, told = others_work(3, lambda _: rc.allreduce(np.ones(2)), joined={0, 1, 2} - {last})
        assert told == last


@pytest.mark.parametrize("name", [None, "x"])
def test_who_went_on_after_others_had_joined_is_the_last_whatever_the_order_of_news(name):
    def body(rank):
        lasts = []
        for _ in range(100):
            for _ in range(2 - rank):
                rc.allreduce(np.ones(4), name=name)
            lasts.append(rc.join())
        return lasts

    assert run_ranks(3, body) == [[0] * 100] * 3


def test_a_rank_alone_joins_itself():
    assert run_ranks(1, lambda _: rc.join()) == [0]


def test_who_has_joined_has_nothing_to_broadcast():
    def work(rank):
        with pytest.raises(rc.MismatchError, match=r"rank 2 could not take part.*called join\(\)"):
            rc.broadcast(np.ones(3), 2)
        return rc.allreduce(np.ones(1)).item()

    assert others_work(3, work)[0] == [2.0, 2.0, None]


def test_a_long_call_reaches_those_who_joined():
    n = 300

    def work(rank):
        name = "n" * 2000
        sums = rc.grouped_allreduce([np.full(k % 3, rank + 1) for k in range(n)], name=name)
        return sum(int(each.sum()) for each in sums)

    results, _ = others_work(3, work)
    assert results[0] == results[1] == 3 * sum(k % 3 for k in range(n))


def test_who_leaves_without_joining_ends_the_wait():
    def body(rank):
        if rank == 0:
            with pytest.raises(rc.PeerFailedError, match="join"):
                rc.join()
            return True
        raise ValueError("no more")

    results = outcomes(2, body)
    assert results[0] is True


@pytest.mark.long
def test_a_wait_for_those_who_never_join_has_a_deadline():
    done = threading.Event()

    def body(rank):
        if rank == 0:
            with pytest.raises(rc.CommTimeoutError, match=r"join\(\): rank 0 .*rank 1"):
                rc.join()
            done.set()
        else:
            done.wait(120)

    run_ranks(2, body, settings=Settings(timeout_s=0.5))
