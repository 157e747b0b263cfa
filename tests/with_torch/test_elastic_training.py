"""A real model after deaths: its weights are those of the same steps without a failure."""

import pytest
from harness import IS_MPICH, at_length, run_script
from storms import LAUNCHERS

pytestmark = pytest.mark.skipif(IS_MPICH, reason="MPICH ends a job when a rank dies")

TRAINING = """
import os, signal, sys
import torch
import ringcomm as rc
import ringcomm.torch as hvd

hvd.init()
torch.set_num_threads(1)
STEPS, me = 30, hvd.rank()
WHEN = {0: (12, "after backward"), 3: (20, "in forward")}.get(me, (-1, ""))
mse = torch.nn.functional.mse_loss

def data(step, member):
    random = torch.Generator().manual_seed(step * 100 + member)
    like = {"generator": random, "dtype": torch.float64}
    return torch.randn(8, 16, **like), torch.randn(8, 4, **like)

def make():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    model = model.double()
    return model, torch.optim.Adam(model.parameters(), lr=0.01)

def die_if(step, moment):
    if WHEN == (step, moment):
        os.kill(os.getpid(), signal.SIGKILL)

model, adam = make()
optimizer = hvd.DistributedOptimizer(adam, named_parameters=model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, step=0, history=[])

@hvd.elastic.run
def train(state):
    while state.step < STEPS:
        members = rc.elastic.view().members
        x, y = data(state.step, me)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        die_if(state.step, "in forward")
        loss.backward()
        die_if(state.step, "after backward")
        optimizer.step()
        state.step += 1
        state.history = [*state.history, members]
        state.commit()

train(state)
assert (optimizer.n_steps, hvd.size()) == (STEPS, 2)
twin, adam = make()
for step, members in enumerate(state.history):
    adam.zero_grad()
    for member in members:
        x, y = data(step, member)
        (mse(twin(x), y) / len(members)).backward()
    adam.step()
sizes = [len(members) for members in state.history]
assert sizes == sorted(sizes, reverse=True) and sizes[0] == 4 and sizes[-1] == 2, sizes
for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
    torch.testing.assert_close(mine, its, rtol=0, atol=1e-10)
print("equal", flush=True)
"""


@pytest.mark.parametrize("launcher", at_length(list(LAUNCHERS), ["ulfm"]))
def test_weights_after_deaths_equal_those_of_an_unfailed_run_with_the_same_batches(
    launcher, tmp_path
):
    environment = {"RINGCOMM_ELASTIC": "1"}
    options = LAUNCHERS[launcher]
    job = run_script(4, TRAINING, cwd=tmp_path, options=options, env=environment)
    assert job.output.count("equal") == 2, job.output


REFUSED = """
import torch, ringcomm.torch as hvd
hvd.init()
model = torch.nn.Linear(2, 2)
sharded = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), shard_state=1)
try:
    hvd.elastic.TorchState(model, sharded)
except hvd.HorovodInternalError as error:
    assert "Use shard_state=0 in an elastic job" in str(error)
    print("refused", flush=True)
"""


@pytest.mark.at_length
def test_a_state_that_is_spread_over_the_ranks_is_refused(tmp_path):
    job = run_script(1, REFUSED, cwd=tmp_path)
    assert "refused" in job.output, job.output


def test_a_torch_state_returns_to_its_commit():
    torch = pytest.importorskip("torch")
    from ringcomm.torch.elastic import TorchState

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = TorchState(model, optimizer, epoch=1)

    def step():
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return [each.detach().clone() for each in model.parameters()]

    step()
    state.commit()
    expected = step()
    for _ in range(2):  # the commit is not changed by steps that follow a restore
        step()
        state.epoch = 7
        state.restore()
        assert state.epoch == 1
        assert model.weight.grad is None
        step_again = step()
        for mine, its in zip(step_again, expected, strict=True):
            torch.testing.assert_close(mine, its, rtol=0, atol=0)
