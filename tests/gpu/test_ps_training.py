"""ps.DistributedOptimizer on parameters of simulated GPUs: the bits of training in host memory."""

import pytest
import simulated_gpu as sim
import simulated_torch
import torch
from harness import at_length
from ps_optimizer_wrap import wrap
from ps_ranks_as_threads import run_workers
from training_models import copies, data, fit, network, share, weights

from ringcomm.engine.api.init_rank_size import engine
from ringcomm.gpu.executor.engine_gpus import Gpus
from ringcomm.torch import ps
from ringcomm.torch.ps import buckets

N = 2
CASES = [
    ({"mode": "sync"}, torch.float32),
    ({"mode": "sync", "max_grad_norm": 0.1}, torch.float64),
    ({"mode": "sync", "apply": "worker"}, torch.float32),
    ({"mode": "sync", "overlap": False}, torch.bfloat16),
    ({"mode": ps.FirstOf(N)}, torch.float16),
]


@pytest.fixture
def gpu(tmp_path):
    """One GPU, which the workers, threads of this process, share."""
    made = sim.SimulatedGpu(tmp_path, seed=1)
    simulated_torch.count_as_gpu(made)
    yield made
    simulated_torch.count_as_gpu(None)
    made.close()


def train(batches, model, **options):
    replicas = copies(model, N)

    def body(rank):
        if simulated_torch._gpu is not None:
            Gpus.use(engine(), sim.drivers())
        optimizer = wrap(replicas[rank], lambda p: torch.optim.AdamW(p, lr=1e-2), **options)
        fit(replicas[rank], optimizer, share(batches, rank, N))
        if options.get("apply") != "worker":
            assert len(optimizer.state_dict()["state"]) == len([*model.parameters()])
        return weights(replicas[rank])

    return run_workers(N, body, 2)


@pytest.mark.parametrize("is_alone", at_length([False, True], [False]))
@pytest.mark.parametrize(("options", "dtype"), CASES, ids=str)
def test_training_has_the_bits_of_host_memory(options, dtype, is_alone, gpu, monkeypatch):
    if is_alone:
        monkeypatch.setattr(buckets, "ALONE_NBYTES", 1)
    model, batches = network(dtype), data(8, N, dtype)
    on_gpu = train(batches, model, **options)
    assert gpu.failure is None
    assert gpu.n_done > 50, "the GPU had nothing to do"
    simulated_torch.count_as_gpu(None)
    for got, expected in zip(on_gpu, train(batches, model, **options), strict=True):
        assert all(map(torch.equal, got, expected))


def test_backward_waits_for_no_copy(gpu):
    def body(rank):
        Gpus.use(engine(), sim.drivers())
        w = torch.nn.Parameter(torch.ones(1000))
        optimizer = ps.DistributedOptimizer(torch.optim.SGD([w], lr=1.0))
        before = gpu.n_done
        gpu.synchronize()
        gpu.freeze()
        w.sum().backward()
        assert optimizer._feeder.n_pushed == 0
        gpu.thaw()
        optimizer.step()
        assert gpu.n_done > before
        return w[0].item()

    assert run_workers(1, body) == [0.0]
