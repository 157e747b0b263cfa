"""A real model after deaths: its weights are those of the same steps without a failure."""

import base64

import pytest
import torch
from harness import IS_MPICH, at_length, run_ranks, run_script
from script_data_and_network import DATA_AND_NETWORK
from storms import LAUNCHERS

import ringcomm as rc
import ringcomm.torch as hvd
from ringcomm.elastic.run import differences, outline_of
from ringcomm.torch.elastic import ObjectState, TorchState

pytestmark = pytest.mark.skipif(IS_MPICH, reason="MPICH ends a job when a rank dies")


def text_of(script):
    return script.replace("DATA_AND_NETWORK", DATA_AND_NETWORK)


TRAINING = """
import os, signal, sys
import torch
import ringcomm as rc
import ringcomm.torch as hvd
from ringcomm.elastic.run import differences, outline_of

hvd.init()
torch.set_num_threads(1)
STEPS, me = 30, hvd.rank()
WHEN = {0: (12, "after backward"), 3: (20, "in forward")}.get(me, (-1, ""))

DATA_AND_NETWORK
def make():
    model = network(32)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)

def decay(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 7, gamma=0.5)

def die_if(step, moment):
    if WHEN == (step, moment):
        os.kill(os.getpid(), signal.SIGKILL)

model, adam = make()
optimizer = hvd.DistributedOptimizer(adam, named_parameters=model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, schedule=decay(optimizer), step=0, history=[])

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
        state.schedule.step()
        state.step += 1
        state.history = [*state.history, members]
        state.commit()

train(state)
assert (optimizer.n_steps, hvd.size()) == (STEPS, 2)
twin, adam = make()
schedule = decay(adam)
for step, members in enumerate(state.history):
    adam.zero_grad()
    for member in members:
        x, y = data(step, member)
        (mse(twin(x), y) / len(members)).backward()
    adam.step()
    schedule.step()
sizes = [len(members) for members in state.history]
assert sizes == sorted(sizes, reverse=True) and sizes[0] == 4 and sizes[-1] == 2, sizes
for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
    assert torch.allclose(mine, its, rtol=0, atol=1e-10)
print("equal", flush=True)
"""


@pytest.mark.at_length  # 4 ranks with torch; the next test compares weights, too
@pytest.mark.parametrize("launcher", at_length(list(LAUNCHERS), ["ulfm"]))
def test_weights_after_deaths_equal_those_of_an_unfailed_run_with_the_same_batches(
    launcher, tmp_path
):
    environment = {"RINGCOMM_ELASTIC": "1"}
    options = LAUNCHERS[launcher]
    job = run_script(4, text_of(TRAINING), cwd=tmp_path, options=options, env=environment)
    assert job.output.count("equal") == 2, job.output


