"""Buckets leave while backward() runs, in an order all ranks share, and nothing else is sent."""

import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from harness import DEADLINE_S, run_ranks
from torch import nn
from torch.nn.functional import mse_loss
from training_models import (
    SMALL,
    Checkpointed,
    assert_close,
    copies,
    data,
    fit,
    models,
    network,
    on_replicas,
    seeded,
    sgd,
    share,
    weights,
    wrap,
)

import ringcomm as rc
import ringcomm.torch as hvd
from ringcomm.engine.api import collectives
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.core import completion
from ringcomm.engine.progress.deadlines import ask_around
from ringcomm.torch.optim.bucket_order import BucketPlan


@pytest.fixture
def sent(monkeypatch):
    """Return {rank: names of all operations so far}."""
    names = {rank: [] for rank in range(4)}
    inside = threading.local()  # one operation may be made of another

    def spied(function):
        def call(*args, **kwargs):
            if getattr(inside, "is_called", False):
                return function(*args, **kwargs)
            inside.is_called = True
            names[rc.rank()].append(plain(str(kwargs.get("name"))))
            try:
                return function(*args, **kwargs)
            finally:
                inside.is_called = False

        return call

    for name in set(vars(collectives)) & set(rc.__all__):
        monkeypatch.setattr(collectives, name, spied(getattr(collectives, name)))
    return names


@pytest.mark.parametrize(("are_on_gpu", "mib"), [([True, True], 64), ([True, False], 25)])
def test_buckets_of_parameters_on_a_gpu_may_be_larger(are_on_gpu, mib):
    slots = [SimpleNamespace(parameter=SimpleNamespace(is_cuda=each)) for each in are_on_gpu]
    (found,) = run_ranks(1, lambda _: BucketPlan(slots, None).max_nbytes)
    assert found == mib << 20


def plain(name):
    """Return what a name says, without the optimizer's number."""
    return name.removesuffix(" (optimizer 1)")


def buckets_in(names):
    return [name for name in names if name.startswith("gradients of")]


@pytest.mark.parametrize("step", [0, 1, 3])
def test_buckets_leave_before_the_first_layer_is_reached(sent, step):
    """But none before the first backward() has ended, in which ranks find out if they agree."""
    seen = {}

    def body(rank, model, optimizer, mine):
        fit(model, optimizer, mine[:step])
        sent[rank].clear()

        def first_layer_is_reached(_):
            seen[rank] = len(buckets_in(sent[rank]))

        model[0].weight.register_hook(first_layer_is_reached)
        fit(model, optimizer, mine[step:])
        return len(buckets_in(sent[rank]))

    n = on_replicas(2, body, steps=step + 1)[0]
    assert n > 3
    early = n - 1 if step else 0
    assert seen == {0: early, 1: early}


def test_a_bucket_comes_back_before_backward_is_over():
    def body(rank, model, optimizer, mine):
        fit(model, optimizer, mine[:2])
        results = []

        def wait_for_the_last_layer(_):
            bucket = optimizer._reducer.plan.buckets[0]
            bucket.handles[0].wait()
            results.append(bucket.members[0].view.clone())

        model[0].weight.register_hook(wait_for_the_last_layer)
        fit(model, optimizer, mine[2:])
        (result,) = results
        return torch.equal(result, model[3].bias.grad)

    assert on_replicas(2, body, steps=3) == [True, True]


class Branches(nn.Module):
    """Registers b before a; which is used last, and so is ready first, is the rank's."""

    def __init__(self):
        super().__init__()
        self.b, self.a, self.unused = nn.Linear(5, 3), nn.Linear(5, 3), nn.Linear(5, 3)
        self.order = "ab"

    def forward(self, x):
        first, second = (getattr(self, name) for name in self.order)
        return second(torch.tanh(x) + 0 * first(x).sum()) + first(x)


def test_after_the_first_step_buckets_go_in_rank_0s_ready_order(sent):
    replicas = copies(seeded(lambda: Branches().double()), 3)
    replicas[1].order = "ba"
    batches = data(4, 3)

    def body(rank):
        model = replicas[rank]
        optimizer = wrap(model)
        fit(model, optimizer, share(batches, rank, 3)[:1])
        started = buckets_in(sent[rank])
        sent[rank].clear()
        fit(model, optimizer, share(batches, rank, 3)[1:2])
        plan = [plain(bucket.name) for bucket in optimizer._reducer.plan.buckets]
        return started, plan, buckets_in(sent[rank])

    def of(*layers):
        return [f"gradients of {layer}.{kind}" for layer in layers for kind in ("bias", "weight")]

    settings = rc.config.Settings(timeout_s=120, fusion_mib=0)
    results = run_ranks(3, body, settings=settings)
    for rank, (started, plan, sent_later) in enumerate(results):
        assert sorted(started) == sorted(of("a", "b"))
        assert plan == of("b", "a", "unused")
        assert sent_later == (of("a", "b") if rank == 1 else of("b", "a"))


