"""torch.distributed over ringcomm, run by every rank of a job at once; not collected by itself."""

import functools
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch_distributed_values import everyones, same, total, values, waited

import ringcomm as rc
import ringcomm.torch
from ringcomm.torch.distributed import ProcessGroup
from ringcomm.torch.distributed.compat import VERSION

pytest_plugins = ["torch_distributed_fixtures"]
# torch 2.13 renamed them, and warns of the names that 2.6 has.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
REDUCED = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64]
MOVED = [*REDUCED, torch.bool, torch.uint8, torch.complex64, torch.float8_e4m3fn]
SHAPES = [(), (1,), (0,), (7,), (3, 5), (1000, 3)]


# --- the group ------------------------------------------------------------------------------------
def test_ranks_are_those_of_mpi(rank, size, world):
    assert (rank, size) == (rc.rank(), rc.size())
    assert isinstance(world, ProcessGroup)
    assert dist.get_backend() == world.name() == "ringcomm"


def test_ringcomms_own_functions_take_tensors(rank, size):
    x = torch.full((3, 4), rank + 1, dtype=torch.bfloat16)
    total = rc.allreduce(x)
    assert isinstance(total, torch.Tensor)
    assert total.dtype == torch.bfloat16
    assert (total == size * (size + 1) / 2).all()


def test_making_the_default_group_again_does_nothing(world):
    ringcomm.torch.init_process_group()
    assert dist.group.WORLD is world


def test_a_default_group_of_another_backend_is_not_taken_for_ours():
    with pytest.raises(ValueError, match="default group of ringcomm, and gloo is wanted"):
        ringcomm.torch.init_process_group("gloo")


# --- collectives ------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", REDUCED, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("is_async", [False, True])
def test_all_reduce_leaves_the_sum_everywhere(shape, dtype, is_async, rank, size):
    x = values(rank, shape, dtype)
    waited(dist.all_reduce(x, async_op=is_async))
    assert torch.equal(x, total(size, shape, dtype))


@pytest.mark.parametrize(
    ("op", "combine"),
    [
        (dist.ReduceOp.SUM, torch.add),
        (dist.ReduceOp.PRODUCT, torch.mul),
        (dist.ReduceOp.MIN, torch.minimum),
        (dist.ReduceOp.MAX, torch.maximum),
        (dist.ReduceOp.BAND, torch.bitwise_and),
        (dist.ReduceOp.BOR, torch.bitwise_or),
        (dist.ReduceOp.BXOR, torch.bitwise_xor),
    ],
    ids=str,
)
def test_every_operator_combines_as_torch_does(op, combine, rank, size):
    x = values(rank, (7,), torch.int64)
    dist.all_reduce(x, op)
    assert torch.equal(x, functools.reduce(combine, everyones(size, (7,), torch.int64)))


@pytest.mark.parametrize("is_async", [False, True])
def test_avg_is_the_mean(is_async, rank, size):
    x = values(rank, (7,), torch.float64)
    waited(dist.all_reduce(x, dist.ReduceOp.AVG, async_op=is_async))
    assert torch.allclose(x, total(size, (7,), torch.float64) / size, rtol=1e-7, atol=0)


def premul(factor):
    return dist._make_nccl_premul_sum(factor)


@pytest.mark.parametrize("factor", [0.5, torch.tensor([2.0])], ids=["float", "tensor"])
def test_premul_sum_scales_before_the_sum(factor, rank, size):
    x, y = values(rank), values(rank, (size * 2,))
    dist.all_reduce(x, premul(factor))
    assert torch.equal(x, total(size) * factor)
    out = torch.empty(2)
    reduce_scatter_single(out, y.clone(), premul(factor))
    assert torch.equal(out, (total(size, (size * 2,)) * factor)[2 * rank : 2 * rank + 2])


def test_complex_numbers_are_added(rank, size):
    x = torch.complex(values(rank), values(rank + 1))
    dist.all_reduce(x)
    other = functools.reduce(torch.add, [values(r + 1) for r in range(size)])
    assert torch.equal(x, torch.complex(total(size), other))


