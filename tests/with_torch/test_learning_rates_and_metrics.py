"""Learning rates and metrics that know of the ranks."""

import copy
import math
import warnings

import pytest
import torch
from harness import run_ranks
from torch.optim import lr_scheduler
from training_models import assert_equals_one_process, fit, network, wrap
from training_models import models as make_models

import ringcomm as rc
import ringcomm.torch as hvd

LR = 0.8


def rates(make, steps, *, is_wrapped=True):
    """Return what a schedule makes of LR, on one of 4 ranks."""
    replicas = make_models(4)

    def body(rank):
        def sgd(parameters):
            return torch.optim.SGD(parameters, lr=LR)

        model = replicas[rank]
        optimizer = wrap(model, sgd) if is_wrapped else sgd(model.parameters())
        schedules = make(optimizer)
        found = [optimizer.param_groups[0]["lr"]]
        for _ in range(steps):
            optimizer.step()
            for schedule in schedules if isinstance(schedules, list) else [schedules]:
                schedule.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    results = run_ranks(4, body)
    assert all(found == results[0] for found in results)
    return results[0]


# --- scaling ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("size", "options", "expected"),
    [(1, {}, 0.1), (4, {}, 0.4), (4, {"rule": "sqrt"}, 0.2), (2, {"passes": 3}, 0.6)],
)
def test_a_rate_is_scaled_with_the_batch(size, options, expected):
    for rate in run_ranks(size, lambda _: hvd.scaled_lr(0.1, **options)):
        assert rate == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"rule": "cubic"}, "linear or sqrt, not 'cubic'"), ({"passes": 0}, "0")],
)
def test_no_such_scaling(options, message):
    with pytest.raises(ValueError, match=message):
        hvd.scaled_lr(0.1, **options)


# --- warm-up ------------------------------------------------------------------------------------
@pytest.mark.parametrize("is_wrapped", [True, False])
def test_a_warm_up_goes_from_one_rank_s_rate_to_the_whole_in_equal_steps(is_wrapped):
    found = rates(lambda o: hvd.WarmupLR(o, 3), 5, is_wrapped=is_wrapped)
    assert found == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8], rel=1e-12)


def test_a_start_of_one_s_own():
    found = rates(lambda o: hvd.WarmupLR(o, 2, start_factor=0.5), 3)
    assert found == pytest.approx([0.4, 0.6, 0.8, 0.8], rel=1e-12)


def test_chained_with_another_schedule_both_count():
    found = rates(lambda o: [hvd.WarmupLR(o, 3), lr_scheduler.StepLR(o, 2, gamma=0.5)], 5)
    expected = [
        f * g
        for f, g in zip([0.2, 0.4, 0.6, 0.8, 0.8, 0.8], [1, 1, 0.5, 0.5, 0.25, 0.25], strict=True)
    ]
    assert found == pytest.approx(expected, rel=1e-12)


def test_before_another_schedule():
    def make(optimizer):
        warmup = hvd.WarmupLR(optimizer, 3)
        after = lr_scheduler.CosineAnnealingLR(optimizer, 4)
        return lr_scheduler.SequentialLR(optimizer, [warmup, after], milestones=[3])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # SequentialLR's own, of an argument of step()
        found = rates(make, 7)
    cosine = [0.4 * (1 + math.cos(math.pi * k / 4)) for k in range(5)]
    assert found == pytest.approx([0.2, 0.4, 0.6, *cosine], rel=1e-6, abs=1e-12)


def test_a_warm_up_saved_half_way_goes_on_also_on_another_number_of_ranks():
    def half(size, steps, state=None):
        replicas = make_models(size)

        def body(rank):
            optimizer = wrap(replicas[rank], lambda p: torch.optim.SGD(p, lr=LR))
            schedule = hvd.WarmupLR(optimizer, 6)
            if state is not None:
                optimizer.load_state_dict(copy.deepcopy(state[0]))
                schedule.load_state_dict(copy.deepcopy(state[1]))
            found = []
            for _ in range(steps):
                optimizer.step()
                schedule.step()
                found.append(optimizer.param_groups[0]["lr"])
            return found, (optimizer.state_dict(), schedule.state_dict())

        return run_ranks(size, body)[0]

    whole, _ = half(4, 8)
    first, state = half(4, 3)
    then, _ = half(2, 5, state)
    assert first + then == pytest.approx(whole, rel=1e-12)


def test_a_training_that_warms_up_equals_one_process():
    def train(model, optimizer, batches):
        schedule = hvd.WarmupLR(optimizer, 4, start_factor=0.1)
        for batch in batches:
            fit(model, optimizer, [batch])
            schedule.step()

    assert_equals_one_process(3, train)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "steps is at least 1, not 0"),
        ({"steps": 1, "start_factor": 0}, "more than 0 and at most 1, not 0"),
        ({"steps": 1, "start_factor": 2}, "more than 0 and at most 1, not 2"),
    ],
)
def test_no_such_warm_up(arguments, message):
    optimizer = torch.optim.SGD(network().parameters(), lr=1)
    with pytest.raises(ValueError, match=message):
        hvd.WarmupLR(optimizer, **arguments)


