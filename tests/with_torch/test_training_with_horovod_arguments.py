"""DistributedOptimizer with each of Horovod's arguments ends where one process does."""

import copy
import io

import pytest
import torch
from harness import run_ranks
from torch import nn
from torch.nn.functional import mse_loss
from training_models import (
    SIZES,
    assert_close,
    assert_equals_one_process,
    copies,
    data,
    fit,
    models,
    seeded,
    sgd,
    share,
    weights,
    wrap,
)

import ringcomm.torch as hvd


def train(model, optimizer, batches):
    fit(model, optimizer, batches)


# --- arguments that change no result ------------------------------------------------------------
@SIZES
@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_the_predivide_factor_changes_no_result(size, factor):
    assert_equals_one_process(size, train, gradient_predivide_factor=factor)


@SIZES
@pytest.mark.parametrize("num_groups", [1, 2, 100])
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_groups_by_number_change_no_result(size, num_groups, factor):
    assert_equals_one_process(size, train, num_groups=num_groups, gradient_predivide_factor=factor)


@SIZES
def test_groups_by_list_travel_as_one_message_each(size):
    replicas = models(size)
    batches = data(4, size)

    def body(rank):
        model = replicas[rank]
        first, *others = list(model.parameters())
        optimizer = wrap(model, groups=[[first, others[-1]], others[1:2]])
        fit(model, optimizer, share(batches, rank, size))
        places = {p: i for i, p in enumerate(model.parameters())}
        buckets = [[m.index for m in b.members] for b in optimizer._reducer.plan.buckets]
        wanted = [places[first], places[others[-1]]]
        assert sorted(wanted) in [sorted(each) for each in buckets]
        assert [places[others[1]]] in buckets
        return weights(model)

    (single,) = models(1)
    fit(single, sgd(single.parameters()), batches)
    assert_close(run_ranks(size, body), weights(single), 1e-12)


@SIZES
def test_groups_with_a_parameter_that_one_rank_does_not_use(size):
    def make():
        return seeded(lambda: nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)}).double())

    x = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)

    def loss(model, rank):
        used = model["a"](x).pow(2).sum()
        return used + model["b"](x).sum() if rank == 0 else used

    single, *replicas = copies(make(), size + 1)  # threads share one generator

    def body(rank):
        model = replicas[rank]
        optimizer = wrap(model, groups=[list(model.parameters())], gradient_predivide_factor=2.0)
        for _ in range(3):
            optimizer.zero_grad()
            loss(model, rank).backward()
            optimizer.step()
        return weights(model)

    optimizer = sgd(single.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        (sum(loss(single, rank) for rank in range(size)) / size).backward()
        optimizer.step()
    assert_close(run_ranks(size, body), weights(single), 1e-12)


@SIZES
@pytest.mark.parametrize("predivide", [1.0, 2.0])
def test_sparse_gradients_made_dense(size, predivide):
    words = torch.tensor([[0, 1], [3, 3], [2, 0], [1, 4], [5, 0], [2, 2]])

    def make():
        return seeded(lambda: nn.Embedding(7, 3, sparse=True).double())

    def step(model, optimizer, part):
        optimizer.zero_grad()
        model(part).pow(2).mean().backward()
        optimizer.step()

    single, *replicas = copies(make(), size + 1)

    def body(rank):
        model = replicas[rank]
        optimizer = wrap(model, sparse_as_dense=True, gradient_predivide_factor=predivide)
        for _ in range(3):
            step(model, optimizer, words[rank::size])
            assert model.weight.grad.layout is torch.sparse_coo
        return weights(model)

    single.sparse = False
    optimizer = sgd(single.parameters())
    for _ in range(3):
        step(single, optimizer, words)
    assert_close(run_ranks(size, body), weights(single), 1e-12)


def clip_as_horovods_scripts(model, optimizer):
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 9.0)
    with optimizer.skip_synchronize():
        optimizer.step()


def clip_after_backward(model, optimizer):
    optimizer.clip_grad_norm_(9.0)
    optimizer.step()


