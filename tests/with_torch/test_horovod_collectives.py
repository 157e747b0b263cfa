"""The collectives under Horovod's names: signatures, defaults, semantics."""

import importlib
import inspect
import itertools
import math
import re
import threading

import pytest
import torch
from harness import at_length, run_ranks
from sample_values import whole_numbers
from undocumented_names import undocumented

import ringcomm as rc
import ringcomm.torch as hvd

# What the engine does by either wire is tested there.
pytestmark = at_length(pytest.mark.usefixtures("wire"), [])

SIZES = pytest.mark.parametrize("size", at_length([1, 2, 3, 4], [3]))
DTYPES = [torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16]
DTYPES += [torch.float32, torch.float64]


def whole(rank, *shape, dtype=torch.float32):
    """Return a rank's integers from 0 to 6: sums of them are exact in every dtype."""
    drawn = whole_numbers(rank, math.prod(shape), "int64") % 7
    return torch.from_numpy(drawn).reshape(shape).to(dtype)


def total(size, *shape):
    return sum(whole(r, *shape, dtype=torch.float64) for r in range(size))


# --- reductions ---------------------------------------------------------------------------------
@SIZES
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_average_is_the_default_and_sum_an_option(size, dtype, dims):
    shape = (5,) * dims

    def body(rank):
        x = whole(rank, *shape, dtype=dtype)
        before = x.clone()
        mean, sums = hvd.allreduce(x), hvd.allreduce(x, op=hvd.Sum)
        assert torch.equal(x, before)
        assert mean.dtype == sums.dtype == dtype
        expected = total(size, *shape)
        assert torch.equal(sums, expected.to(dtype))
        exact = expected / size if dtype.is_floating_point else (expected / size).trunc()
        assert torch.allclose(mean.double(), exact.to(dtype).double(), rtol=1e-6)

    run_ranks(size, body)


@SIZES
def test_the_older_average_argument_still_works(size):
    def body(rank):
        x = whole(rank, 4)
        with pytest.warns(DeprecationWarning, match="op="):
            assert torch.equal(hvd.allreduce(x, average=False), total(size, 4).float())
        with pytest.warns(DeprecationWarning, match="op="):
            assert torch.allclose(hvd.allreduce(x, average=True), (total(size, 4) / size).float())
        with pytest.raises(ValueError, match="not both"):
            hvd.allreduce(x, average=True, op=hvd.Sum)

    run_ranks(size, body)


@SIZES
@pytest.mark.parametrize(("op", "fold"), [(hvd.Min, torch.amin), (hvd.Max, torch.amax)])
def test_min_and_max(size, op, fold):
    def body(rank):
        expected = fold(torch.stack([whole(r, 6) for r in range(size)]), 0)
        assert torch.equal(hvd.allreduce(whole(rank, 6), op=op), expected)

    run_ranks(size, body)


@SIZES
def test_in_place_forms_overwrite_and_return_their_argument(size):
    def body(rank):
        x, y = whole(rank, 4), whole(rank, 3)
        assert hvd.allreduce_(x, op=hvd.Sum) is x
        handle = hvd.allreduce_async_(y, op=hvd.Sum)
        assert hvd.synchronize(handle) is y
        assert torch.equal(x, total(size, 4).float())
        assert torch.equal(y, total(size, 3).float())

    run_ranks(size, body)


@SIZES
def test_grouped_forms_reduce_each_tensor(size):
    def body(rank):
        xs = [whole(rank, n, dtype=d) for n, d in itertools.product((0, 3), DTYPES)]
        results = hvd.grouped_allreduce(xs, op=hvd.Sum)
        for x, result in zip(xs, results, strict=True):
            assert torch.equal(result, total(size, *x.shape).to(x.dtype))
        copies = [x.clone() for x in xs]
        handle = hvd.grouped_allreduce_async_(copies, op=hvd.Sum, name="g")
        assert all(a is b for a, b in zip(hvd.synchronize(handle), copies, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(copies, results, strict=True))

    run_ranks(size, body)


@SIZES
@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.float16])
def test_factors_scale_before_and_after(size, dtype):
    def body(rank):
        x = whole(rank, 9, dtype=dtype) + 1
        result = hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=1.5)
        parts = [(whole(r, 9, dtype=dtype) + 1).double() * 0.5 for r in range(size)]
        if not dtype.is_floating_point:
            parts = [part.trunc() for part in parts]
        expected = sum(parts) * 1.5
        expected = expected if dtype.is_floating_point else expected.trunc()
        assert torch.allclose(result.double(), expected.to(dtype).double(), rtol=1e-3)

    run_ranks(size, body)


