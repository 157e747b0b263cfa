"""ps.DistributedOptimizer makes of n workers and servers what one process makes of all samples."""

import copy

import pytest
import torch
from harness import at_length
from ps_optimizer_wrap import wrap
from ps_ranks_as_threads import run_workers
from torch import nn
from training_models import assert_close, copies, data, fit, network, share, weights

import ringcomm.torch as hvd
from ringcomm.torch import ps
from ringcomm.torch.ps import buckets

OPTIMIZERS = {
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True), 1e-12),
    "Adam": (lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True), 1e-10),
    "AdamW": (lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.01), 1e-10),
    "Adagrad": (lambda p: torch.optim.Adagrad(p, lr=0.02, lr_decay=1e-3), 1e-10),
    "RMSprop": (lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True), 1e-10),
    # torch keeps NAdam's mu_product in float32, whatever the parameters are: 1e-10 by itself.
    "NAdam": (lambda p: torch.optim.NAdam(p, lr=1e-3), 1e-9),
}


pytestmark = pytest.mark.usefixtures("odd_cuts")


def fit_on_schedule(model, optimizer, batches):
    """Train, with another learning rate in each step."""
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.01, total_steps=len(batches) + 1, cycle_momentum=False
    )
    for batch in batches:
        fit(model, optimizer, [batch])
        schedule.step()


def results_of(
    n_workers, n_servers, make, batches, train=fit, *, split=share, model=None, **options
):
    replicas = copies(network() if model is None else model, n_workers)

    def body(rank):
        optimizer = wrap(replicas[rank], make, **options)
        train(replicas[rank], optimizer, split(batches, rank, n_workers))
        return weights(replicas[rank])

    return run_workers(n_workers, body, n_servers)


def alone(make, batches, train=fit, model=None):
    (model,) = copies(network() if model is None else model, 1)
    train(model, make(model.parameters()), batches)
    return weights(model)


LAYOUTS = [(w, s) for w in (1, 2, 3, 4) for s in (1, 2, 3)]


@pytest.mark.parametrize(("n_workers", "n_servers"), at_length(LAYOUTS, [(2, 2)]))
@pytest.mark.parametrize("name", at_length(list(OPTIMIZERS), list(OPTIMIZERS)[:2]))
def test_workers_with_a_schedule_equal_one_process(name, n_workers, n_servers):
    make, tolerance = OPTIMIZERS[name]
    n_steps = at_length(200, 60)
    batches = data(n_steps, n_workers)
    got = results_of(n_workers, n_servers, make, batches, fit_on_schedule)
    assert_close(got, alone(make, batches, fit_on_schedule), tolerance)


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize(("n_workers", "n_servers"), at_length(LAYOUTS, [(1, 1), (2, 3), (4, 1)]))
def test_any_layout_equals_one_process(n_workers, n_servers):
    make, tolerance = OPTIMIZERS["AdamW"]
    batches = data(10, n_workers)
    got = results_of(n_workers, n_servers, make, batches)
    assert_close(got, alone(make, batches), tolerance)


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5}], ids=["plain", "clipped"])
def test_any_number_of_servers_gives_the_same_bits(options):
    make, _ = OPTIMIZERS["NAdam"]
    batches = data(10, 3)
    one, three = (results_of(3, n, make, batches, **options)[0] for n in (1, 3))
    for a, b in zip(one, three, strict=True):
        assert torch.equal(a, b)


def test_the_oracle_sees_a_wrong_mean():
    make, tolerance = OPTIMIZERS["Adam"]
    batches = data(10, 2)
    right, wrong = (alone(make, x)[0] for x in (batches, share(batches, 0, 2)))
    assert (right - wrong).abs().max() > 1e6 * tolerance * right.abs().max()


