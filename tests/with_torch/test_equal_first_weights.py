"""The weights with which ranks begin: compared once, and made alike with a warning."""

import copy

import pytest
import torch
from harness import run_ranks
from torch import nn
from training_models import BATCH, copies, data, network, share

import ringcomm as rc
import ringcomm.torch as hvd
from ringcomm.config import Settings
from ringcomm.torch.optim import first_weights
from ringcomm.torch.optim.first_weights import fingerprint

STEPS = 2


def unlike(n):
    """Return n networks of different weights."""
    models = copies(network(), n)
    for rank, model in enumerate(models):
        generator = torch.Generator().manual_seed(rank)
        for p in model.parameters():
            p.data.normal_(generator=generator)
    return models


def train(model, rank, size, wrap=hvd.DistributedOptimizer, **options):
    plain = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = wrap(plain, named_parameters=model.named_parameters(), **options)
    for x, y in share(data(STEPS, size), rank, size):
        optimizer.zero_grad()
        (model(x) - y).pow(2).mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def warnings_in(caplog):
    return [each.getMessage() for each in caplog.records if "different weights" in each.message]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("options", [{}, {"shard_state": 1}, {"op": hvd.Adasum}, {"op": hvd.Sum}])
def test_ranks_that_begin_with_different_weights_get_the_first_one_s(size, options, caplog):
    models = unlike(size)
    weights = run_ranks(size, lambda rank: train(models[rank], rank, size, **options))
    for theirs in weights[1:]:
        assert all(map(torch.equal, theirs, weights[0]))
    (warning,) = warnings_in(caplog)
    assert "0.weight, 0.bias, 2.weight, ...: 6 of 6 parameters" in warning
    assert "the weights of rank 0" in warning
    assert "hvd.broadcast_parameters(model.state_dict())" in warning


@pytest.mark.parametrize("options", [{}, {"shard_state": 1}, {"op": hvd.Adasum}])
def test_the_weights_are_rank_0_s_before_the_first_update(options):
    models = unlike(2)
    first = [p.detach().clone() for p in models[0].parameters()]

    def body(rank):
        plain = torch.optim.SGD(models[rank].parameters(), lr=0.0)
        named = models[rank].named_parameters()
        optimizer = hvd.DistributedOptimizer(plain, named_parameters=named, **options)
        models[rank](torch.ones(BATCH, 5, dtype=torch.float64)).sum().backward()
        optimizer.step()
        return [p.detach().clone() for p in models[rank].parameters()]

    for theirs in run_ranks(2, body):
        assert all(map(torch.equal, theirs, first))


def test_one_difference_in_one_frozen_parameter_is_found(caplog):
    models = copies(network(), 2)
    for model in models:
        model[2].bias.requires_grad_(False)
    models[1][2].bias.data[3] += 1e-15

    weights = run_ranks(2, lambda rank: train(models[rank], rank, 2))
    assert all(map(torch.equal, *weights))
    (warning,) = warnings_in(caplog)
    assert "(2.bias: 1 of 6 parameters)" in warning


@pytest.mark.parametrize("options", [{}, {"op": hvd.Adasum}])
def test_ranks_that_mean_to_differ_do(options, caplog):
    models = unlike(2)
    body = lambda rank: train(models[rank], rank, 2, sync_weights=False, **options)  # noqa: E731
    mine, theirs = run_ranks(2, body)
    assert not any(map(torch.equal, mine, theirs))
    assert not warnings_in(caplog)


def test_ranks_that_broadcast_hear_nothing_and_pay_once(caplog, monkeypatch):
    models = unlike(2)
    seen = []

    def counted(x):
        seen.append(x.shape)
        return fingerprint(x)

    monkeypatch.setattr(first_weights, "fingerprint", counted)

    def wrap(optimizer, **options):
        wrapped = hvd.DistributedOptimizer(optimizer, **options)
        hvd.broadcast_parameters([p for g in optimizer.param_groups for p in g["params"]])
        return wrapped

    weights = run_ranks(2, lambda rank: train(models[rank], rank, 2, wrap))
    assert all(map(torch.equal, *weights))
    assert not warnings_in(caplog)
    assert len(seen) == 2 * 6