def test_a_strided_tensor_is_reduced_in_place(rank, size):
    whole = torch.full((6, 4), -1.0)
    part = whole[::2, 1:3]
    part.copy_(values(rank, (3, 2)))
    dist.all_reduce(part)
    assert torch.equal(part, total(size, (3, 2)))
    assert (whole[1::2] == -1).all()
    assert (whole[:, 0] == -1).all()


def test_ranks_may_hold_the_same_elements_in_other_layouts(rank, size):
    x = values(rank, (2, 3, 4, 5))
    if rank == 0:
        x = x.to(memory_format=torch.channels_last)
    dist.all_reduce(x)
    assert torch.equal(x, total(size, (2, 3, 4, 5)))


def test_a_parameter_is_reduced_and_autograd_knows(rank, size):
    p = torch.nn.Parameter(values(rank))
    before = p._version
    dist.all_reduce(p)
    assert torch.equal(p.detach(), total(size))
    assert p._version > before


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reduce_gives_the_root_the_sum_and_leaves_the_others(shape, rank, size):
    root = size - 1
    x = values(rank, shape)
    dist.reduce(x, root)
    assert torch.equal(x, total(size, shape) if rank == root else values(rank, shape))


@pytest.mark.parametrize("dtype", MOVED, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_broadcast_takes_the_roots_values(shape, dtype, rank, size):
    x = values(rank, shape, dtype)
    dist.broadcast(x, size - 1)
    assert same(x, values(size - 1, shape, dtype))


@pytest.mark.parametrize("dtype", MOVED, ids=str)
@pytest.mark.parametrize("is_async", [False, True])
def test_all_gather_fills_a_tensor_for_each_rank(dtype, is_async, rank, size):
    outs = [torch.zeros((3, 2), dtype=dtype) for _ in range(size)]
    waited(dist.all_gather(outs, values(rank, (3, 2), dtype), async_op=is_async))
    assert all(map(same, outs, everyones(size, (3, 2), dtype)))


def test_all_gather_takes_tensors_of_different_sizes(rank, size):
    outs = [torch.zeros((r, 2)) for r in range(size)]
    dist.all_gather(outs, values(rank, (rank, 2)))
    assert all(torch.equal(outs[r], values(r, (r, 2))) for r in range(size))


@pytest.mark.parametrize("dtype", MOVED, ids=str)
@pytest.mark.parametrize("is_own_slot", [False, True])
def test_all_gather_into_tensor_may_read_from_its_own_slot(dtype, is_own_slot, rank, size):
    out = torch.zeros((size * 2, 3), dtype=dtype)
    x = values(rank, (2, 3), dtype)
    if is_own_slot:
        out.view(torch.uint8).view(size, -1)[rank] = x.view(torch.uint8).view(-1)
        x = out[2 * rank : 2 * rank + 2]
    all_gather_single(out, x)
    assert same(
        out,
        torch.cat([each.view(torch.uint8) for each in everyones(size, (2, 3), dtype)])
        .view(dtype)
        .view(-1, 3),
    )


def test_all_gather_into_tensor_fills_a_strided_output(rank, size):
    whole = torch.zeros(size, 3, 2)
    out = whole[..., 0]
    all_gather_single(out, values(rank, (3,)))
    assert torch.equal(out, torch.stack(everyones(size, (3,))))
    assert (whole[..., 1] == 0).all()


@pytest.mark.parametrize("is_async", [False, True])
def test_reduce_scatter_gives_each_rank_its_sum(is_async, rank, size):
    parts = [values(rank + r, (2, 3)) for r in range(size)]
    out = torch.empty(2, 3)
    waited(dist.reduce_scatter(out, parts, async_op=is_async))
    expected = functools.reduce(torch.add, [values(r + rank, (2, 3)) for r in range(size)])
    assert torch.equal(out, expected)


def test_reduce_scatter_takes_parts_of_different_sizes(rank, size):
    out = torch.empty(rank + 1)
    dist.reduce_scatter(out, [values(rank, (r + 1,)) for r in range(size)])
    assert torch.equal(out, total(size, (rank + 1,)))


@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.AVG], ids=str)
def test_reduce_scatter_tensor_leaves_its_input_alone(op, rank, size):
    x = values(rank, (size * 4,), torch.float64)
    kept, out = x.clone(), torch.empty(4, dtype=torch.float64)
    reduce_scatter_single(out, x, op)
    whole = total(size, (size * 4,), torch.float64)
    if op == dist.ReduceOp.AVG:
        whole = whole / size
    assert torch.allclose(out, whole[4 * rank : 4 * rank + 4], rtol=1e-7, atol=0)
    assert torch.equal(x, kept)