@pytest.mark.parametrize("factor", ["prescale_factor", "postscale_factor"])
@pytest.mark.parametrize("value", [True, [1.0]])
def test_a_factor_is_a_number_in_place_too(factor, value):
    def body(rank):
        with pytest.raises(TypeError, match=f"must be numbers, not {re.escape(repr(value))}"):
            hvd.allreduce_(torch.ones(2), **{factor: value})
        return hvd.allreduce_(torch.ones(1), op=hvd.Sum).item()

    assert run_ranks(2, body) == [2, 2]


def test_wrong_arguments_name_the_function_that_was_called():
    def body(rank):
        x = torch.ones(2)
        for module, name in ((hvd, "allreduce_"), (hvd, "allreduce_async_"),
                             (rc, "reduce_scatter_"), (rc, "gather_async")):  # fmt: skip
            with pytest.raises(TypeError, match=rf"^{name}\(\): .*'bogus'"):
                getattr(module, name)(x, bogus=1)
        with pytest.raises(TypeError, match="op must be"):
            rc.reduce_scatter_(x, "sum")

    run_ranks(2, body)


@SIZES
@pytest.mark.parametrize("compression", [hvd.Compression.fp16, hvd.Compression.bf16])
def test_compression_sends_16_bits_and_returns_the_dtype(size, compression):
    def body(rank):
        x = whole(rank, 5)
        result = hvd.allreduce(x, op=hvd.Sum, compression=compression)
        assert result.dtype == torch.float32
        assert torch.equal(result, total(size, 5).float())
        n = torch.tensor([rank])
        assert hvd.allreduce(n, op=hvd.Sum, compression=compression).item() == sum(range(size))

    run_ranks(size, body)


@SIZES
def test_reducescatter_gives_the_first_ranks_one_row_more(size):
    def body(rank):
        x = whole(rank, size + 1, 2)
        rows = hvd.reducescatter(x, op=hvd.Sum)
        first = rank + min(rank, 1)
        n = 2 if rank == 0 else 1
        assert torch.equal(rows, total(size, size + 1, 2)[first : first + n].float())
        assert torch.allclose(hvd.reducescatter(x), rows / size)
        several = hvd.grouped_reducescatter([x, x], op=hvd.Sum)
        assert all(torch.equal(each, rows) for each in several)

    run_ranks(size, body)


@SIZES
@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average])
def test_sparse_tensors_are_added_up(size, op):
    def body(rank):
        x = torch.sparse_coo_tensor(
            [[rank, 0], [1, 2]], [1.0, 2.0], (size, 3), check_invariants=True
        )
        result = hvd.synchronize(hvd.sparse_allreduce_async(x, name="s", op=op))
        expected = sum(
            torch.sparse_coo_tensor(
                [[r, 0], [1, 2]], [1.0, 2.0], (size, 3), check_invariants=True
            ).to_dense()
            for r in range(size)
        )
        assert torch.allclose(result.to_dense(), expected / (size if op is hvd.Average else 1))

    run_ranks(size, body)


@pytest.mark.parametrize("sparse_rank", [0, 1])
def test_sparse_and_dense_under_one_name_are_an_error_that_says_so(sparse_rank):
    def body(rank):
        is_sparse = rank == sparse_rank
        start = hvd.sparse_allreduce_async if is_sparse else hvd.allreduce_async
        x = torch.eye(2).to_sparse() if is_sparse else torch.eye(2)
        with pytest.raises(rc.MismatchError) as caught:
            hvd.synchronize(start(x, name="table"))
        return str(caught.value), hvd.allreduce(torch.ones(1), op=hvd.Sum).item()

    (text, total), other = run_ranks(2, body)
    assert other == (text, total)
    assert total == 2
    assert f"rank {sparse_rank} called sparse_allreduce[table]" in text
    assert "One has a sparse tensor, the other a dense one" in text


