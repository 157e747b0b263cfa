"""A server dies: torch models, their optimizers, buffers and embeddings go on from a checkpoint."""

import threading

import pytest
import torch
from harness import DEADLINE_S, at_length, wait_until
from ps_ranks_as_threads import ended, kill_server, run_all
from torch import nn

import ringcomm as rc
from ringcomm.config import Settings
from ringcomm.ps.checkpoint import files
from ringcomm.ps.server.homes.local_homes import Homes
from ringcomm.torch import ps

ELASTIC = Settings(timeout_s=DEADLINE_S, elastic=1)
N_STEPS, SAVED_AT, DIES_AT = 9, 4, 6


class Model(nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.rows = ps.Embedding(50, 6, name="rows", mode=mode, optimizer=ps.optim.Adagrad(0.1))
        self.norm = nn.BatchNorm1d(6)
        self.out = nn.Linear(6, 3)
        with torch.no_grad():  # threads share the random numbers of torch
            self.out.weight.copy_(torch.linspace(-1, 1, 18).view(3, 6).sin())
            self.out.bias.zero_()

    def forward(self, ids):
        return self.out(self.norm(self.rows(ids)))


def batch(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, 50, (8,), generator=generator)


def train_one(model, optimizer, rank, step):
    optimizer.zero_grad()
    model(batch(rank, step)).square().sum().backward()
    optimizer.step()


def train_on(model, optimizer):
    while True:
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()


def state_of(model):
    """Return what all workers have, and what the chief has."""
    values = [*(p.detach().clone() for p in model.parameters()), model.rows.weight_now()]
    return values, [each.clone() for each in model.buffers()]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


OPTIONS = {
    "sync": {},
    "clipped": {"max_grad_norm": 0.5},
    "first_of": {"mode": ps.FirstOf(2)},
    "deferred": {"overlap": False},
}


@pytest.mark.parametrize("name", at_length(OPTIONS, ["sync", "first_of"]))
def test_training_goes_on_as_if_no_server_had_died(name, tmp_path):
    options = OPTIONS[name]
    mode = options.get("mode", "sync")

    def job(victim):
        def body(rank):
            model = Model(mode)
            plain = torch.optim.Adam(model.parameters(), lr=0.01)
            optimizer = ps.DistributedOptimizer(plain, model.named_parameters(), **options)
            step, n_lost = 0, 0
            while step < N_STEPS:
                if step == DIES_AT and rank == 0 and victim is not None and not n_lost:
                    kill_server(victim)
                try:
                    train_one(model, optimizer, rank, step)
                    step += 1
                except rc.ServerLostError:
                    manifest, lost = ps.recover(tmp_path / str(victim))
                    assert manifest["step"] == SAVED_AT
                    step, n_lost = SAVED_AT, n_lost + lost
                    continue
                if step == SAVED_AT:
                    rc.barrier()
                    if ps.is_chief():
                        ps.save(tmp_path / str(victim), step=step, background=False)
                    rc.barrier()
                if step == DIES_AT and victim is not None and not n_lost:
                    rc.barrier()
            if rank == 0 and victim is not None:
                assert n_lost >= DIES_AT - SAVED_AT
            rc.barrier()
            return state_of(model)

        return ended(run_all(2, body, 3, settings=ELASTIC), victim is not None)[:2]

    expected = job(None)
    for victim in (0, 2):
        lived = job(victim)
        for mine, theirs in zip(lived, expected, strict=True):
            torch.testing.assert_close(mine[0], theirs[0], rtol=0, atol=0)
        torch.testing.assert_close(lived[0][1], expected[0][1], rtol=0, atol=0)


def test_where_workers_make_the_updates_it_says_that_it_cannot(tmp_path):
    all_know = threading.Barrier(2)

    def body(rank):
        model = nn.Linear(3, 2)
        plain = torch.optim.Adam(model.parameters(), lr=0.01)
        optimizer = ps.DistributedOptimizer(plain, model.named_parameters(), apply="worker")
        rc.barrier()
        if rank == 0:
            kill_server(1)
        with pytest.raises(rc.ServerLostError):
            train_on(model, optimizer)
        with pytest.raises(rc.RingcommError, match="apply='worker'"):
            ps.recover(tmp_path)
        all_know.wait(60)  # an operation that is under way needs both workers
        return "lived"

    assert ended(run_all(2, body, 2, settings=ELASTIC), 1)[:2] == ["lived"] * 2


@pytest.mark.parametrize("name", at_length(["sync", "clipped"], ["clipped"]))
def test_training_recovers_by_itself(name, tmp_path):
    require_recovery_by_itself(OPTIONS[name], [(0,), (2,)], tmp_path)


@pytest.mark.parametrize("victims", at_length([(0, 1), (1, 2), (2, 0)], [(0, 1)]), ids=str)
def test_training_recovers_by_itself_if_both_copies_of_a_server_are_lost(
    victims, tmp_path, monkeypatch
):
    monkeypatch.setattr(Homes, "_restore_copies", lambda _: None)  # between the two deaths
    require_recovery_by_itself({}, [victims], tmp_path, replication=2)


def require_recovery_by_itself(options, deaths, tmp_path, **job_options):
    """Fail unless jobs in which servers die end with what one has in which none does.

    deaths: of each job, the servers that die at the same time.
    """

    def job(victims):
        path = tmp_path / str(victims)

        def body(rank):
            model = Model("sync")
            plain = torch.optim.Adam(model.parameters(), lr=0.01)
            optimizer = ps.DistributedOptimizer(plain, model.named_parameters(), **options)
            is_due = bool(victims) and rank == 0
            went_back = 0
            while ps.step_number() < N_STEPS:
                step = ps.step_number()
                if step == DIES_AT and is_due:
                    wait_until(lambda: files.complete(path), "nothing was saved")
                    for victim in victims:
                        kill_server(victim)
                    is_due = False
                train_one(model, optimizer, rank, step)
                went_back += ps.step_number() <= step
                assert optimizer.was_applied == (ps.step_number() > step)
            rc.barrier()
            assert went_back == bool(victims)
            return state_of(model)

        options_of_job = {"recover": path, "save_every_s": 1e-9, **job_options}
        results = run_all(2, body, 3, settings=ELASTIC, **options_of_job)
        return ended(results, len(victims))[:2]

    expected = job(())
    for victims in deaths:
        for mine, theirs in zip(job(victims), expected, strict=True):
            torch.testing.assert_close(mine[0], theirs[0], rtol=0, atol=0)


def test_what_cannot_recover_by_itself_is_refused(tmp_path):
    def body(_rank):
        model = nn.Linear(3, 2)
        plain = torch.optim.Adam(model.parameters(), lr=0.01)
        with pytest.raises(rc.RingcommError, match="workers make the updates"):
            ps.DistributedOptimizer(plain, model.named_parameters(), apply="worker")
        kept = ps.DistributedOptimizer(plain, model.named_parameters())
        other = nn.Linear(3, 2)
        with pytest.raises(rc.RingcommError, match="second optimizer"):
            ps.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1))
        return kept.was_applied

    assert run_all(1, body, recover=tmp_path)[0]
