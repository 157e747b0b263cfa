"""torch under a real mpirun: DataLoader workers, and a rank that fails in training."""

import pytest
from harness import run_script

pytest.importorskip("torch")

LOADER = """
import sys
import torch
from torch.utils.data import DataLoader, Dataset
import ringcomm as rc
import ringcomm.torch as hvd

class Squares(Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, i):
        if BAD and i == 13:
            raise ValueError("bad sample 13")
        return torch.full((4,), float(i)), torch.tensor([float(i) ** 2])

BAD = False
if __name__ == "__main__":
    hvd.init()
    BAD = "bad" in sys.argv and hvd.rank() == 1
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict())
    loader = DataLoader(Squares(), 8, num_workers=2, multiprocessing_context=sys.argv[1])
    for epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    ends = rc.allgather(model.weight.detach())
    assert torch.equal(ends[0], ends[-1])
    print("trained", flush=True)
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_dataloader_workers_disturb_nobody(method, tmp_path):
    job = run_script(2, LOADER, method, cwd=tmp_path, timeout_s=120)
    assert job.code == 0, job.output
    assert job.output.count("trained") == 2


def test_a_loader_worker_that_raises_fails_its_rank_with_its_error(tmp_path):
    job = run_script(2, LOADER, "fork", "bad", cwd=tmp_path, timeout_s=120)
    assert job.code != 0
    assert "x rank 1" in job.output
    assert "raised ValueError after step 1 - exit 1" in job.output
    assert "bad sample 13" in job.output