# --- movements ----------------------------------------------------------------------------------
@SIZES
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool])
def test_allgather_takes_rows_of_any_number(size, dtype):
    def body(rank):
        expected = torch.cat([whole(r, r + 1, 2, dtype=dtype) for r in range(size)])
        assert torch.equal(hvd.allgather(whole(rank, rank + 1, 2, dtype=dtype)), expected)
        several = hvd.grouped_allgather([whole(rank, rank + 1, 2, dtype=dtype)] * 2)
        assert all(torch.equal(each, expected) for each in several)

    run_ranks(size, body)


@SIZES
def test_broadcast_from_every_root(size):
    def body(rank):
        for root in range(size):
            x = whole(rank, 3)
            assert torch.equal(hvd.broadcast(x, root), whole(root, 3))
            assert torch.equal(x, whole(rank, 3))
            assert hvd.broadcast_(x, root) is x
            assert torch.equal(x, whole(root, 3))

    run_ranks(size, body)


@SIZES
@pytest.mark.parametrize("form", [list, torch.tensor])
def test_alltoall_tells_what_came_where_splits_are_given(size, form):
    def body(rank):
        counts = [rank + other for other in range(size)]  # as many as the other one sends
        rows, received = hvd.alltoall(torch.full((sum(counts), 2), rank), splits=form(counts))
        assert received.dtype == torch.int32
        assert received.tolist() == counts
        assert torch.equal(rows[:, 0], torch.arange(size).repeat_interleave(received))
        mine = torch.arange(size) + 10 * rank
        even, received = hvd.synchronize(hvd.alltoall_async(mine))
        assert even.tolist() == [10 * r + rank for r in range(size)]
        assert received.tolist() == [1] * size
        assert torch.equal(hvd.alltoall(mine), even)

    run_ranks(size, body)


@SIZES
def test_objects(size):
    def body(rank):
        obj = {"rank": rank}
        assert hvd.broadcast_object(obj if rank == 0 else None, 0) == {"rank": 0}
        assert hvd.allgather_object(obj) == [{"rank": r} for r in range(size)]

    run_ranks(size, body)


# --- matching -----------------------------------------------------------------------------------
@SIZES
def test_names_match_whatever_the_order(size):
    def body(rank):
        names = [f"n{k}" for k in range(8)]
        order = names[rank:] + names[:rank]
        handles = {
            name: hvd.allreduce_async(torch.tensor([int(name[1:])]), name=name, op=hvd.Sum)
            for name in order
        }
        return [hvd.synchronize(handles[name]).item() for name in names]

    assert run_ranks(size, body) == [[k * size for k in range(8)]] * size


@SIZES
def test_without_names_operations_are_matched_among_those_of_their_kind(size):
    def body(rank):
        starts = [
            lambda: hvd.allreduce_async(torch.tensor([1.0]), op=hvd.Sum),
            lambda: hvd.allgather_async(torch.tensor([rank])),
            lambda: hvd.broadcast_async(torch.tensor([rank]), size - 1),
            lambda: hvd.alltoall_async(torch.full((size,), rank)),
            lambda: hvd.reducescatter_async(torch.ones(size), op=hvd.Sum),
        ]
        order = [(k + rank) % len(starts) for k in range(len(starts))]
        handles = {k: starts[k]() for k in order}
        results = [hvd.synchronize(handles[k]) for k in range(len(starts))]
        results = [(r[0] if isinstance(r, tuple) else r).tolist() for r in results]
        everyone = list(range(size))
        assert results == [[size], everyone, [size - 1], everyone, [size]]

    run_ranks(size, body)


@pytest.mark.parametrize("name", [None, "made again"])
@pytest.mark.parametrize(
    "kind", ["allreduce", "reducescatter", "allgather", "broadcast", "alltoall"]
)
def test_ranks_may_make_a_call_in_different_forms_each_time_it_is_made_again(kind, name):
    """Blocking calls take the short way, unless they have a gradient or splits."""
    size = 3

    def body(rank):
        results = []
        for turn in range(9):
            x, named = whole(rank + turn, 6), {"name": name and f"{name} {kind}"}
            how = (turn + rank) % size if turn > 2 else 1
            x.requires_grad_(how == 0 and turn > 4)
            args = (turn % 2,) if kind == "broadcast" else ()
            form = getattr(hvd, kind if how else f"{kind}_async")
            if kind == "alltoall" and how == 2:
                args = ([2, 2, 2],)
            result = form(x, *args, **named)
            result = result if how else hvd.synchronize(result)
            results.append((result[0] if isinstance(result, tuple) else result).detach())
        for turn, result in enumerate(results):  # no call has written to the result of another
            xs = [whole(r + turn, 6) for r in range(size)]
            rows = slice(2 * rank, 2 * rank + 2)
            wanted = {
                "allreduce": sum(xs) / size,
                "reducescatter": (sum(xs) / size)[rows],
                "allgather": torch.cat(xs),
                "broadcast": xs[turn % 2],
                "alltoall": torch.cat([x[rows] for x in xs]),
            }[kind]
            torch.testing.assert_close(result, wanted)

    run_ranks(size, body)