@pytest.mark.parametrize(
    ("members", "clip_and_step", "how"),
    [
        ([0, 1], clip_after_backward, {"compression": hvd.Compression.bf16}),
        ([0, 2], clip_as_horovods_scripts, {"num_groups": 1}),
    ],
    ids=["compressed", "of a process set"],
)
def test_sparse_gradients_made_dense_come_back_to_sparse_adam(members, clip_and_step, how):
    generator = torch.Generator().manual_seed(4)
    shape = (3, 2, 2, 5)  # steps, passes, ranks, words
    words = torch.randint(0, 23, shape, generator=generator)
    factors = torch.randint(1, 9, shape, generator=generator)  # means of them are exact in 16 bits
    factors[1, :, 1] = 0  # rank 1 has no gradient in this step
    single, *replicas = copies(seeded(lambda: nn.Embedding(23, 4, sparse=True)).double(), 4)

    def adam(parameters):
        return torch.optim.SparseAdam(list(parameters), lr=0.1)

    def body(rank):
        hvd.init()
        of_two = len(members) == hvd.size()
        some = hvd.global_process_set if of_two else hvd.add_process_set(members)
        model, mine = replicas[rank], some.rank()
        optimizer = wrap(
            model, adam, sparse_as_dense=True, backward_passes_per_step=2, process_set=some, **how
        )
        for step in range(3 if some.included() else 0):
            optimizer.zero_grad()
            for part in range(2 if factors[step, :, mine].any() else 0):
                rows = model(words[step, part, mine])
                (rows * factors[step, part, mine, :, None]).sum().backward()
            clip_and_step(model, optimizer)
            assert model.weight.grad.is_sparse
        return weights(model)

    optimizer = adam(single.parameters())
    for step in range(3):
        optimizer.zero_grad()
        there = factors[step].nonzero(as_tuple=True)
        (single(words[step][there]) * factors[step][there][:, None] / 2).sum().backward()
        gradient = single.weight.grad.coalesce()
        gradient.values().mul_((9.0 / (gradient.values().norm() + 1e-6)).clamp(max=1.0))
        single.weight.grad = gradient
        optimizer.step()
    results = run_ranks(max(members) + 1, body)
    assert_close([results[r] for r in members], weights(single), 1e-12)


@SIZES
@pytest.mark.parametrize("compression", [hvd.Compression.fp16, hvd.Compression.bf16])
def test_compressed_gradients_are_rounded_once_on_each_way(size, compression):
    def body(rank):
        model = seeded(lambda: nn.Linear(4, 3))
        optimizer = wrap(model, compression=compression)
        x = torch.arange(8.0).reshape(2, 4) + rank
        for _ in range(2):
            optimizer.zero_grad()
            model(x).sum().backward()
        return model.weight.grad.clone()

    wire = compression.wire
    columns = [(torch.arange(8.0).reshape(2, 4) + rank).sum(0) for rank in range(size)]
    exact = sum(c.to(wire).double() for c in columns) / size
    expected = exact.to(wire).float().expand(3, 4)
    for found in run_ranks(size, body):
        assert found.dtype == torch.float32
        assert torch.equal(found, expected)


def test_a_compressor_of_ones_own():
    class Halved:
        @staticmethod
        def compress(tensor):
            return tensor * 0.5, "halved"

        @staticmethod
        def decompress(tensor, ctx):
            assert ctx == "halved"
            return tensor * 2

    assert_equals_one_process(2, train, compression=Halved)


# --- process sets -------------------------------------------------------------------------------
def test_a_process_set_trains_apart_from_the_others():
    batches = data(4, 2)
    replicas = models(4)

    def body(rank):
        hvd.init()
        pairs = [hvd.add_process_set([0, 2]), hvd.add_process_set([1, 3])]
        mine = pairs[rank % 2]
        model = replicas[rank]
        optimizer = wrap(model, process_set=mine)
        if rank % 2 == 0:
            fit(model, optimizer, share(batches, mine.rank(), 2))
        return weights(model)

    single, untrained = models(2)
    fit(single, sgd(single.parameters()), batches)
    results = run_ranks(4, body)
    assert_close(results[::2], weights(single), 1e-12)
    assert_close(results[1::2], weights(untrained), 0)


def test_a_rank_outside_the_process_set_trains_alone():
    batches = data(3, 1)
    replicas = models(2)

    def body(rank):
        hvd.init()
        some = hvd.add_process_set([0])
        model = replicas[rank]
        fit(model, wrap(model, process_set=some), batches)
        # Of the other optimizer both ranks speak, whatever each has made before.
        both = wrap(models(1)[0])
        both.zero_grad()
        both.step()
        return weights(model)

    (single,) = models(1)
    fit(single, sgd(single.parameters()), batches)
    assert_close(run_ranks(2, body), weights(single), 1e-12)


