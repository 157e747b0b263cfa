"""torch under a real mpirun: DataLoader workers, and a rank that fails in training."""

import os
import signal

import pytest
from find_ranks_of_a_job import await_caught, ranks_in
from harness import at_length, finish_job, run_script, start_job

LOADER = """
import sys
import torch
from torch.utils.data import DataLoader, Dataset, Subset
import ringcomm as rc
import ringcomm.torch as hvd

class Squares(Dataset):
    def __init__(self, model=None, bad=None):
        self.model, self.bad = model, bad
    def __len__(self):
        return 64
    def __getitem__(self, i):
        if i == self.bad:
            raise ValueError(f"bad sample {i}")
        x = torch.full((4,), i / 64, dtype=torch.float64)
        if self.model is not None:
            self.model(x).sum().backward()    # a worker's own gradients, of no concern to the rank
        return x, x[:1] ** 2

def train(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

def new():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    model.double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

if __name__ == "__main__":
    method, *more = sys.argv[1:]
    hvd.init()
    model, optimizer = new()
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict())
    bad = hvd.size() * 13 + 1 if "bad" in more else None    # of rank 1
    mine = Subset(Squares(model, bad), range(hvd.rank(), 64, hvd.size()))
    loader = DataLoader(mine, 8, num_workers=2, multiprocessing_context=method,
                        persistent_workers=method == "spawn")
    for epoch in range(2):
        train(model, optimizer, loader)
    alone, plain = new()
    for epoch in range(2):
        train(alone, plain, DataLoader(Squares(), 8 * hvd.size()))
    for p, q in zip(model.parameters(), alone.parameters()):
        assert (p - q).abs().max() <= 1e-12 * q.abs().max()
    print("trained", flush=True)
"""


@pytest.mark.parametrize("method", at_length(["fork", "spawn"], ["fork"]))
def test_ranks_with_loader_workers_equal_one_process(method, tmp_path):
    job = run_script(2, LOADER, method, cwd=tmp_path, timeout_s=120)
    assert job.code == 0, job.output
    assert job.output.count("trained") == 2


STOPPED = """
import sys
import torch
from torch.utils.data import DataLoader
import ringcomm as rc

if __name__ == "__main__":
    rc.init()
    rc.on_checkpoint(lambda step: print("saved", step, flush=True))
    loader = DataLoader(torch.ones(10**6), num_workers=2, multiprocessing_context=sys.argv[1])
    for x in loader:
        rc.allreduce(x)
        rc.step()
"""


@pytest.mark.parametrize("method", at_length(["fork", "spawn", "forkserver"], ["fork"]))
def test_workers_hold_a_stop_signal_until_the_ranks_have_saved(method, tmp_path):
    (tmp_path / "train.py").write_text(STOPPED)
    job = start_job(2, tmp_path / "train.py", method, cwd=tmp_path)
    await_caught(tmp_path, 2)
    for rank in ranks_in(tmp_path).values():
        os.killpg(os.getpgid(rank.page["pid"]), signal.SIGTERM)
    done = finish_job(job)
    assert (done.code, done.output.count("saved ")) == (75, 2), done.output


@pytest.mark.at_length
def test_a_loader_worker_that_raises_fails_its_rank_with_its_error(tmp_path):
    job = run_script(2, LOADER, "fork", "bad", cwd=tmp_path, timeout_s=120)
    assert job.code != 0
    assert "x rank 1" in job.output
    assert "raised ValueError after step 1 - exit 1" in job.output
    assert "bad sample 27" in job.output