def test_the_first_step_goes_from_the_last_parameter(sent):
    def body(rank, model, optimizer, mine):
        a, b = mine[0]
        mse_loss(model(a), b).backward()
        plan = [plain(bucket.name) for bucket in optimizer._reducer.plan.buckets]
        return plan == buckets_in(sent[rank]) and plan[0] == "gradients of 3.bias+2"

    assert on_replicas(2, body, steps=1) == [True, True]


def test_the_first_passes_of_a_step_send_nothing(sent):
    def body(rank, model, optimizer, mine):
        counts = []
        for number, (x, y) in enumerate(mine):
            sent[rank].clear()
            mse_loss(model(x), y).backward()
            counts.append(len(sent[rank]))
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        return counts

    for counts in on_replicas(2, body, steps=9, backward_passes_per_step=3):
        assert [n > 0 for n in counts] == [False, False, True] * 3


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # an inner checkpoint
@pytest.mark.parametrize("mode", ["reentrant", "not reentrant", "everything", "nested"])
def test_runs_within_a_backward_are_no_passes_of_their_own(sent, mode):
    def body(rank, model, optimizer, mine):
        counts = []
        for number, (x, y) in enumerate(mine):
            sent[rank].clear()
            mse_loss(model(x), y).backward()
            counts.append(sent[rank].count("which gradients are there"))
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        return counts

    model = seeded(lambda: Checkpointed(mode).double())
    sent = on_replicas(2, body, model=model, steps=4, backward_passes_per_step=2)
    assert sent == [[0, 1, 0, 1]] * 2


def test_a_step_sends_its_buckets_and_one_message_more(sent):
    def body(rank, model, optimizer, mine):
        fit(model, optimizer, mine[:3])
        sent[rank].clear()
        fit(model, optimizer, mine[3:])
        names = [plain(bucket.name) for bucket in optimizer._reducer.plan.buckets]
        return sorted(sent[rank]) == sorted([*names, "which gradients are there"])

    assert on_replicas(2, body, steps=4) == [True, True]


def test_a_second_backward_sends_the_buckets_that_it_touches_alone(sent):
    def body(rank, model, optimizer, mine):
        (x, y), second = mine
        fit(model, optimizer, [second])
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        sent[rank].clear()
        model[0](x).sum().backward()
        return buckets_in(sent[rank])

    settings = rc.config.Settings(timeout_s=120, fusion_mib=0)
    expected = ["gradients of 0.bias", "gradients of 0.weight"]
    sent = on_replicas(2, body, steps=2, settings=settings)
    assert [sorted(names) for names in sent] == [expected] * 2


@pytest.mark.filterwarnings("ignore:optimizer.step")  # after synchronize(), on purpose
def test_step_sends_nothing_after_a_backward(sent):
    def body(rank, model, optimizer, mine):
        fit(model, optimizer, mine[:2])
        x, y = mine[2]
        mse_loss(model(x), y).backward()
        sent[rank].clear()
        optimizer.synchronize()
        optimizer.step()
        return len(sent[rank])

    assert on_replicas(2, body, steps=3) == [0, 0]


def test_step_within_skip_synchronize_sends_nothing(sent):
    def body(rank, model, optimizer, _):
        with optimizer.skip_synchronize():
            optimizer.step()
        assert not sent[rank]
        optimizer.step()
        return len(sent[rank]) > 0

    assert on_replicas(1, body) == [True]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_grad_is_a_view_of_its_bucket(set_to_none):
    def body(rank, model, optimizer, mine):
        fit(model, optimizer, mine[:2])
        optimizer.zero_grad(set_to_none)
        assert all((p.grad is None) == set_to_none for p in model.parameters())
        x, y = mine[2]
        mse_loss(model(x), y).backward()
        memory = {b.buffer.untyped_storage().data_ptr() for b in optimizer._reducer.plan.buckets}
        assert {p.grad.untyped_storage().data_ptr() for p in model.parameters()} == memory

    on_replicas(2, body, steps=4)


