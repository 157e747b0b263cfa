"""DistributedOptimizer(on_failure="continue"): a death costs one step, on all ranks or on none."""

import json
import random

import pytest
from harness import IS_MPICH, at_length, run_script
from script_data_and_network import DATA_AND_NETWORK
from storms import LAUNCHERS

import ringcomm.torch as hvd

TRAINING = """
import json, os, random, signal, sys, threading, time
import torch
import ringcomm as rc
import ringcomm.torch as hvd
from ringcomm.torch.elastic.on_failure_continue import TolerantReducer

hvd.init()
torch.set_num_threads(1)
me, STEPS = hvd.rank(), 24
kills = {(rank, step): when for rank, step, when in json.loads(sys.argv[1])}
behind = json.loads(sys.argv[2])  # (rank, step): it loses the mean that it has got

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def die_if(step, moment):
    when = kills.get((me, step), "")
    if when == moment:
        die()
    if when == "inside" and moment == "in forward":
        threading.Timer(random.random() * 4e-3, die).start()

DATA_AND_NETWORK
def make():
    model = network(300)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)

def bits(model):
    return b"".join(p.detach().numpy().tobytes() for p in model.parameters())

finish = TolerantReducer._finish

def finish_but_lose(self):
    yield from finish(self)
    if [me, self.step] in behind and self.error is None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:  # until the one that dies after this step is dead
            try:
                rc.allreduce(torch.zeros(1), name="never")
            except rc.PeerFailedError as error:
                self._note(error)
                return

TolerantReducer._finish = finish_but_lose

model, adam = make()
adam.register_step_pre_hook(lambda *_: die_if(step, "in apply"))
optimizer = hvd.DistributedOptimizer(
    adam, named_parameters=model.named_parameters(), on_failure="continue"
)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
history, before = [], bits(model)
for step in range(STEPS):
    members = rc.elastic.view().members
    x, y = data(step, me)
    optimizer.zero_grad()
    loss = mse(model(x), y)
    die_if(step, "in forward")
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9, error_if_nonfinite=True)
    assert norm == 0 or not optimizer._reducer.is_idle
    die_if(step, "after backward")
    optimizer.step()
    schedule.step()
    after = bits(model)
    history.append(members if after != before else None)
    before = after
    die_if(step, "after step")

twin, adam = make()
schedule = torch.optim.lr_scheduler.ExponentialLR(adam, 0.95)
for step, members in enumerate(history):
    if members is not None:
        adam.zero_grad()
        for member in members:
            x, y = data(step, member)
            (mse(twin(x), y) / len(members)).backward()
        adam.step()
    schedule.step()
off = max((a - b).abs().max().item() for a, b in zip(model.parameters(), twin.parameters()))
result = {"member": me, "view": rc.elastic.view().number, "off": off, "history": history,
          "steps": optimizer.n_steps, "bytes": hash(bits(model)), "norm": norm.item()}
print("RESULT", json.dumps(result), flush=True)
"""

TRAINING = TRAINING.replace("DATA_AND_NETWORK", DATA_AND_NETWORK)
elastic = pytest.mark.skipif(IS_MPICH, reason="MPICH ends a job when a rank dies")


def results_of(n, kills, *, cwd, behind=(), launcher="ulfm"):
    """Return the output, and what each rank that lives has reported; check it."""
    environment = {"RINGCOMM_ELASTIC": "1", "PYTHONHASHSEED": "0"}
    arguments = (json.dumps(kills), json.dumps(list(behind)))
    options = LAUNCHERS[launcher]
    job = run_script(n, TRAINING, *arguments, cwd=cwd, options=options, env=environment)
    lines = [line for line in job.output.splitlines() if line.startswith("RESULT ")]
    results = [json.loads(line.removeprefix("RESULT ")) for line in lines]
    assert {r["member"] for r in results} == set(range(n)) - {k[0] for k in kills}, job.output
    assert len({r["bytes"] for r in results}) == 1, (kills, job.output)
    assert len({str(r["history"]) for r in results}) == 1, (kills, job.output)
    assert "weights differ" not in job.output
    for each in results:
        assert each["off"] < 1e-10, (kills, each)
        assert each["steps"] == len(each["history"]) == 24
        assert each["view"] == len(kills)
        assert each["history"].count(None) <= len(kills), (kills, each)
    return job.output, results


MOMENTS = ("in forward", "inside", "inside", "after backward", "in apply", "after step")


