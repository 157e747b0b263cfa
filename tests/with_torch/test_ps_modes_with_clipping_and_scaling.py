"""All modes with clipping, scaling and accumulation, on all layouts of tables, at unequal speeds.

Each worker has a gradient that does not change, so the values tell which gradients are in them, and
by what they were clipped.
"""

import random
import threading

import pytest
import torch
from ps_optimizer_wrap import wrap
from ps_ranks_as_threads import cross_gradients, run_workers

import ringcomm as rc
from ringcomm.torch import ps

pytestmark = pytest.mark.usefixtures("odd_cuts")
LAYOUTS = {"one block": [60], "several blocks": [300], "several tables": [300, 20, 90, 200]}
FEW_LAYOUTS = [  # the gate runs the one with most to go wrong
    pytest.param("one block", marks=pytest.mark.at_length),
    pytest.param("several blocks", marks=pytest.mark.at_length),
    "several tables",
]
MODES = ["sync", "async", ps.SSP(1), ps.FirstOf(1)]
N_WORKERS, N_STEPS = 2, 4


class Model(torch.nn.Module):
    """Parameters that begin with 0, and a loss whose gradient is rank + 1 everywhere."""

    def __init__(self, counts):
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.zeros(n, dtype=torch.float64) for n in counts)

    def loss(self, rank, value=None):
        value = rank + 1.0 if value is None else value
        return sum((p * value).sum() for p in self.parts)

    def values(self):
        return torch.cat([p.detach().reshape(-1) for p in self.parts])


def lr_one(parameters):
    return torch.optim.SGD(parameters, lr=1.0)


def gradient(rank, option, n_elements):
    """Return each element of a worker's gradient, as it is applied alone."""
    value = rank + 1.0
    if option == "accumulation":
        value *= 2
    if option == "max_grad_norm":
        value *= min(0.5 / (value * n_elements**0.5 + 1e-6), 1.0)
    return value


def expected(mode, option, n_applied, n_elements):
    """Return each element of the values after so many gradients of each worker."""
    if mode == "sync":
        mean = sum(gradient(rank, "", n_elements) for rank in range(N_WORKERS)) / N_WORKERS
        return -N_STEPS * gradient(mean - 1, option, n_elements)
    return -sum(n * gradient(rank, option, n_elements) for rank, n in enumerate(n_applied))


def train(model, rank, mode, option, *, scaler=None, between):
    """Train; return how many gradients were applied."""
    options = {
        "max_grad_norm": {"max_grad_norm": 0.5},
        "accumulation": {"backward_passes_per_step": 2},
        "scaler": {"scaler": scaler},
    }[option]
    optimizer = wrap(model, lr_one, mode=mode, **options)
    rc.barrier()
    n_applied = 0
    for _ in range(N_STEPS):
        between()
        optimizer.zero_grad()
        for _ in range(options.get("backward_passes_per_step", 1)):
            loss = model.loss(rank)
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        n_applied += optimizer.was_applied
    rc.barrier()
    optimizer.pull_parameters()
    return n_applied


def scaler_of(rank):
    """Return a scaler that grows, and begins elsewhere than the other worker's."""
    return torch.amp.GradScaler("cpu", init_scale=2.0 ** (4 + 3 * rank), growth_interval=2)


@pytest.mark.parametrize("layout", FEW_LAYOUTS)
@pytest.mark.parametrize("option", ["max_grad_norm", "scaler", "accumulation"])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_what_was_applied_is_in_the_values_and_clipped_as_it_is(mode, option, layout):
    counts = LAYOUTS[layout]

    def body(rank):
        rng, model = random.Random(rank), Model(counts)

        def between():
            for _ in range(rng.randrange(4) * rank):
                ps.stats()

        scaler = None
        if option == "scaler":
            scaler = scaler_of(0 if mode == "sync" else rank)
        n_applied = train(model, rank, mode, option, scaler=scaler, between=between)
        return n_applied, model.values()

    results = run_workers(N_WORKERS, body, 2)
    n_applied = [n for n, _ in results]
    if mode != ps.FirstOf(1):
        assert n_applied == [N_STEPS] * N_WORKERS
    wanted = expected(mode, option, n_applied, sum(counts))
    for _, values in results:
        torch.testing.assert_close(values, torch.full_like(values, wanted), rtol=1e-6, atol=1e-9)


@pytest.fixture
def crossed(monkeypatch):
    """Set: each worker is late at another server."""
    return cross_gradients(monkeypatch)