# --- clipping and scaling -------------------------------------------------------------------------
def clipping(max_norm):
    def train(model, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()

    return train


@pytest.mark.parametrize("apply", ["server", "worker"])
@pytest.mark.parametrize(("n_workers", "n_servers"), at_length(LAYOUTS, [(3, 2)]))
def test_the_gradient_of_all_is_clipped_as_in_one_process(n_workers, n_servers, apply):
    make, tolerance = OPTIMIZERS["SGD"]
    batches = data(10, n_workers)
    got = results_of(n_workers, n_servers, make, batches, max_grad_norm=0.3, apply=apply)
    assert_close(got, alone(make, batches, clipping(0.3)), tolerance)
    unclipped = alone(make, batches)[0]
    assert (unclipped - got[0][0]).abs().max() > 1e-3


@pytest.mark.parametrize("apply", ["server", "worker"])
@pytest.mark.parametrize("max_grad_norm", [None, 0.3])
def test_one_inf_anywhere_skips_the_step_everywhere(apply, max_grad_norm):
    make, tolerance = OPTIMIZERS["Adam"]
    batches, bad = data(6, 2), 3
    replicas = copies(network(), 2)

    def body(rank):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
        optimizer = wrap(
            replicas[rank], make, apply=apply, scaler=scaler, max_grad_norm=max_grad_norm
        )
        scales, applied = [], []
        for step, (x, y) in enumerate(share(batches, rank, 2)):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(replicas[rank](x), y)
            poison = float("inf") if (step, rank) == (bad, 1) else 1.0
            scaler.scale(loss * poison).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            applied.append(optimizer.was_applied)
        return weights(replicas[rank]), scales, applied

    results = run_workers(2, body, 2)
    good = [batch for step, batch in enumerate(batches) if step != bad]
    train = fit if max_grad_norm is None else clipping(max_grad_norm)
    assert_close([w for w, _, _ in results], alone(make, good, train), tolerance)
    for _, scales, applied in results:
        assert scales == [1024, 1024, 1024, 512, 512, 512]
        assert applied == [True, True, True, False, True, True]


# --- batches --------------------------------------------------------------------------------------
def uneven(batches, rank, size):
    """The first worker has most of each batch, the last one none."""
    bounds = [0, *(len(batches[0][0]) - size + 2 + k for k in range(size - 1))]
    bounds.append(bounds[-1])
    return [tuple(part[bounds[rank] : bounds[rank + 1]] for part in batch) for batch in batches]


def fit_weighed(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        if hasattr(optimizer, "set_samples"):
            optimizer.set_samples(len(x))
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("apply", ["server", "worker"])
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.3}], ids=["plain", "clipped"])
def test_uneven_batches_are_weighed_also_empty_ones(apply, options):
    make, _ = OPTIMIZERS["SGD"]
    batches = data(8, 3)
    got = results_of(3, 2, make, batches, fit_weighed, split=uneven, apply=apply, **options)
    train = clipping(0.3) if options else fit
    assert_close(got, alone(make, batches, train), 1e-12)


