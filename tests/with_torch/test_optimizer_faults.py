"""What goes wrong in training is one clear error on every rank, and training can go on."""

import threading

import pytest
import torch
from harness import errors_of_ranks, outcomes, run_ranks
from torch import nn
from torch.nn.functional import mse_loss
from training_models import (
    SMALL,
    assert_close,
    data,
    fit,
    models,
    network,
    on_replicas,
    seeded,
    weights,
    wrap,
)

import ringcomm as rc
from ringcomm.config import Settings
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.core.meet_and_leave import leave
from ringcomm.torch.optim.distributed_optimizer_options import GradientOptions
from ringcomm.torch.optim.exchange import Attempt, is_skipped_by_all

UNSENT = Settings(timeout_s=120, fusion_mib=1)  # one bucket: nothing leaves before all is there


def expected_after(batches):
    (alone,) = models(1)
    fit(alone, torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9), batches)
    return weights(alone)


@pytest.mark.parametrize("settings", [SMALL, UNSENT])
@pytest.mark.parametrize("failing", [{0, 1, 2}, {1}, {0, 2}])
def test_a_backward_that_raises_does_not_spoil_the_next(failing, settings):
    """Those whose backward() did not raise hear of it, or wait until the others repeat theirs."""
    batches = data(4, 3)

    def body(rank, model, optimizer, mine):
        fit(model, optimizer, mine[:2])
        x, y = mine[2]
        attempts = 0
        heard = set()
        while True:
            attempts += 1
            hidden = model[0](x)
            if rank in failing and attempts == 1:
                hidden.register_hook(lambda grad: 1 / 0)
            optimizer.zero_grad()
            try:
                mse_loss(model[1:](hidden), y).backward()
                break
            except (ZeroDivisionError, rc.MismatchError) as error:
                heard.add(str(error))
        assert all("an error on another rank" in text for text in heard - {"division by zero"})
        optimizer.step()
        fit(model, optimizer, mine[3:])
        return weights(model)

    assert_close(on_replicas(3, body, steps=4, settings=settings), expected_after(batches), 1e-12)


PLACES = ("forward", "loss", "last layer", "first layer")  # where a batch fails
FIRST_LAYER = 3


@pytest.mark.parametrize("shard_state", [0, 1])
@pytest.mark.parametrize("places", [(3, 3), (2, 3), (0, 3), (1, 3), (3, 2, 1, 0)], ids=str)
@pytest.mark.parametrize("skipped", [{0, 1}, {2, 3}], ids=["first", "later"])
@pytest.mark.parametrize("then", ["backward", "allreduce"])
def test_all_ranks_skip_a_batch_wherever_it_fails(then, skipped, places, shard_state):
    """What it has computed counts nowhere. One rank comes late: their times are never equal.

    A rank that failed in forward() is in the next allreduce, one that failed in backward() is in
    zero_grad(), where the others are to hear of it: neither waits for the other.
    """
    size = len(places)
    batches = data(6, size)
    is_ahead = threading.Event()

    def body(rank, model, optimizer, mine):
        for step, (x, y) in enumerate(mine):
            place = PLACES[places[rank]] if step in skipped else None
            # A .grad with zeros in its bucket cannot be sent again once another rank has failed.
            optimizer.zero_grad(set_to_none=then == "backward" or places[rank] < FIRST_LAYER)
            if then == "allreduce":
                assert rc.allreduce(torch.ones(1)).item() == size
            if step == 0 and step in skipped and rank == size - 1:
                assert is_ahead.wait(60)
            try:
                train(model, x, y, place)
            except ZeroDivisionError:
                if step == 0:
                    is_ahead.set()
                continue
            optimizer.step()
        return weights(model)

    kept = [batch for step, batch in enumerate(batches) if step not in skipped]
    assert_close(
        on_replicas(size, body, steps=6, shard_state=shard_state), expected_after(kept), 1e-12
    )


def test_the_last_batch_that_all_ranks_skip_is_no_error():
    """A rank that leaves the job completes the buckets that the other one has left."""
    batches = data(3, 2)

    def body(rank, model, optimizer, mine):
        *kept, (x, y) = mine
        fit(model, optimizer, kept)
        optimizer.zero_grad()
        with pytest.raises(ZeroDivisionError):
            train(model, x, y, "first layer" if rank else "forward")
        optimizer.zero_grad()
        assert rc.allreduce(torch.ones(1)).item() == 2
        assert leave(engine(), "called shutdown()")
        return weights(model)

    assert_close(on_replicas(2, body, steps=3), expected_after(batches[:2]), 1e-12)