def test_parameters_that_are_added_are_compared_too(caplog):
    models = copies(network(), 2)
    heads = [nn.Linear(3, 2).double() for _ in range(2)]

    def body(rank):
        model, head = models[rank], heads[rank]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
        x = torch.ones(BATCH, 5, dtype=torch.float64)
        model(x).sum().backward()
        optimizer.step()
        optimizer.add_param_group({"params": head.parameters()})
        optimizer.zero_grad()
        head(model(x)).sum().backward()
        optimizer.step()
        return [p.detach().clone() for p in head.parameters()]

    assert all(map(torch.equal, *run_ranks(2, body)))
    (warning,) = warnings_in(caplog)
    assert "2 of 8 parameters" in warning


def test_a_rank_outside_of_the_process_set_keeps_its_weights(caplog):
    models = unlike(3)
    before = copy.deepcopy(models[2].state_dict())

    def body(rank):
        pair = hvd.add_process_set([0, 1])
        plain = torch.optim.SGD(models[rank].parameters(), lr=0.0)
        optimizer = hvd.DistributedOptimizer(plain, process_set=pair)
        models[rank](torch.ones(BATCH, 5, dtype=torch.float64)).sum().backward()
        optimizer.step()
        return models[rank].state_dict()

    first, second, alone = run_ranks(3, body)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(alone[name], before[name]) for name in alone)
    assert len(warnings_in(caplog)) == 1


def test_weights_are_made_alike_within_a_closure(caplog):
    models = unlike(2)

    def body(rank):
        plain = torch.optim.SGD(models[rank].parameters(), lr=0.05)
        optimizer = hvd.DistributedOptimizer(plain)

        def closure():
            optimizer.zero_grad()
            loss = models[rank](torch.ones(BATCH, 5, dtype=torch.float64)).pow(2).mean()
            loss.backward()
            return loss

        for _ in range(STEPS):
            optimizer.step(closure)
        return [p.detach().clone() for p in models[rank].parameters()]

    assert all(map(torch.equal, *run_ranks(2, body)))
    assert len(warnings_in(caplog)) == 1


def test_whether_weights_are_compared_must_be_alike():
    models = copies(network(), 2)
    body = lambda rank: train(models[rank], rank, 2, sync_weights=rank == 0)  # noqa: E731
    with pytest.raises(rc.MismatchError, match="sync_weights=True, rank 1 has sync_weights=False"):
        run_ranks(2, body)


def test_a_graph_that_is_kept_can_be_used_again(caplog):
    models = unlike(2)

    def body(rank):
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(models[rank].parameters(), lr=0.05))
        out = models[rank](torch.ones(BATCH, 5, dtype=torch.float64))
        out.sum().backward(retain_graph=True)
        out.pow(2).sum().backward()
        optimizer.step()
        return [p.detach().clone() for p in models[rank].parameters()]

    assert all(map(torch.equal, *run_ranks(2, body)))
    assert len(warnings_in(caplog)) == 1


def test_rank_0_may_join_before_its_first_step(caplog):
    """The others go on as if they were alone, with the weights of the first of them."""
    steps = 5

    def job(models, first):
        for model in models[first:]:
            model[0].requires_grad_(False)

        def body(rank):
            if rank >= first:
                batches = share(data(steps, 2), rank - first, 2)
                plain = torch.optim.SGD(models[rank][2:].parameters(), lr=0.01)
                named = models[rank].named_parameters()
                optimizer = hvd.DistributedOptimizer(plain, named_parameters=named, op=hvd.Sum)
                for x, y in batches:
                    optimizer.zero_grad()
                    (models[rank](x) - y).pow(2).mean().backward()
                    optimizer.step()
            hvd.join()
            return [p.detach().clone() for p in models[rank][2:].parameters()]

        return run_ranks(2 + first, body, settings=Settings(timeout_s=60))[first:]

    for model in (models := unlike(3)):
        model[0].load_state_dict(models[1][0].state_dict())
    models[2][0].bias.data[3] += 1e-15
    expected = job(copy.deepcopy(models[1:]), 0)
    caplog.clear()
    for theirs, alone in zip(job(models, 1), expected, strict=True):
        assert all(map(torch.equal, theirs, alone))
    others, told = sorted(warnings_in(caplog), key=len)
    assert "the weights of rank 1" in told
    assert "2 frozen parameters that it does not hold" in others