BATCHES = """
import os, signal, sys
import torch
import ringcomm as rc
import ringcomm.torch as hvd
from ringcomm.elastic.run import differences, outline_of

hvd.init()
torch.set_num_threads(1)
N, BATCH, EPOCHS, RATE, me = 173, 4, 2, 0.05, hvd.rank()
constant, n_spares = sys.argv[1], int(sys.argv[2])
KILLS, FULL = {(0, 6, "after backward"), (2, 19, "in forward")}, N_FULL
like = {"generator": torch.Generator().manual_seed(1), "dtype": torch.float64}
X, Y = torch.randn(N, 16, **like), torch.randn(N, 4, **like)

DATA_AND_NETWORK
def make():
    model = network(32)
    return model, torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)

def die_if(step, moment):
    if (me, step, moment) in KILLS:
        os.kill(os.getpid(), signal.SIGKILL)

model, sgd = make()
optimizer = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())
loader = rc.data.Loader(
    (torch.arange(N), X, Y), BATCH, sampler=rc.data.ShardedSampler(N, remainder="uneven"),
    optimizer=optimizer, constant=constant,
)
rule = "linear" if constant == "local" else None
state = hvd.elastic.TorchState(model, optimizer, scale_lr=rule, loader=loader, step=0, history=[])

@hvd.elastic.run
def train(state):
    for epoch in range(loader.sampler.epoch, EPOCHS):
        for indices, x, y in loader:
            optimizer.zero_grad()
            loss = mse(model(x), y)
            die_if(state.step, "in forward")
            loss.backward()
            die_if(state.step, "after backward")
            optimizer.step()
            all_of_step = rc.allgather_object((indices.tolist(), loss.item()))
            state.history = [*state.history, all_of_step]
            state.step += 1
            state.commit()

train(state)
sizes = [len(each) for each in state.history]
least = FULL - 2 + n_spares  # two ranks are killed
assert sizes == sorted(sizes, reverse=True) and set(sizes) == {*range(least, FULL + 1)}, sizes
plain = rc.data.ShardedSampler(N, remainder="uneven", rank=0, size=1)
expected = [set(batch) for _ in range(EPOCHS) for batch in plain.batches(FULL * BATCH)]
used = [sorted(index for part, _ in each for index in part) for each in state.history]
assert sorted(sum(used, [])) == sorted([*range(N)] * EPOCHS)
if constant == "global":
    assert [set(each) for each in used] == expected
twin, sgd = make()
for indices, parts in zip(used, state.history, strict=True):
    sgd.param_groups[0]["lr"] = RATE * (1 if constant == "global" else len(parts) / FULL)
    sgd.zero_grad()
    loss = mse(twin(X[indices]), Y[indices])
    loss.backward()
    sgd.step()
    mean = sum(len(part) * each for part, each in parts) / len(indices)
    assert abs(mean - loss.item()) < 1e-10, (mean, loss.item())
assert abs(optimizer.param_groups[0]["lr"] - sgd.param_groups[0]["lr"]) < 1e-15
for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
    assert torch.allclose(mine, its, rtol=0, atol=1e-10)
print("as without a failure", flush=True)
"""


@pytest.mark.parametrize("n_spares", at_length([0, 1], [1]))
@pytest.mark.parametrize("constant", at_length(["global", "local"], ["global"]))
def test_batches_after_deaths_are_those_of_an_unfailed_run_or_the_rate_is_scaled(
    constant, n_spares, tmp_path
):
    n = at_length(3, 2)  # beside the spare; a rank takes 1.2 s of a core
    script = text_of(BATCHES).replace("N_FULL", str(n))
    job = run_script(
        n + n_spares, script, constant, str(n_spares), cwd=tmp_path,
        options=LAUNCHERS["ulfm"],
        env={"RINGCOMM_ELASTIC": "1", "RINGCOMM_SPARES": str(n_spares)},
    )  # fmt: skip
    assert job.output.count("as without a failure") == n - 2 + n_spares, job.output


def test_a_torch_state_returns_to_its_commit():
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


SCHEDULES = {
    "StepLR": lambda torch, optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    "CosineAnnealingLR": lambda torch, optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, 9
    ),
    "OneCycleLR": lambda torch, optimizer: torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.5, total_steps=12
    ),
    "SequentialLR": lambda torch, optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.ConstantLR(optimizer, 0.1, 2),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        ],
        milestones=[4],
    ),
}


@pytest.mark.parametrize("shard_state", [0, 1])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_back_with_its_optimizer_and_forth_to_a_new_rank(name, shard_state):
    def body(rank):
        model = torch.nn.Linear(3, 2)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), shard_state=shard_state
        )
        schedule = SCHEDULES[name](torch, optimizer)
        state = hvd.elastic.TorchState(model, optimizer, schedule=schedule, step=0)

        def rates(n_steps):
            found = []
            for _ in range(n_steps):
                optimizer.zero_grad()
                model(torch.ones(1, 3)).sum().backward()
                optimizer.step()
                state.schedule.step()
                found.append(optimizer.param_groups[0]["lr"])
            return found

        rates(3)
        state.commit()
        expected = rates(4)
        for _ in range(2):
            state.restore()
            assert state.schedule is schedule
            assert rates(4) == expected
        if rank == 1:  # this one is new
            state.schedule = SCHEDULES[name](torch, optimizer)
        state.receive(0, is_new=rank == 1)
        state.restore()
        assert rates(4) == expected
        return expected

    first, second = run_ranks(2, body)
    assert first == second
    assert len(set(first)) > 1


