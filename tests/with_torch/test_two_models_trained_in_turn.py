"""Two models that are trained in turn, as in a GAN, equal one process, in every usual order.

The loss of the maker goes through the critic, so its backward() fills the critic's gradients, too.
"""

from types import SimpleNamespace

import pytest
import torch
from harness import at_length, run_ranks
from ps_optimizer_wrap import wrap
from ps_ranks_as_threads import run_workers
from torch import nn
from training_models import assert_close, copies, data, seeded, share, weights
from training_models import wrap as wrap_for_ring

import ringcomm as rc
from ringcomm.torch import ps

N_WORKERS = 2
STEPS = 5


class Pair(nn.Module):
    """A maker of samples, and a critic that tells them from real ones."""

    def __init__(self):
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        self.critic = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def judge(self, x, y):
        """Return the critic's loss."""
        return self.critic(self.maker(x).detach()).pow(2).mean() - self.critic(y).mean()

    def fool(self, x):
        """Return the maker's loss."""
        return -self.critic(self.maker(x)).pow(2).mean()


def pair():
    return seeded(Pair).double()


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def rmsprop_of_its_own_class(parameters):  # workers make the updates
    return type("Own", (torch.optim.RMSprop,), {})(parameters, lr=0.01)


# --- orders: (pair, optimizers of maker and critic, batches) --------------------------------------
def critic_first(net, of, batches):
    for x, y in batches:
        of.critic.zero_grad()
        net.judge(x, y).backward()
        of.critic.step()
        of.maker.zero_grad()
        net.fool(x).backward()
        of.maker.step()


def maker_first(net, of, batches):
    for x, y in batches:
        of.maker.zero_grad()
        net.fool(x).backward()
        of.maker.step()
        of.critic.zero_grad()
        net.judge(x, y).backward()
        of.critic.step()


def gradients_cleared_by_the_modules(net, of, batches):
    for x, y in batches:
        net.critic.zero_grad()
        net.judge(x, y).backward()
        of.critic.step()
        net.maker.zero_grad()
        net.fool(x).backward()
        of.maker.step()


def gradients_set_to_zero(net, of, batches):
    for x, y in batches:
        of.critic.zero_grad(set_to_none=False)
        net.judge(x, y).backward()
        of.critic.step()
        of.maker.zero_grad(set_to_none=False)
        net.fool(x).backward()
        of.maker.step()


def both_cleared_after_each_step(net, of, batches):
    for x, y in batches:
        for loss, optimizer in ((net.judge(x, y), of.critic), (None, of.maker)):
            (net.fool(x) if loss is None else loss).backward()
            optimizer.step()
            of.critic.zero_grad()
            of.maker.zero_grad()


def two_backwards_for_the_critic(net, of, batches):
    for x, y in batches:
        net.critic.zero_grad()
        (-net.critic(y).mean()).backward()
        made = net.maker(x)
        net.critic(made.detach()).pow(2).mean().backward()
        of.critic.step()
        net.maker.zero_grad()
        (-net.critic(made).pow(2).mean()).backward()
        of.maker.step()


def samples_made_once_and_not_detached(net, of, batches):
    """The critic's loss fills the maker's gradients as well."""
    for x, y in batches:
        made = net.maker(x)
        of.critic.zero_grad()
        (net.critic(made).pow(2).mean() - net.critic(y).mean()).backward(retain_graph=True)
        of.critic.step()
        of.maker.zero_grad()
        net.fool(x).backward()
        of.maker.step()


def critic_frozen_while_the_maker_trains(net, of, batches):
    for x, y in batches:
        net.critic.requires_grad_(True)
        of.critic.zero_grad()
        net.judge(x, y).backward()
        of.critic.step()
        net.critic.requires_grad_(False)
        of.maker.zero_grad()
        net.fool(x).backward()
        of.maker.step()
    net.critic.requires_grad_(True)


def each_frozen_while_the_other_trains(net, of, batches):
    for x, y in batches:
        net.maker.requires_grad_(False)
        of.critic.zero_grad()
        net.judge(x, y).backward()
        of.critic.step()
        net.maker.requires_grad_(True)
        net.critic.requires_grad_(False)
        of.maker.zero_grad()
        net.fool(x).backward()
        of.maker.step()
        net.critic.requires_grad_(True)


def several_steps_of_the_critic(net, of, batches):
    """With gradients cleared before and after, so that the maker's loss finds none."""
    for step, (x, y) in enumerate(batches):
        of.critic.zero_grad()
        net.judge(x, y).backward()
        of.critic.step()
        of.critic.zero_grad()
        if step % 2:
            of.maker.zero_grad()
            net.fool(x).backward()
            of.maker.step()


def gradient_penalty(net, of, batches):
    for x, y in batches:
        of.critic.zero_grad()
        between = (0.3 * y + 0.7 * net.maker(x)).detach().requires_grad_()
        (slope,) = torch.autograd.grad(net.critic(between).sum(), between, create_graph=True)
        (net.judge(x, y) + 0.1 * (slope.norm(dim=1) - 1).pow(2).mean()).backward()
        of.critic.step()
        of.maker.zero_grad()
        net.fool(x).backward()
        of.maker.step()


def one_backward_for_both(net, of, batches):
    for x, y in batches:
        of.maker.zero_grad()
        of.critic.zero_grad()
        (net.fool(x) + net.judge(x, y)).backward()
        of.maker.step()
        of.critic.step()