# --- fingerprints ---------------------------------------------------------------------------------
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.complex64]
N = 3 * first_weights._PIECE + 61


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 7, 61, N])
def test_a_fingerprint_is_of_the_values_alone(dtype, n):
    x = (torch.rand(n, generator=torch.Generator().manual_seed(n)) * 100).to(dtype)
    shifted = torch.cat([x[:1], x])[1:] if n else x.clone()
    assert (
        fingerprint(x) == fingerprint(shifted) == fingerprint(nn.Parameter(x, requires_grad=False))
    )


def test_a_fingerprint_knows_no_layout():
    x = torch.rand(3, 5, 7, 7)
    assert fingerprint(x) == fingerprint(x.to(memory_format=torch.channels_last))
    assert fingerprint(x.transpose(0, 1)) == fingerprint(x.transpose(0, 1).contiguous())


CHANGES = {
    "one bit": lambda x: x.view(torch.int64)[61].bitwise_xor_(1),
    "the last": lambda x: x[-1:].add_(1),
    "signs": lambda x: x.neg_(),
    "two signs": lambda x: x[2:5:2].neg_(),
    "two change places": lambda x: x.__setitem__([3, 8191], x[[8191, 3]]),
    "pieces change places": lambda x: x.copy_(x.roll(first_weights._PIECE)),
    "reversed": lambda x: x.copy_(x.flip(0)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_fingerprint_tells_a_change(change):
    x = torch.rand(2 * first_weights._PIECE, generator=torch.Generator().manual_seed(1)).double()
    before = fingerprint(x)
    CHANGES[change](x)
    assert fingerprint(x) != before


# --- frozen parameters that the optimizer does not hold -------------------------------------------
def fine_tune(model, stride=1, **options):
    """Train what is not frozen, by an optimizer that holds nothing else.

    Args:
        model: whose first layer is frozen.
        stride: -1: parameters are named in the reverse order.
        options: of the optimizer.
    """
    plain = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    named = list(model.named_parameters())[::stride]
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=named, **options)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(BATCH, 5, dtype=torch.float64)).sum().backward()
        optimizer.step()
    return [p.detach().clone() for p in model[0].parameters()]


@pytest.mark.parametrize("options", [{}, {"shard_state": 1}, {"op": hvd.Adasum}])
def test_frozen_weights_beside_the_optimizer_that_differ_are_told_and_left(options, caplog):
    models = copies(network(), 2)
    for model in models:
        model[0].requires_grad_(False)
    models[1][0].bias.data[3] += 1e-15
    before = [[p.clone() for p in model[0].parameters()] for model in models]

    after = run_ranks(2, lambda rank: fine_tune(models[rank], **options))
    assert all(map(torch.equal, before[0] + before[1], after[0] + after[1]))
    (warning,) = warnings_in(caplog)
    assert "2 frozen parameters that it does not hold (0.bias, 0.weight)" in warning
    assert "hvd.broadcast_parameters(model.state_dict())" in warning


@pytest.mark.parametrize("options", [{}, {"sync_weights": False}])
def test_nothing_is_told_of_frozen_weights_that_are_alike_or_meant_to_differ(options, caplog):
    models = copies(network(), 2)
    for model in models:
        model[0].requires_grad_(False)
    if options:
        models[1][0].bias.data[3] += 1
    run_ranks(2, lambda rank: fine_tune(models[rank], stride=1 - 2 * rank, **options))
    assert not warnings_in(caplog)


def test_weights_that_others_train_are_not_compared(caplog):
    models = unlike(2)
    for model in models:
        model[2].load_state_dict(models[0][2].state_dict())

    def body(rank):
        named = models[rank].named_parameters()
        plain = torch.optim.SGD(models[rank][2].parameters(), lr=0.05)
        optimizer = hvd.DistributedOptimizer(plain, named_parameters=named)
        models[rank](torch.ones(BATCH, 5, dtype=torch.float64)).sum().backward()
        optimizer.step()

    run_ranks(2, body)
    assert not warnings_in(caplog)