def test_a_scaler_keeps_its_scale_and_a_value_that_cannot_load_one_is_refused():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    state = ObjectState(scaler=scaler, step=0)
    state.commit()
    scaler.load_state_dict(scaler.state_dict() | {"scale": 2.0})
    state.restore()
    assert state.scaler is scaler
    assert scaler.state_dict()["scale"] == 8.0
    state.scaler = None
    with pytest.raises(rc.RingcommError, match=r"state_dict\(\) of scaler, and here it is None"):
        state.restore()


def test_a_scaler_that_is_not_enabled_is_no_hindrance():
    state = ObjectState(scaler=torch.amp.GradScaler("cpu", enabled=False), step=0)
    state.commit()
    state.step = 1
    state.restore()
    assert state.step == 0


@pytest.mark.parametrize("has_stepped", [False, True])
def test_a_scaled_step_that_a_loss_has_cut_off_is_made_again_as_a_whole(has_stepped):
    weight = torch.nn.Parameter(torch.zeros(1))
    sgd = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    state = TorchState(None, sgd, scaler=scaler)

    def backward():
        sgd.zero_grad()
        scaler.scale(2 * weight).backward()
        scaler.unscale_(sgd)

    state.commit()
    backward()  # then an allreduce of the norm fails, say
    if has_stepped:
        scaler.step(sgd)
    state.restore()
    with torch.no_grad():
        weight.zero_()
    backward()
    scaler.step(sgd)
    scaler.update()
    assert weight.item() == -2.0


@pytest.mark.parametrize(
    ("size", "is_weighed", "constant", "is_warned"),
    [
        (2, False, "global", False),
        (3, True, "global", False),
        (3, False, "local", False),
        (3, False, "global", True),
    ],
)
def test_unequal_batches_without_weights_are_a_warning(
    size, is_weighed, constant, is_warned, caplog
):
    from ringcomm.data import Loader, ShardedSampler

    def body(rank):
        model = torch.nn.Linear(3, 2)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        told = optimizer if is_weighed else None
        sampler = ShardedSampler(64)
        loader = Loader(torch.ones(64), 4, sampler=sampler, optimizer=told, constant=constant)
        state = hvd.elastic.TorchState(model, optimizer, loader=loader)
        sampler.first_size = 4  # two ranks or one are lost
        state.commit()
        state.restore()

    run_ranks(size, body)
    text = "loader has 16 samples in a step, now on 3 ranks, so their batches are unequal"
    assert [text in record.getMessage() for record in caplog.records] == [True] * is_warned


@pytest.mark.parametrize(("rule", "factor"), [("linear", 0.5), ("sqrt", 0.5**0.5), (None, 1.0)])
def test_a_rate_is_scaled_from_the_ranks_of_the_commit_to_those_of_today(rule, factor):
    def body(rank):
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([{"params": [parameter], "lr": 0.3}], lr=0.1)
        state = TorchState(optimizer=optimizer, scale_lr=rule)
        state.commit()
        state._copies["optimizer"]["n_ranks"] = 4  # two are lost
        for _ in range(2):
            state.restore()
            assert optimizer.param_groups[0]["lr"] == pytest.approx(0.3 * factor, rel=1e-15)
        state.commit()
        state.restore()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.3 * factor, rel=1e-15)

    run_ranks(2, body)


def test_an_unknown_rule_for_rates_is_an_error_at_once():
    with pytest.raises(ValueError, match="scale_lr is linear or sqrt, or None, not 'cubic'"):
        TorchState(scale_lr="cubic")


