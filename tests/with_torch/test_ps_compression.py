"""ps.DistributedOptimizer with gradients in fewer bytes."""

import pytest
import torch
from harness import at_length
from ps_optimizer_wrap import wrap
from ps_ranks_as_threads import run_workers
from torch import nn
from training_models import assert_close, copies, data, fit, network, sgd, share, weights

import ringcomm as rc
import ringcomm.torch as hvd
from ringcomm import codec

FORMS = ["fp16", "bf16", "int8", codec.TopK(0.1), codec.Int8(block=32), hvd.Compression.fp16]

WAYS = [("sync", "server"), ("sync", "worker"), ("async", "server")]


pytestmark = pytest.mark.usefixtures("odd_cuts")


def results_of(batches, n_servers=2, make=sgd, model=None, **options):
    n_workers = 2
    replicas = copies(network(torch.float32) if model is None else model, n_workers)

    def body(rank):
        optimizer = wrap(replicas[rank], make, **options)
        fit(replicas[rank], optimizer, share(batches, rank, n_workers))
        return weights(replicas[rank])

    return run_workers(n_workers, body, n_servers)


def alone(batches, make=sgd):
    (model,) = copies(network(torch.float32), 1)
    fit(model, make(model.parameters()), batches)
    return weights(model)


@pytest.mark.parametrize("apply", ["server", "worker"])
@pytest.mark.parametrize("form", at_length(FORMS, FORMS[1:4]), ids=str)
def test_training_is_near_that_without_and_has_the_same_bits_on_all(form, apply):
    batches = data(20, 2, torch.float32)
    plain = alone(batches)
    got = results_of(batches, compression=form, apply=apply)
    again = results_of(batches, n_servers=1, compression=form, apply=apply)
    for mine, other in zip((*got[0], *got[0]), (*got[1], *again[0]), strict=True):
        assert torch.equal(mine, other)
    start = weights(network(torch.float32))
    for mine, wanted, before in zip(got[0], plain, start, strict=True):
        assert 0 < (mine - wanted).norm() < 0.6 * (wanted - before).norm()


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.3}, {"apply": "worker"}], ids=str)
def test_if_all_is_sent_nothing_changes(options):
    batches = data(10, 2)
    model = network()
    plain = results_of(batches, model=model, **options)
    got = results_of(batches, model=model, compression=codec.TopK(1.0), **options)
    for mine, wanted in zip(got[0], plain[0], strict=True):
        assert torch.equal(mine, wanted)


def slopes(n_steps, n_workers, count):
    generator = torch.Generator().manual_seed(2)
    return torch.randint(-8, 9, (n_steps, n_workers, count), generator=generator).float()


@pytest.mark.parametrize(("mode", "apply"), WAYS)
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
def test_nothing_is_lost_over_a_schedule_skipped_steps_and_loss_scales(mode, scaled, apply):
    """Gradients do not depend on the values: these, and what is kept, tell all that was sent."""
    rates = [1.0, 0.5, 0.25, 0.25] if apply == "server" else [1.0] * 4
    steps, bad = slopes(len(rates), 2, 900), 2
    replicas = [nn.Linear(900, 1, bias=False) for _ in range(2)]
    nn.init.zeros_(replicas[0].weight)

    def body(rank):
        model = replicas[rank]
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if scaled else None
        optimizer = wrap(
            model, lambda p: torch.optim.SGD(p, lr=1.0), compression=codec.TopK(0.02),
            mode=mode, scaler=scaler, apply=apply,
        )  # fmt: skip
        for k, lr in enumerate(rates):
            optimizer.param_groups[0]["lr"] = lr
            optimizer.zero_grad()
            loss = model(steps[k, rank]).sum()
            if scaled:
                poison = float("inf") if (k, rank) == (bad, 1) else 1.0
                scaler.scale(loss * poison).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                optimizer.step()
        rc.barrier()
        if apply == "server":
            optimizer.zero_grad()
            values = optimizer._feeder.buckets[0].table.pull().wait()
        else:
            values = model.weight.detach().numpy().reshape(-1)
        kept = sum(torch.from_numpy(b.table.residual) for b in optimizer._feeder.buckets)
        return torch.from_numpy(values), kept * rates[-1]

    results = run_workers(2, body, 2)
    share = 2 if mode == "sync" else 1
    got = -share * results[0][0] + results[0][1] + results[1][1]
    expected = torch.einsum("k,krc->c", torch.tensor(rates), steps)
    if scaled:  # the worker that had inf has no gradient of that step to keep
        expected -= rates[bad] * steps[bad, 1]
    assert torch.equal(got, expected)
    assert any(bool(kept.any()) for _, kept in results)


@pytest.mark.parametrize(("mode", "apply"), WAYS)
@pytest.mark.parametrize("form", ["int8", "fp16", codec.TopK(0.1)], ids=str)
def test_one_inf_skips_the_step_whatever_it_travels_in(form, apply, mode):
    replicas = copies(network(torch.float32), 2)

    def body(rank):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = wrap(replicas[rank], apply=apply, scaler=scaler, compression=form, mode=mode)
        applied = []
        for step, (x, y) in enumerate(share(data(3, 2, torch.float32), rank, 2)):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(replicas[rank](x), y)
            poison = float("inf") if (step, rank) == (1, 1) else 1.0
            scaler.scale(loss * poison).backward()
            scaler.step(optimizer)
            scaler.update()
            applied.append(optimizer.was_applied)
        assert all(bool(torch.isfinite(p).all()) for p in weights(replicas[rank]))
        return applied

    first, second = run_workers(2, body, 2)
    assert second == [True, False, True]
    assert first == [True, mode == "async", True]


def test_nan_in_int8_is_an_error_of_the_worker_that_has_it():
    def body(rank):
        model = network(torch.float32)
        optimizer = wrap(model, compression="int8", mode="async")
        x = torch.full((4, 5), float("nan") if rank else 1.0)
        if rank:
            with pytest.raises(ValueError, match=r"push\[.*NaN or inf among .* elements.*scaler="):
                model(x).sum().backward()
        else:
            model(x).sum().backward()
            optimizer.step()

    run_workers(2, body)


def test_workers_that_disagree_are_told():
    def body(rank):
        with pytest.raises(rc.MismatchError, match=r"rank 0 has compression=FP16.* rank 1"):
            wrap(network(), compression=["fp16", "bf16"][rank])

    run_workers(2, body)


def test_new_values_begin_without_what_was_kept():
    def body(rank):
        model = network(torch.float32)
        optimizer = wrap(model, compression=codec.TopK(0.1))
        fit(model, optimizer, data(2, 1, torch.float32))
        tables = [bucket.table for bucket in optimizer._feeder.buckets]
        assert any(t.residual.any() for t in tables)
        optimizer.push_parameters()
        return any(t.residual.any() for t in tables)

    assert run_workers(2, body) == [False, False]


def test_a_tenth_of_the_gradient_still_learns():
    batches = data(4, 2, torch.float32) * 25

    def loss(values):
        (model,) = copies(network(torch.float32), 1)
        with torch.no_grad():
            for p, value in zip(model.parameters(), values, strict=True):
                p.copy_(value)
        return sum(nn.functional.mse_loss(model(x), y).item() for x, y in batches[:4])

    def make(p):
        return torch.optim.SGD(p, lr=0.05)

    plain = loss(alone(batches, make))
    got = results_of(batches, make=make, compression=codec.TopK(0.1))
    assert_close(got, got[0], 0)
    start = loss(weights(network(torch.float32)))
    assert start - loss(got[0]) > 0.9 * (start - plain)
