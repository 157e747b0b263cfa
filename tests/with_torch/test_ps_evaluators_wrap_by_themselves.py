"""Evaluators wrap a model each for itself: no other evaluator, and no earlier attempt, matters."""

import pytest
import torch
from harness import DEADLINE_S
from ps_ranks_as_threads import Boom, ended, kill_server, run_all, run_workers
from torch import nn

import ringcomm as rc
from ringcomm.config import Settings
from ringcomm.ps import evaluation
from ringcomm.ps.session import session
from ringcomm.torch import ps
from ringcomm.torch.ps.feeder import Feeder

ELASTIC = Settings(timeout_s=DEADLINE_S, elastic=1)


@pytest.fixture(autouse=True)
def no_evaluation(monkeypatch):
    monkeypatch.setattr(evaluation, "_evaluation", None)


def wrapped():
    model = nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return model, ps.DistributedOptimizer(optimizer, model.named_parameters())


def values(model):
    return [each.tolist() for each in model.parameters()]


def train(rank):
    model, optimizer = wrapped()
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
    if ps.is_chief():
        ps.reports(until=4)
    rc.barrier()
    return values(model)


def train_until(models, step):
    """Return the values that each model had after each step: a snapshot may be in between."""
    had = [[] for _ in models]
    while session().clock < step:
        for of_one, (model, optimizer) in zip(had, models, strict=True):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            of_one.append(values(model))
    return had


def test_an_evaluator_goes_on_if_another_one_dies_before_it_has_wrapped():
    seen = []

    @ps.evaluator(every=4)
    def evaluate(step):
        if session().engine.job_rank == session().layout.evaluators[1]:
            raise Boom
        model, optimizer = wrapped()
        optimizer.pull_parameters()
        seen.append(values(model))
        ps.report(step, {})

    results = ended(run_all(2, train, 1, evaluators=2, settings=ELASTIC), 1)
    assert seen == [results[0]]


def test_an_evaluator_that_wraps_again_after_a_loss_finds_the_same_tables(monkeypatch):
    seen, lost = [], []
    fetch = Feeder.fetch_values

    def fetch_or_lose(self, buckets):
        if session().is_evaluator and not lost:
            lost.append(True)
            raise rc.ServerLostError("as after a death", rank=3, reason="died", view=0)
        return fetch(self, buckets)

    monkeypatch.setattr(Feeder, "fetch_values", fetch_or_lose)

    @ps.evaluator(every=4)
    def evaluate(step):
        with pytest.raises(rc.ServerLostError):
            wrapped()
        model, optimizer = wrapped()
        optimizer.pull_parameters()
        seen.append(values(model))
        ps.report(step, {})

    first, *_ = run_workers(2, train, 1, evaluators=1)
    assert seen == [first]


@pytest.mark.parametrize("keeps_first", [False, True])
def test_an_evaluator_that_loses_a_server_behind_the_first_of_two_models(
    keeps_first, tmp_path, monkeypatch
):
    seen, kept, pushers = [], [], []
    fetch = Feeder.fetch_values

    def fetch_or_lose(self, buckets):
        if session().is_evaluator and self not in pushers and None not in pushers:
            pushers.append(self)
            if len(pushers) == 2:
                pushers[:] = [None]
                kill_server(1)
                while True:
                    fetch(self, buckets)
        return fetch(self, buckets)

    monkeypatch.setattr(Feeder, "fetch_values", fetch_or_lose)

    @ps.evaluator(every=2)
    def evaluate(step):
        both = [*kept]
        while len(both) < 2:
            both.append(wrapped())
            if keeps_first:
                kept[:] = both
        kept[:] = both
        for _, optimizer in both:
            optimizer.pull_parameters()
        seen.append([values(model) for model, _ in both])
        ps.report(step, {})

    def train_both(rank):
        both = [wrapped(), wrapped()]
        if ps.is_chief():
            ps.save(tmp_path).wait()
        rc.barrier()
        with pytest.raises(rc.ServerLostError):
            train_until(both, 1000)
        ps.recover(tmp_path)
        had = train_until(both, 4)
        if ps.is_chief():
            ps.reports(until=4)
        rc.barrier()
        return had

    results = ended(run_all(2, train_both, 2, evaluators=1, settings=ELASTIC), 1)
    assert [found in had for found, had in zip(seen[-1], results[0], strict=True)] == [True] * 2


def test_an_evaluator_that_loses_a_server_behind_the_conversion_of_embeddings(
    tmp_path, monkeypatch
):
    seen, killed = [], []
    fetch = Feeder.fetch_values

    def fetch_or_lose(self, buckets):
        if session().is_evaluator and not killed:
            killed.append(True)
            kill_server(1)
            while True:
                fetch(self, buckets)
        return fetch(self, buckets)

    monkeypatch.setattr(Feeder, "fetch_values", fetch_or_lose)
    ids = torch.arange(5)

    def converted():
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3))
        ps.convert(model, min_rows=1, mode="sync")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, ps.DistributedOptimizer(optimizer, model.named_parameters())

    @ps.evaluator(every=2)
    def evaluate(step):
        model, optimizer = converted()
        optimizer.pull_parameters()
        model.eval()
        seen.append(model(ids).tolist())
        ps.report(step, {})

    def body(rank):
        model, optimizer = converted()
        if ps.is_chief():
            ps.save(tmp_path).wait()
        rc.barrier()
        with pytest.raises(rc.ServerLostError):
            learn(model, optimizer, 1000)
        ps.recover(tmp_path)
        learn(model, optimizer, 2)
        if ps.is_chief():
            ps.reports(until=2)
        rc.barrier()
        model.eval()
        return model(ids).tolist()

    def learn(model, optimizer, step):
        while session().clock < step:
            optimizer.zero_grad()
            model(ids).square().sum().backward()
            optimizer.step()

    results = ended(run_all(1, body, 2, evaluators=1, settings=ELASTIC), 1)
    assert seen == results[:1]


def test_an_evaluator_that_dropped_its_first_model_before_a_loss_wraps_the_second(tmp_path):
    first, second, seen = [], [], []

    @ps.evaluator(every=2)
    def evaluate(step):
        if session().n_recovered:
            second[:] = second or [wrapped()]
            second[0][1].pull_parameters()
            seen.append(values(second[0][0]))
        elif not first:
            first.append(wrapped())
        else:
            try:
                kill_server(1)
                while True:
                    first[0][1].pull_parameters()
            finally:
                first.clear()
        ps.report(step, {})

    def body(rank):
        both = [wrapped(), wrapped()]
        train_until(both, 2)
        if ps.is_chief():
            ps.reports(until=2)
            ps.save(tmp_path).wait()
        rc.barrier()
        with pytest.raises(rc.ServerLostError):
            train_until(both, 1000)
        ps.recover(tmp_path)
        had = train_until(both, 4)
        if ps.is_chief():
            ps.reports(until=4)
        rc.barrier()
        return had[1]

    results = ended(run_all(2, body, 2, evaluators=1, settings=ELASTIC), 1)
    assert seen[-1] in results[0]