def test_a_handle_is_not_done_before_all_ranks_have_come():
    asked = threading.Event()

    def body(rank):
        hvd.init()
        if rank == 1:
            assert asked.wait(120)
        handle = hvd.allreduce_async(torch.ones(2), name="x")
        if rank == 0:
            assert not hvd.poll(handle)
            asked.set()
        assert hvd.synchronize(handle).tolist() == [1.0, 1.0]
        assert hvd.poll(handle)
        return hvd.synchronize(handle).tolist()

    assert run_ranks(2, body) == [[1.0, 1.0]] * 2


def test_a_name_that_is_pending_is_refused_where_it_is_used_again():
    first = threading.Event()

    def body(rank):
        hvd.init()
        if rank == 1:
            assert first.wait(120)
            return hvd.synchronize(hvd.allreduce_async(torch.ones(2), name="x")).tolist()
        handle = hvd.allreduce_async(torch.ones(2), name="x")
        with pytest.raises(ValueError, match="'x' is pending"):
            hvd.allreduce_async(torch.ones(2), name="x")
        first.set()
        return hvd.synchronize(handle).tolist()

    assert run_ranks(2, body) == [[1.0, 1.0]] * 2


def test_a_barrier_may_overtake_named_operations():
    def body(rank):
        handle = hvd.allreduce_async(torch.ones(2), name="x") if rank == 0 else None
        hvd.barrier()
        handle = handle or hvd.allreduce_async(torch.ones(2), name="x")
        return hvd.synchronize(handle).tolist()

    assert run_ranks(2, body) == [[1.0, 1.0]] * 2


MISTAKES = {
    "shapes": lambda rank: hvd.allreduce(torch.ones(2 + rank), name="m"),
    "dimensions": lambda rank: hvd.allreduce(torch.ones((2,) * (rank + 1)), name="m"),
    "dtypes": lambda rank: hvd.allreduce(torch.ones(2).to(DTYPES[rank - 2]), name="m"),
    "operators": lambda rank: hvd.allreduce(torch.ones(2), op=[hvd.Sum, hvd.Max][rank], name="m"),
    "factors": lambda rank: hvd.allreduce(torch.ones(2), prescale_factor=1.0 + rank, name="m"),
    "roots": lambda rank: hvd.broadcast(torch.ones(2), rank, name="m"),
    "widths": lambda rank: hvd.allgather(torch.ones(2, 1 + rank), name="m"),
    "kinds": lambda rank: [hvd.allreduce, hvd.allgather][rank](torch.ones(2), name="m"),
    "numbers": lambda rank: hvd.grouped_allreduce([torch.ones(2)] * (rank + 1), name="m"),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mismatch_is_the_same_error_on_every_rank_and_the_next_operation_works(mistake):
    def body(rank):
        with pytest.raises(hvd.HorovodInternalError) as caught:
            mistake(rank)
        assert isinstance(caught.value, RuntimeError)
        return str(caught.value), hvd.allreduce(torch.ones(1), op=hvd.Sum, name="after").item()

    (text, after), other = run_ranks(2, body)
    assert other == (text, after)
    assert after == 2.0


@pytest.mark.parametrize("splits", [[1], [1, 5], [-1, 4], [1.5, 1.5]])
def test_wrong_splits_are_refused(splits):
    def body(rank):
        with pytest.raises((ValueError, TypeError)):
            hvd.alltoall(torch.ones(3), splits=splits)
        with pytest.raises(hvd.HorovodInternalError, match="rank 1 could not take part"):
            hvd.alltoall(torch.ones(3), splits=[1, 2] if rank == 0 else splits)
        return hvd.alltoall(torch.ones(2)).tolist()

    assert run_ranks(2, body) == [[1.0, 1.0]] * 2


@pytest.mark.parametrize(
    ("splits", "kind"), [([1.5, 1.5], TypeError), (torch.tensor([1.0, 2.0]), ValueError)]
)
def test_splits_that_are_no_integers_are_told_as_such(splits, kind):
    def body(rank):
        with pytest.raises(kind, match=r"splits=.* must be 2 integers, one per rank"):
            hvd.alltoall(torch.ones(3), splits=splits)
        return hvd.alltoall(torch.ones(2)).tolist()

    assert run_ranks(2, body) == [[1.0, 1.0]] * 2


# --- gradients ----------------------------------------------------------------------------------
def gradient(f, x):
    x = x.clone().requires_grad_()
    f(x).sum().backward()
    return x.grad


@SIZES
def test_gradients_of_reductions(size):
    def body(rank):
        x = whole(rank, 4, 2)
        ones = torch.ones(4, 2)
        assert torch.equal(gradient(lambda x: hvd.allreduce(x, op=hvd.Sum), x), ones * size)
        assert torch.allclose(gradient(hvd.allreduce, x), ones)
        scaled = gradient(lambda x: hvd.allreduce(x, prescale_factor=2, postscale_factor=3), x)
        assert torch.allclose(scaled, ones * 6)
        several = gradient(lambda x: sum(hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum)), x)
        assert torch.equal(several, ones * 3 * size)
        assert torch.equal(gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum), x), ones * size)
        assert torch.allclose(gradient(hvd.reducescatter, x), ones)

    run_ranks(size, body)