@elastic
@pytest.mark.at_length  # 4 ranks with torch take 12 s of a core; the next test loses ranks, too
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("seed", range(30))
def test_all_ranks_make_the_same_steps_and_lose_one_for_each_death(launcher, seed, tmp_path):
    chance = random.Random(seed)
    n, step = chance.randint(3, 5), chance.randrange(2, 12)
    kills = []
    for rank in chance.sample(range(n), chance.randint(1, n - 2)):
        kills.append([rank, step, chance.choice(MOMENTS)])
        step += chance.choice([0, 1, 3])
    results_of(n, kills, cwd=tmp_path, launcher=launcher)


@elastic
@pytest.mark.parametrize(
    "moment", at_length(["after backward", "in apply", "after step"], ["in apply"])
)
def test_a_rank_that_lost_the_mean_gets_the_weights_of_one_that_has_applied_it(moment, tmp_path):
    kills = [[2, 7, moment], [1, 15, "inside"]]  # and another one dies within a reduction
    also = at_length([3], [])  # a rank takes 1.3 s of a core
    output, results = results_of(
        3 + len(also), kills, cwd=tmp_path, behind=[[rank, 7] for rank in (1, *also)]
    )
    history = results[0]["history"]
    assert history[7] == [0, 1, 2, *also]  # applied by rank 0, and so by all
    assert history[8] is None  # the step that rank 0 had begun
    assert history[9] == [0, 1, *also]
    assert history[-1] == [0, *also]
    assert "a rank is lost" in output


@pytest.mark.at_length  # 3 ranks with torch take 8 s of a core
@elastic
def test_ranks_that_have_all_lost_the_mean_leave_the_step_out(tmp_path):
    kills = [[2, 7, "after step"]]
    _, results = results_of(3, kills, cwd=tmp_path, behind=[[0, 7], [1, 7]])
    assert results[0]["history"][6:9] == [[0, 1, 2], None, [0, 1]]


TWO = """
import os, signal
import torch
import ringcomm as rc
import ringcomm.torch as hvd
hvd.init()
me = hvd.rank()
models = [torch.nn.Linear(4, 4).double() for _ in range(2)]
optimizers = [
    hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.1), on_failure="continue")
    for m in models
]
for step in range(12):
    for number, (model, optimizer) in enumerate(zip(models, optimizers)):
        optimizer.zero_grad()
        if (me, step, number) == (1, 5, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        (model(torch.ones(1, 4).double()) * (step + me)).sum().backward()
    for optimizer in reversed(optimizers):
        optimizer.step()
both = [rc.allgather_object([p.tolist() for p in m.parameters()]) for m in models]
assert all(each == of_ranks[0] for of_ranks in both for each in of_ranks)
assert [o.n_steps for o in optimizers] == [12, 12] and hvd.size() == 2
try:
    optimizers[0].step(lambda: None)
except ValueError as error:
    assert "step(closure)" in str(error)
    print("fine", flush=True)
"""


@elastic
@pytest.mark.at_length  # likewise
def test_two_optimizers_go_on_together(tmp_path):
    options, environment = LAUNCHERS["ulfm"], {"RINGCOMM_ELASTIC": "1"}
    job = run_script(3, TWO, cwd=tmp_path, options=options, env=environment)
    assert job.output.count("fine") == 2, job.output


NOT_ELASTIC = """
import os, sys
import torch
import ringcomm.torch as hvd
hvd.init()
model = torch.nn.Linear(4, 4)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(sgd, on_failure="continue")
for step in range(12):
    if (hvd.rank(), step) == (1, 5):
        raise ValueError("boom")
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
"""


@pytest.mark.at_length  # 2 ranks with torch, for a warning
def test_in_another_job_a_failure_ends_it_and_a_warning_has_said_so(tmp_path):
    job = run_script(2, NOT_ELASTIC, cwd=tmp_path)
    assert job.code != 0
    assert 'on_failure="continue"): a failure of a rank ends this job, because' in job.output
    assert "x rank 1 " in job.output


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"on_failure": "ignore"}, "not 'ignore'"),
        ({"on_failure": "continue", "shard_state": 1}, "shard_state=1"),
        ({"on_failure": "continue", "sync_weights": False}, "sync_weights=False"),
        ({"on_failure": "continue", "op": hvd.Adasum}, "Adasum"),
    ],
)
def test_what_does_not_go_with_it_is_refused(options, text):
    import torch
    from harness import run_ranks

    def body(rank):
        model = torch.nn.Linear(2, 2)
        with pytest.raises(ValueError, match=text):
            hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)

    run_ranks(1, body)
