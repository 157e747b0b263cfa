"""Works, callbacks, other devices and wrong arguments of torch.distributed over ringcomm.

Run by every rank of a job at once; not collected by itself.
"""

import functools
import itertools
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch_distributed_values import HANG_S, everyones, total, values

import ringcomm as rc
import ringcomm.torch
from ringcomm.torch.distributed.compat import VERSION

pytest_plugins = ["torch_distributed_fixtures"]
# torch 2.13 renamed them, and warns of the names that 2.6 has.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


# --- Work and Future ------------------------------------------------------------------------------
def test_a_work_tells_when_it_is_done_and_what_it_fills(rank, size):
    x = values(rank)
    work = dist.all_reduce(x, async_op=True)
    assert work.wait() is True
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result()[0] is x
    assert work.get_future().wait()[0] is x
    assert work.get_future() is work.get_future()


def test_the_value_of_a_future_is_a_list_of_tensors(rank, size):
    work = dist.all_reduce(values(rank), async_op=True)
    found = work.get_future().then(lambda future: future.value()[0] * 2).wait()
    assert torch.equal(found, 2 * total(size))


def test_a_wait_that_is_too_short_can_be_done_again(rank, size):
    if rank == size - 1:
        dist.recv(torch.empty(1), 0)
        dist.all_reduce(torch.ones(3))
        return
    x = torch.ones(3)
    work = dist.all_reduce(x, async_op=True)
    if rank == 0:
        for other in range(1, size - 1):  # which have begun it then
            dist.recv(torch.empty(1), other)
        with pytest.raises(RuntimeError, match=r" (Timed out|closed|timeout) ") as caught:
            work.wait(timedelta(seconds=1))
        assert f"rank {size - 1}" in str(caught.value)
        assert isinstance(caught.value, rc.CommTimeoutError)
        dist.send(torch.zeros(1), size - 1)
    else:
        dist.send(torch.zeros(1), 0)
    work.wait()
    assert (x == size).all()


def test_monitored_barrier_names_who_is_missing(rank, size, world):
    if rank == size - 1:
        dist.recv(torch.empty(1), 0)
    elif rank == 0:
        with pytest.raises(rc.CommTimeoutError, match=r"monitored_barrier") as caught:
            dist.monitored_barrier(timeout=timedelta(seconds=3))  # in which others must come
        assert caught.value.missing == (size - 1,)
        dist.send(torch.zeros(1), size - 1)
        return
    world.monitored_barrier()


# --- the nine rules -------------------------------------------------------------------------------
def differing(rank):
    """Return an operation that ends with a MismatchError on every rank."""
    return dist.all_reduce(torch.zeros(2 + rank % 2), async_op=True)


def test_rule_1_the_future_of_a_failed_operation_raises(rank):
    future = differing(rank).get_future()
    with pytest.raises(RuntimeError, match=r"sent float32 \(3,\)"):
        future.wait()
    with pytest.raises(RuntimeError, match=r"sent float32 \(3,\)"):
        future.then(lambda done: done.value()).wait()


def test_rule_1_a_failed_work_says_so(rank):
    work = differing(rank)
    with pytest.raises(rc.MismatchError):
        work.wait()
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), rc.MismatchError)


@pytest.mark.parametrize("n", [1, 40])
def test_rule_2_callbacks_may_wait_for_further_collectives(n, rank, size):
    """All n callbacks are at work at a time: each waits for what is started after the last one."""
    first, second = ([torch.ones(1) for _ in range(n)] for _ in range(2))
    if rank == size - 1:
        for other in range(size - 1):  # so that their callbacks are set before anything is over
            dist.recv(torch.empty(1), other)
    works = [dist.all_reduce(x, async_op=True) for x in first]
    at_work, is_started, later = threading.Semaphore(0), threading.Event(), []

    def wait_for_second(index, future):
        at_work.release()
        assert is_started.wait(HANG_S)
        later[index].wait()
        return future.value()[0] + second[index]

    futures = []
    if rank != size - 1:
        wait = [functools.partial(wait_for_second, i) for i in range(n)]
        futures = [work.get_future().then(wait[i]) for i, work in enumerate(works)]
    if rank != size - 1:
        dist.send(torch.zeros(1), size - 1)
    assert all(at_work.acquire(timeout=HANG_S) for _ in futures)
    later += [dist.all_reduce(x, async_op=True) for x in second]
    is_started.set()
    assert all((future.wait() == 2 * size).all() for future in futures)
    for work in later:
        work.wait()


def test_rule_2_callbacks_never_run_on_a_thread_that_communicates(rank, size):
    if rank == size - 1:
        for other in range(size - 1):
            dist.recv(torch.empty(1), other)
        dist.barrier()
        dist.all_reduce(torch.ones(1))
        return
    release, names = threading.Event(), []

    def block(future):
        names.append(threading.current_thread().name)
        assert release.wait(HANG_S)

    blocked = dist.barrier(async_op=True).get_future().then(block)
    dist.send(torch.zeros(1), size - 1)
    dist.all_reduce(torch.ones(1), async_op=True).wait()  # goes on while the callback blocks
    release.set()
    blocked.wait()
    assert names == ["ringcomm-callback"]