def test_parameters_and_optimizer_state_of_a_process_set():
    def body(rank):
        hvd.init()
        some = hvd.add_process_set([1, 2])
        model = nn.Linear(2, 2)
        with torch.no_grad():
            model.weight.fill_(rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1))
        if some.included():
            hvd.broadcast_parameters(model.parameters(), 2, process_set=some)
            hvd.broadcast_optimizer_state(optimizer, 2, process_set=some)
        return model.weight[0, 0].item(), round(optimizer.param_groups[0]["lr"], 6)

    assert run_ranks(3, body) == [(0, 0.1), (2, 0.3), (2, 0.3)]


# --- copies and settings ------------------------------------------------------------------------
def test_copies_keep_all_arguments():
    def body(rank):
        hvd.init()
        some = hvd.add_process_set([0, 1])
        (model,) = models(1)
        groups = [list(model.parameters())[:2]]
        wrapped = wrap(
            model,
            compression=hvd.Compression.fp16,
            gradient_predivide_factor=2.0,
            groups=groups,
            sparse_as_dense=True,
            process_set=some,
        )
        twin, copied = copy.deepcopy((model, wrapped))
        recipe = copied._reducer.options
        assert recipe.compression is hvd.Compression.fp16
        assert recipe.predivide == 2.0
        assert recipe.sparse_as_dense
        assert recipe.process_set is some
        assert [p is q for p, q in zip(recipe.groups[0], twin.parameters(), strict=False)] == [
            True,
            True,
        ]
        file = io.BytesIO()
        torch.save(wrap(models(1)[0]), file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert loaded._reducer.options.process_set is hvd.global_process_set

    run_ranks(3, body)


def test_the_number_of_passes_can_be_changed():
    batches = data(6, 1)
    replicas = models(2)

    def body(rank):
        model = replicas[rank]
        optimizer = wrap(model, backward_passes_per_step=2)
        for k, (x, y) in enumerate(batches):
            mse_loss(model(x), y).backward()
            if k in (1, 4):
                optimizer.step()
                optimizer.zero_grad()
                optimizer.set_backward_passes_per_step(3)
        return weights(model)

    (single,) = models(1)
    optimizer = sgd(single.parameters())
    for k, (x, y) in enumerate(batches):
        mse_loss(single(x), y).backward()
        if k in (1, 4):
            optimizer.step()
            optimizer.zero_grad()
    assert_close(run_ranks(2, body), weights(single), 1e-12)


def test_step_after_synchronize_warns_once():
    def body(rank):
        (model,) = models(1)
        optimizer = wrap(model)
        optimizer.synchronize()
        horovods = r"optimizer.step\(\) called without optimizer.skip_synchronize\(\) context after"
        with pytest.warns(UserWarning, match=horovods):
            optimizer.step()
        optimizer.synchronize()
        optimizer.step()
        with optimizer.skip_synchronize():
            optimizer.synchronize()
            optimizer.step()

    run_ranks(1, body)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gradient_predivide_factor": 0.0}, "above 0"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "op=hvd.Average"),
        ({"num_groups": 2, "groups": 3}, "not both"),
        ({"num_groups": -1}, ">= 0"),
        ({"groups": [["weight"]]}, "lists of parameters"),
        ({"op": hvd.Max}, "AVERAGE or SUM"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, message):
    def body(rank):
        with pytest.raises(ValueError, match=message):
            wrap(models(1)[0], **arguments)

    run_ranks(1, body)


@pytest.mark.parametrize("is_named", [True, False])
def test_a_group_with_a_parameter_that_is_not_the_optimizers_is_refused(is_named):
    def body(rank):
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 5))
        named = model.named_parameters() if is_named else None
        expected = "1.weight" if is_named else "a parameter"
        with pytest.raises(ValueError, match=rf"^groups\[1\]\[0\], {expected} of shape \(5, 2\)"):
            hvd.DistributedOptimizer(
                sgd(model[0].parameters()), named, groups=[[model[0].weight], [model[1].weight]]
            )

    run_ranks(1, body)


@pytest.mark.parametrize("wrong", [list, lambda ps: dict(enumerate(ps)), lambda ps: [(0, 1, 2)]])
def test_named_parameters_that_are_no_pairs_are_refused_with_what_to_pass(wrong):
    def body(rank):
        model = nn.Linear(3, 2)
        with pytest.raises(ValueError, match=r"item 0 is a .*named_parameters=model.named_param"):
            hvd.DistributedOptimizer(sgd(model.parameters()), wrong(model.parameters()))

    run_ranks(1, body)


