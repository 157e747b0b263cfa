"""Workers and servers make what one process makes of all samples: everything at once.

Schedules that change every hyper-parameter there is a schedule for, clipping, uneven and empty
batches, tensors that are cut where none ends; and numbers that are none.
"""

import threading

import numpy as np
import pytest
import torch
from harness import at_length
from ps_ranks_as_threads import run_workers
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from training_models import assert_close, copies, data, network, weights

from ringcomm.torch import ps

OPTIMIZERS = {
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01), 1e-11),
    "Adam": (lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True), 1e-9),
    "AdamW": (lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1), 1e-9),
    "Adagrad": (lambda p: torch.optim.Adagrad(p, lr=0.02, lr_decay=1e-3), 1e-9),
    "RMSprop": (lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True), 1e-9),
    "Adadelta": (lambda p: torch.optim.Adadelta(p, lr=0.5), 1e-9),
}
LAYOUTS = [(w, s) for w in (1, 2, 3, 4) for s in (1, 2, 3)]
ALL = [(name, w, s, 200) for name in OPTIMIZERS for w, s in LAYOUTS]
SOME = [
    ("SGD", 4, 3, 20), ("Adam", 3, 2, 40), ("AdamW", 2, 3, 20), ("Adagrad", 1, 2, 20),
    ("RMSprop", 3, 1, 20), ("Adadelta", 2, 1, 20),
]  # fmt: skip
MAX_NORM = 0.4


pytestmark = pytest.mark.usefixtures("odd_cuts")


def uneven(batch, step, rank, size):
    """Return a worker's part of a batch: the bounds differ from step to step; some are empty."""
    n = len(batch[0])
    inner = sorted((7 * step * k + 3 * k) % (n + 1) for k in range(1, size))
    bounds = [0, *inner, n]
    return tuple(part[bounds[rank] : bounds[rank + 1]] for part in batch)


def schedule_for(optimizer, n_steps):
    """Change the learning rate, and momentum or betas, in every step."""
    has_momentum = any(key in optimizer.defaults for key in ("momentum", "betas"))
    return OneCycleLR(optimizer, 0.01, total_steps=n_steps + 1, cycle_momentum=has_momentum)


def train(model, optimizer, batches, clip=None):
    schedule = schedule_for(optimizer, len(batches))
    for step, (x, y) in enumerate(batches):
        for group in optimizer.param_groups:
            if "weight_decay" in group:
                group["weight_decay"] = 0.01 * (step % 3)
        optimizer.zero_grad()
        if clip is None:
            optimizer.set_samples(len(x))
        nn.functional.mse_loss(model(x), y).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize(("name", "n_workers", "n_servers", "n_steps"), at_length(ALL, SOME))
def test_everything_at_once_equals_one_process(name, n_workers, n_servers, n_steps):
    make, tolerance = OPTIMIZERS[name]
    batches = data(n_steps, n_workers)
    plain, unclipped, *replicas = copies(network(), n_workers + 2)
    train(plain, make(plain.parameters()), batches, MAX_NORM)
    train(unclipped, make(unclipped.parameters()), batches, 1e9)
    assert max((a - b).abs().max() for a, b in zip(weights(plain), weights(unclipped), strict=True))

    def body(rank):
        model = replicas[rank]
        optimizer = ps.DistributedOptimizer(
            make(model.parameters()), model.named_parameters(), max_grad_norm=MAX_NORM
        )
        mine = [uneven(batch, step, rank, n_workers) for step, batch in enumerate(batches)]
        train(model, optimizer, mine)
        return weights(model)

    assert_close(run_workers(n_workers, body, n_servers), weights(plain), tolerance)


@pytest.mark.parametrize("name", at_length(list(OPTIMIZERS), ["Adam", "SGD"]))
@pytest.mark.parametrize("max_norm", [None, MAX_NORM], ids=["plain", "clipped"])
def test_bits_are_the_same_for_any_number_of_servers_and_order_of_workers(name, max_norm):
    """In float32, where another order of sums would show."""
    make, _ = OPTIMIZERS[name]
    n_steps, n = at_length(40, 8), 3
    batches = data(n_steps, n, torch.float32)
    found = []
    for n_servers, order in [(1, (0, 1, 2)), (3, (2, 0, 1)), (2, (1, 2, 0))]:
        replicas = copies(network(torch.float32), n)
        turns = [threading.Event() for _ in range(n_steps * n)]

        def body(rank, replicas=replicas, turns=turns, order=order):
            model = replicas[rank]
            optimizer = ps.DistributedOptimizer(
                make(model.parameters()), model.named_parameters(), max_grad_norm=max_norm
            )
            for step, batch in enumerate(batches):
                x, y = uneven(batch, step, rank, n)
                place = step * n + order.index(rank)
                optimizer.zero_grad()
                optimizer.set_samples(len(x))
                assert place == 0 or turns[place - 1].wait(120)
                nn.functional.mse_loss(model(x), y).backward()  # pushes, unless step() does
                turns[place].set()
                optimizer.step()
            return b"".join(p.numpy().tobytes() for p in weights(model))

        found += run_workers(n, body, n_servers)
    assert len(set(found)) == 1
    assert np.isfinite(np.frombuffer(found[0], np.float32)).all()


# --- numbers that are none ------------------------------------------------------------------------
SPECIAL = [
    0.0,
    -0.0,
    np.inf,
    -np.inf,
    np.nan,
    1e-310,
    -1e-310,
    1e-40,
    1e30,
    5e-324,
    1.0,
]  # of one sign: cancellation shows who rounds once
CLASSES = ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "NAdam", "RAdam"]


@pytest.mark.parametrize("apply", ["server", "worker"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CLASSES)
def test_nan_inf_and_denormals_come_through_servers_as_in_torch(name, dtype, apply):
    """Two workers with the same gradient: their mean is that gradient, whatever it is."""
    special = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)
    start = torch.cat([special[i % len(special) :] for i in range(len(special))])
    steps = [start.roll(k) for k in range(4)]
    kind = getattr(torch.optim, name)

    def parameters():
        values = torch.linspace(-1, 1, len(start), dtype=dtype)
        return [nn.Parameter(values), nn.Parameter(torch.empty(0, dtype=dtype))]

    def go(optimizer, own):
        for slope in steps:
            optimizer.zero_grad()
            for p in own:  # the gradient of p * slope, also where that is NaN
                p.backward(slope[: len(p)])
            optimizer.step()
        return own[0].detach()

    torch.set_default_dtype(torch.float64)  # of NAdam's mu_product
    try:
        alone = parameters()
        expected = go(kind(alone, lr=0.01, foreach=False), alone)
        both = [parameters() for _ in range(2)]

        def body(rank):
            own = both[rank]
            return go(ps.DistributedOptimizer(kind(own, lr=0.01), apply=apply), own)

        results = run_workers(2, body, 2)
    finally:
        torch.set_default_dtype(torch.float32)
    bound = 1e-10 if dtype == torch.float64 else 1e-5
    tiny = torch.finfo(dtype).tiny
    for got in results:
        torch.testing.assert_close(got, expected, rtol=bound, atol=tiny, equal_nan=True)
    assert expected.isnan().any()
    assert expected.isfinite().any()
