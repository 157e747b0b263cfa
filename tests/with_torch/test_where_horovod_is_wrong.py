"""What Horovod refuses, gets wrong or hangs at, and this library does not: a test per rule.

That ranks at rest burn no core is shown by test_data_loader_workers.py.
"""

import copy
import io
import itertools

import numpy as np
import pytest
import torch
from harness import run_ranks, run_script
from torch import nn
from training_models import copies, data, fit, models, weights, wrap

import ringcomm.torch as hvd
from ringcomm.collectives.message_patterns import chunks
from ringcomm.config import Settings
from ringcomm.transport.mpi import _segments


def test_an_unnamed_operation_after_join_does_not_deadlock():
    def body(rank):
        for _ in range(3 * rank):
            hvd.allreduce(torch.ones(1))
        hvd.join()
        return hvd.allreduce(torch.ones(1), op=hvd.Sum).item()

    assert run_ranks(3, body) == [3.0] * 3


def test_an_unnamed_operation_after_unequal_use_of_process_sets_does_not_deadlock():
    def body(rank):
        some = hvd.add_process_set([0])
        if rank == 0:
            hvd.allreduce(torch.ones(1), process_set=some)
            hvd.allgather(torch.ones(1), process_set=some)
        return hvd.allreduce(torch.ones(1), op=hvd.Sum).item(), len(hvd.allgather(torch.ones(1)))

    assert run_ranks(2, body) == [(2.0, 2)] * 2


@pytest.mark.parametrize(
    ("op", "expected"), [(hvd.Min, [2.0, -5.0]), (hvd.Max, [3.0, -4.0]), (hvd.Product, [6.0, 20.0])]
)
def test_a_joined_rank_does_not_count_in_min_max_and_product(op, expected):
    values = [[2.0, -4.0], [3.0, -5.0]]

    def body(rank):
        result = hvd.allreduce(torch.tensor(values[rank]), op=op).tolist() if rank < 2 else None
        hvd.join()
        return result

    assert run_ranks(3, body) == [expected, expected, None]


def test_the_gradient_of_a_sum_of_an_allreduce_is_not_refused():
    def body(rank):
        x = torch.ones(2, 3, requires_grad=True)
        hvd.allreduce(x).sum().backward()  # its gradient is an expanded number, not contiguous
        return x.grad.unique().tolist()

    assert run_ranks(2, body) == [[1.0]] * 2


def test_channels_last_models_are_not_refused():
    x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    replicas = copies(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), 3)

    def body(rank):
        model = replicas[rank]
        hvd.broadcast_parameters(model.state_dict())
        optimizer = wrap(model)
        optimizer.zero_grad()
        model(x[rank::2].contiguous(memory_format=torch.channels_last)).pow(2).mean().backward()
        assert model.weight.grad.is_contiguous(memory_format=torch.channels_last)
        optimizer.step()
        return weights(model)

    results = run_ranks(2, body)
    single = replicas[2]
    optimizer = torch.optim.SGD(single.parameters(), lr=0.05, momentum=0.9)
    single(x).pow(2).mean().backward()
    optimizer.step()
    for got, want in zip(results[0], weights(single), strict=True):
        assert torch.allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool])
def test_bfloat16_and_bool_are_reduced_gathered_and_sent(dtype):
    def body(rank):
        x = torch.tensor([1, rank]).to(dtype)
        moved = hvd.broadcast(x, 1), hvd.allgather(x), hvd.alltoall(x)
        reduced = hvd.allreduce(x, op=hvd.Max)
        assert all(each.dtype == dtype for each in (*moved, reduced))
        return reduced.tolist(), moved[0].tolist(), moved[1].tolist(), moved[2].tolist()

    first, second = run_ranks(2, body)
    assert first == ([1, 1], [1, 1], [1, 0, 1, 1], [1, 1])
    assert second == ([1, 1], [1, 1], [1, 0, 1, 1], [0, 1])


def test_the_mean_of_float16_does_not_overflow():
    def body(rank):
        x = torch.full((2,), 40000.0, dtype=torch.float16)
        return hvd.allreduce(x).tolist(), hvd.allreduce_(x.clone()).tolist()

    assert run_ranks(4, body) == [([40000.0] * 2, [40000.0] * 2)] * 4


def test_wrapping_keeps_the_state_of_an_optimizer_that_has_run():
    def body(rank):
        (model,) = models(1)
        plain = torch.optim.Adam(model.parameters(), lr=0.01)
        fit(model, plain, data(2, 1))
        state = copy.deepcopy(plain.state_dict())
        wrapped = hvd.DistributedOptimizer(plain, model.named_parameters())
        kept = wrapped.state_dict()
        assert kept["state"][0]["step"] == state["state"][0]["step"] == 2
        assert torch.equal(kept["state"][0]["exp_avg"], state["state"][0]["exp_avg"])

    run_ranks(1, body)


def test_a_wrapped_optimizer_can_be_pickled():
    def body(rank):
        (model,) = models(1)
        file = io.BytesIO()
        torch.save((model, wrap(model)), file)
        file.seek(0)
        twin, optimizer = torch.load(file, weights_only=False)
        fit(model, wrap_again(model), data(2, 1))
        fit(twin, optimizer, data(2, 1))
        assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(twin), strict=True))

    def wrap_again(model):
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    run_ranks(1, body)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_takes_set_to_none(set_to_none):
    def body(rank):
        (model,) = models(1)
        optimizer = wrap(model)
        fit(model, optimizer, data(1, 1))
        optimizer.zero_grad(set_to_none=set_to_none)
        grads = [p.grad for p in model.parameters()]
        assert all((g is None) if set_to_none else not g.any() for g in grads)

    run_ranks(2, body)


