"""Changes of .grad, weights and param_groups count as in plain torch with servers, or are refused.

The table of docs/torch.md has a test here for each row of the servers.
"""

import pytest
import torch
from harness import at_length
from ps_optimizer_wrap import wrap
from ps_ranks_as_threads import run_workers
from torch import nn
from torch.nn.functional import mse_loss
from training_models import assert_close, copies, data, models, network, share, weights

import ringcomm as rc
from ringcomm import ps

MODES = at_length(["sync", "async", ps.SSP(1), ps.FirstOf(1)], ["sync", "async", ps.SSP(1)])
SGD = [lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)]
WITH_LONE_TENSORS = pytest.mark.usefixtures("odd_cuts")


def plain(model):
    return SGD[0](model.parameters())


def assert_equals_plain_torch(train, n_workers=1, **options):
    """Assert that workers end with the weights of one process; train(model, optimizer, batches)."""
    alone, *replicas = copies(network(), n_workers + 1)
    batches = data(6, n_workers)
    train(alone, plain(alone), batches)

    def body(rank):
        optimizer = wrap(replicas[rank], SGD[0], **options)
        train(replicas[rank], optimizer, share(batches, rank, n_workers))
        return weights(replicas[rank])

    assert_close(run_workers(n_workers, body), weights(alone), 1e-12)


def refused(train, text, **options):
    """Assert that the one worker's train() raises RingcommError with this text."""
    (model,) = models(1)

    def body(rank):
        optimizer = wrap(model, SGD[0], **options)
        with pytest.raises(rc.RingcommError, match=text):
            train(model, optimizer, data(6, 1))

    run_workers(1, body)


# --- gradients that are dropped -----------------------------------------------------------------
def skip_some(model, optimizer, batches):
    for step, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        if step % 3 == 1:
            optimizer.zero_grad()
            continue
        optimizer.step()


def skip_until_the_next_zero_grad(model, optimizer, batches):
    for step, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        if step % 3 != 1:
            optimizer.step()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("train", [skip_some, skip_until_the_next_zero_grad])
def test_zero_grad_instead_of_step_is_refused_or_drops_the_gradients(mode, train):
    refused(train, "overlap=False", mode=mode)
    assert_equals_plain_torch(train, mode=mode, overlap=False)


@pytest.mark.parametrize("apply", ["server", "worker"])
def test_workers_that_drop_gradients_together_equal_one_process(apply):
    assert_equals_plain_torch(skip_some, 2, apply=apply, overlap=False)


def test_two_models_whose_losses_fill_each_others_gradients():
    def train(maker, critic, of_maker, of_critic, batches):
        for x, _ in batches:
            of_critic.zero_grad()
            critic(maker(x).detach()).pow(2).mean().backward()
            of_critic.step()
            of_maker.zero_grad()
            (-critic(maker(x)).pow(2).mean()).backward()  # fills the critic's, too
            of_maker.step()

    def two():
        return copies(nn.Sequential(nn.Linear(5, 4)).double(), 1)[0], nn.Linear(4, 1).double()

    makers, critics = zip(*(copies(nn.ModuleList(two()), 2)), strict=True)
    batches = data(4, 1)
    train(makers[0], critics[0], plain(makers[0]), plain(critics[0]), batches)

    def body(rank):
        of_both = [wrap(m, SGD[0], mode="async", overlap=False) for m in (makers[1], critics[1])]
        train(makers[1], critics[1], *of_both, batches)
        return weights(makers[1]) + weights(critics[1])

    assert_close(run_workers(1, body), weights(makers[0]) + weights(critics[0]), 1e-12)


# --- gradients that are changed -------------------------------------------------------------------
def clamp_data(p):
    p.grad.data.clamp_(-0.01, 0.01)


def scale_data(p):
    p.grad.data = p.grad.data / 2


def scale_in_place(p):
    p.grad.mul_(0.5)


def drop(p):
    p.grad = None