def train(model, x, y, place):
    """Run backward(), which raises at this place."""
    hidden = torch.tanh(model[0](x))
    if place == "first layer":
        hidden.register_hook(lambda _: 1 / 0)
    hidden = model[2](hidden)
    if place == "last layer":
        hidden.register_hook(lambda _: 1 / 0)
    if place == "forward":
        raise ZeroDivisionError
    loss = mse_loss(model[3](hidden), y)
    if place == "loss":
        loss.register_hook(lambda _: 1 / 0)
    loss.backward()


@pytest.mark.parametrize(
    ("attempts", "expected"),
    [
        ([Attempt(1, True, True), Attempt(1, True, False)], True),
        ([Attempt(2, True, True), Attempt(1, False, True)], False),  # it has not failed
        ([Attempt(2, True, True), None, Attempt(3, False, True)], True),
        ([None, Attempt(3, False, True)], True),  # the one that failed is in join() by now
        ([Attempt(2, True, True), Attempt(2, False, True)], True),
        ([Attempt(2, True, True), Attempt(3, False, False)], False),
        ([Attempt(2, True, True), Attempt(3, True, True), Attempt(2, False, True)], False),
    ],
)
def test_whether_all_skip_the_batch_that_failed(attempts, expected):
    assert is_skipped_by_all(attempts) is expected


def test_a_reentrant_run_that_raises_does_not_spoil_the_next():
    from torch.utils.checkpoint import checkpoint

    class Net(nn.Module):
        is_bad = False

        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(5, 5) for _ in range(3))

        def forward(self, x):
            hidden = self.a(x)
            if self.is_bad:
                hidden.register_hook(lambda _: 1 / 0)
            return self.c(checkpoint(self.b, hidden, use_reentrant=True))

    def body(rank, model, optimizer, _):
        x = torch.full((1, 5), rank + 1.0, dtype=torch.float64)
        model.is_bad = True
        with pytest.raises(ZeroDivisionError):
            model(x).sum().backward()
        model.is_bad = False
        optimizer.zero_grad()
        model(x).sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    results = on_replicas(2, body, model=seeded(lambda: Net().double()))
    alone = seeded(lambda: Net().double())
    for rank in range(2):
        (alone(torch.full((1, 5), rank + 1.0, dtype=torch.float64)).sum() / 2).backward()
    assert_close(results, [p.grad for p in alone.parameters()], 1e-12)


def step(_, optimizer, __):
    optimizer.step()


def synchronize(_, optimizer, __):
    optimizer.synchronize()


def backward(model, _, x):
    model(x).sum().backward()


@pytest.mark.parametrize("use", [step, synchronize, backward])
def test_after_a_failed_backward_gradients_are_refused_until_zero_grad(use):
    x = torch.ones(1, 5, dtype=torch.float64)

    def body(rank, model, optimizer, _):
        hidden = model[0](x)
        hidden.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model[1:](hidden).sum().backward()
        with pytest.raises(rc.RingcommError, match=r"call optimizer.zero_grad\(\) and repeat"):
            use(model, optimizer, x)
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    on_replicas(1, body)


def test_ranks_with_unequal_numbers_of_backward_get_one_error():
    def body(rank, model, optimizer, mine):
        (x, y), *_ = mine

        def train():
            for _ in range(2):
                optimizer.zero_grad()
                for _ in range(2 if rank == 1 else 1):
                    mse_loss(model(x), y).backward()
                optimizer.step()

        with pytest.raises(rc.MismatchError) as caught:
            train()
        return str(caught.value)

    (text,) = set(on_replicas(3, body, steps=3))
    assert "rank 0 is in step 2, rank 1 in step 1" in text


@pytest.mark.parametrize("settings", [SMALL, UNSENT])
def test_unequal_numbers_of_backward_in_the_first_step_are_told_at_once(settings):
    """One rank has put its buckets into another order by then, and others wait for the old ones."""

    def body(rank):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
        model.register_module("unused", nn.Linear(4, 1))
        model.forward = lambda x: model[2](model[0](model[1](x)))
        optimizer = wrap(model)
        for _ in range(2 if rank == 0 else 1):
            model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        model(torch.ones(2, 4)).sum().backward()

    errors = errors_of_ranks(2, body, settings=settings)
    assert {type(each) for each in errors} == {rc.MismatchError}
    [text] = {str(each) for each in errors}
    assert "Every rank must run as many" in text


def smaller(rank, first):
    return wrap(nn.Sequential(nn.Linear(5, 3)).double() if rank == 2 else first)


def fewer_frozen(rank, first):
    first[0].weight.requires_grad_(rank != 1)
    return wrap(first)