@SIZES
def test_gradients_of_movements(size):
    def body(rank):
        x = whole(rank, rank + 1, 2)
        ones = torch.ones_like(x)
        weights = torch.arange(float(sum(range(size + 1)))).unsqueeze(1)
        first = sum(range(rank + 1))
        gathered = gradient(lambda x: hvd.allgather(x) * weights, x)
        assert torch.allclose(gathered, ones * weights[first : first + rank + 1])
        same = whole(rank, 3)
        expected = torch.full((3,), 1.0 if rank == size - 1 else 0.0)
        assert torch.allclose(gradient(lambda x: hvd.broadcast(x, size - 1), same), expected)
        rows = whole(rank, size, 2)
        assert torch.equal(
            gradient(lambda x: hvd.alltoall(x) * 3, rows), torch.full((size, 2), 3.0)
        )

    run_ranks(size, body)


def scaled(y, factor):
    """Return y, of which gradients of any order are multiplied by the factor."""
    return y * factor + (y * (1 - factor)).detach()


DIFFERENTIATED = {  # a collective, and what each rank gets of all ranks' tensors
    "allreduce": (lambda x: hvd.allreduce(x, op=hvd.Sum), lambda xs: [sum(xs)] * len(xs)),
    "grouped_allreduce": (
        lambda x: hvd.grouped_allreduce([x], prescale_factor=3)[0],
        lambda xs: [sum(xs) * 3 / len(xs)] * len(xs),
    ),
    "allgather": (hvd.allgather, lambda xs: [scaled(torch.cat(xs), 1 / len(xs))] * len(xs)),
    "grouped_allgather": (
        lambda x: hvd.grouped_allgather([x])[0],
        lambda xs: [scaled(torch.cat(xs), 1 / len(xs))] * len(xs),
    ),
    "broadcast": (lambda x: hvd.broadcast(x, 1), lambda xs: [scaled(xs[1], 1 / len(xs))] * len(xs)),
    "alltoall": (
        hvd.alltoall,
        lambda xs: [torch.cat([x.chunk(len(xs))[r] for x in xs]) for r in range(len(xs))],
    ),
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradients_of_gradients_are_those_of_one_process(size, name):
    collective, of_all = DIFFERENTIATED[name]
    ones = torch.ones(size, 2, dtype=torch.float64)

    def penalty(gradients):
        return sum(each.square().sum() for each in gradients)

    def body(rank):
        x = (ones + rank).requires_grad_()
        loss = collective(x).pow(3).sum() * (rank + 1)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        penalty([gradient]).backward()
        return x.grad

    xs = [(ones + rank).requires_grad_() for rank in range(size)]
    loss = sum(y.pow(3).sum() * (rank + 1) for rank, y in enumerate(of_all(xs)))
    gradients = torch.autograd.grad(loss, xs, create_graph=True, materialize_grads=True)
    penalty(gradients).backward()
    for got, x in zip(run_ranks(size, body), xs, strict=True):
        assert torch.allclose(got, torch.zeros_like(x) if x.grad is None else x.grad)


@pytest.mark.parametrize("op", [hvd.Min, hvd.Max, hvd.Product, hvd.Adasum], ids=repr)
def test_an_operator_without_a_gradient_says_so_in_backward(op):
    def body(rank):
        x = torch.ones(2, requires_grad=True)
        ys = [hvd.allreduce(x, op=op), *hvd.grouped_allreduce([x], op=op)]
        if op is not hvd.Adasum:
            ys += [hvd.reducescatter(x, op=op), *hvd.grouped_reducescatter([x], op=op)]
        for y in ys:
            with pytest.raises(ValueError, match=f"not by {op}: pass tensor.detach()"):
                y.sum().backward()
        assert x.grad is None

    run_ranks(2, body)


def test_no_graph_is_kept_where_none_is_wanted():
    def body(rank):
        x = torch.ones(3, requires_grad=True)
        with torch.no_grad():
            assert not hvd.allreduce(x).requires_grad
        assert not hvd.allreduce(torch.ones(3)).requires_grad
        assert hvd.allreduce(x).requires_grad

    run_ranks(2, body)


# --- join ---------------------------------------------------------------------------------------
def test_operations_without_names_go_on_after_a_join():
    def body(rank):
        for k in range(rank + 1):
            alive = 3 - k
            assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [alive] * 2
            assert len(hvd.allgather(torch.ones(1))) == alive
        assert hvd.join() == 2
        return hvd.allreduce(torch.ones(1), op=hvd.Sum).item(), len(hvd.allgather(torch.ones(1)))

    assert run_ranks(3, body) == [(3, 3)] * 3


@pytest.mark.parametrize("optimizer_of", [torch.optim.SGD, torch.optim.Adam])
def test_the_last_to_join_brings_the_others_up_to_date(optimizer_of):
    """Rank 1 has most batches, rank 2 none: they have weights of earlier steps until then."""

    def body(rank):
        model = torch.nn.Linear(3, 1)
        torch.nn.init.ones_(model.weight)
        torch.nn.init.zeros_(model.bias)
        optimizer = optimizer_of(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

        def train(n):
            for _ in range(n):
                optimizer.zero_grad()
                model(torch.ones(2, 3)).pow(2).mean().backward()
                optimizer.step()

        train([2, 4, 0][rank])
        last = hvd.join()
        old = model.weight.tolist()
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        hvd.broadcast_optimizer_state(optimizer, root_rank=last)
        updated = model.weight.tolist()
        train(2)
        return last, old, updated, model.weight.tolist()

    lasts, olds, updated, trained = zip(*run_ranks(3, body), strict=True)
    assert lasts == (1, 1, 1)
    assert olds[0] != olds[1]
    assert olds[2] != olds[1]
    assert updated == (olds[1],) * 3
    assert trained == (trained[0],) * 3


# --- Adasum -------------------------------------------------------------------------------------
def combined(vectors):
    """Adasum by its definition, in float64."""
    if len(vectors) == 1:
        return vectors[0]
    paired = 1 << (len(vectors).bit_length() - 1)
    head = list(vectors[:paired])
    for k, extra in enumerate(vectors[paired:]):
        head[k] = pair(head[k], extra)
    while len(head) > 1:
        head = [pair(a, b) for a, b in zip(head[::2], head[1::2], strict=True)]
    return head[0]


def pair(a, b):
    dot = (a * b).sum()
    share = [1 - dot / (2 * (v * v).sum()) if v.any() else 1.0 for v in (a, b)]
    return a * share[0] + b * share[1]


@SIZES
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)],
)
def test_adasum_by_its_definition(size, dtype, tolerance):
    vectors = [torch.randn(50, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    vectors = [v.to(dtype) for v in vectors]

    def body(rank):
        x = vectors[rank].clone()
        result = hvd.allreduce(x, op=hvd.Adasum)
        assert hvd.allreduce_(x, op=hvd.Adasum) is x
        assert torch.equal(x, result)
        return result

    results = run_ranks(size, body)
    expected = combined([v.double() for v in vectors])
    assert torch.allclose(results[0].double(), expected, rtol=tolerance, atol=tolerance)
    assert all(torch.equal(each, results[0]) for each in results)


def test_adasum_is_the_sum_of_orthogonal_and_the_mean_of_equal_vectors():
    def body(rank):
        apart = torch.zeros(2)
        apart[rank] = 3.0
        same = torch.tensor([1.0, 2.0])
        several = hvd.grouped_allreduce([apart, same], op=hvd.Adasum)
        return [each.tolist() for each in several]

    assert run_ranks(2, body) == [[[3.0, 3.0], [1.0, 2.0]]] * 2


def test_reducescatter_takes_no_adasum_and_says_so_as_horovod_does():
    def body(rank):
        for f in (hvd.reducescatter, lambda x, **how: hvd.grouped_reducescatter([x], **how)):
            with pytest.raises(hvd.HorovodInternalError, match="not Adasum"):
                f(torch.ones(4), op=hvd.Adasum)

    run_ranks(1, body)


def test_adasum_takes_floats_only():
    def body(rank):
        with pytest.raises(TypeError, match="takes floats"):
            hvd.allreduce(torch.ones(2, dtype=torch.int32), op=hvd.Adasum)

    run_ranks(1, body)


# --- mistakes that a user makes -----------------------------------------------------------------
def test_what_is_no_tensor_is_refused_by_name():
    def body(rank):
        hvd.init()
        for wrong in ([1.0], None, "x"):
            with pytest.raises(TypeError, match="take torch tensors, not"):
                hvd.allreduce(wrong)

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["ab", "ac"], r"rank 1 has other parameters than rank 0: it has \['c'\] besides"),
        (["ab", "a"], r"it lacks \['b'\]"),
        (["ab", "ba"], "another order"),
    ],
)
def test_parameters_of_other_names_are_told_at_once(names, message):
    def body(rank):
        params = {name: torch.ones(2) for name in names[rank]}
        with pytest.raises(rc.MismatchError, match=message):
            hvd.broadcast_parameters(params)
        hvd.broadcast_parameters({"a": torch.ones(1)})

    run_ranks(2, body)