# --- metrics ------------------------------------------------------------------------------------
def test_metrics_are_means_over_ranks_in_the_callers_order():
    def body(rank):
        numbers = {"loss": torch.tensor(float(rank)), "accuracy": rank == 0}
        return hvd.average_metrics(dict(sorted(numbers.items(), reverse=rank == 0)))

    for found in run_ranks(4, body):
        assert found == {"loss": 1.5, "accuracy": 0.25}
        assert list(found) == ["loss", "accuracy"]


def test_metrics_are_weighed_and_a_rank_without_samples_does_not_count():
    samples, losses = [3, 0, 1, 0], [1.0, math.nan, 5.0, None]

    def body(rank):
        numbers = {} if losses[rank] is None else {"loss": losses[rank]}
        return hvd.average_metrics(numbers, samples=samples[rank])

    assert run_ranks(4, body) == [{"loss": 2.0}] * 4


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_seen_on_every_rank(value):
    for found in run_ranks(2, lambda rank: hvd.average_metrics({"x": value if rank else 1.0})):
        assert str(found["x"]) == str(value)


def test_metrics_of_nobody_are_nan():
    for found in run_ranks(
        2, lambda rank: hvd.average_metrics({"x": 1} if rank else {}, samples=0)
    ):
        assert math.isnan(found["x"])


def test_other_names_are_a_mismatch_on_every_rank():
    def body(rank):
        with pytest.raises(rc.MismatchError) as told:
            hvd.average_metrics({"b" if rank == 2 else "a": 1.0})
        return str(told.value)

    assert set(run_ranks(3, body)) == {
        "average_metrics: rank 0 has a; rank 2 has b. Pass the same names on every rank"
    }


def test_metrics_of_many_batches_equal_those_of_all_samples():
    """Batches of unequal sizes, some ranks with more of them, one with none."""
    values = torch.randn(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shares = [values[:25].split(7), values[25:].split(4), ()]

    def body(rank):
        metrics = hvd.Metrics()
        for turn in range(2):
            for part in shares[rank]:
                metrics.add(len(part), x=part.mean() + turn, square=float((part**2).mean()))
            metrics.add(0, x=math.nan, square=math.nan)
            found = metrics.average()
        return found

    for found in run_ranks(3, body):
        assert found["x"] == pytest.approx(float(values.mean()) + 1, rel=1e-12)
        assert found["square"] == pytest.approx(float((values**2).mean()), rel=1e-12)


def test_metrics_keep_no_graph():
    x = torch.ones(3, requires_grad=True)

    def body(_):
        metrics = hvd.Metrics()
        metrics.add(3, loss=(x * 2).mean())
        assert not metrics._sums["loss"].requires_grad
        return metrics.average()

    assert run_ranks(1, body) == [{"loss": 2.0}]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hvd.average_metrics({"x": [1.0, 2.0]}), r"x has the shape \(2,\)"),
        (lambda: hvd.average_metrics({}, samples=-1), "at least 0, not -1"),
        (lambda: hvd.Metrics().add(math.inf, x=1), "at least 0, not inf"),
    ],
)
def test_numbers_that_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        run_ranks(1, lambda _: call())


@pytest.mark.parametrize("bad", ["samples", "metrics", "added"])
def test_what_one_rank_alone_cannot_report_is_an_error_on_all(bad):
    """So the next exchange is not that of another call."""

    def average(rank):
        if bad == "added":
            metrics = hvd.Metrics()
            metrics.add(1, x=torch.ones(2 if rank == 1 else 1))
            return metrics.average()
        if bad == "samples":
            return hvd.average_metrics({"x": 1}, samples=-1 if rank == 1 else 1)
        return hvd.average_metrics({"x": [1, 2] if rank == 1 else 1})

    def body(rank):
        with pytest.raises(rc.MismatchError, match="rank 1 could not take part: ValueError"):
            average(rank)
        return hvd.average_metrics({"y": rank})

    assert run_ranks(3, body) == [{"y": 1.0}] * 3


def test_other_names_in_another_batch_are_refused():
    metrics = hvd.Metrics()
    metrics.add(1, a=1)
    with pytest.raises(ValueError, match=r"has a, and add\(\) got b"):
        metrics.add(1, b=1)


def test_a_rank_in_join_does_not_count_in_metrics():
    def body(rank):
        hvd.barrier()
        means = hvd.average_metrics({"loss": 3.0}, samples=2) if rank == 0 else None
        hvd.join()
        return means

    assert run_ranks(2, body) == [{"loss": 3.0}, None]


def test_a_loss_that_requires_gradients_is_logged_without_a_warning():
    def body(_):
        rc.log(step=1, loss=loss)

    loss = torch.ones(1, requires_grad=True).sum()
    warns_always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # else once per process
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run_ranks(1, body)
    finally:
        torch.set_warn_always(warns_always)