@pytest.mark.parametrize("kind", ["plain", "averaging", "sharded"])
def test_groups_that_were_added_after_a_commit_go_with_it_and_can_be_added_again(kind):
    def body(rank):
        torch.manual_seed(0)
        head, body = torch.nn.Linear(3, 2), torch.nn.Linear(3, 3)
        optimizer = torch.optim.Adam(head.parameters(), lr=0.1)
        if kind != "plain":
            optimizer = hvd.DistributedOptimizer(optimizer, shard_state=int(kind == "sharded"))
        state = TorchState(torch.nn.Sequential(body, head), optimizer)

        def steps(n):
            for _ in range(n):
                optimizer.zero_grad()
                head(body(torch.ones(1, 3))).sum().backward()
                optimizer.step()
            return [each.detach().clone() for each in [*body.parameters(), *head.parameters()]]

        def add_group():
            optimizer.zero_grad()
            body.zero_grad()
            optimizer.add_param_group({"params": body.parameters(), "lr": 0.2})

        steps(2)
        state.commit()
        found = []
        for _ in range(2):
            steps(1)
            add_group()
            found.append(steps(2))
            state.restore()
            assert len(optimizer.param_groups) == 1
            assert head.weight.grad is None
            assert body.weight.grad is None
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)

    run_ranks(1 if kind == "plain" else 2, body)


def test_a_process_that_joins_with_fewer_groups_than_the_commit_is_told_so():
    def body(rank):
        first, second = torch.nn.Linear(3, 2), torch.nn.Linear(3, 3)
        optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
        state = TorchState(optimizer=optimizer)
        if rank == 0:
            optimizer.add_param_group({"params": second.parameters()})
            state.commit()
        state.sync()

    with pytest.raises(rc.RingcommError, match=r"has 2 groups .* of optimizer, and here it has 1"):
        run_ranks(2, body)


# Written by the version that had no checksum in the file: commit 1 of the state below.
OF_BEFORE = (
    "gAWVGwEAAAAAAAB9lCiMBmZvcm1hdJRLAYwJbl9jb21taXRzlEsBjAZjb3BpZXOUfZQojAZfc2F2ZWSUfZQojARzdGVwlEsH"
    "jAhzY2hlZHVsZZSMFnJpbmdjb21tLmVsYXN0aWMuc3RhdGWUjAdTdGF0ZU9mlJOUfZSMBHJhdGWURz/QAAAAAAAAc4WUgZR1"
    "jApfcG9zaXRpb25zlH2UjAdzYW1wbGVylIwecmluZ2NvbW0udG9yY2guZWxhc3RpYy5zYW1wbGVylIwIUG9zaXRpb26Uk5Qp"
    "gZR9lCiMBWVwb2NolEsAjARkb25llCiRlIwEcmFua5RLAIwEc2l6ZZRLAYwGcGxhY2VzlEsASwOGlIWUjAZvdGhlcnOUKJGU"
    "dWJzdXUu"
)


class Schedule:
    def __init__(self):
        self.rate = 0.5

    def state_dict(self):
        return {"rate": self.rate}

    def load_state_dict(self, state):
        self.rate = state["rate"]


def test_a_kept_commit_of_the_version_before_is_read(tmp_path):
    path = tmp_path / "state"
    path.write_bytes(base64.b64decode(OF_BEFORE))

    def body(rank):
        sampler = hvd.elastic.ElasticSampler(range(10), shuffle=False)
        state = ObjectState(step=0, schedule=Schedule(), sampler=sampler)
        state.keep_in(path)
        state.sync()
        state.on_reset()
        state.commit()
        return state.n_commits, state.step, state.schedule.rate, sorted(sampler)

    (n, step, rate, first), (*alike, second) = run_ranks(2, body)
    assert (n, step, rate) == (2, 7, 0.25) == tuple(alike)
    assert {*first, *second} == {3, 4, 5, 6, 7, 8, 9}  # 0, 1 and 2 were recorded
    assert (tmp_path / "state.previous").read_bytes() == base64.b64decode(OF_BEFORE)


def test_the_outline_of_a_state_has_the_shapes_of_models():
    def outline(*layers):
        model = torch.nn.Sequential(*layers)
        return outline_of(TorchState(model, torch.optim.SGD([torch.zeros(1)]), step=0))

    here, there = outline(torch.nn.Linear(2, 3)), outline(torch.nn.Linear(2, 4))
    assert differences(here, there) == (
        "model.0.weight is torch.float32 (3, 2) here, and torch.float32 (4, 2) in the job; "
        "model.0.bias is torch.float32 (3,) here, and torch.float32 (4,) in the job"
    )
    assert differences(here, here) == ""