def test_rule_4_no_group_is_reachable_from_a_work(world):
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()
    assert all(value is not world for value in vars(work).values())


def test_rule_6_the_input_may_be_the_outputs_own_slot_and_async(rank, size):
    out = torch.zeros(size * 1000)
    mine = out[1000 * rank : 1000 * (rank + 1)]
    mine.copy_(values(rank, (1000,)))
    all_gather_single(out, mine, async_op=True).wait()
    assert torch.equal(out, torch.cat(everyones(size, (1000,))))


def test_rule_8_groups_may_be_used_in_other_orders_on_other_ranks(rank, size):
    groups = [dist.new_group() for _ in range(3)]
    xs = [values(rank + i) for i in range(3)]
    order = list(itertools.permutations(range(3)))[rank % 6]
    works = [dist.all_reduce(xs[i], group=groups[i], async_op=True) for i in order]
    for work in works:
        work.wait()
    sums = [sum(values(r + i) for r in range(size)) for i in range(3)]
    assert all(map(torch.equal, xs, sums))


def test_rule_8_another_order_within_a_group_is_an_error_on_every_rank(rank):
    sizes = [3, 4] if rank == 0 else [4, 3]
    works = [dist.all_reduce(torch.zeros(n), async_op=True) for n in sizes]
    for work in works:
        with pytest.raises(rc.MismatchError, match=r"\(3,\)"):
            work.wait()


def test_rule_8_ringcomms_own_operations_pass_beside_those_of_groups(rank, size):
    x, y = torch.ones(2), torch.ones(2)
    if rank == 0:
        ours, theirs = rc.allreduce_async_(x), dist.all_reduce(y, async_op=True)
    else:
        theirs, ours = dist.all_reduce(y, async_op=True), rc.allreduce_async_(x)
    ours.wait()
    theirs.wait()
    assert (x == size).all()
    assert (y == size).all()


@torch.inference_mode()
def filled(kind, rank, size):
    """Start to fill a tensor that is not contiguous and was made in inference mode."""
    x, ones, n = torch.ones(2, 3).t(), torch.ones(3, 2), float(size)
    every, s = [torch.zeros(3, 2) for _ in range(size)], torch.ones(3).to_sparse()
    if kind == "premul":
        factor = dist._make_nccl_premul_sum(2.0)
        return dist.all_reduce(x, factor, async_op=True), x, 2 * n
    if kind == "sparse":
        return dist.all_reduce(s, async_op=True), s, n
    if kind == "allgather":
        return dist.all_gather(every, ones, async_op=True), every[-1], 1.0
    if kind == "scatter":
        return dist.scatter(x, None if rank else every, 0, async_op=True), x, 0.0
    if kind == "recv":
        sent = dist.isend(5 * ones, (rank + 1) % size)
        work = dist.irecv(x, (rank - 1) % size)
        sent.wait()
        return work, x, 5.0
    return rc.allreduce_async_(x), x, n


KINDS = "premul", "sparse", "allgather", "scatter", "recv", "ringcomm"


@pytest.mark.parametrize("kind", KINDS)
def test_any_thread_fills_tensors_made_in_inference_mode(kind, rank, size):
    work, x, expected = filled(kind, rank, size)
    is_over = work.is_completed if isinstance(work, dist.Work) else work.done
    deadline = time.monotonic() + HANG_S
    while not is_over():  # a wait would make this thread end the operation
        assert time.monotonic() < deadline
        time.sleep(0.001)
    work.wait()
    assert x.to_dense().unique().tolist() == [expected]


@pytest.mark.parametrize("is_on", [False, True])
def test_rule_9_profilers_see_our_operations_and_only_they_pay(is_on, rank, monkeypatch):
    is_on = is_on and rank == 0  # others pay nothing
    entered = []
    original = torch.profiler.record_function

    def record(name):
        entered.append(name)
        return original(name)

    monkeypatch.setattr(torch.profiler, "record_function", record)
    if is_on:
        # torch.profiler.profile() does this, too, but first it imports sympy, for 2 s.
        with torch.autograd.profiler.profile() as seen:
            dist.all_reduce(torch.ones(1))
        assert any(event.key == "ringcomm:allreduce" for event in seen.key_averages())
    else:
        dist.all_reduce(torch.ones(1))
    assert ("ringcomm:allreduce" in entered) == is_on


# --- tensors of other devices -------------------------------------------------------------------
def test_tensors_of_a_device_without_a_backend_are_refused_with_what_to_do():
    with pytest.raises(RuntimeError, match=r"on meta.*to_empty"):
        dist.all_reduce(torch.ones(1, device="meta"))


