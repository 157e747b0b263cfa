"""DistributedOptimizer on parameters of a simulated GPU: N ranks equal one process."""

from pathlib import Path

import pytest
from harness import at_length, run_script

TESTS = Path(__file__).parents[1]
N_RANKS = at_length(3, 2)

SCRIPT = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import time; began = time.monotonic()
import torch
import ringcomm as rc
import ringcomm.torch as hvd
import simulated_torch
from gpu_ranks import begin, choose

transport, shard_state, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
STEPS, BATCH = 5, 4
hvd.init()
torch.set_num_threads(1)
print("imported", round(time.monotonic() - began, 1), flush=True)
gpu = begin(rc.rank(), folder, slow=0, **choose(transport))
simulated_torch.count_as_gpu(gpu)


def network():
    torch.manual_seed(1)
    layers = (torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3))
    return torch.nn.Sequential(*layers).double()


def train(model, optimizer, samples):
    for x in samples:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()


data = torch.randn(STEPS, BATCH * hvd.size(), 6, dtype=torch.float64,
                   generator=torch.Generator().manual_seed(2))
for make in (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
             lambda p: torch.optim.AdamW(p, lr=1e-2)):
    model = network()
    if hvd.rank() != 0:
        for p in model.parameters():
            p.data.zero_()
    optimizer = make(model.parameters())
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), shard_state=shard_state)
    hvd.broadcast_parameters(model.state_dict())
    hvd.broadcast_optimizer_state(optimizer)
    train(model, optimizer, [x.chunk(hvd.size())[hvd.rank()] for x in data])
    simulated_torch.count_as_gpu(None)
    alone = network()
    train(alone, make(alone.parameters()), data)
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        assert (p - q).abs().max() <= 1e-10 * q.abs().max()
    simulated_torch.count_as_gpu(gpu)
chosen = str(rc.explain(1, device="cuda"))
assert chosen.startswith(f"arrays on GPUs: {{transport}},"), chosen
assert gpu.n_done > 100, "the GPU had nothing to do"
print("equal", round(time.monotonic() - began, 1), flush=True)
"""


@pytest.mark.parametrize(
    ("transport", "shard_state"),
    at_length(
        [(t, s) for t in ("ipc", "nccl", "staged") for s in (0, 1)],
        [("nccl", 0)],  # test_shard_state_fused_update.py trains over ipc, with shard_state
    ),
)
def test_training_on_gpus_equals_one_process(transport, shard_state, tmp_path):
    job = run_script(N_RANKS, SCRIPT, transport, shard_state, tmp_path, cwd=tmp_path)
    assert job.code == 0, job.output
    assert job.output.count("equal") == N_RANKS, job.output