def fit_accumulating(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        for half in zip(x.chunk(2), y.chunk(2), strict=True):
            (nn.functional.mse_loss(model(half[0]), half[1]) / 2).backward()
        optimizer.step()


def test_several_backward_passes_are_added_up():
    make, tolerance = OPTIMIZERS["Adam"]
    batches = data(10, 2)
    got = results_of(2, 2, make, batches, fit_accumulating, backward_passes_per_step=2)
    assert_close(got, alone(make, batches, fit_accumulating), tolerance)


def test_gradients_travel_in_16_bits_if_asked():
    make, _ = OPTIMIZERS["SGD"]
    model, batches = network(torch.float32), data(10, 2, torch.float32)
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        got = results_of(2, 2, make, batches, model=model, compression=compression)
        expected = alone(make, batches, model=model)
        assert_close(got, expected, 0.01)
        assert (got[0][0] - expected[0]).abs().max() > 1e-6


# --- applied by workers ---------------------------------------------------------------------------
def closing(model, optimizer, batches):
    for x, y in batches:

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        assert torch.isfinite(optimizer.step(closure))


@pytest.mark.parametrize("apply", ["server", "worker"])
def test_closures_work(apply):
    make, tolerance = OPTIMIZERS["Adam"]
    batches = data(10, 2)
    got = results_of(2, 2, make, batches, closing, apply=apply)
    assert_close(got, alone(make, batches), tolerance)


def test_an_optimizer_that_servers_cannot_be_is_applied_by_workers_and_says_so_once(caplog):
    def make(p):
        return torch.optim.LBFGS(p, max_iter=4, line_search_fn="strong_wolfe")

    batches = data(3, 2)
    got = results_of(2, 1, make, batches, closing)
    assert_close(got, alone(make, batches, closing), 1e-8)
    said = [r for r in caplog.records if "cannot be LBFGS" in r.message]
    assert [r.levelname for r in said] == ["WARNING"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_workers_that_apply_equal_one_process(name):
    make, tolerance = OPTIMIZERS[name]
    batches = data(10, 2)
    got = results_of(2, 1, make, batches, fit_on_schedule, apply="worker")
    assert_close(got, alone(make, batches, fit_on_schedule), tolerance)


# --- parameters -----------------------------------------------------------------------------------
def groups(parameters):
    """Two groups with hyper-parameters of their own."""
    first, *rest = parameters
    return torch.optim.AdamW(
        [
            {"params": [first], "lr": 0.01, "weight_decay": 0.1},
            {"params": rest, "betas": (0.5, 0.9)},
        ],
        lr=1e-3,
    )


def test_hyper_parameters_of_groups_stay_right():
    batches = data(10, 2)
    got = results_of(2, 2, groups, batches, fit_on_schedule)
    assert_close(got, alone(groups, batches, fit_on_schedule), 1e-10)


class Strided(nn.Module):
    """Weights that are transposed, of odd strides, empty, and of one element."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(20, 5, dtype=torch.float64).t() / 5)
        self.b = nn.Parameter(torch.randn(20, 6, dtype=torch.float64)[:, ::2] / 5)
        self.none = nn.Parameter(torch.empty(0, 1, dtype=torch.float64))
        self.one = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, x):
        return x @ self.a @ self.b * self.one + self.none.sum()


@pytest.mark.parametrize("apply", ["server", "worker"])
def test_parameters_of_any_layout_are_served(apply):
    torch.manual_seed(0)
    model, batches = Strided(), data(10, 2)
    make, _ = OPTIMIZERS["SGD"]
    got = results_of(2, 2, make, batches, model=model, apply=apply)
    a, b, none, one = alone(make, batches, model=model)
    assert none.shape == got[0][2].shape
    assert_close([[w[0], w[1], w[3]] for w in got], [a, b, one], 1e-12)


class Towers(nn.Module):
    """Which of the two large layers is used depends on the step; a small one never is."""

    def __init__(self):
        super().__init__()
        self.steps = 0
        self.left, self.right = (nn.Linear(5, 16, bias=False) for _ in range(2))
        self.unused, self.out = nn.Linear(3, 3), nn.Linear(16, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x):
        self.steps += 1
        tower = self.left if self.steps % 3 else self.right
        return self.frozen(self.out(torch.tanh(tower(x))))


def test_parameters_that_nobody_used_and_frozen_ones_are_left_alone():
    torch.manual_seed(0)
    model, batches = Towers().double(), data(12, 2)
    make, tolerance = OPTIMIZERS["AdamW"]
    got = results_of(2, 2, make, batches, model=model)
    assert_close(got, alone(make, batches, model=model), tolerance)
    names = [name for name, _ in model.named_parameters()]
    before = dict(model.named_parameters())
    for name in ("frozen.weight", "unused.weight", "unused.bias"):
        assert torch.equal(before[name], got[0][names.index(name)])


class Branches(nn.Module):
    """Small layers, which share tables; some steps use only some of them, some none of one."""

    def __init__(self):
        super().__init__()
        self.steps = 0
        self.branches = nn.ModuleList([nn.Linear(5, 3) for _ in range(4)])

    def forward(self, x):
        self.steps += 1
        used = [b for k, b in enumerate(self.branches) if not k or self.steps % (k + 1)]
        return sum(branch(x) for branch in used)


DECAYING = OPTIMIZERS | {
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1), 1e-12),
    "Adam": (lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1), 1e-10),
    "RMSprop": (lambda p: torch.optim.RMSprop(p, lr=1e-3, weight_decay=0.1), 1e-10),
}


@pytest.mark.parametrize("fused", [1200, 4 << 20])
@pytest.mark.parametrize("name", DECAYING)
def test_small_parameters_without_a_gradient_are_left_alone_as_torch_does(name, fused, monkeypatch):
    monkeypatch.setattr(buckets, "FUSED_NBYTES", fused)
    torch.manual_seed(0)
    model, batches = Branches().double(), data(14, 2)
    make, tolerance = DECAYING[name]
    replicas = copies(model, 2)
    (single,) = copies(model, 1)
    plain = make(single.parameters())
    fit(single, plain, batches[:7])
    expected_state = copy.deepcopy(plain.state_dict()["state"])
    states = [None, None]

    def body(rank):
        optimizer = wrap(replicas[rank], make)
        mine = share(batches, rank, 2)
        fit(replicas[rank], optimizer, mine[:7])
        states[rank] = optimizer.state_dict()
        optimizer.load_state_dict(states[rank])
        fit(replicas[rank], optimizer, mine[7:])
        return weights(replicas[rank])

    got = run_workers(2, body, 2)
    fit(single, plain, batches[7:])
    assert_close(got, weights(single), tolerance)
    state = states[0]["state"]
    assert state.keys() == expected_state.keys()
    for index, entry in expected_state.items():
        for key, x in entry.items():
            if x is not None:
                torch.testing.assert_close(
                    state[index][key].double(), x.double(), rtol=tolerance, atol=tolerance
                )


def test_a_parameter_that_one_worker_does_not_use_counts_as_zeros_there():
    batches = data(4, 2)
    replicas = copies(nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)]).double(), 3)
    make, _ = OPTIMIZERS["SGD"]

    def train(model, optimizer, batches, which):
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.mse_loss(model[which](x), y).backward()
            optimizer.step()

    def body(rank):
        optimizer = wrap(replicas[rank], make)
        train(replicas[rank], optimizer, share(batches, rank, 2), rank)
        return weights(replicas[rank])

    got = run_workers(2, body)
    expected = []
    for which in range(2):
        (model,) = copies(replicas[2], 1)
        halves = share(batches, which, 2)
        optimizer = make(model.parameters())
        for x, y in halves:
            optimizer.zero_grad()
            (nn.functional.mse_loss(model[which](x), y) / 2).backward()
            optimizer.step()
        expected += weights(model[which])
    assert_close(got, expected, 1e-12)


@pytest.mark.parametrize("is_tensor", [False, True])
def test_a_rate_that_the_program_changes_counts_in_the_next_step(is_tensor):
    """Also one that it writes to a tensor, which stays the same object."""

    def body(_):
        model, rate = torch.nn.Linear(3, 1), torch.tensor(1.0) if is_tensor else 1.0
        sgd = torch.optim.SGD(model.parameters(), lr=rate)
        optimizer = ps.DistributedOptimizer(sgd, model.named_parameters(), mode="async")
        for power in range(4):
            new = 0.5 ** (power // 2)
            rate.fill_(new) if is_tensor else optimizer.param_groups[0].update(lr=new)
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            expected = model.weight.detach() - new * model.weight.grad
            optimizer.step()
            torch.testing.assert_close(model.weight.detach(), expected)

    run_workers(1, body)
