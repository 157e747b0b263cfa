"""Updates that do not go through step() of the wrapped optimizer count, or are refused."""

import pytest
import torch
from harness import outcomes
from ps_ranks_as_threads import run_all, run_workers
from torch.nn.functional import mse_loss
from training_models import SMALL, assert_close, copies, data, network, share, weights

import ringcomm as rc
import ringcomm.torch as hvd
from ringcomm import ps
from ringcomm.torch import ps as torch_ps

WORKERS_APPLY = {"apply": "worker", "overlap": False}
SERVED = {"servers": {}, "servers, step pushes": {"overlap": False}, "workers": WORKERS_APPLY}
WAYS = {"ring": {}, "sharded": {"shard_state": 1}, **SERVED}
EVERY_WAY = pytest.mark.parametrize("way", WAYS)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def run(way, train, make=sgd):
    """Return the weights of one process, and those of two ranks, or their errors.

    train(model, original, wrapped, batches) has the optimizer that was wrapped, and the result.
    """
    alone, *replicas = copies(network(), 3)
    batches = data(6, 2)
    optimizer = make(alone)
    train(alone, optimizer, optimizer, batches)

    def body(rank):
        model = replicas[rank]
        original = make(model)
        wrap = torch_ps.DistributedOptimizer if way in SERVED else hvd.DistributedOptimizer
        wrapped = wrap(original, model.named_parameters(), **WAYS[way])
        train(model, original, wrapped, share(batches, rank, 2))
        return weights(model)

    if way in SERVED:
        return weights(alone), run_all(2, body, deadline_s=30)[:2]
    return weights(alone), outcomes(2, body, settings=SMALL)


def assert_counts(way, train, make=sgd):
    expected, results = run(way, train, make)
    for each in results:
        if isinstance(each, BaseException):
            raise each
    assert_close(results, expected, 1e-12)


def assert_refused(way, train, text, make=sgd):
    _, results = run(way, train, make)
    assert all(isinstance(each, rc.RingcommError) for each in results), results
    assert any(text in str(each) for each in results), results


def fit(model, cleared, stepped, batches, scheduler=None):
    for x, y in batches:
        cleared.zero_grad()
        mse_loss(model(x), y).backward()
        stepped.step()
        if scheduler is not None:
            scheduler.step()


# --- the optimizer that was wrapped -------------------------------------------------------------
@EVERY_WAY
def test_a_step_of_the_original_is_one_of_the_wrapped_optimizer(way):
    def train(model, original, wrapped, batches):
        fit(model, wrapped, original, batches)

    assert_counts(way, train)


@EVERY_WAY
def test_a_schedule_of_the_original_leaves_the_wrapped_optimizers_step_alone(way):
    def train(model, original, wrapped, batches):
        scheduler = torch.optim.lr_scheduler.StepLR(original, 1, 0.7)
        fit(model, wrapped, wrapped, batches, scheduler)

    assert_counts(way, train)


@pytest.mark.parametrize("way", ["ring", "sharded", "workers"])
def test_a_program_that_drops_the_result_goes_on_with_the_original(way):
    def train(model, original, wrapped, batches):
        del wrapped
        fit(model, original, original, batches)

    assert_counts(way, train)


# --- parts of an optimizer ----------------------------------------------------------------------
class Sharp(torch.optim.Optimizer):
    """Sharpness-aware minimization: has an optimizer of its own over the same param_groups."""

    def __init__(self, model):
        super().__init__(model.parameters(), {"lr": 0.05, "momentum": 0.9})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.05, momentum=0.9)
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def climb(self):
        self.starts = [p.clone() for p in self.param_groups[0]["params"]]
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad, alpha=0.1)
        self.zero_grad()

    @torch.no_grad()
    def descend(self):
        for p, start in zip(self.param_groups[0]["params"], self.starts, strict=True):
            p.data = start
        self.inner.step()
        self.zero_grad()

    def step(self, closure):
        self.climb()
        with torch.enable_grad():
            closure()
        self.descend()


def in_two_steps(model, original, wrapped, batches):
    for x, y in batches:
        mse_loss(model(x), y).backward()
        wrapped.climb()
        mse_loss(model(x), y).backward()
        wrapped.descend()


def test_an_inner_optimizer_that_steps_by_itself_counts_or_is_refused():
    assert_counts("ring", in_two_steps, Sharp)
    assert_refused("servers", in_two_steps, "zero_grad() between backward() and step()", Sharp)
    assert_refused("workers", in_two_steps, "was changed between backward() and zero_grad()", Sharp)


def step_inside(model, original, wrapped, batches):
    for x, y in batches:
        wrapped.zero_grad()
        mse_loss(model(x), y).backward()
        wrapped.inner.step()


def test_a_step_of_a_part_with_this_workers_gradient_is_refused():
    assert_counts("ring", step_inside, Sharp)
    text = "SGD.step() was called outside of step() of the optimizer of which it is a part"
    assert_refused("workers", step_inside, text, Sharp)


# --- updates by hand ----------------------------------------------------------------------------
def update_by_hand(model, original, wrapped, batches):
    for x, y in batches:
        wrapped.zero_grad()
        mse_loss(model(x), y).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad, alpha=0.05)


def test_weights_changed_by_a_gradient_that_is_no_mean_are_refused():
    assert_counts("ring", update_by_hand)
    for way in ("sharded", "workers"):
        assert_refused(way, update_by_hand, "was changed between backward() and zero_grad()")


@pytest.mark.parametrize("way", ["ring", "sharded", "workers"])
def test_weights_may_decay_by_hand_before_step(way):
    def train(model, original, wrapped, batches):
        for x, y in batches:
            wrapped.zero_grad()
            mse_loss(model(x), y).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.9)
            wrapped.step()

    assert_counts(way, train)


# --- parameters in other groups -------------------------------------------------------------------
@EVERY_WAY
def test_a_parameter_that_moves_to_another_group_has_its_settings_or_is_refused(way):
    def make(model):
        *front, last = model.parameters()
        groups = [{"params": front}, {"params": [last], "lr": 0.2}]
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)

    def train(model, original, wrapped, batches):
        fit(model, wrapped, wrapped, batches[:3])
        front, last = (group["params"] for group in wrapped.param_groups)
        last.append(front.pop())
        fit(model, wrapped, wrapped, batches[3:])

    if way in ("servers", "servers, step pushes"):
        text = "is in param_groups[1] now, and the servers know it in group 0"
        assert_refused(way, train, text, make)
    else:
        assert_counts(way, train, make)


# --- workers that have made unequal numbers of steps ---------------------------------------------
def test_a_bounded_optimizer_begins_on_all_workers_at_once():
    first, second = zip(*(copies(network(), 2) for _ in range(2)), strict=True)

    def body(rank):
        earlier = torch_ps.DistributedOptimizer(sgd(first[rank]), mode="async")
        batches = data(5, 1)
        fit(first[rank], earlier, earlier, batches[: 5 - 4 * rank])
        later = torch_ps.DistributedOptimizer(sgd(second[rank]), mode=ps.SSP(1))
        fit(second[rank], later, later, batches)

    run_workers(2, body, deadline_s=5)
