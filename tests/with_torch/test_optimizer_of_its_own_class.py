"""What DistributedOptimizer is: an optimizer of its own class, over all ranks."""

import copy
import os
import pickle

import pytest
import torch
from harness import at_length, run_ranks
from torch import nn
from torch.nn.functional import mse_loss
from training_models import (
    BATCH,
    assert_close,
    assert_equals_one_process,
    data,
    fit,
    models,
    network,
    on_replicas,
    sgd,
    share,
    weights,
    wrap,
)

import ringcomm as rc
import ringcomm.torch as hvd
from ringcomm._core import StatusPage
from ringcomm.config import Settings

OPTIMIZERS = {
    "SGD with momentum": (sgd, 1e-12),
    "Adam": (lambda p: torch.optim.Adam(p, lr=1e-3), 1e-10),
    "AdamW": (lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.01), 1e-10),
}


# --- equal to one process -----------------------------------------------------------------------
@pytest.mark.parametrize("size", at_length([1, 2, 3, 4], [3]))
@pytest.mark.parametrize(
    ("name", "n_steps"),
    at_length(
        [(name, 200) for name in OPTIMIZERS],
        [("SGD with momentum", 30), ("Adam", 30), ("AdamW", 200)],
    ),
)
def test_n_ranks_with_batch_b_equal_one_process_with_batch_nb(name, n_steps, size):
    make, tolerance = OPTIMIZERS[name]
    settings = Settings(timeout_s=120, fusion_mib=0.001)
    batches = data(n_steps, size)
    assert_equals_one_process(
        size, make=make, tolerance=tolerance, batches=batches, settings=settings
    )


def test_a_wrong_gradient_would_be_seen():
    """The oracle itself: without the reduction the replicas drift apart far beyond tolerance."""
    batches = data(20, 2)
    one, two = models(2)
    make, tolerance = OPTIMIZERS["Adam"]
    fit(one, make(one.parameters()), share(batches, 0, 2))
    fit(two, make(two.parameters()), share(batches, 1, 2))
    a, b = weights(one)[0], weights(two)[0]
    assert (a - b).abs().max() > 1e6 * tolerance * a.abs().max()


@pytest.mark.parametrize("name", at_length(list(OPTIMIZERS), ["AdamW"]))
def test_float32_stays_within_ten_times_the_spread_of_reordered_sums(name):
    """Two right answers in float32 differ by rounding: by how much, permuted batches tell."""
    make, _ = OPTIMIZERS[name]
    batches = data(100, 2, torch.float32)
    *alone, one, two = models(5, dtype=torch.float32)
    runs = []
    for seed, model in enumerate(alone):
        order = torch.randperm(2 * BATCH, generator=torch.Generator().manual_seed(seed))
        fit(model, make(model.parameters()), [(x[order], y[order]) for x, y in batches])
        runs.append(weights(model))

    def body(rank):
        model = (one, two)[rank]
        fit(model, wrap(model, make), share(batches, rank, 2))
        return weights(model)

    result, _ = run_ranks(2, body)
    for index, got in enumerate(result):
        spread = max(float((a[index] - b[index]).abs().max()) for a in runs for b in runs)
        assert float((got - runs[0][index]).abs().max()) <= 10 * spread


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes_reduce_to_the_same_bits_everywhere(dtype):
    replicas = models(3, dtype=dtype)
    batches = data(3, 3, dtype)

    def body(rank):
        model = replicas[rank]
        fit(model, wrap(model), share(batches, rank, 3))
        return weights(model)

    first, *others = run_ranks(3, body)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_complex_parameters_are_averaged():
    gradients = torch.tensor([[1 + 2j, -3j], [5 + 0j, 1 + 1j]])

    def body(rank):
        parameter = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1))
        (parameter * gradients[rank].conj()).real.sum().backward()
        optimizer.step()
        return parameter.detach()

    for parameter in run_ranks(2, body):
        assert torch.equal(parameter, -gradients.mean(0))


def test_sum_adds_gradients_up():
    replicas, singles = models(2), models(2)
    batches = data(1, 2)

    def body(rank):
        a, b = share(batches, rank, 2)[0]
        optimizer = wrap(replicas[rank], op=hvd.Sum)
        mse_loss(replicas[rank](a), b).backward()
        mse_loss(singles[rank](a), b).backward()
        optimizer.step()
        total = rc.allreduce(singles[rank][0].weight.grad)
        assert torch.allclose(replicas[rank][0].weight.grad, total, rtol=1e-12)

    run_ranks(2, body)