def test_frozen_parameters_take_no_bucket_memory():
    (model,) = models(1)
    model[0].requires_grad_(False)

    def body(rank):
        optimizer = wrap(model)
        fit(model, optimizer, data(2, 1))
        return sum(bucket.buffer.numel() for bucket in optimizer._reducer.plan.buckets)

    assert run_ranks(1, body) == [sum(p.numel() for p in model[2:].parameters())]


def test_memory_does_not_grow_with_steps():
    model = network()
    batches = data(2, 1)

    def count():
        gc.collect()
        kinds = [type(thing) for thing in gc.get_objects()]
        return len(kinds), sum(issubclass(kind, torch.Tensor) for kind in kinds)

    def body(rank):
        optimizer = wrap(model, make=lambda p: torch.optim.SGD(p, lr=0.01))
        fit(model, optimizer, batches)
        buffers = [bucket.buffer.data_ptr() for bucket in optimizer._reducer.plan.buckets]
        before = count()
        for _ in range(20):
            fit(model, optimizer, batches)
        after = count()
        assert [bucket.buffer.data_ptr() for bucket in optimizer._reducer.plan.buckets] == buffers
        return after[0] - before[0], after[1] - before[1]

    ((objects, tensors),) = run_ranks(1, body, settings=SMALL)
    assert tensors <= 0  # what other tests left behind may go meanwhile
    assert objects < 20


@pytest.mark.parametrize("has_scheduler", [True, False])
def test_an_optimizer_that_was_dropped_reduces_nothing(sent, has_scheduler):
    replicas = models(2)
    ((x, y),) = data(1, 1)

    def body(rank):
        plain = sgd(replicas[rank].parameters())
        if has_scheduler:
            torch.optim.lr_scheduler.StepLR(plain, 1)
        optimizer = hvd.DistributedOptimizer(plain)
        dropped = weakref.ref(optimizer._reducer)
        del optimizer, plain
        assert dropped() is None
        mse_loss(replicas[rank](x), y).backward()
        return len(sent[rank])

    assert run_ranks(2, body) == [0, 0]


def test_a_parameter_has_one_distributed_optimizer_at_a_time():
    (model,) = models(1)

    def body(rank):
        first = wrap(model)
        with pytest.raises(ValueError, match=r"0.weight belongs to another DistributedOptimizer"):
            wrap(model)
        del first
        fit(model, wrap(model), data(1, 1))

    run_ranks(1, body)


def test_an_optimizer_left_in_a_cycle_is_found_out(sent):
    def body(rank, model, optimizer, _):
        optimizer.itself = optimizer
        del optimizer
        wrap(model)

    on_replicas(1, body)


def test_two_optimizers_with_parameters_of_the_same_names_in_one_backward():
    batches = data(6, 2)
    alone, *replicas = models(3)

    def train(model, make_two, batches):
        optimizers = make_two(model)
        for x, y in batches:
            for optimizer in optimizers:
                optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()
        return weights(model)

    def two_plain(model):
        return [sgd(model[0].parameters()), sgd(model[2:].parameters())]

    def two_wrapped(model):
        return [hvd.DistributedOptimizer(optimizer) for optimizer in two_plain(model)]

    results = run_ranks(
        2, lambda r: train(replicas[r], two_wrapped, share(batches, r, 2)), settings=SMALL
    )
    assert_close(results, train(alone, two_plain, batches), 1e-12)


def test_two_optimizers_in_one_backward_after_a_third_was_dropped():
    def body(rank):
        parameters = [nn.Parameter(torch.full((2,), float(i))) for i in range(3)]
        optimizers = [hvd.DistributedOptimizer(sgd([p])) for p in parameters[:2]]
        del optimizers[0]
        optimizers.append(hvd.DistributedOptimizer(sgd(parameters[2:])))
        (parameters[1] * parameters[2]).sum().backward()
        return [parameters[i].grad.tolist() for i in (1, 2)]

    assert run_ranks(2, body) == [[[2.0] * 2, [1.0] * 2]] * 2


def test_optimizers_that_wait_for_the_garbage_collector_on_one_rank_alone_confuse_nobody():
    def body(rank):
        kept, sums = [], []
        for fold in range(4):
            model = nn.Linear(2, 2)
            optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
            model(torch.full((1, 2), float(fold))).sum().backward()
            sums.append(model.weight.grad.tolist())
            if rank == 1:
                kept.append((model, optimizer))
        return sums

    assert run_ranks(2, body) == [[[[float(i)] * 2] * 2 for i in range(4)]] * 2


