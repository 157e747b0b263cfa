"""Training with torch on servers of which there are two copies: servers are killed."""

import json
import re
from pathlib import Path

import ps_copy_cost
import pytest
from harness import IS_MPICH, run_job, run_script
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

torch.set_num_threads(1)

class Model(nn.Module):
    def __init__(self, name):
        super().__init__()
        equal = ps.initializers.constant(0.1)  # those at random are others for another name
        self.rows = ps.Embedding(
            50, 6, name=f"{name}.rows", mode="sync", optimizer=ps.optim.Adagrad(0.1), init=equal
        )
        self.hidden, self.out = nn.Linear(6, 200), nn.Linear(200, 3)

    def forward(self, ids):
        return self.out(self.hidden(self.rows(ids)).tanh())

me = rc.rank()

def train(name, deaths):
    torch.manual_seed(3)
    model = Model(name)
    parameters = [(f"{name}.{key}", each) for key, each in model.named_parameters()]
    optimizer = ps.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), parameters)
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
    print(f"weights, {name}:", hashlib.sha256(whole.numpy().tobytes()).hexdigest(), flush=True)

train("whole", {})
train("with deaths", dict(zip((4, 9), map(int, sys.argv[1:]))))
"""


RUN = {
    "env": {"RINGCOMM_ELASTIC": "1"},
    "options": (*LAUNCHERS["ulfm"], "--runtime-options", "error-nonzero-status=0"),
}


@pytest.mark.at_length  # tests/unit shows it without processes
def test_weights_have_the_bits_of_a_run_without_deaths_after_two_of_them(tmp_path):
    """The second server dies once there are two copies of each again."""
    victims = "0", "1"
    ended = run_script(5, TRAINING, *victims, cwd=tmp_path, **RUN)
    output = ended.output
    assert ended.code == 0, output
    for victim in victims:
        assert f"server {victim}, died" in output, output
    found = re.findall(r"weights, ([\w ]+): (\w+)", output)
    assert sorted(name for name, _ in found) == ["whole", "whole", "with deaths", "with deaths"]
    assert len({digest for _, digest in found}) == 1, output


def test_no_step_waits_while_lost_copies_are_made(tmp_path):
    """They are made of many pieces, which go one by one; else it would be over too soon."""
    script = Path(ps_copy_cost.__file__)
    options = ("--mib=1", "--steps=20", "--many=3", "--frame=1")
    ended = run_job(4, script, "--rank", *options, cwd=tmp_path, **RUN)
    assert ended.code == 0, ended.output
    found = json.loads(re.search(r"{.*}", ended.output)[0])
    assert found["second_s"] < found["copied_s"] / 4, found  # the longest has the death
    assert found["steps"] > 14, found  # ten are behind it
