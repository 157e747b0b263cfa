"""Callbacks of Futures that communicate: matched by who started what, in any order."""

import threading

import pytest
import torch
import torch.distributed as dist
from harness import at_length, run_ranks, wait_until

from ringcomm.engine.core.group import Group
from ringcomm.errors import CommTimeoutError
from ringcomm.torch.distributed import ProcessGroup
from ringcomm.torch.distributed.group import work as works
from ringcomm.torch.distributed.group.callback_names import Path

SIZES = at_length([2, 4], [4])
N = 6


def make(size, ranks=None):
    return ProcessGroup(dist.HashStore(), Group(range(size) if ranks is None else ranks), 10.0)


def order(rank, n=N):
    """Return another order on each of four ranks."""
    by_halves, by_twos = [*range(n // 2, n), *range(n // 2)], [*range(0, n, 2), *range(1, n, 2)]
    return [list(range(n)), list(range(n))[::-1], by_halves, by_twos][rank]


def total(size, i):
    return float(sum(10 * i + rank for rank in range(size)))


def filled(i, rank, count=4):
    return torch.full((count,), 10.0 * i + rank)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count_of", [lambda i: 4, lambda i: 1 + i], ids=["alike", "unlike"])
def test_what_callbacks_start_is_matched_in_whatever_order_they_run(size, count_of):
    def body(rank):
        pg = make(size)
        futures = [pg.allreduce([torch.ones(2)]).get_future() for _ in range(N)]
        started = {}

        def communicate(i):
            x, y = filled(i, rank, count_of(i)), filled(i + 1, rank, 9)
            started[i] = (x, pg.allreduce([x])), (y, pg.allreduce([y]))

        for i in order(rank):
            futures[i].wait()
            futures[i].then(lambda _, i=i: communicate(i))
        y = torch.ones(1)
        pg.allreduce([y]).wait()  # goes on beside them
        for pair in started.values():
            for _, work in pair:
                work.wait()
        assert [started[i][0][0].numel() for i in range(N)] == [count_of(i) for i in range(N)]
        return [[x.unique().tolist() for x, _ in started[i]] for i in range(N)], y.item()

    for sums, y in run_ranks(size, body):
        assert sums == [[[total(size, i)], [total(size, i + 1)]] for i in range(N)]
        assert y == size


@pytest.mark.parametrize("size", SIZES)
def test_chains_whose_callbacks_wait_find_their_like_in_any_order(size):
    """As PowerSGD: each callback waits for what it starts, and the next one goes on from it."""

    def body(rank):
        pg = make(size)
        futures = [pg.allreduce([torch.ones(2)]).get_future() for _ in range(N)]
        has_started = [threading.Event() for _ in range(N)]

        def first(i):
            x = filled(i, rank)
            work = pg.allreduce([x])
            has_started[i].set()
            work.wait()
            return pg.broadcast([x + rank], 0).get_future().wait()[0]

        def second(future):
            parts = [[torch.empty(4) for _ in range(size)]]
            pg.allgather(parts, [future.value() + rank]).wait()
            return torch.stack(parts[0]).sum(0)

        ends = {}

        def chain(i):
            ends[i] = futures[i].then(lambda _: first(i)).then(second).then(lambda f: f.value() * 2)

        # then() may run a callback at once, in this thread, where the operation is over
        threads = [threading.Thread(target=chain, args=(i,), daemon=True) for i in range(N)]
        for i in order(rank):
            threads[i].start()
            assert has_started[i].wait(60)
        for thread in threads:
            thread.join(60)
        return [ends[i].wait().unique().tolist() for i in range(N)]

    ranks = sum(range(size))
    expected = [[2 * (size * total(size, i) + ranks)] for i in range(N)]
    assert run_ranks(size, body) == [expected] * size


@pytest.mark.parametrize("size", SIZES)
def test_a_callback_that_only_some_ranks_give_disturbs_nothing(size):
    def body(rank):
        pg = make(size)
        future = pg.allreduce([torch.ones(2)]).get_future()
        future.wait()
        seen = []
        if rank == 0:
            future.then(lambda f: seen.append(f.value()))
            future.add_done_callback(seen.append)
        x = torch.ones(2)
        future.then(lambda _: pg.allreduce([x]).wait())
        return x.tolist(), len(seen)

    assert run_ranks(size, body) == [([size] * 2, 2), *[([size] * 2, 0)] * (size - 1)]


@pytest.mark.parametrize("size", SIZES)
def test_callbacks_of_one_group_communicate_in_another(size):
    def body(rank):
        rows = make(size, [rank])  # another group on each rank
        world = make(size)
        futures = [rows.allreduce([torch.ones(2)]).get_future() for _ in range(N)]
        xs = [filled(i, rank) for i in range(N)]
        works = {}

        def across(i):
            works[i] = world.allreduce([xs[i]])

        for i in order(rank):
            futures[i].wait()
            futures[i].then(lambda _, i=i: across(i))
        for work in works.values():
            work.wait()
        return [x.unique().tolist() for x in xs]

    assert run_ranks(size, body) == [[[total(size, i)] for i in range(N)]] * size


@pytest.mark.parametrize("size", SIZES)
def test_a_mismatch_within_callbacks_is_the_same_error_everywhere_and_names_them(size):
    def body(rank):
        pg = make(size)
        future = pg.allreduce([torch.ones(2)]).get_future()
        future.wait()

        def differ(_):
            pg.allreduce([torch.ones(2 + rank)]).wait()

        with pytest.raises(
            RuntimeError, match=r"MismatchError: allreduce_\[#1>differ:\d+>1\]: rank 0 sent"
        ):
            future.then(differ).wait()
        x = torch.ones(2)
        pg.allreduce([x]).wait()
        return x.tolist()

    assert run_ranks(size, body) == [[size] * 2] * size


def test_an_argument_that_is_wrong_on_one_rank_is_heard_of_by_the_others():
    def body(rank):
        pg = make(2)
        future = pg.allreduce([torch.ones(2)]).get_future()
        future.wait()

        def scatter(_):
            parts = [[torch.ones(1)]] if rank == 0 else []  # for two ranks, one is missing
            pg.scatter([torch.ones(1)], parts, 0).wait()

        with pytest.raises(
            RuntimeError, match="scatter_list has 1 tensors, and the group has 2 ranks"
        ):
            future.then(scatter).wait()

    run_ranks(2, body)


def test_futures_of_torch_are_left_alone():
    def body(rank):
        make(1).allreduce([torch.ones(1)]).get_future().wait()

    run_ranks(1, body)
    future = torch.futures.Future()
    seen = []
    last = future.then(lambda f: f.value() + 1).then(lambda f: f.value() + 1)
    last.add_done_callback(lambda f: seen.append(f.value()))
    future.set_result(1)
    assert last.wait() == 3
    assert seen == [3]
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        future.then(lambda _: 1 / 0).wait()


def test_names_that_come_once_fill_no_table():
    def body(rank):
        pg = make(2)
        for _ in range(3):
            pg.allreduce([torch.ones(1)]).get_future().then(
                lambda _: pg.allreduce([torch.ones(1)]).wait()
            ).wait()
        ledger = pg.group.ledger
        return len(ledger._entries), len(ledger._pending), ledger.has_overflown

    assert run_ranks(2, body) == [(0, 0, False)] * 2


def test_a_path_stays_short_however_deep_it_is():
    path, other = Path(1, "#5"), Path(1, "#6")
    for _ in range(1000):
        path, other = path.then("f:10"), other.then("f:10")
    assert len(path.steps) < 250
    assert path != other
    assert path.steps.startswith("#5>")
    assert path.then("g:1") != path.then("g:2")
    assert path.name_in(1) == path.steps
    assert path.name_in(2) == f"group 1, {path.steps}"


def test_callbacks_are_over_when_their_future_is():
    def body(rank):
        pg = make(2)
        done = threading.Event()
        pg.allreduce([torch.ones(1)]).get_future().then(lambda _: done.set())
        wait_until(done.is_set, "the callback has not run")

    run_ranks(2, body)


def test_a_failed_work_is_not_kept_after_wait(monkeypatch):
    class FailedHandle:
        def wait(self, timeout_s):
            raise CommTimeoutError("too late")

    monkeypatch.setattr(works, "LOSES_WORKS", True)  # torch 2.6
    failed = works.Work(FailedHandle(), [])
    assert failed in works._kept
    with pytest.raises(CommTimeoutError):
        failed.wait()
    assert failed not in works._kept
