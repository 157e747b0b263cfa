"""Tensors that collectives are filling, or have filled: who waits for them, who may resize them."""

import threading

import harness
import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch.multiprocessing.reductions import StorageWeakRef

import ringcomm as rc
import ringcomm.torch as hvd
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.core.group import Group
from ringcomm.torch.distributed import ProcessGroup

N = 6


class Late(torch.Tensor):
    """As AsyncCollectiveTensor: whoever reads it waits."""

    def trigger_wait(self):
        self.waiters.append(threading.get_ident())
        return self.as_subclass(torch.Tensor)


def late(waiters, all_made):
    def make(value=0.0, count=N):
        made = torch.full((count,), float(value)).as_subclass(Late)
        made.waiters = waiters
        all_made.append(made)
        return made

    return make


def resize(tensors):
    """Let each tensor take new memory: over gloo and NCCL all can, and PowerSGD's hook does it."""
    for each in tensors:
        each.resize_(1000)


def both(send, receive):
    return [send, receive]


# By method: the call, and how many tensors are passed; of group, rank, and what makes a tensor.
CALLS = {
    "allreduce": (lambda g, r, t: g.allreduce([t(r)]), 1),
    "allreduce_coalesced": (lambda g, r, t: g.allreduce_coalesced([t(r), t(2)]), 2),
    "reduce": (lambda g, r, t: g.reduce([t(r)], dist.ReduceOptions()), 1),
    "reduce_scatter": (lambda g, r, t: g.reduce_scatter([t()], [[t(r), t(r)]]), 3),
    "reduce_scatter_single": (lambda g, r, t: g.reduce_scatter_single(t(count=3), t(r)), 2),
    "reduce_scatter_single_coalesced": (
        lambda g, r, t: g.reduce_scatter_single_coalesced([t(count=3)], [t(r)]),
        2,
    ),
    "broadcast": (lambda g, r, t: g.broadcast([t(r)], dist.BroadcastOptions()), 1),
    "allgather": (lambda g, r, t: g.allgather([[t(), t()]], [t(r)]), 3),
    "allgather_coalesced": (lambda g, r, t: g.allgather_coalesced([[t()], [t()]], [t(r)]), 3),
    "all_gather_single": (lambda g, r, t: g.all_gather_single(t(count=12), t(r)), 2),
    "all_gather_single_coalesced": (
        lambda g, r, t: g.all_gather_single_coalesced([t(count=12)], [t(r)]),
        2,
    ),
    "gather": (
        lambda g, r, t: g.gather([[t(), t()]] if r == 0 else [], [t(r)], dist.GatherOptions()),
        (3, 1),
    ),
    "scatter": (
        lambda g, r, t: g.scatter([t()], [[t(), t()]] if r == 0 else [], dist.ScatterOptions()),
        (3, 1),
    ),
    "all_to_all_single": (lambda g, r, t: g.all_to_all_single(t(), t(r), [], []), 2),
    "alltoall": (lambda g, r, t: g.alltoall([t(), t()], [t(r), t(r)]), 4),
    "send": (lambda g, r, t: both(g.send([t(r)], 1 - r), g.recv([t()], 1 - r)), 2),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_process_group_waits_in_the_caller_and_leaves_tensors_resizable(name):
    call, n_tensors = CALLS[name]

    def body(rank):
        group = ProcessGroup(dist.HashStore(), Group(range(2)), 10.0)
        waiters, passed = [], []
        works = call(group, rank, late(waiters, passed))
        due = n_tensors[rank] if isinstance(n_tensors, tuple) else n_tensors
        assert waiters == [threading.get_ident()] * due
        for work in works if isinstance(works, list) else [works]:
            work.wait()
        resize(passed)
        return True

    assert run_ranks(2, body) == [True, True]


HVD = {
    "allreduce_": (lambda t, r: hvd.allreduce_async_(t(r), op=hvd.Sum), 1),
    "allreduce": (lambda t, r: hvd.allreduce_async(t(r), op=hvd.Adasum), 1),
    "grouped_allreduce": (lambda t, r: hvd.grouped_allreduce_async([t(r), t(r)]), 2),
    "allgather": (lambda t, r: hvd.allgather_async(t(r)), 1),
    "grouped_allreduce_": (lambda t, r: hvd.grouped_allreduce_async_([t(r), t(r)]), 2),
    "broadcast_": (lambda t, r: hvd.broadcast_async_(t(r), 0), 1),
    "alltoall": (lambda t, r: hvd.alltoall_async(t(r)), 1),
    "reducescatter": (lambda t, r: hvd.reducescatter_async(t(r)), 1),
}


@pytest.mark.parametrize("name", HVD)
def test_hvd_waits_in_the_caller_and_leaves_tensors_resizable(name):
    call, n_tensors = HVD[name]

    def body(rank):
        waiters, passed = [], []
        handle = call(late(waiters, passed), rank)
        assert waiters == [threading.get_ident()] * n_tensors
        results = hvd.synchronize(handle)
        resize([*passed, *(results if isinstance(results, list | tuple) else [results])])
        return True

    assert run_ranks(2, body) == [True, True]


def test_an_operation_keeps_memory_that_its_tensor_has_left():
    is_asked = threading.Event()

    def body(rank):
        hvd.barrier()  # the first call of all is collective
        x = torch.arange(1000.0) + rank
        if rank == 1:
            assert is_asked.wait(120)
        handle = hvd.allreduce_async_(x, op=hvd.Sum)
        if rank == 0:
            memory = StorageWeakRef(x.untyped_storage())
            x.set_(torch.zeros(3).untyped_storage())
            assert not memory.expired()
            is_asked.set()
        return hvd.synchronize(handle).tolist()

    expected = (torch.arange(1000.0) * 2 + 1).tolist()
    assert run_ranks(2, body) == [[0.0] * 3, expected]


def test_a_tensor_whose_memory_is_freed_is_refused_also_the_short_way(monkeypatch):
    monkeypatch.setattr(harness, "wire", "node")

    def body(rank):
        x = torch.full((100,), float(rank))[40:]
        for _ in range(3):
            rc.allreduce_(x)
        assert engine().groups.default.short_calls is not None
        for nbytes in (x.nbytes, 0):  # x begins 160 bytes behind the beginning of its memory
            x.untyped_storage().resize_(nbytes)
            with pytest.raises(TypeError, match=r"Tensor \(60,\) without memory: .*resize it back"):
                rc.allreduce_(x)
        return True

    assert run_ranks(2, body) == [True, True]


def test_a_tensor_of_a_functional_collective_is_sent_as_its_result():
    """As pipelines do behind tensor parallelism: rank 1 sends what rank 0 is late for."""
    funcol = pytest.importorskip("torch.distributed._functional_collectives")
    from torch._C._distributed_c10d import _register_work

    has_called = threading.Event()

    def body(rank):
        world = ProcessGroup(dist.HashStore(), Group(range(3)), 20.0)
        pair = ProcessGroup(dist.HashStore(), Group(range(2)), 20.0) if rank < 2 else None
        x = torch.arange(50.0)
        if rank == 0:
            assert has_called.wait(120)
            pair.allreduce([x]).wait()
        elif rank == 1:
            _register_work(x, pair.allreduce([x]))
            summed = funcol.AsyncCollectiveTensor(x)
            offered = threading.Timer(0.3, has_called.set)  # by then the message is under way
            offered.start()
            world.send([summed], 2).wait()
            offered.join()
        else:
            x.zero_()
            world.recv([x], 1).wait()
        return x.tolist()

    expected = torch.arange(50.0).mul(2).tolist()
    assert run_ranks(3, body)[2] == expected
