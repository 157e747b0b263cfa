"""Buffers of a model on the servers: for evaluators, in checkpoints, chosen, left out, refused."""

import pytest
import torch
from harness import DEADLINE_S
from ps_optimizer_wrap import wrap
from ps_ranks_as_threads import run_workers
from torch import nn
from training_models import copies

import ringcomm as rc
from ringcomm.ps import evaluation
from ringcomm.ps.job import session
from ringcomm.torch import ps


class Normed(nn.Module):
    """A model with buffers of several kinds."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.top = nn.Linear(5, 2)
        self.register_buffer("low", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("large", torch.tensor(2**53 - 1))
        self.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)

    def forward(self, x):
        with torch.no_grad():
            self.low += x.mean()
            self.large -= 1
            self.phase = self.phase + 1j  # another tensor
            self.scratch += 1
        return self.top(self.norm(x))


def fit_normed(model, optimizer, rank, n):
    for step in range(n):
        x = torch.randn(8, 5, generator=torch.Generator().manual_seed(10 * step + rank)) + 3
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def buffers_of(model):
    return {name: x.clone() for name, x in model.named_buffers() if name != "scratch"}


def assert_equal(a, b):
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def test_an_evaluator_has_the_chief_s_buffers(monkeypatch):
    monkeypatch.setattr(evaluation, "_evaluation", None)
    replicas, on_evaluator, seen = copies(Normed(), 3), [], []

    @ps.evaluator(every=4)
    def evaluate(step):
        if not on_evaluator:
            on_evaluator.append(wrap(replicas[2]))
        on_evaluator[0].pull_parameters()
        seen.append(buffers_of(replicas[2]))
        ps.report(step, {})

    def body(rank):
        optimizer = wrap(replicas[rank])
        fit_normed(replicas[rank], optimizer, rank, 4)
        if ps.is_chief():
            ps.reports(until=4)
        return buffers_of(replicas[rank])

    chief, other = run_workers(2, body, 2, evaluators=1)
    assert_equal(seen[0], chief)
    assert not torch.equal(chief["norm.running_mean"], other["norm.running_mean"])
    assert (replicas[2].scratch == 0).all()


def test_a_checkpoint_has_buffers(tmp_path):
    (model,), wanted = copies(Normed(), 1), {}

    def first(rank):
        optimizer = wrap(model)
        fit_normed(model, optimizer, rank, 3)
        wanted.update(buffers_of(model))
        ps.save(tmp_path, background=False)

    def again(rank):
        replica = replicas[rank]
        optimizer = wrap(replica)
        if rank == 0:
            ps.restore(tmp_path)
        rc.barrier()
        optimizer.pull_parameters()
        assert_equal(buffers_of(replica), wanted)

    run_workers(1, first)
    replicas = copies(Normed(), 2)
    run_workers(2, again)


def test_once_the_chief_has_left_the_buffers_of_the_next_worker_are_served():
    replicas = copies(Normed(), 2)

    def body(rank):
        model = replicas[rank]
        optimizer = wrap(model)
        fit_normed(model, optimizer, rank, 2)
        rc.barrier()
        if rank == 0:
            return
        current = session()
        assert current.client.drive_until(
            lambda: 0 in current.engine.watch.peers.left, "test", DEADLINE_S
        )
        fit_normed(model, optimizer, rank, 3)
        own = buffers_of(model)
        optimizer.pull_parameters()
        assert_equal(buffers_of(model), own)

    run_workers(2, body)


def test_buffers_may_be_passed_or_left_out():
    def body(rank):
        chosen, none = copies(Normed(), 2)
        named = dict(chosen.norm.named_buffers())
        sgd = torch.optim.SGD(chosen.parameters(), 0.1)
        ps.DistributedOptimizer(sgd, list(chosen.named_parameters()), buffers=named.items())
        assert sorted(session().tables["buffers in float32 (optimizer 1)"].shape) == [10]
        ps.DistributedOptimizer(
            torch.optim.SGD(none.parameters(), 0.1), none.named_parameters(), buffers=()
        )
        assert not [name for name in session().tables if "buffers" in name and "2" in name[-3:]]

    run_workers(1, body)


def test_a_buffer_that_servers_cannot_keep_is_named():
    def body(rank):
        model = Normed()
        model.large += 10
        with pytest.raises(ValueError, match=r"the buffer large has 9007199254741001.*2\^53"):
            wrap(model)
        with pytest.raises(TypeError, match=r"pairs \(name, tensor\)"):
            wrap(model, buffers=model.buffers())

    run_workers(1, body)
