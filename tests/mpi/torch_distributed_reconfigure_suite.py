"""The default process group with other ranks, run by every rank of a job at once; see torch's
`_reconfigure`, which is there from 2.14.1 on.

Ranks that a group leaves out wait in the reconfiguration to all ranks that ends each test.
"""

import itertools
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType
from torch.distributed import _functional_collectives as functional

import ringcomm as rc
import ringcomm.torch

pytest_plugins = ["torch_distributed_fixtures"]
HAS_IT = hasattr(dist, "_reconfigure")
uuids = itertools.count(1)  # each rank takes as many as all others


def own_handle():
    return dist._get_reconfigure_handle() if HAS_IT else dist.group.WORLD.get_reconfigure_handle()


def reconfigure(uuid, handles, timeout_s=30):
    timeout = timedelta(seconds=timeout_s)
    if HAS_IT:
        dist._reconfigure(uuid, handles, timeout=timeout).wait()
        return
    options = SimpleNamespace(uuid=uuid, handles=handles, timeout=timeout, hints={})
    dist.group.WORLD.reconfigure(options).wait()


@pytest.fixture(scope="module")
def handles():
    """Return the handles of all ranks, in their order."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, own_handle())
    return found


@pytest.fixture(autouse=True)
def all_again(handles, in_step):
    yield
    reconfigure(next(uuids), handles)
    require_group([*range(rc.size())])


def require_group(ranks):
    """Fail unless the default group has these ranks of the job, in this order, and can sum."""
    assert dist.get_world_size() == dist.group.WORLD.size() == len(ranks)
    assert ranks[dist.get_rank()] == rc.rank()
    x = torch.full((4,), dist.get_rank() + 1.0)
    dist.all_reduce(x)
    assert torch.equal(x, torch.full((4,), sum(range(1, len(ranks) + 1)) * 1.0))
    found = [None] * len(ranks)
    dist.all_gather_object(found, rc.rank())
    assert found == ranks


def test_a_group_by_handles_sums(handles, size):
    assert HAS_IT is hasattr(dist, "_supports_reconfigure")
    assert not HAS_IT or dist._supports_reconfigure()
    assert dist.group.WORLD.supports_reconfigure
    reconfigure(next(uuids), handles)
    require_group([*range(size)])


def test_a_group_by_handles_sends_and_receives(handles, size, rank):
    reconfigure(next(uuids), handles)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    got = torch.zeros(4)
    sent = backend.send([torch.full((4,), rank + 1.0)], (rank + 1) % size, 0)
    received = backend.recv([got], (rank - 1) % size, 0)
    sent.wait()
    received.wait()
    assert torch.equal(got, torch.full((4,), (rank - 1) % size + 1.0))


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_without_a_rank_that_lives(place, handles, size, rank):
    left_out = {"first": 0, "middle": size // 2, "last": size - 1}[place]
    uuid = next(uuids)
    live = [r for r in range(size) if r != left_out]
    if rank == left_out:
        return
    reconfigure(uuid, [handles[r] for r in live])
    require_group(live)
    x = torch.tensor([42.0 if dist.get_rank() == 0 else 0.0])
    dist.broadcast(x, 0)
    assert x == 42


def test_each_alone_then_all_then_alone(handles, size, rank):
    first, then, last = next(uuids), next(uuids), next(uuids)
    reconfigure(first, [handles[rank]])
    require_group([rank])
    reconfigure(then, handles)
    require_group([*range(size)])
    reconfigure(last, [handles[rank]])
    require_group([rank])


def test_the_same_members_again(handles, size):
    before = dist.group.WORLD.group
    reconfigure(next(uuids), handles)
    reconfigure(next(uuids), [own_handle()] if size == 1 else handles)
    require_group([*range(size)])
    assert dist.group.WORLD.group is not before


def test_some_first_and_all_later(handles, size, rank):
    some, everyone = next(uuids), next(uuids)
    n = size // 2
    if rank < n:
        reconfigure(some, handles[:n])
        require_group([*range(n)])
    reconfigure(everyone, handles)
    require_group([*range(size)])


def test_two_halves_are_merged(handles, size, rank):
    halves, both = next(uuids), next(uuids)
    n = size // 2
    mine = [*range(n)] if rank < n else [*range(n, size)]
    reconfigure(halves, [handles[r] for r in mine])
    require_group(mine)
    reconfigure(both, handles)
    require_group([*range(size)])


def test_the_order_of_the_handles_is_that_of_the_ranks(handles, size, rank):
    reconfigure(next(uuids), handles[::-1])
    require_group([*range(size)][::-1])
    reconfigure(next(uuids), {*handles})  # a set stands for the order of the job
    require_group([*range(size)])


def test_groups_of_a_group_count_its_ranks(handles, size, rank):
    uuid = next(uuids)
    if rank == 0:
        return
    live = [*range(1, size)][::-1]
    reconfigure(uuid, [handles[r] for r in live])
    ends = dist.new_group(sorted({0, len(live) - 1}))  # ranks of the default group
    if dist.get_rank() in (0, len(live) - 1):
        found = [None] * ends.size()
        dist.all_gather_object(found, rank, group=ends)
        assert found == list(dict.fromkeys([live[0], live[-1]]))


def test_functional_collectives_know_the_new_size(handles, size, rank):
    uuid = next(uuids)
    if rank == size - 1:
        return
    reconfigure(uuid, handles[: size - 1])
    gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
    found = gather(torch.tensor([rank]), 0, dist.group.WORLD)
    assert found.tolist() == [*range(size - 1)]


def test_after_abort_until_it_is_reconfigured_a_group_refuses_operations(handles, size):
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    backend.abort()
    assert backend.get_error() == ErrorType.SUCCESS  # nothing has failed
    with pytest.raises(RuntimeError, match="aborted"):
        dist.all_reduce(torch.ones(1))
    reconfigure(next(uuids), handles)
    require_group([*range(size)])


def test_a_uuid_is_used_once(handles, rank):
    uuid = next(uuids)
    reconfigure(uuid, [handles[rank]])
    with pytest.raises(RuntimeError, match="already used"):
        reconfigure(uuid, [handles[rank]])


def test_a_uuid_of_a_call_that_failed_is_taken_again(handles, size, rank):
    uuid = next(uuids)
    with pytest.raises(ValueError, match="no handle of this process"):
        reconfigure(uuid, [handles[(rank + 1) % size]])
    with pytest.raises(ValueError, match="no handle of"):
        reconfigure(uuid, ["x"])
    with pytest.raises(ValueError, match=r"processes \[77\]"):
        reconfigure(uuid, [*handles, handles[0][:-1] + "77"])
    if size > 1:
        with pytest.raises(rc.MismatchError):
            reconfigure(uuid, handles[::-1] if rank == 0 else handles)
    require_group([*range(size)])  # the group of before is still there
    reconfigure(uuid, handles)
    require_group([*range(size)])


def test_a_group_that_is_not_the_default_one_is_refused(handles):
    other = dist.new_group()
    options = SimpleNamespace(uuid=0, handles=handles, timeout=None, hints={})
    with pytest.raises(ValueError, match="only the default group"):
        other.reconfigure(options)


def test_a_group_of_several_backends_is_refused(handles, monkeypatch):
    configs = dist.distributed_c10d._world.pg_backend_config
    monkeypatch.setitem(configs, dist.group.WORLD, "cpu:ringcomm,cuda:nccl")
    for ask in (own_handle, lambda: dist.group.WORLD.supports_reconfigure):
        with pytest.raises(RuntimeError, match="multiple backends"):
            ask()
    with pytest.raises(RuntimeError, match="multiple backends"):
        reconfigure(next(uuids), handles)