@pytest.mark.parametrize("layout", FEW_LAYOUTS)
@pytest.mark.parametrize("option", ["max_grad_norm", "scaler", "accumulation"])
def test_a_worker_that_is_late_in_some_blocks_is_late_in_all(option, layout, crossed):
    counts = LAYOUTS[layout]

    def body(rank):
        model = Model(counts)

        def between():
            rc.barrier()
            crossed.set()

        scaler = scaler_of(rank) if option == "scaler" else None
        n_applied = train(model, rank, ps.FirstOf(1), option, scaler=scaler, between=between)
        return n_applied, model.values()

    (n0, values), (n1, same) = run_workers(2, body, 2)
    assert n0 + n1 == N_STEPS  # one in each round
    wanted = expected(ps.FirstOf(1), option, [n0, n1], sum(counts))
    for each in (values, same):
        torch.testing.assert_close(each, torch.full_like(each, wanted), rtol=1e-6, atol=1e-9)


def test_a_round_whose_mean_has_inf_is_skipped_and_scalers_of_its_workers_learn_of_it():
    first_is_done = threading.Event()

    def body(rank):
        model, scaler = Model([300]), scaler_of(rank)
        optimizer = wrap(model, lr_one, mode=ps.FirstOf(1), scaler=scaler)
        rc.barrier()
        before = scaler.get_scale()
        if rank == 1:
            assert first_is_done.wait(60)
        optimizer.zero_grad()
        scaler.scale(model.loss(rank, None if rank else torch.inf)).backward()
        scaler.step(optimizer)
        scaler.update()
        first_is_done.set()
        return optimizer.was_applied, scaler.get_scale() / before, model.values().abs().max().item()

    assert run_workers(2, body, 2) == [(False, 0.5, 0.0), (False, 1.0, 0.0)]  # the other was late


def test_workers_that_freeze_and_thaw_parameters_before_different_rounds():
    def body(rank):
        model = Model([300, 200])
        optimizer = wrap(model, lr_one, mode=ps.FirstOf(1), max_grad_norm=1e9)
        rc.barrier()
        n_applied = [0, 0]
        for step in range(6):
            is_frozen = 2 + rank <= step < 4
            model.parts[1].requires_grad_(not is_frozen)
            optimizer.zero_grad()
            model.loss(rank).backward()
            optimizer.step()
            n_applied[0] += optimizer.was_applied
            n_applied[1] += optimizer.was_applied and not is_frozen
        rc.barrier()
        model.parts[1].requires_grad_(True)
        optimizer.pull_parameters()
        return n_applied, [p.detach().unique().tolist() for p in model.parts]

    (n0, values), (n1, same) = run_workers(2, body, 2)
    assert values == same == [[-(n0[k] + 2.0 * n1[k])] for k in range(2)]


def test_parameters_that_are_added_share_the_rounds_from_there_on():
    def body(rank):
        model, more = Model([300]), Model([200])
        optimizer = wrap(model, lr_one, mode=ps.FirstOf(1), max_grad_norm=1e9)
        rc.barrier()
        n_applied = [0, 0]
        for step in range(6):
            if step == 3:
                optimizer.add_param_group({"params": list(more.parameters())})
            optimizer.zero_grad()
            (model.loss(rank) + more.loss(rank)).backward()
            optimizer.step()
            n_applied[0] += optimizer.was_applied
            n_applied[1] += optimizer.was_applied and step >= 3
        rc.barrier()
        optimizer.pull_parameters()
        return n_applied, [each.values().unique().tolist() for each in (model, more)]

    (n0, values), (n1, same) = run_workers(2, body, 2)
    assert values == same == [[-(n0[k] + 2.0 * n1[k])] for k in range(2)]


def test_what_a_late_worker_could_not_take_part_in_is_refused():
    def body(rank):
        first_of = {"mode": ps.FirstOf(1)}
        with pytest.raises(ValueError, match="a worker that is late misses the means of rounds"):
            wrap(Model([20]), lr_one, apply="worker", **first_of)
        rows, model = ps.Embedding(None, 2, name="rows", **first_of), Model([20])
        optimizer = wrap(model, lr_one, max_grad_norm=1.0, **first_of)
        (model.loss(rank) + rows(torch.arange(3)).sum()).backward()
        with pytest.raises(ValueError, match=r"embedding\[rows\] has rounds of its own"):
            optimizer.step()

    run_workers(2, body)