def test_tensors_of_another_device_go_to_its_own_backend(rank, size, monkeypatch, world):
    calls = []

    class Elsewhere:
        def allreduce(self, tensors, opts):
            calls.append(tensors[0].device.type)
            return dist._Work() if hasattr(dist, "_Work") else dist.Work()

        def shutdown(self):
            calls.append("shut down")

    group = dist.new_group()
    monkeypatch.setitem(dist.Backend.default_device_backend_map, "meta", "elsewhere")
    plugin = dist.Backend._BackendPlugin(lambda *_: Elsewhere(), False)
    monkeypatch.setitem(dist.Backend._plugins, "ELSEWHERE", plugin)
    group.allreduce([torch.ones(1, device="meta")])
    dist.destroy_process_group(group)
    assert calls == ["meta", "shut down"]


# --- callers from C++ -----------------------------------------------------------------------------
def test_operators_of_c10d_reach_the_group_where_torch_lets_them(rank, size, world):
    """They ask a group for its backend, which can be written in Python from torch 2.14 on."""
    x = values(rank)
    group = world.boxed() if hasattr(world, "boxed") else world
    if VERSION < (2, 14):
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            torch.ops.c10d.broadcast_([x], group, 1, 0, True, -1)
        return
    _, work = torch.ops.c10d.broadcast_([x], group, 1, 0, True, -1)
    dist.Work.unbox(work).wait()
    assert torch.equal(x, values(1))


@pytest.mark.parametrize(
    "call",
    [
        lambda x, n: dist.all_reduce(x),
        lambda x, n: dist.broadcast(x, 0),
        lambda x, n: dist.reduce(x, 0),
        lambda x, n: dist.all_gather([x] * n, torch.ones(4)),
        lambda x, n: dist.all_to_all_single(x, torch.ones(4)) if 4 % n == 0 else dist.all_reduce(x),
    ],
)
@pytest.mark.parametrize(
    "make",
    [lambda: torch.ones(1).expand(4), lambda: torch.ones(3).as_strided((2, 2), (1, 1))],
    ids=["expanded", "windows"],
)
def test_a_tensor_whose_elements_overlap_is_refused_and_nothing_is_lost(call, make):
    with pytest.raises((ValueError, RuntimeError), match="overlap in memory"):
        call(make(), dist.get_world_size())
    dist.barrier()


def test_nothing_is_received_into_a_tensor_whose_elements_overlap(rank):
    if rank == 0:
        dist.send(torch.ones(4), 1)
    elif rank == 1:
        with pytest.raises(ValueError, match=r"overlap in memory.*waits until another recv\(\)"):
            dist.recv(torch.zeros(1).expand(4), 0)
        x = torch.zeros(4)
        dist.recv(x, 0)
        assert x.tolist() == [1] * 4


# --- wrong arguments ------------------------------------------------------------------------------
LISTS = {
    "scatter_list": lambda x, xs, n: dist.scatter(x, xs if dist.get_rank() == 0 else None, 0),
    "gather_list": lambda x, xs, n: dist.gather(x, xs if dist.get_rank() == 0 else None, 0),
    "tensor_list": lambda x, xs, n: dist.all_gather(xs, x),
    "input_list": lambda x, xs, n: dist.reduce_scatter(x, xs),
    "output_tensor_list": lambda x, xs, n: dist.all_to_all(xs, [x] * n),
    "input_tensor_list": lambda x, xs, n: dist.all_to_all([torch.ones(2) for _ in range(n)], xs),
}


@pytest.mark.parametrize("argument", LISTS)
@pytest.mark.parametrize("n", [1, 5])
def test_a_list_of_the_wrong_length_is_an_error_with_both_numbers(argument, n, size):
    with pytest.raises((rc.MismatchError, ValueError)) as caught:
        LISTS[argument](torch.ones(2), [torch.ones(2) for _ in range(n)], size)
    assert f"{argument} has {n} tensors, and the group has {size} ranks" in str(caught.value)


def test_scatter_of_unequal_tensors_names_the_one(rank, size):
    parts = [torch.ones(2 + (r == size - 1)) for r in range(size)] if rank == 0 else None
    with pytest.raises(
        (rc.MismatchError, ValueError), match=rf"scatter_list\[{size - 1}\] has 3 elements"
    ):
        dist.scatter(torch.ones(2), parts, 0)


def test_a_gather_of_a_tensor_that_the_root_does_not_expect_is_an_error_on_all(rank, size):
    x = torch.zeros(3 if rank == 1 else 2)
    outs = [torch.ones(2) for _ in range(size)] if rank == 0 else None
    text = r"rank 1 sends 3 elements, and gather_list\[1\] of the root, rank 0, has 2"
    with pytest.raises(rc.MismatchError, match=text):
        dist.gather(x, outs, 0)
    assert rank or all((out == 1).all() for out in outs)


def test_sparse_beside_dense_is_an_error_that_says_so(rank):
    x = torch.eye(2).to_sparse() if rank == 0 else torch.eye(2)
    with pytest.raises(rc.MismatchError, match="One has a sparse tensor, the other a dense one"):
        dist.all_reduce(x)


def test_who_receives_a_broadcast_is_not_said_to_have_sent(rank):
    with pytest.raises(
        rc.MismatchError, match=r"0.* would receive float32 \(2,\), rank 1 sent float32 \(3,\)"
    ):
        dist.broadcast(torch.ones(2 + (rank == 1)), 1)