def test_broadcasting_an_optimizers_state_moves_no_weights():
    def body(rank):
        (model,) = models(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.5)
        before = weights(model)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))

    run_ranks(2, body)


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average])
def test_groups_do_not_drop_the_factors(op):
    def body(rank):
        xs = [torch.ones(2), torch.ones(3)]
        results = hvd.grouped_allreduce(xs, op=op, prescale_factor=0.5, postscale_factor=6.0)
        return [each.unique().tolist() for each in results]

    assert run_ranks(2, body) == [[[6.0 if op is hvd.Sum else 3.0]] * 2] * 2


@pytest.mark.parametrize("grouping", ["none", "num_groups", "groups"])
def test_groups_do_not_drop_the_gradient_predivide_factor(grouping):
    replicas = copies(nn.Linear(2, 1, bias=False), 2)

    def gradient(rank, factor):
        model = replicas[rank]
        how = {"num_groups": 1} if grouping == "num_groups" else {}
        how |= {"groups": [list(model.parameters())]} if grouping == "groups" else {}
        optimizer = wrap(model, gradient_predivide_factor=factor, **how)
        optimizer.zero_grad()
        model(torch.tensor([[3e38, 1e38]])).sum().backward()
        return model.weight.grad[0].tolist()

    def body(rank):
        return gradient(rank, 1.0), gradient(rank, 4.0)

    inf = float("inf")
    without, divided = [inf, pytest.approx(1e38)], [pytest.approx(3e38), pytest.approx(1e38)]
    assert (
        run_ranks(2, body) == [(without, divided)] * 2
    )  # 3e38 + 3e38 is more than a float32 holds


@pytest.mark.parametrize("grouping", ["num_groups", "groups", "sparse_as_dense", "sparse"])
def test_a_parameter_that_one_rank_does_not_use_does_not_deadlock(grouping):
    is_sparse = grouping in ("sparse", "sparse_as_dense")
    replicas = copies(nn.ModuleList([nn.Embedding(4, 2, sparse=is_sparse), nn.Embedding(4, 2)]), 2)

    def body(rank):
        model = replicas[rank]
        arguments = {
            "num_groups": {"num_groups": 1},
            "groups": {"groups": [list(model.parameters())]},
            "sparse_as_dense": {"sparse_as_dense": True},
            "sparse": {},
        }[grouping]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), **arguments
        )
        words = torch.tensor([1, 2])
        (model[0](words).sum() if rank == 0 else model[1](words).sum()).backward()
        optimizer.step()
        return [p.grad.to_dense()[:, 0].tolist() for p in model.parameters()]

    expected = [[0.0, 0.5, 0.5, 0.0]] * 2
    assert run_ranks(2, body) == [expected] * 2


def test_one_name_for_two_kinds_of_operation_is_an_error_and_does_not_stall():
    def body(rank):
        x = torch.ones(2)
        with pytest.raises(hvd.HorovodInternalError, match=r"rank 0 called allreduce\[x\], rank 1"):
            hvd.allreduce(x, name="x") if rank == 0 else hvd.broadcast(x, 0, name="x")
        return hvd.allreduce(x, op=hvd.Sum, name="x").tolist()

    assert run_ranks(2, body) == [[2.0, 2.0]] * 2


@pytest.mark.parametrize("form", ["state_dict", "named_parameters", "parameters", "list"])
def test_parameters_may_come_from_a_generator(form):
    def body(rank):
        model = nn.Linear(2, 2)
        with torch.no_grad():
            model.weight.fill_(rank)
            model.bias.fill_(-rank)
        source = list(model.parameters()) if form == "list" else getattr(model, form)()
        hvd.broadcast_parameters(source, root_rank=1)
        return model.weight.unique().tolist(), model.bias.unique().tolist()

    assert run_ranks(2, body) == [([1.0], [-1.0])] * 2


def test_a_mismatch_does_not_hang_by_default():
    assert 0 < Settings().timeout_s < float("inf")
    assert 0 < Settings().stall_warning_s < Settings().timeout_s


@pytest.mark.at_length
def test_shutdown_then_init_does_not_abort(tmp_path):
    text = """
import torch, ringcomm.torch as hvd
for _ in range(3):
    hvd.init()
    some = hvd.add_process_set([0])
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
    assert hvd.join() >= 0
    hvd.shutdown()
    assert not hvd.is_initialized()
print("done")
"""
    job = run_script(2, text, cwd=tmp_path)
    assert job.code == 0, job.output
    assert job.output.count("done") == 2


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("count", [(1 << 31) - 1, 1 << 31, (1 << 31) + 5, 5 << 31])
def test_counts_beyond_2_31_elements_do_not_overflow(count, size):
    """tests/mpi/test_more_than_2_gib.py reduces as many; counts alone need no memory."""
    x = np.broadcast_to(np.zeros(1, np.uint8), (count,))
    messages = [part.nbytes for part in _segments(x)]
    assert sum(messages) == count
    assert all(0 < nbytes < 1 << 31 for nbytes in messages)  # MPI counts in C ints
    parts = chunks(count, size)
    assert parts[0].start == 0
    assert parts[-1].stop == count
    assert all(a.stop == b.start for a, b in itertools.pairwise(parts))
