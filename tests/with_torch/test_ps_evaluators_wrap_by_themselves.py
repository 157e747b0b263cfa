"""Evaluators wrap a model each for itself: no other evaluator, and no earlier attempt, matters."""

import pytest
import torch
from harness import DEADLINE_S
from ps_ranks_as_threads import Boom, ended, run_all, run_workers
from torch import nn

import ringcomm as rc
from ringcomm.config import Settings
from ringcomm.ps import evaluation
from ringcomm.ps.session import session
from ringcomm.torch import ps
from ringcomm.torch.ps.bucket_pusher import BucketPusher

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
    fetch = BucketPusher.fetch_values

    def fetch_or_lose(self, buckets):
        if session().is_evaluator and not lost:
            lost.append(True)
            raise rc.ServerLostError("as after a death", rank=3, reason="died", view=0)
        return fetch(self, buckets)

    monkeypatch.setattr(BucketPusher, "fetch_values", fetch_or_lose)

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
