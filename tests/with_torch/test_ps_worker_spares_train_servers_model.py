"""A rank takes the place of a worker that died: it trains the servers' model, not its own."""

import pytest
import torch
from harness import DEADLINE_S
from ps_ranks_as_threads import Boom, ended, run_all
from torch import nn

import ringcomm as rc
from ringcomm.config import Settings
from ringcomm.ps.members.let_in import let_in
from ringcomm.ps.session import session
from ringcomm.torch import ps

ELASTIC = Settings(timeout_s=DEADLINE_S, elastic=1)
N_STEPS, DIES_AT, AWAITED_AT = 12, 3, 6


class Model(nn.Module):
    def __init__(self, start):
        super().__init__()
        self.first, self.norm, self.last = (
            nn.Linear(5, 7, bias=False),
            nn.BatchNorm1d(7),
            nn.Linear(7, 2),
        )
        with torch.no_grad():
            for each in self.parameters():
                each.copy_(torch.linspace(-start, 1, each.numel()).view(each.shape).sin())
            self.norm.running_mean.fill_(start)

    def forward(self, x):
        return self.last(self.norm(self.first(x)).tanh())


def train_one(model, optimizer, step):
    optimizer.zero_grad()
    batch = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
    model(batch).square().sum().backward()
    optimizer.step()


def await_newcomer():
    current = session()
    while not current.layout.joined:
        is_asked = lambda: bool(current.layout.joined or current.newcomers)  # noqa: E731
        assert current.client.drive_until(is_asked, "test", DEADLINE_S)
        let_in(current)


def test_a_newcomer_is_told_that_nobody_has_parameters_for_it():
    def body(rank):
        model = Model(start=1)
        if rank == 1:
            raise Boom
        if rank == 0:
            await_newcomer()
            return rank
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(rc.RingcommError, match="nobody has parameters for it"):
            ps.DistributedOptimizer(optimizer, model.named_parameters(), apply="worker")
        return rank

    assert ended(run_all(2, body, 1, settings=ELASTIC, worker_spares=1), 1)[:2] == [0, 2]


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5}], ids=str)
@pytest.mark.parametrize("mode", ["sync", ps.FirstOf(2)], ids=str)
def test_training_with_a_newcomer_equals_training_without_a_death(mode, options):
    """All workers have the same batches, so the mean is the gradient of each of them."""
    torch.set_num_threads(1)

    def body(rank):
        model = Model(start=1 + rank)  # the chief's counts; that of a newcomer does not
        optimizer = ps.DistributedOptimizer(
            torch.optim.Adam(model.parameters(), lr=0.05), model.named_parameters(), mode=mode,
            **options,
        )  # fmt: skip
        joined, begun_with = session().is_newcomer, model.norm.running_mean.clone()
        while ps.step_number() < N_STEPS:
            if rank == 1 and ps.step_number() == DIES_AT:
                raise Boom
            if rank == 0 and ps.step_number() == AWAITED_AT:
                await_newcomer()
            train_one(model, optimizer, ps.step_number())
        if joined:
            assert abs(begun_with - 3).max() > 0.1
        return joined, [each.detach().clone() for each in model.parameters()]

    results = ended(run_all(2, body, 2, settings=ELASTIC, worker_spares=1), 1)
    results = [each for each in results if not isinstance(each, str)]
    assert [joined for joined, _ in results] == [False, True]
    alone = Model(start=1)
    optimizer = torch.optim.Adam(alone.parameters(), lr=0.05)
    for step in range(N_STEPS):
        optimizer.zero_grad()
        batch = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
        alone(batch).square().sum().backward()
        if options:
            nn.utils.clip_grad_norm_(alone.parameters(), options["max_grad_norm"])
        optimizer.step()
    for _, values in results:
        for mine, wanted in zip(values, alone.parameters(), strict=True):
            torch.testing.assert_close(mine, wanted.detach(), rtol=1e-3, atol=1e-4)