def changing(change):
    def train(model, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            change(model[2].weight)
            optimizer.step()

    return train


@WITH_LONE_TENSORS
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", [clamp_data, scale_data, scale_in_place, drop])
def test_a_change_after_backward_is_refused_or_counts(mode, change):
    refused(changing(change), r"2\.weight was changed after it had been pushed", mode=mode)
    assert_equals_plain_torch(changing(change), mode=mode, overlap=False)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("change", [scale_data, scale_in_place, None])
def test_what_a_parameters_hook_does_comes_before_the_push(mode, is_first, change):
    alone, model = copies(network(), 2)
    batches = data(4, 1)

    def hook(model):
        for p in model.parameters():
            if change is None:
                p.register_hook(lambda g: g * 0.5)
            else:
                p.register_post_accumulate_grad_hook(change)

    def train(model, optimizer):
        for x, y in batches:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()

    hook(alone)
    train(alone, plain(alone))

    def body(rank):
        if is_first:
            hook(model)
        optimizer = wrap(model, SGD[0], mode=mode)
        if not is_first:
            hook(model)
        train(model, optimizer)
        return weights(model)

    assert_close(run_workers(1, body), weights(alone), 1e-12)


@pytest.mark.parametrize("apply", ["server", "worker"])
def test_gradients_set_by_hand_are_pushed(apply):
    def train(model, optimizer, batches):
        parameters = list(model.parameters())
        for x, y in batches:
            made = torch.autograd.grad(mse_loss(model(x), y), parameters)
            for p, g in zip(parameters, made, strict=True):
                p.grad = g
            optimizer.step()

    assert_equals_plain_torch(train, 2, apply=apply)


@pytest.mark.parametrize("apply", ["server", "worker"])
def test_gradients_that_are_pieces_of_one_tensor(apply):
    def train(model, optimizer, batches):
        flat = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
        pieces = flat.split([p.numel() for p in model.parameters()])
        for p, g in zip(model.parameters(), pieces, strict=True):
            p.grad = g.view_as(p)
        for x, y in batches:
            flat.zero_()
            mse_loss(model(x), y).backward()
            flat.mul_(0.5)
            optimizer.step()

    assert_equals_plain_torch(train, 2, apply=apply, overlap=False)


@pytest.mark.parametrize("apply", ["server", "worker"])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_gradient_that_is_kept_stays_as_it_was(apply, overlap):
    (model,) = models(1)

    def body(rank):
        optimizer = wrap(model, SGD[0], apply=apply, overlap=overlap)
        history = []
        for x, y in data(5, 1):
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
            kept = [p.grad.view(-1)[1:] for p in model.parameters()]
            history.append((kept, [g.clone() for g in kept]))
        return all(
            torch.equal(a, b) for kept, old in history for a, b in zip(kept, old, strict=True)
        )

    assert run_workers(1, body) == [True]


def test_a_gradient_of_a_frozen_parameter_is_refused():
    def train(model, optimizer, batches):
        model[0].requires_grad_(False)
        for x, y in batches:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            model[0].weight.grad = torch.ones_like(model[0].weight)
            optimizer.step()

    (model,) = models(1)
    model[0].requires_grad_(False)

    def body(rank):
        with pytest.raises(rc.RingcommError, match=r"0\.weight has a \.grad and is frozen"):
            train(model, wrap(model, SGD[0]), data(2, 1))

    run_workers(1, body)


# --- weights and parameters -----------------------------------------------------------------------
def clip_data(model):
    for p in model.parameters():
        p.data.clamp_(-0.1, 0.1)


def replace_data(model):
    for p in model.parameters():
        p.data = p.data.clamp(-0.1, 0.1)


@WITH_LONE_TENSORS
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", [clip_data, replace_data])
def test_weights_changed_through_data_are_refused_until_they_are_pushed(mode, change):
    def train(model, optimizer, batches, *, is_told=True):
        for x, y in batches:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
            change(model)
            if is_told and hasattr(optimizer, "push_parameters"):
                optimizer.push_parameters()

    refused(lambda *args: train(*args, is_told=False), "push_parameters", mode=mode)
    assert_equals_plain_torch(train, mode=mode)


EXCHANGES = {
    "push_parameters": lambda optimizer: optimizer.push_parameters(),
    "pull_parameters": lambda optimizer: optimizer.pull_parameters(),
    "load_state_dict": lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("what", EXCHANGES)
def test_an_exchange_with_the_servers_after_gradients_were_pushed_is_refused(mode, what):
    def train(model, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            if hasattr(optimizer, "push_parameters"):
                EXCHANGES[what](optimizer)
            optimizer.step()

    refused(train, rf"{what}\(\) between backward", mode=mode)
    assert_equals_plain_torch(train, mode=mode, overlap=False)


def test_weights_that_workers_update_may_be_changed():
    def train(model, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
            clip_data(model)

    assert_equals_plain_torch(train, 2, apply="worker")


@pytest.mark.parametrize("n_changed", [1, 200])
def test_a_change_through_data_of_a_large_parameter(n_changed):
    """One in a thousand elements is seen at once, a single one if its turn has come."""
    model = nn.Linear(1000, 100)

    def body(rank):
        optimizer = wrap(model, SGD[0])
        places = torch.randperm(model.weight.numel(), generator=torch.Generator().manual_seed(0))

        def step():
            optimizer.zero_grad()
            model(torch.ones(2, 1000)).pow(2).mean().backward()
            optimizer.step()

        for n_steps in range(1, 8):
            step()
            model.weight.data.view(-1)[places[:n_changed]] += 1
            try:
                step()
            except rc.RingcommError:
                return n_steps
        return None

    (n_steps,) = run_workers(1, body)
    assert n_steps == 1 or n_changed == 1


@pytest.mark.parametrize("apply", ["server", "worker"])
@pytest.mark.parametrize("moment", ["zero_grad", "step"])
def test_an_exchanged_parameter_is_refused(apply, moment):
    (model,) = models(1)
    ((x, y),) = data(1, 1)

    def body(rank):
        optimizer = wrap(model, SGD[0], apply=apply)
        optimizer.zero_grad()
        if moment == "step":
            mse_loss(model(x), y).backward()
        model[0].weight = nn.Parameter(model[0].weight.detach().clone())
        optimizer.param_groups[0]["params"][0] = model[0].weight
        with pytest.raises(rc.RingcommError, match="Wrap a new optimizer to exchange parameters"):
            getattr(optimizer, moment)()

    run_workers(1, body)