def test_a_parameter_in_two_groups_is_refused():
    def body(rank):
        (model,) = models(1)
        first = next(model.parameters())
        with pytest.raises(ValueError, match="in two groups"):
            wrap(model, groups=[[first], [first]])

    run_ranks(1, body)


def test_ranks_with_other_groups_all_hear_of_it():
    def body(rank):
        (model,) = models(1)
        optimizer = wrap(model, num_groups=rank + 1)
        with pytest.raises(hvd.HorovodInternalError, match="groups"):
            fit(model, optimizer, data(1, 1))

    run_ranks(2, body)


# --- Adasum -------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [1, 2, 3])
def test_adasum_combines_what_the_steps_add(size):
    batches = data(3, size)
    replicas = models(size)

    def body(rank):
        model = replicas[rank]
        optimizer = hvd.DistributedOptimizer(
            sgd(model.parameters()), model.named_parameters(), op=hvd.Adasum
        )
        fit(model, optimizer, share(batches, rank, size))
        return weights(model)

    singles = copies(models(1)[0], size)
    optimizers = [sgd(each.parameters()) for each in singles]
    for step in range(len(batches)):
        starts = [p.detach().clone() for p in singles[0].parameters()]
        for rank, (single, optimizer) in enumerate(zip(singles, optimizers, strict=True)):
            fit(single, optimizer, share(batches, rank, size)[step : step + 1])
        for place, start in enumerate(starts):
            parts = [list(each.parameters())[place].detach() - start for each in singles]
            total = start + adasum_of(parts)
            for single in singles:
                with torch.no_grad():
                    list(single.parameters())[place].copy_(total)
    assert_close(run_ranks(size, body), weights(singles[0]), 1e-12)


def adasum_of(parts):
    """Combine one, two or three vectors by the definition."""
    if len(parts) == 3:
        return pair(pair(parts[0], parts[2]), parts[1])
    return parts[0] if len(parts) == 1 else pair(*parts)


def pair(a, b):
    dot = (a * b).sum()
    share_of = [1 - dot / (2 * (v * v).sum()) if v.any() else 1.0 for v in (a, b)]
    return a * share_of[0] + b * share_of[1]


def test_the_names_of_parameters_are_where_scripts_for_horovod_look():
    def body(rank):
        for op in (hvd.Average, hvd.Adasum):
            (model,) = models(1)
            named = dict(model.named_parameters())
            optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), named.items(), op=op)
            assert optimizer._parameter_names == {p: name for name, p in named.items()}
            optimizer = hvd.DistributedOptimizer(sgd(models(1)[0].parameters()), op=op)
            assert len(set(optimizer._parameter_names.values())) == len(named)

    run_ranks(1, body)


def test_an_adasum_optimizer_can_be_copied():
    def body(rank):
        (model,) = models(1)
        optimizer = hvd.DistributedOptimizer(
            sgd(model.parameters()), model.named_parameters(), op=hvd.Adasum
        )
        twin, copied = copy.deepcopy((model, optimizer))
        fit(model, optimizer, data(2, 1))
        fit(twin, copied, data(2, 1))
        assert_close([weights(twin)], weights(model), 0)

    run_ranks(2, body)


def test_adasum_refuses_what_it_cannot_heed():
    def body(rank):
        (model,) = models(1)

        def wrapped(**options):
            return hvd.DistributedOptimizer(sgd(model.parameters()), op=hvd.Adasum, **options)

        with pytest.raises(ValueError, match="not Adasum"):
            wrapped(gradient_predivide_factor=2.0)
        with pytest.raises(ValueError, match="from 1 on, not 0"):
            wrapped(backward_passes_per_step=0)
        optimizer = wrapped(backward_passes_per_step=2)
        optimizer.set_backward_passes_per_step(3)
        with pytest.raises(AssertionError, match="skip_synchronize"), optimizer.skip_synchronize():
            pass

    run_ranks(2, body)


@pytest.mark.parametrize("op", ["Sum", "sum", 1, "nonsense"])
def test_an_op_that_is_none_is_refused(op):
    model = nn.Linear(2, 1)

    def body(rank):
        with pytest.raises(TypeError, match=r"op must be one of hvd.Average, Sum, Min"):
            hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), op=op)

    run_ranks(2, body)