def other_width(rank, _):
    return wrap(nn.Linear(5, 4 if rank else 3))


def other_passes(rank, first):
    return wrap(first, backward_passes_per_step=2 if rank == 2 else 1)


def other_op(rank, first):
    return wrap(first, op=rc.SUM if rank == 2 else rc.AVERAGE)


@pytest.mark.parametrize(
    ("wrapped", "message"),
    [
        (smaller, "rank 0 has 6 parameters, rank 2 has 2 parameters"),
        (other_width, r"rank 0 has weight torch.float32 \(3, 5\).*, rank 1 has weight .*\(4, 5\)"),
        (fewer_frozen, "rank 0 has 0.weight .* trainable, rank 1 has 0.weight .* frozen"),
        (other_passes, "rank 0 has backward_passes_per_step=1, rank 2 has .*=2"),
        (other_op, "rank 0 has op=AVERAGE, rank 2 has op=SUM"),
    ],
)
def test_what_was_wrapped_otherwise_on_another_rank_is_told_before_anything_is_sent(
    wrapped, message
):
    replicas = models(3)

    def body(rank):
        optimizer = wrapped(rank, replicas[rank])
        (parameter, *_) = optimizer.param_groups[0]["params"]
        with pytest.raises(rc.MismatchError, match=message):
            optimizer.step()
        assert parameter.grad is None
        assert rc.allreduce(torch.ones(1)).item() == 3

    run_ranks(3, body, settings=SMALL)


def test_a_bucket_that_ranks_send_otherwise_is_named_and_training_can_go_on():
    batches = data(4, 2)

    def body(rank, model, optimizer, mine):
        fit(model, optimizer, mine[:2])
        optimizer._reducer.options = GradientOptions(rc.SUM if rank else rc.AVERAGE)
        with pytest.raises(rc.MismatchError, match=r"gradients of \d"):
            mse_loss(model(mine[2][0]), mine[2][1]).backward()
        optimizer._reducer.options = GradientOptions(rc.AVERAGE)
        with pytest.raises(rc.RingcommError, match="zero_grad"):
            optimizer.step()
        fit(model, optimizer, mine[2:])
        return weights(model)

    assert_close(on_replicas(2, body, steps=4), expected_after(batches), 1e-12)


@pytest.mark.parametrize("settings", [SMALL, UNSENT])
@pytest.mark.parametrize("n_steps", [0, 2])
def test_a_dead_rank_ends_backward_with_its_reason(n_steps, settings):
    def body(rank, model, optimizer, mine):
        fit(model, optimizer, mine[:n_steps])
        if rank == 1:
            raise ValueError("boom")
        with pytest.raises(rc.PeerFailedError):
            mse_loss(model(mine[2][0]), mine[2][1]).backward()
        assert optimizer._reducer.plan.buckets is None  # the engine may write to what was sent
        fit(model, optimizer, mine[2:])

    error = on_replicas(2, body, steps=3, settings=settings, run=outcomes)[0]
    assert isinstance(error, rc.PeerFailedError)
    assert "boom" in str(error)


def test_an_interrupt_while_waiting_ends_the_use_of_the_optimizer(monkeypatch):
    ((x, y),) = data(1, 1)

    def body(rank, model, optimizer, _):
        fit(model, optimizer, data(2, 1))
        bucket = optimizer._reducer.plan.buckets[0]

        def interrupted(_):
            raise KeyboardInterrupt

        monkeypatch.setattr(bucket, "land", interrupted)
        with pytest.raises(KeyboardInterrupt):
            mse_loss(model(x), y).backward()
        optimizer.zero_grad()
        with pytest.raises(rc.RingcommError, match="interrupted half-way"):
            mse_loss(model(x), y).backward()

    on_replicas(1, body)


def test_a_failed_pass_that_would_have_sent_nothing():
    batches = data(4, 2)

    def body(rank, model, optimizer, mine):
        if rank == 0:
            x, y = mine[0]
            hidden = model[0](x)
            hidden.register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                mse_loss(model[1:](hidden), y).backward()
        for first, second in ((0, 1), (2, 3)):
            optimizer.zero_grad()
            for x, y in (mine[first], mine[second]):
                mse_loss(model(x), y).backward()
            optimizer.step()
        return weights(model)

    alone = network()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    for first, second in ((0, 1), (2, 3)):
        optimizer.zero_grad()
        for x, y in (batches[first], batches[second]):
            mse_loss(alone(x), y).backward()
        optimizer.step()
    assert_close(on_replicas(2, body, steps=4, backward_passes_per_step=2), weights(alone), 1e-12)
