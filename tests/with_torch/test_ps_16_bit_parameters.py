"""Parameters of 16 bits: the servers have float32 masters, as a careful process would alone."""

import copy

import pytest
import torch
from harness import at_length
from ps_optimizer_wrap import wrap
from ps_ranks_as_threads import run_workers
from training_models import copies, data, fit, network, share, weights

from ringcomm import ps as core
from ringcomm.torch import ps
from ringcomm.torch.ps import buckets

MAKE = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.01),
}
DTYPES = [torch.bfloat16, torch.float16]


def alone_with_masters(model, make, batches, n):
    """Train one process as n workers would: means of 16-bit gradients, updates of float32."""
    masters = [p.detach().float() for p in model.parameters()]
    optimizer = make(masters)
    for batch in batches:
        means = [torch.zeros_like(p) for p in masters]
        for rank in range(n):
            model.zero_grad()
            [(x, y)] = share([batch], rank, n)
            torch.nn.functional.mse_loss(model(x), y).backward()
            for k, p in enumerate(model.parameters()):
                means[k] += p.grad.float()
        for master, mean in zip(masters, means, strict=True):
            master.grad = mean / n
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                p.copy_(master)
    return weights(model), masters


@pytest.mark.parametrize("is_alone", [False, True], ids=["sharing tables", "with tables"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MAKE)
def test_workers_equal_one_process_with_masters(name, dtype, is_alone, monkeypatch, tmp_path):
    if is_alone:
        monkeypatch.setattr(buckets, "ALONE_NBYTES", 1)
    n, model = 2, network(dtype)
    batches = data(at_length(100, 20), n, dtype)
    replicas = copies(model, n)

    def body(rank):
        optimizer = wrap(replicas[rank], MAKE[name])
        fit(replicas[rank], optimizer, share(batches, rank, n))
        if ps.is_chief():
            ps.save(tmp_path, background=False)
        return weights(replicas[rank])

    results = run_workers(n, body, 2)
    expected, masters = alone_with_masters(copy.deepcopy(model), MAKE[name], batches, n)
    for got in results:
        for p, q in zip(got, expected, strict=True):
            assert p.dtype == dtype
            torch.testing.assert_close(p, q)
    saved = core.load_state_dict(tmp_path)
    for (key, _), master in zip(model.named_parameters(), masters, strict=True):
        rtol = 1e-5 if dtype == torch.bfloat16 else 1e-3  # numpy has float16
        torch.testing.assert_close(torch.tensor(saved[key]).float(), master, rtol=rtol, atol=1e-6)
        assert ps.model_state_dict(tmp_path)[key].dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_updates_that_16_bits_cannot_hold_add_up(dtype):
    def body(rank):
        w = torch.nn.Parameter(torch.ones(10, dtype=dtype))
        optimizer = ps.DistributedOptimizer(torch.optim.SGD([w], lr=1e-4))
        for _ in range(300):
            w.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return w.tolist()

    assert run_workers(1, body) == [torch.full((10,), 1 - 0.03, dtype=dtype).tolist()]


def test_the_state_that_is_loaded_has_the_precision_of_the_servers():
    def body(rank):
        w = torch.nn.Parameter(torch.ones(10, dtype=torch.bfloat16))
        optimizer = ps.DistributedOptimizer(torch.optim.Adam([w], lr=1e-3))
        for _ in range(3):
            (w * 0.3).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        state = optimizer.state_dict()
        optimizer.load_state_dict(copy.deepcopy(state))
        again = optimizer.state_dict()
        for key in ("exp_avg", "exp_avg_sq"):
            assert state["state"][0][key].dtype == torch.float32
            assert torch.equal(state["state"][0][key], again["state"][0][key])

    run_workers(1, body)


def test_workers_that_update_get_means_of_16_bits():
    def body(rank):
        w = torch.nn.Parameter(torch.ones(10, dtype=torch.bfloat16))
        optimizer = ps.DistributedOptimizer(torch.optim.SGD([w], lr=1.0), apply="worker")
        (w * (rank + 1)).sum().backward()
        optimizer.step()
        assert (w.grad.dtype, w.grad[0].item()) == (torch.bfloat16, 1.5)
        return w[0].item()

    assert run_workers(2, body) == [-0.5, -0.5]