def test_gather_fills_the_roots_list(rank, size):
    root = size - 1
    outs = [torch.zeros(3, 2) for _ in range(size)] if rank == root else None
    dist.gather(values(rank, (3, 2)), outs, root)
    assert rank != root or all(map(torch.equal, outs, everyones(size, (3, 2))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_scatter_gives_each_rank_its_tensor(dtype, rank, size):
    out = torch.zeros((3, 2), dtype=dtype)
    parts = everyones(size, (3, 2), dtype) if rank == 0 else None
    dist.scatter(out, parts, 0)
    assert same(out, values(rank, (3, 2), dtype))


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("call", ["scatter", "gather", "dtype of scatter"])
def test_another_size_on_one_rank_is_told_to_all_and_the_job_goes_on(call, odd, rank, size):
    n, dtype = (5 if rank == odd else 3), torch.float32
    if call == "dtype of scatter":
        n, dtype = 3, torch.float64 if rank == odd else torch.float32
    x = torch.zeros(n, dtype=dtype)
    others = [torch.zeros(n, dtype=dtype) for _ in range(size)] if rank == 0 else None
    move = dist.gather if call == "gather" else dist.scatter
    with pytest.raises(rc.MismatchError, match=r"gather|scatter") as caught:
        move(x, others, 0)
    assert "rank" in str(caught.value)
    done = torch.ones(1)
    dist.all_reduce(done)
    assert done.item() == size


def test_all_to_all_single_exchanges_equal_parts(rank, size):
    x = torch.cat([values(rank * size + r, (2, 3)) for r in range(size)])
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x)
    assert torch.equal(out, torch.cat([values(r * size + rank, (2, 3)) for r in range(size)]))


def test_all_to_all_single_exchanges_uneven_parts(rank, size):
    sent = [rank + r for r in range(size)]
    received = [r + rank for r in range(size)]
    x = torch.cat([torch.full((n, 2), 10.0 * rank + r) for r, n in enumerate(sent)])
    out = torch.empty(sum(received), 2)
    dist.all_to_all_single(out, x, received, sent)
    expected = [torch.full((n, 2), 10.0 * r + rank) for r, n in enumerate(received)]
    assert torch.equal(out, torch.cat(expected))


@pytest.mark.parametrize("kind", [np.array, torch.tensor, torch.Size])
def test_splits_may_be_anything_that_lists_integers(rank, size, kind):
    out = torch.empty(size * (size + 1) // 2)
    x = torch.full((size * (rank + 1),), float(rank))
    dist.all_to_all_single(out, x, kind(list(range(1, size + 1))), kind([rank + 1] * size))
    assert out.tolist() == [float(r) for r in range(size) for _ in range(r + 1)]


def test_rows_of_an_array_are_lists_of_ranks(rank, size):
    for row in np.arange(size).reshape(-1, 1):
        group = dist.new_group(row)
        assert (dist.get_rank(group) == 0) == (rank in row)
    mine, _ = dist.new_subgroups_by_enumeration(np.arange(size).reshape(1, -1))
    x = torch.ones(1)
    dist.all_reduce(x, group=mine)
    assert x.item() == size


def test_all_to_all_exchanges_lists(rank, size):
    outs = [torch.empty(r + rank, 2) for r in range(size)]
    dist.all_to_all(outs, [torch.full((rank + r, 2), 10.0 * rank + r) for r in range(size)])
    assert all(
        torch.equal(outs[r], torch.full((r + rank, 2), 10.0 * r + rank)) for r in range(size)
    )


def test_coalesced_forms_are_several_at_once(rank, size, world):
    xs = [values(rank, (3,)), values(rank, (2, 2), torch.float64), values(rank, (4,))]
    with dist._coalescing_manager():
        for x in (xs[0], xs[2]):
            dist.all_reduce(x)
    dist.all_reduce(xs[1])
    shapes = [((3,),), ((2, 2), torch.float64), ((4,),)]
    assert all(torch.equal(x, total(size, *args)) for x, args in zip(xs, shapes, strict=True))

    outs = [torch.empty(size * 2), torch.empty(size, 3)]
    with dist._coalescing_manager(async_ops=True) as several:
        all_gather_single(outs[0], values(rank, (2,)))
        all_gather_single(outs[1], values(rank, (1, 3)))
    several.wait()
    assert torch.equal(outs[0], torch.cat(everyones(size, (2,))))
    assert torch.equal(outs[1], torch.cat(everyones(size, (1, 3))))

    parts = [torch.empty(2), torch.empty(1)]
    with dist._coalescing_manager():
        reduce_scatter_single(parts[0], values(rank, (2 * size,)))
        reduce_scatter_single(parts[1], values(rank, (size,)))
    assert torch.equal(parts[0], total(size, (2 * size,))[2 * rank : 2 * rank + 2])
    assert torch.equal(parts[1], total(size, (size,))[rank : rank + 1])

    lists = [[torch.empty(2), torch.empty(3)] for _ in range(size)]
    world.allgather_coalesced(lists, [values(rank, (2,)), values(rank, (3,))]).wait()
    assert all(torch.equal(lists[r][1], values(r, (3,))) for r in range(size))


def tensors_of(size, count, dtype, turn):
    """Return lists of a tensor for each rank, that lie together in memory, apart, or strided."""
    lists = [
        list(torch.zeros(size, count, dtype=dtype)),
        [torch.zeros(count, dtype=dtype) for _ in range(size)],
    ]
    if turn > 3:
        lists.append([torch.zeros(count, 2, dtype=dtype)[:, 1] for _ in range(size)])
    return lists


@pytest.mark.parametrize("count", [3, 30_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_blocking_calls_made_again_have_the_values_of_each_turn(dtype, count, rank, size):
    root = size - 1
    for turn in range(6):  # short calls from the third on, unless memory is shared
        x = values(rank + turn, (count,), dtype)
        before = x._version
        dist.broadcast(x, root)
        assert same(x, values(root + turn, (count,), dtype))
        assert rank == root or x._version > before

        out = torch.zeros(size, count, dtype=dtype)
        x = values(rank + turn, (count,), dtype)
        if turn % 3 == 2:
            out[rank].copy_(x)
            x = out[rank]
        before = out._version
        all_gather_single(out, x)
        wanted = [values(r + turn, (count,), dtype) for r in range(size)]
        assert all(map(same, out, wanted))
        assert out._version > before
        dist.barrier()

        for outs in tensors_of(size, count, dtype, turn):
            before = outs[0]._version
            dist.all_gather(outs, values(rank + turn, (count,), dtype))
            assert all(map(same, outs, wanted))
            assert outs[0]._version > before
        for outs, parts in zip(
            tensors_of(size, count, dtype, turn), tensors_of(size, count, dtype, turn), strict=True
        ):
            is_root = rank == root
            dist.gather(values(rank + turn, (count,), dtype), outs if is_root else None, root)
            assert not is_root or all(map(same, outs, wanted))
            for r in range(size):
                parts[r].copy_(values(rank + 2 * r + turn, (count,), dtype))
            out = parts[rank] if is_root and turn % 3 == 2 else torch.zeros(count, dtype=dtype)
            dist.scatter(out, parts if is_root else None, root)
            assert same(out, values(root + 2 * rank + turn, (count,), dtype))
            if turn % 3 == 2:
                continue
            dist.all_to_all(outs, parts)
            from_each = [values(r + 2 * rank + turn, (count,), dtype) for r in range(size)]
            assert all(map(same, outs, from_each))
            x, out = torch.stack(parts), torch.zeros(size, count, dtype=dtype)
            dist.all_to_all_single(out, x)
            assert all(map(same, out, from_each))
        if dtype == torch.float8_e4m3fn:
            continue

        x = values(rank + turn, (count,), dtype)
        dist.reduce(x, root, dist.ReduceOp.MAX)
        largest = functools.reduce(torch.maximum, wanted)
        assert same(x, largest if rank == root else wanted[rank])

        x = torch.stack([values(rank + r + turn, (count,), dtype) for r in range(size)])
        out = x[rank] if turn % 3 == 2 else torch.zeros(count, dtype=dtype)
        before = out._version
        reduce_scatter_single(out, x, dist.ReduceOp.MIN)
        parts = [values(r + rank + turn, (count,), dtype) for r in range(size)]
        assert same(out, functools.reduce(torch.minimum, parts))
        assert out._version > before


def test_the_short_forms_of_the_methods_are_understood(rank, size, world):
    x = values(rank)
    world.allreduce(x, dist.ReduceOp.MAX).wait()
    assert torch.equal(x, functools.reduce(torch.maximum, everyones(size)))
    y = values(rank)
    world.broadcast(y, root=1, timeout=timedelta(seconds=30)).wait()
    assert torch.equal(y, values(1))
    outs = [torch.empty(7) for _ in range(size)]
    world.allgather(outs, values(rank)).wait()
    assert all(map(torch.equal, outs, everyones(size)))
    world.barrier().wait()


def test_sparse_tensors_stay_sparse_and_are_added(rank, size):
    def sparse(r):
        index = torch.tensor([[r, size]])
        return torch.sparse_coo_tensor(
            index, torch.full((2, 3), r + 1.0), (size + 1, 3), check_invariants=True
        )

    x = sparse(rank)
    dist.all_reduce(x)
    assert x.is_sparse
    assert torch.equal(x.to_dense(), sum(sparse(r).to_dense() for r in range(size)))


def test_sparse_results_are_the_same_on_every_rank_through_an_alias(rank, size):
    """A result that went to a detached alias would leave each rank its own values, in silence."""
    x = torch.sparse_coo_tensor([[rank]], [1.0], (size,), check_invariants=True)
    x.requires_grad_()
    dist.all_reduce(x)
    assert torch.equal(x.detach().to_dense(), torch.ones(size))


@pytest.mark.parametrize("root", [0, 1])
def test_objects_travel(root, rank, size):
    mine = {"rank": rank, "text": "x" * 1000 * rank}
    everyone = [None] * size
    dist.all_gather_object(everyone, mine)
    assert [each["rank"] for each in everyone] == list(range(size))
    shared = [mine, rank]
    dist.broadcast_object_list(shared, root)
    assert shared[1] == root
    gathered = [None] * size if rank == root else None
    dist.gather_object(mine, gathered, root)
    assert rank != root or [each["rank"] for each in gathered] == list(range(size))
    got = [None]
    dist.scatter_object_list(got, list(range(size)) if rank == root else None, root)
    assert got == [rank]


def test_a_barrier_holds_until_the_last_rank(rank, size):
    late = size - 1
    if rank == late:
        dist.recv(torch.empty(1), 0)  # rank 0 sends once it has begun to wait
        dist.barrier()
        return
    work = dist.barrier(async_op=True)
    if rank == 0:
        assert not work.is_completed()
        dist.send(torch.zeros(1), late)
    work.wait()


# --- messages -------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_send_and_recv_pass_a_tensor_round_the_ring(dtype, rank, size):
    out = torch.zeros((3, 2), dtype=dtype)
    sent = dist.isend(values(rank, (3, 2), dtype), (rank + 1) % size)
    assert dist.recv(out, (rank - 1) % size) == (rank - 1) % size
    sent.wait()
    assert same(out, values((rank - 1) % size, (3, 2), dtype))


def test_recv_from_any_source_says_who_it_was(rank, size):
    if rank != 0:
        dist.send(values(rank), 0)
        return
    seen = set()
    for _ in range(size - 1):
        x = torch.empty(7)
        source = dist.recv(x)
        assert torch.equal(x, values(source))
        seen.add(source)
    assert seen == set(range(1, size))


def test_tags_tell_messages_apart(rank):
    if rank == 0:
        works = [dist.isend(values(tag), 1, tag=tag) for tag in (1, 2)]
        [work.wait() for work in works]
    elif rank == 1:
        for tag in (2, 1):
            x = torch.empty(7)
            dist.recv(x, 0, tag=tag)
            assert torch.equal(x, values(tag))


def test_a_strided_tensor_receives(rank):
    if rank == 0:
        dist.send(values(0, (6,)), 1)
    elif rank == 1:
        whole = torch.zeros(3, 4)
        dist.recv(whole[:, ::2], 0)
        assert torch.equal(whole[:, ::2], values(0, (3, 2)))
        assert (whole[:, 1::2] == 0).all()


def test_batches_of_messages_need_no_order(rank, size):
    out = torch.empty(7)
    others = [
        dist.P2POp(dist.isend, values(rank), (rank + 1) % size),
        dist.P2POp(dist.irecv, out, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(others):
        work.wait()
    assert torch.equal(out, values((rank - 1) % size))


def test_messages_pass_beside_collectives(rank):
    """A rank that is in a collective hears what another one sends it before it joins."""
    x = torch.empty(7)
    receiving = dist.irecv(x, 0) if rank == 1 else None
    work = dist.barrier(async_op=True) if rank != 0 else None
    if rank == 0:
        dist.send(values(0), 1)
        work = dist.barrier(async_op=True)
    work.wait()
    if rank == 1:
        receiving.wait()
        assert torch.equal(x, values(0))


# --- groups ---------------------------------------------------------------------------------------
def test_subgroups_number_their_own_ranks(rank, size):
    members = [0, size - 1]
    group = dist.new_group(members)
    if rank in members:
        x = values(rank)
        dist.all_reduce(x, group=group)
        assert torch.equal(x, values(0) + values(size - 1))
        dist.broadcast(x, src=size - 1, group=group)
        assert group.rank() == members.index(rank)
        assert dist.get_global_rank(group, 1) == size - 1
        dist.destroy_process_group(group)


# Before the next one: torch 2.14 counts a group that only its members make on them alone, and finds
# the ranks of later groups by that number. Over gloo alone it hangs there, too.
def test_a_group_of_gloo_works_beside_ours(rank, size):
    group = dist.new_group(backend="gloo")
    x = values(rank)
    dist.all_reduce(x, group=group)
    assert torch.equal(x, total(size))


def test_members_alone_may_make_a_group(rank, size):
    members = [0, 1]
    if rank in members:
        group = dist.new_group(members, use_local_synchronization=True)
        x = values(rank)
        dist.all_reduce(x, group=group)
        assert torch.equal(x, values(0) + values(1))


def test_a_group_can_be_split_by_its_method(rank, size, world):
    part = world.split_group([0, 1])
    if rank < 2:
        x = values(rank)
        part.allreduce([x]).wait()
        assert torch.equal(x, values(0) + values(1))
    else:
        assert part is None


@pytest.mark.skipif(VERSION < (2, 13), reason="older torch cannot be told of such a group")
def test_split_group_keeps_the_order_of_the_ranks(rank, size):
    mine, others = [*range(size - 1)][::-1], [size - 1]
    part = dist.split_group(split_ranks=[mine, others], group_desc="parts")
    ranks = others if rank == size - 1 else mine
    assert dist.get_process_group_ranks(part) == ranks
    assert ranks[dist.get_rank(part)] == rank
    found = [None] * len(ranks)
    dist.all_gather_object(found, rank, group=part)
    assert found == ranks
    again = dist.split_group(part, [[0]])
    assert (again is dist.GroupMember.NON_GROUP_MEMBER or again is None) == (rank != ranks[0])
    dist.destroy_process_group(part)


def test_ranks_that_divide_groups_of_their_own_do_so_at_once(rank, size):
    """Uneven ones, so that ranks make unequally many groups, as torch does inside; then by mesh."""
    even, odd = list(range(0, size, 2)), list(range(1, size, 2))
    mine = odd if rank % 2 else even
    half, _ = dist.new_subgroups_by_enumeration([even, odd])
    part, parts = dist.new_subgroups(group_size=1, group=half)
    divides_half = VERSION >= (2, 13)  # 2.6 divides all ranks, whatever the group
    assert (part.size(), len(parts)) == (1, len(mine) if divides_half else size)
    if divides_half and rank in even:
        dist.new_subgroups(group_size=len(even), group=half)
    mesh = DeviceMesh("cpu", mine)
    tagged = dist.distributed_c10d._find_or_create_pg_by_ranks_and_tag("ours", mine, len(mine))
    for group in (mesh.get_group(), tagged):
        x = values(rank)
        dist.all_reduce(x, group=group)
        assert torch.equal(x, sum(map(values, mine)))


def members_by_rank(rank, size, kind):
    """Return what a rank passes to new_group(): rank 0 wants another group than the others."""
    return {
        "with other ranks": [0, 1] if rank == 0 else [0, size - 1] if size > 2 else [1],
        "without rank 0": [0, 1] if rank == 0 else list(range(1, size)),
        "of all": None if rank == 0 else [0],
    }[kind]


@pytest.mark.parametrize("kind", ["with other ranks", "without rank 0", "of all"])
def test_a_group_whose_members_differ_between_ranks_is_an_error_on_all(kind, rank, size):
    with pytest.raises(
        rc.MismatchError, match=r"rank 0 called new_group\(\[.*rank.* 1.* called new_g"
    ):
        dist.new_group(members_by_rank(rank, size, kind))
    x = torch.ones(1)
    dist.all_reduce(x, group=dist.new_group())
    assert x.item() == size


def test_ranks_of_which_one_makes_no_group_all_hear_of_it(rank):
    with pytest.raises(rc.MismatchError, match=r"rank 0 called new_group #\d+, rank"):
        dist.new_group([0, 1]) if rank == 0 else dist.barrier()


def test_a_destroyed_group_refuses_calls():
    group = dist.new_group()
    dist.destroy_process_group(group)
    with pytest.raises(rc.NotInitializedError, match="was destroyed"):
        group.allreduce([torch.zeros(1)])


def test_the_operators_of_functional_collectives_give_new_tensors(rank, size, world):
    operators, name = torch.ops._c10d_functional, world.group_name
    shape, splits = (size * 2,), [2] * size
    x = values(rank, shape)
    kept = x.clone()
    [one, two] = operators.all_reduce_coalesced([x, x * 2], "sum", name)
    expected = {
        operators.all_reduce(x, "sum", name): total(size, shape),
        operators.all_gather_into_tensor(x, size, name): torch.cat(everyones(size, shape)),
        operators.reduce_scatter_tensor(x, "sum", size, name): (
            total(size, shape)[2 * rank : 2 * rank + 2]
        ),
        operators.all_to_all_single(x, splits, splits, name): torch.cat(
            [values(r, shape)[2 * rank : 2 * rank + 2] for r in range(size)]
        ),
        operators.broadcast(x, 0, name): values(0, shape),
        one: total(size, shape),
        two: 2 * total(size, shape),
    }
    for out, right in expected.items():
        assert torch.equal(operators.wait_tensor(out), right)
    assert torch.equal(x, kept)


@pytest.mark.at_length  # torch takes 5 s of a core to import what it makes of these operators
def test_functional_collectives_give_new_tensors(rank, size):
    from torch.distributed import _functional_collectives as funcol

    x = values(rank, (size * 2,))
    kept = x.clone()
    assert torch.equal(funcol.all_reduce(x, "sum", dist.group.WORLD), total(size, (size * 2,)))
    gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
    scatter_sum = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor
    gathered = gather(x, 0, dist.group.WORLD)
    assert torch.equal(gathered, torch.cat(everyones(size, (size * 2,))))
    mine = scatter_sum(x, "sum", 0, dist.group.WORLD)
    assert torch.equal(mine, total(size, (size * 2,))[2 * rank : 2 * rank + 2])
    splits = [2] * size
    swapped = funcol.all_to_all_single(x, splits, splits, dist.group.WORLD)
    expected = torch.cat([values(r, (size * 2,))[2 * rank : 2 * rank + 2] for r in range(size)])
    assert torch.equal(swapped, expected)
    assert torch.equal(funcol.broadcast(x, 0, dist.group.WORLD), values(0, (size * 2,)))
    several = funcol.all_reduce_coalesced([x, x * 2], "sum", dist.group.WORLD)
    assert torch.equal(several[1], 2 * total(size, (size * 2,)))
    assert torch.equal(x, kept)


def test_the_operator_that_gathers_into_a_tensor_reaches_us(rank, size, world):
    """inductor makes it of functional collectives; torch 2.13 takes it to no group in Python."""
    out = torch.empty(size * 7)
    gather = torch.ops._c10d_functional.all_gather_into_tensor_out
    done = gather(values(rank), size, world.group_name, out=out)
    torch.ops._c10d_functional.wait_tensor(done)
    assert torch.equal(out, torch.cat(everyones(size)))