# --- an optimizer like any other ----------------------------------------------------------------
@pytest.mark.parametrize("is_early", [True, False])
def test_schedulers_work_whether_made_before_or_after_wrapping(is_early):
    batches = data(30, 2)
    alone, *replicas = models(3)

    def schedule(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 7, gamma=0.5)

    def train(model, optimizer, scheduler, batches):
        for batch in batches:
            fit(model, optimizer, [batch])
            scheduler.step()
        return weights(model)

    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    expected = train(alone, reference, schedule(reference), batches)

    def body(rank):
        model = replicas[rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = schedule(optimizer) if is_early else None
        wrapped = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        result = train(model, wrapped, scheduler or schedule(wrapped), share(batches, rank, 2))
        assert wrapped.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
        return result

    assert_close(run_ranks(2, body), expected, 1e-12)


def test_it_is_an_optimizer_of_its_own_class_and_shares_state():
    (model,) = models(1)

    def body(rank):
        optimizer = torch.optim.Adam(model.parameters())
        fit(model, optimizer, data(2, 1))
        before = optimizer.state_dict()
        wrapped = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        assert isinstance(wrapped, torch.optim.Adam)
        assert type(wrapped).__name__ == "Adam"
        assert wrapped.state_dict().keys() == before.keys()
        assert wrapped.state_dict()["state"][0]["step"] == 2
        fit(model, wrapped, data(3, 1))
        assert optimizer.state_dict()["state"][0]["step"] == 5
        saved = copy.deepcopy(wrapped.state_dict())
        wrapped.load_state_dict(saved)
        assert wrapped.state_dict()["state"][0]["step"] == 5

    run_ranks(1, body)


def test_attributes_that_a_user_gave_the_optimizer_stay():
    (model,) = models(1)

    def body(rank):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.note = "mine"
        wrapped = hvd.DistributedOptimizer(optimizer)
        assert wrapped.note == "mine"
        assert wrapped.defaults is optimizer.defaults

    run_ranks(1, body)


def test_state_dict_round_trip_continues_the_same_training():
    batches = data(20, 2)
    alone, *replicas = models(3)
    fit(alone, torch.optim.Adam(alone.parameters()), batches)

    def body(rank):
        model = replicas[rank]
        mine = share(batches, rank, 2)
        first = wrap(model, torch.optim.Adam)
        fit(model, first, mine[:10])
        saved = copy.deepcopy(first.state_dict())
        del first
        second = wrap(model, lambda p: torch.optim.Adam(p, lr=9))
        second.load_state_dict(saved)
        fit(model, second, mine[10:])
        return weights(model)

    assert_close(run_ranks(2, body), weights(alone), 1e-10)


def pickled(pair):
    return pickle.loads(pickle.dumps(pair))


@pytest.mark.parametrize("copied", [pickled, copy.deepcopy])
def test_copies_of_model_and_optimizer_continue_the_same_training(copied):
    def train(model, optimizer, batches):
        fit(model, optimizer, batches[:4])
        other, continued = copied((model, optimizer))
        assert type(continued).__name__ == type(optimizer).__name__ == "Adam"
        fit(other, continued, batches[4:])
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            p.data.copy_(q.data)

    def make(parameters):
        return torch.optim.Adam(parameters, lr=1e-3)

    assert_equals_one_process(2, train, make=make, tolerance=1e-10)


def test_a_copy_keeps_the_arguments():
    (model,) = models(1)

    def body(rank):
        wrapped = wrap(model, op=rc.SUM, backward_passes_per_step=3)
        _, copied = copy.deepcopy((model, wrapped))
        assert copied._reducer.options.op is rc.SUM
        assert copied._reducer.passes_per_step == 3
        assert [slot.name for slot in copied._reducer.slots] == [
            n for n, _ in model.named_parameters()
        ]

    run_ranks(1, body)


def test_a_shallow_copy_would_reduce_twice_and_is_refused():
    (model,) = models(1)

    def body(rank):
        wrapped = wrap(model)
        with pytest.raises(ValueError, match="another DistributedOptimizer"):
            copy.copy(wrapped)

    run_ranks(1, body)


def test_unpickling_before_init_says_what_to_save_instead():
    (model,) = models(1)
    (packed,) = run_ranks(1, lambda _: pickle.dumps(wrap(model)))
    with pytest.raises(rc.NotInitializedError, match=r"save optimizer\.state_dict"):
        pickle.loads(packed)


def test_step_hooks_run_once():
    def body(rank, model, optimizer, _):
        calls = []
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
        fit(model, optimizer, data(1, 1))
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        fit(model, optimizer, data(1, 1))
        return len(calls)

    assert on_replicas(1, body) == [2]


def test_step_hooks_see_reduced_gradients_also_without_a_backward():
    ((x, y),) = data(1, 1)

    def body(rank, model, optimizer, _):
        seen = []
        optimizer.register_step_pre_hook(lambda *_: seen.append(model[0].weight.grad.clone()))
        if rank == 0:
            mse_loss(model(x), y).backward()
        optimizer.step()
        return seen[0]

    one, two = on_replicas(2, body)
    assert torch.equal(one, two)


def test_steps_and_their_parts_are_on_the_status_page():
    page = StatusPage.create(job="test", host="here", rank=0, size=1, local_rank=0, nonce=7)
    (model,) = models(1)

    def body(rank):
        from ringcomm.engine.api.init_rank_size import engine

        engine().page = page
        fit(model, wrap(model), data(3, 1))

    run_ranks(1, body)
    assert page.snapshot()["step"] == 3
    assert [number for number, _, _ in page.steps()] == [0, 1, 2]
    assert all(list(marks) == sorted(set(marks)) for _, marks, _ in page.steps())


def test_a_command_of_ctl_is_taken_at_the_end_of_a_step():
    page = StatusPage.create(job="test", host="here", rank=0, size=1, local_rank=0, nonce=7)
    (model,) = models(1)

    def body(rank):
        from ringcomm.engine.api.init_rank_size import engine
        from ringcomm.engine.control.step_boundary import Control

        this = engine()
        this.page = page
        this.control = Control(this, this.groups)
        optimizer = wrap(model)
        fit(model, optimizer, data(1, 1))
        assert page.take_mailbox(os.getpid())
        page.put_command("set lr=0.125")
        fit(model, optimizer, data(1, 1))
        return optimizer.param_groups[0]["lr"], page.answer

    assert run_ranks(1, body) == [(0.125, "ok lr is 0.125 after step 2")]


# --- what is refused ----------------------------------------------------------------------------
def meta(_):
    return nn.Linear(2, 2, device="meta"), None, {}


def twice(model):
    return model, [("0.weight", p) for p in model.parameters()], {}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda m: (m, [], {}), ValueError, "6 of the optimizer's 6 parameters are not in named_p"),
        (twice, ValueError, "not unique: 0.weight"),
        (meta, TypeError, r"parameter0: .* on meta here\. It has no values yet: .*to_empty"),
        (lambda m: (m, None, {"op": rc.MAX}), ValueError, "op is AVERAGE or SUM, not MAX"),
        (lambda m: (m, None, {"backward_passes_per_step": 0}), ValueError, "from 1 on, not 0"),
        (lambda m: (m, None, {"backward_passes_per_step": 1.5}), ValueError, "whole number"),
    ],
)
def test_what_cannot_be_wrapped_is_refused(change, error, message):
    model, named, kwargs = change(network())

    def body(rank):
        with pytest.raises(error, match=message):
            hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1), named, **kwargs)

    run_ranks(1, body)


def test_wrapping_twice_is_refused():
    (model,) = models(1)

    def body(rank):
        with pytest.raises(ValueError, match="already"):
            hvd.DistributedOptimizer(wrap(model))

    run_ranks(1, body)


def test_before_init_wrapping_and_size_say_so_by_horovods_kind_of_error():
    model = nn.Linear(1, 1)
    names = [("same", model.weight), ("same", model.bias)]
    for use in (
        hvd.size,
        lambda: hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1), names),
    ):
        with pytest.raises(rc.NotInitializedError, match="init") as caught:
            use()
        assert isinstance(caught.value, ValueError)


def test_a_dtype_changed_after_wrapping_is_refused():
    def body(rank, model, optimizer, _):
        fit(model, optimizer, share(data(2, 2, torch.float32), rank, 2))
        model.double()
        optimizer.zero_grad()
        with pytest.raises(rc.RingcommError, match=r"model.to\(\) before"):
            fit(model, optimizer, share(data(1, 2), rank, 2))

    on_replicas(2, body, model=network(torch.float32))