@pytest.mark.parametrize("wrong", [5, None, "weights", torch.ones(2)], ids=repr)
def test_what_holds_no_parameters_is_told_on_every_rank(wrong):
    def body(rank):
        with pytest.raises(ValueError, match=r"params is model.state_dict\(\), .*, not"):
            hvd.broadcast_parameters(wrong)
        with pytest.raises((ValueError, rc.MismatchError), match=r"params is model.state_dict\(\)"):
            hvd.broadcast_parameters({"a": torch.ones(2)} if rank == 0 else wrong)
        x = torch.full((2,), float(rank))
        hvd.broadcast_parameters({"a": x}, root_rank=1)
        return x.tolist()

    assert run_ranks(2, body) == [[1.0, 1.0]] * 2


def test_parameters_are_not_broadcast_while_a_rank_is_in_join():
    def body(rank):
        hvd.add_process_set([0])
        if rank == 0:
            with pytest.raises(rc.MismatchError, match=r"ranks \[1\] are in join\(\)"):
                hvd.broadcast_parameters({"a": torch.ones(2)})
        return hvd.join()

    run_ranks(2, body)


@pytest.mark.parametrize("face", ["", ".elastic", ".ps"])
def test_every_public_name_has_a_docstring(face):
    assert undocumented(importlib.import_module(f"ringcomm.torch{face}")) == []


def test_help_of_each_operation_names_all_its_arguments():
    kinds = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter")
    others = {"broadcast_parameters", "broadcast_optimizer_state"}
    names = [name for name in hvd.__all__ if any(kind in name for kind in kinds)]
    assert len(names) == 27
    for name in {*names} - others:
        function = getattr(hvd, name)
        arguments = inspect.getdoc(function).partition("\nArgs:")[2]
        assert function.__name__ == name
        assert "above" not in function.__doc__
        is_started = "async" in name and "sparse" not in name
        assert ("synchronize() at once" in function.__doc__) == is_started
        for parameter in inspect.signature(function).parameters:
            assert f"\n    {parameter}: " in arguments, (name, parameter)