def test_a_user_s_names_are_not_those_of_an_optimizer():
    def body(rank):
        model = nn.Linear(2, 2)
        hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        names = ["parameters", "gradients of bias+1", "which gradients are there"]
        handles = [rc.allreduce_async(torch.ones(1), name=name) for name in names]
        model(torch.ones(1, 2)).sum().backward()
        return [handle.wait().item() for handle in handles]

    assert run_ranks(2, body) == [[2.0] * 3] * 2


def test_a_rank_that_waits_in_two_optimizers_interrupts_no_other_to_learn_its_line(monkeypatch):
    asked, has_asked, lines = [], threading.Event(), []

    def ask(task, watch):
        asked.append(task.label)
        if len(asked) > 3:
            has_asked.set()
        ask_around(task, watch)

    monkeypatch.setattr(completion, "ask_around", ask)

    def body(rank):
        engine().watch.line_of = lambda other: lines.append(other) or ""
        parts = nn.Linear(2, 2), nn.Linear(2, 2)
        optimizers = [hvd.DistributedOptimizer(sgd(part.parameters())) for part in parts]
        if rank == 1:
            assert has_asked.wait(DEADLINE_S)
        parts[1](parts[0](torch.ones(1, 2))).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        return weights(parts[0])

    results = run_ranks(2, body)
    assert lines == []
    assert_close(results, results[0], 0)


@pytest.mark.parametrize("is_lone", [False, True])
def test_two_optimizers_whose_gradients_come_in_another_order_on_another_rank(is_lone):
    """Or not in the same backward(): rank 1 has none for one of them, and comes by step()."""
    batches = data(6, 2)
    replicas = copies(seeded(lambda: Branches().double()), 2)
    replicas[1].order = "ba"
    alone = copies(replicas[0], 2)
    alone[1].order = "ba"

    def loss_of(model, rank, x, y):
        return mse_loss(model.b(x) if is_lone and rank else model(x), y)

    def two(model):
        return [sgd(model.a.parameters()), sgd(model.b.parameters())]

    def body(rank):
        model = replicas[rank]
        optimizers = [hvd.DistributedOptimizer(optimizer) for optimizer in two(model)]
        for x, y in share(batches, rank, 2):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(model, rank, x, y).backward()
            for optimizer in optimizers:
                optimizer.step()
        return weights(model)[:4]

    results = run_ranks(2, body, settings=rc.config.Settings(timeout_s=120, fusion_mib=0.00005))
    optimizers = two(alone[0])
    alone[1].b, alone[1].a = alone[0].b, alone[0].a
    for x, y in batches:
        for optimizer in optimizers:
            optimizer.zero_grad()
        for rank, (a, b) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
            (loss_of(alone[rank], rank, a, b) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert_close(results, weights(alone[0])[:4], 1e-12)


def test_adversaries_that_take_turns():
    """One's backward() runs through the other's parameters, whose gradients are dropped."""
    batches = data(6, 2)
    maker, critic = network(), seeded(lambda: nn.Linear(3, 1).double())
    makers, critics = copies(maker, 2), copies(critic, 2)

    def train(maker, critic, by_maker, by_critic, batches):
        for x, y in batches:
            by_critic.zero_grad()
            (critic(maker(x).detach()).mean() - critic(y).mean()).backward()
            by_critic.step()
            by_maker.zero_grad()
            critic(maker(x)).mean().neg().backward()
            by_maker.step()
        return weights(maker) + weights(critic)

    def body(rank):
        two = [
            wrap(m, make=lambda p: torch.optim.SGD(p, lr=0.1))
            for m in (makers[rank], critics[rank])
        ]
        return train(makers[rank], critics[rank], *two, share(batches, rank, 2))

    results = run_ranks(2, body, settings=SMALL)
    two = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (maker, critic)]
    assert_close(results, train(maker, critic, *two, batches), 1e-12)


def test_a_forked_childs_backward_sends_nothing(sent):
    import os

    ((x, y),) = data(1, 1)

    def body(rank, model, optimizer, _):
        pid = os.getpid
        real = pid()
        try:
            os.getpid = lambda: real + 1
            mse_loss(model(x), y).backward()
        finally:
            os.getpid = pid
        return len(sent[0]), optimizer._reducer.plan.buckets

    assert on_replicas(1, body) == [(0, None)]
    assert threading.active_count() < 50