def both_losses_before_both_steps(net, of, batches):
    """The critic's step includes what the maker's loss has left, as in torch."""
    for x, y in batches:
        of.maker.zero_grad()
        of.critic.zero_grad()
        net.fool(x).backward()
        net.judge(x, y).backward()
        of.maker.step()
        of.critic.step()


def gradients_dropped_before_some_steps(net, of, batches):
    for step, (x, y) in enumerate(batches):
        net.critic.zero_grad()
        net.judge(x, y).backward()
        if step % 2:
            net.critic.zero_grad(set_to_none=step == 1)
        of.critic.step()
        of.maker.zero_grad()
        net.fool(x).backward()
        of.maker.step()


ORDERS = [
    gradients_dropped_before_some_steps,
    critic_first,
    maker_first,
    gradients_cleared_by_the_modules,
    gradients_set_to_zero,
    both_cleared_after_each_step,
    two_backwards_for_the_critic,
    samples_made_once_and_not_detached,
    critic_frozen_while_the_maker_trains,
    each_frozen_while_the_other_trains,
    several_steps_of_the_critic,
    gradient_penalty,
    one_backward_for_both,
    both_losses_before_both_steps,
]
IN_ORDER = pytest.mark.parametrize("train", ORDERS, ids=lambda train: train.__name__)


def assert_equals_one_process(train, run, n, *, make, wrap):
    alone, *replicas = copies(pair(), n + 1)
    batches = data(STEPS, n)
    train(alone, both(alone, lambda part: make(part.parameters())), batches)

    def body(rank):
        of = both(replicas[rank], lambda part: wrap(part, make))
        train(replicas[rank], of, share(batches, rank, n))
        return weights(replicas[rank])

    assert_close(run(n, body), weights(alone), 1e-9)


def both(net, make):
    return SimpleNamespace(maker=make(net.maker), critic=make(net.critic))


@IN_ORDER
@pytest.mark.parametrize("make", at_length([adam, sgd, rmsprop_of_its_own_class], [adam]))
def test_orders_with_servers(train, make):
    assert_equals_one_process(train, run_workers, N_WORKERS, make=make, wrap=wrap)


@IN_ORDER
@pytest.mark.parametrize("mode", at_length(["async", ps.SSP(1), ps.FirstOf(1)], ["async"]))
def test_orders_of_one_worker_without_rounds_of_all(train, mode):
    def wrap_in_mode(part, make):
        return wrap(part, make, mode=mode)

    assert_equals_one_process(train, run_workers, 1, make=sgd, wrap=wrap_in_mode)


@IN_ORDER
def test_orders_on_the_ring(train):
    assert_equals_one_process(train, run_ranks, N_WORKERS, make=adam, wrap=wrap_for_ring)


# --- what decides that step() pushes --------------------------------------------------------------
def has_pushed_before_step(optimizer, model):
    """Return True if a second backward() meets gradients that the first one has pushed."""
    optimizer.zero_grad()
    model(torch.ones(2, 5).double()).sum().backward()
    try:
        model(torch.ones(2, 5).double()).sum().backward()
    except rc.RingcommError:
        return True
    optimizer.step()
    return False


def layers(n):
    return [nn.Linear(5, 3).double() for _ in range(n)]


@pytest.mark.parametrize("overlap", [True, None])
def test_a_second_optimizer_lets_step_push_unless_told_otherwise(overlap, caplog):
    models = layers(3)

    def body(rank):
        of = [wrap(model, sgd, mode="async", overlap=overlap) for model in models]
        return [has_pushed_before_step(*each) for each in zip(of, models, strict=True)]

    assert run_workers(1, body) == [[overlap is True] * 3]
    said = [
        each.getMessage() for each in caplog.records if "there are several" in each.getMessage()
    ]
    assert len(said) == (0 if overlap else 1)


def test_optimizers_that_are_gone_do_not_count():
    models = layers(2)

    def body(rank):
        optimizer = wrap(models[0], sgd, mode="async")
        optimizer.itself = optimizer  # as a schedule of learning rates makes it part of a cycle
        del optimizer
        return has_pushed_before_step(wrap(models[1], sgd, mode="async"), models[1])

    assert run_workers(1, body) == [True]


def test_workers_agree_that_there_are_several():
    """One of them keeps an optimizer that the others have dropped."""
    models = [layers(2) for _ in range(N_WORKERS)]

    def body(rank):
        first = wrap(models[rank][0], sgd)
        kept = [first] if rank == 1 else []
        del first
        second = wrap(models[rank][1], sgd)
        assert len(kept) == rank
        return has_pushed_before_step(second, models[rank][1])

    assert run_workers(N_WORKERS, body) == [False] * N_WORKERS


def halve(p):
    p.grad.mul_(0.5)


def halve_through_data(p):
    p.grad.data.mul_(0.5)


def drop(p):
    p.grad = None


@pytest.mark.parametrize("change", [halve, halve_through_data, drop])
def test_a_gradient_changed_before_step_is_refused_as_with_one_optimizer(change):
    nets = copies(pair(), 1)

    def body(rank):
        of = both(nets[0], lambda part: wrap(part, sgd))
        ((x, y),) = data(1, 1)
        critic_first(nets[0], of, [(x, y)])
        of.critic.zero_grad()
        nets[0].judge(x, y).backward()
        change(nets[0].critic[0].weight)
        with pytest.raises(rc.RingcommError, match=r"0\.weight was changed after backward"):
            of.critic.step()

    run_workers(1, body)
