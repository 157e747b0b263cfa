"""Training with torch on servers of which there are two copies: servers are killed."""

import re

import pytest
from harness import IS_MPICH, run_script
from storms import LAUNCHERS

pytestmark = pytest.mark.skipif(IS_MPICH, reason="MPICH ends a job when a rank dies")

TRAINING = """
import hashlib, os, signal, sys, time
import ringcomm as rc
from ringcomm import ps

rc.init()
pids = rc.allgather_object(os.getpid())
ps.init(3, replication=2)  # the servers end here, and need no torch

import torch
from torch import nn
from ringcomm.torch import ps

torch.manual_seed(3)
torch.set_num_threads(1)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = ps.Embedding(50, 6, name="rows", mode="sync", optimizer=ps.optim.Adagrad(0.1))
        self.hidden, self.out = nn.Linear(6, 200), nn.Linear(200, 3)

    def forward(self, ids):
        return self.out(self.hidden(self.rows(ids)).tanh())

me, model = rc.rank(), Model()
optimizer = ps.DistributedOptimizer(
    torch.optim.Adam(model.parameters(), lr=0.01), model.named_parameters()
)
deaths = dict(zip((4, 9), map(int, sys.argv[1:])))
for step in range(14):
    batch = torch.Generator().manual_seed(10 * step + me)
    optimizer.zero_grad()
    model(torch.randint(0, 50, (8,), generator=batch)).square().sum().backward()
    if step in deaths and me == 0:
        until = time.monotonic() + 30
        while any(each["copies"] < 2 for each in ps.stats()):
            assert time.monotonic() < until, ps.stats()
        os.kill(pids[2 + deaths[step]], signal.SIGKILL)
    optimizer.step()
weights = [*(each.detach() for each in model.parameters()), model.rows.weight_now()]
whole = torch.cat([each.flatten() for each in weights])
print("weights", hashlib.sha256(whole.numpy().tobytes()).hexdigest())
"""


def train(cwd, *victims):
    ended = run_script(
        5, TRAINING, *map(str, victims), cwd=cwd, env={"RINGCOMM_ELASTIC": "1"},
        options=(*LAUNCHERS["ulfm"], "--runtime-options", "error-nonzero-status=0"),
    )  # fmt: skip
    output = ended.output
    assert ended.code == 0, output
    for victim in victims:
        assert f"server {victim}, died" in output, output
    weights = re.findall(r"weights (\w+)", output)
    assert len(weights) == 2, output
    return {*weights}


def test_weights_have_the_bits_of_a_run_without_deaths_after_two_of_them(tmp_path):
    """The second server dies once there are two copies of each again."""
    assert train(tmp_path, 0, 1) == train(tmp_path)
