"""torch.distributed in elastic jobs: groups are made anew in each view; old ones say so."""

import json

import pytest
from harness import IS_MPICH, at_length, run_script
from script_data_and_network import DATA_AND_NETWORK
from storms import LAUNCHERS

pytestmark = pytest.mark.skipif(IS_MPICH, reason="MPICH ends a job when a rank dies")

PRELUDE = """
import json, os, random, signal, sys, threading, time, weakref
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import ringcomm as rc
import ringcomm.torch as hvd

dist.init_process_group("ringcomm")
torch.set_num_threads(1)
me, STEPS = dist.get_rank(), 20
kills = json.loads(sys.argv[1])

def die_if(step, moment):
    die = lambda: os.kill(os.getpid(), signal.SIGKILL)
    if [me, step, moment] in kills:
        die()
    if moment == "before backward" and [me, step, "inside"] in kills:
        threading.Timer(random.random() * 3e-3, die).start()

def make():
    model = network(40)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

def check(model, history):
    twin, sgd = make()
    for step, members in enumerate(history):
        sgd.zero_grad()
        for member in members:
            x, y = data(step, member)
            (mse(twin(x), y) / len(members)).backward()
        sgd.step()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    off = max((a - b).abs().max().item() for a, b in pairs)
    print("RESULT", json.dumps([off, [len(each) for each in history]]), flush=True)
"""

DDP = """
model, sgd = make()
state = hvd.elastic.TorchState(model, sgd, step=0, history=[])
old, refs = [(dist.group.WORLD, DistributedDataParallel(make()[0]))], []

@rc.elastic.on_new_view
def make_groups():
    while old:
        group, ddp = old.pop()
        x, _ = data(0, 0)
        for use in (lambda: dist.all_reduce(x, group=group), lambda: ddp(x).sum().backward()):
            try:
                use()
            except rc.RingcommError as error:
                assert "of an earlier view of this elastic job" in str(error), error
            else:
                raise SystemExit("an old group was used")
    dist.destroy_process_group()
    dist.init_process_group("ringcomm")

@rc.elastic.run
def train(state):
    assert not any(ref() for ref in refs)  # its hooks would add to those of the next
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-3)
    refs.append(weakref.ref(ddp))
    pair = dist.new_group(list(range(dist.get_world_size())))
    while state.step < STEPS:
        members = rc.elastic.view().members
        assert dist.get_world_size() == len(members) and members[dist.get_rank()] == me
        x, y = data(state.step, me)
        sgd.zero_grad()
        die_if(state.step, "before forward")
        loss = mse(ddp(x), y)
        die_if(state.step, "before backward")
        loss.backward()
        die_if(state.step, "after backward")
        total = torch.ones(1)
        dist.all_reduce(total, group=pair)
        assert total.item() == len(members)
        sgd.step()
        state.step += 1
        state.history = [*state.history, members]
        state.commit()

train(state)
check(model, state.history)
"""


def results_of(n, script, kills, *, cwd, launcher="ulfm"):
    environment = {"RINGCOMM_ELASTIC": "1"}
    options, arguments = LAUNCHERS[launcher], json.dumps(kills)
    job = run_script(
        n, PRELUDE + DATA_AND_NETWORK + script, arguments, cwd=cwd, options=options, env=environment
    )
    lines = [line for line in job.output.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == n - len(kills), job.output
    assert len(set(lines)) == 1
    assert job.seconds < 100
    off, sizes = json.loads(lines[0].removeprefix("RESULT "))
    assert off < 1e-10, job.output
    return sizes


@pytest.mark.parametrize("launcher", at_length(list(LAUNCHERS), ["ulfm"]))
@pytest.mark.parametrize(
    "moments",
    at_length(
        [("before forward", "before backward"), ("after backward", "inside"), ("inside",) * 2],
        [("before backward", "inside")],
    ),
)
def test_ddp_that_is_made_anew_in_each_view_trains_on(moments, launcher, tmp_path):
    kills = [[0, 5, moments[0]], [2, 9, moments[1]]]  # rank 0 serves torch's store
    n = at_length(4, 3)  # a rank takes 1.3 s of a core
    sizes = results_of(n, DDP, kills, cwd=tmp_path, launcher=launcher)
    assert (sizes[0], sizes[7], sizes[-1]) == (n, n - 1, n - 2)


RECONFIGURE = """
from datetime import timedelta
from types import SimpleNamespace
group = dist.group.WORLD
has_it = hasattr(dist, "_reconfigure")  # torch 2.14.1
assert not has_it or dist._supports_reconfigure()

def handle():
    return dist._get_reconfigure_handle() if has_it else group.get_reconfigure_handle()

def reconfigure(uuid, handles):
    if has_it:
        return dist._reconfigure(uuid=uuid, handles=handles).wait()
    options = SimpleNamespace(uuid=uuid, handles=handles, timeout=None, hints={})
    return group.reconfigure(options).wait()

def refused(kind, text, uuid, handles):
    try:
        reconfigure(uuid, handles)
    except kind as error:
        assert text in str(error), error
    else:
        raise SystemExit(f"not refused: {text}")

handles = [None] * dist.get_world_size()
dist.all_gather_object(handles, handle())
reconfigure(1, handles)  # all are there
reconfigure(2, handles[::-1])  # a group of the living needs no new view
assert dist.get_rank() == len(handles) - 1 - me
reconfigure(3, handles)

model, sgd = make()
ddp = DistributedDataParallel(model)
HOOK
history, live, uuid = [], list(range(len(handles))), 10
saved = []
rc.on_checkpoint(saved.append)
while len(history) < STEPS:
    step = len(history)
    x, y = data(step, me)
    sgd.zero_grad()
    try:
        loss = mse(ddp(x), y)
        die_if(step, "before backward")
        loss.backward()
    except RuntimeError as error:
        assert "died without a word" in str(error), error
        live = [r for r in live if r not in {rank for rank, at, _ in kills if at <= step}]
        reconfigure(uuid, [handles[r] for r in live])
        uuid += 1
        assert dist.get_world_size() == group.size() == len(live)
        assert dist.get_rank() == live.index(me) == rc.rank()
        AGAIN
        continue
    sgd.step()
    rc.step()
    history.append(live)

if me == live[0]:
    os.kill(os.getpid(), signal.SIGUSR1)
while not rc.should_stop():
    dist.barrier()
    rc.step()
assert saved[0] > STEPS, saved
total = torch.ones(3)
dist.all_reduce(total)
assert total.tolist() == [len(live)] * 3
pair = dist.new_group([0, dist.get_world_size() - 1])
found = [None] * dist.get_world_size()
dist.all_gather_object(found, me)
assert found == live
check(model, history)
"""


NODE_HOOK = "ddp.register_comm_hook(None, hvd.node_hook)"
BUILTIN = "ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)"
ANEW = "ddp = DistributedDataParallel(model)"


@pytest.mark.at_length  # 4 ranks with torch take 10 s of a core
@pytest.mark.parametrize(
    ("hook", "again"),
    at_length([("", ""), ("", ANEW), (NODE_HOOK, ""), (BUILTIN, "")], [("", "")]),
    ids=str,
)
def test_ddp_of_a_reconfigured_group_trains_on(hook, again, tmp_path):
    script = RECONFIGURE.replace("HOOK", hook).replace("AGAIN", again or "pass")
    kills = [[0, 5, "before backward"], [2, 9, "before backward"]]
    sizes = results_of(4, script, kills, cwd=tmp_path)
    assert (sizes[0], sizes[7], sizes[-1]) == (4, 3, 2)
