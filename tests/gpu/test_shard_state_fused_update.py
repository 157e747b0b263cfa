"""shard_state=1 on simulated GPUs that map each other's memory: a kernel updates, and pushes."""

from pathlib import Path

import pytest
from harness import at_length, run_script

TESTS = Path(__file__).parents[1]
N_RANKS = at_length(3, 2)

SCRIPT = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import torch
import ringcomm as rc
import ringcomm.torch as hvd
import simulated_torch
from gpu_ranks import begin, choose

hvd.init()
torch.set_num_threads(1)
gpu = begin(rc.rank(), sys.argv[1], slow=0, **choose("ipc"))
simulated_torch.count_as_gpu(gpu)


def network(dtype=torch.float32):
    torch.manual_seed(1)
    layers = (torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3), torch.nn.Linear(3, 1))
    return torch.nn.Sequential(*layers).to(dtype)


def groups_of(model):
    return [{{"params": model[0].parameters()}},
            {{"params": [*model[2].parameters(), *model[3].parameters()], "lr": 0.02}}]


def data(n, dtype=torch.float32):
    made = torch.randn(n, 4 * hvd.size(), 6, generator=torch.Generator().manual_seed(2))
    return made.to(dtype)


def share(x):
    return x.chunk(hvd.size())[hvd.rank()]


def train(model, optimizer, samples, begin=0):
    for number, x in enumerate(samples, begin):
        optimizer.zero_grad()
        # The last layer has no gradient in every third step.
        out = model[:3](x) if number % 3 == 2 else model(x)
        out.pow(2).mean().backward()
        if number == 4:
            if hasattr(optimizer, "synchronize"):
                optimizer.synchronize()
            p = model[2].weight
            p.grad = p.grad * 0.5  # in memory of its own
        optimizer.step()


def alone(run):
    simulated_torch.count_as_gpu(None)
    try:
        return run()
    finally:
        simulated_torch.count_as_gpu(gpu)


def assert_close(a, b, what, tolerance=2e-5):
    assert a.shape == b.shape and a.dtype == b.dtype, (what, a, b)
    assert (a - b).abs().max() <= tolerance * b.abs().max() + 1e-12, (what, a, b)


def assert_same_states(a, b):
    assert a["param_groups"] == b["param_groups"]
    assert a["state"].keys() == b["state"].keys()
    for number, state in b["state"].items():
        mine = a["state"][number]
        assert mine.keys() == state.keys(), (mine.keys(), state.keys())
        for key, value in state.items():
            assert_close(torch.as_tensor(mine[key]), torch.as_tensor(value), key)

turn = iter(range(100))


def named(model):
    number = next(turn)
    return [(f"{{number}}.{{name}}", p) for name, p in model.named_parameters()]


OPTIMIZERS = {{
    "plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True,
                                          weight_decay=0.1),
    "dampened": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.8, dampening=0.3, maximize=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, betas=(0.8, 0.99)),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.2),
}}


def takes_the_steps_of(make):
    model, whole = network(), network()
    begun = gpu.n_updates
    optimizer = hvd.DistributedOptimizer(make(groups_of(model)), shard_state=1,
                                         named_parameters=named(model))
    reference = make(groups_of(whole))
    late = reference.param_groups[0].get("momentum") == 0  # its buffer begins in a later step
    schedules = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in (optimizer, reference)]
    for number, x in enumerate(data(7)):
        train(model, optimizer, [share(x)], number)
        alone(lambda: train(whole, reference, [x], number))
        for each in schedules:
            each.step()
        if late and number == 1:
            for group in (*optimizer.param_groups, *reference.param_groups):
                group.update(momentum=0.9, dampening=0.3)
        if number == 2:
            with torch.no_grad():  # somebody writes to the weights
                for p in (*model.parameters(), *whole.parameters()):
                    p.mul_(0.9)
        if number == 3:
            saved = optimizer.state_dict()
            assert_same_states(saved, reference.state_dict())
            optimizer.load_state_dict(saved)
    for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert_close(p, q, name)
    assert_same_states(optimizer.state_dict(), reference.state_dict())
    everyone = rc.allgather(torch.cat([p.detach().reshape(-1) for p in model.parameters()])[None])
    assert (everyone == everyone[0]).all()
    assert gpu.n_updates >= begun + 7, gpu.n_updates


def goes_to_torch_and_back():
    model, whole = network(), network()
    make = lambda p: torch.optim.Adam(p, lr=1e-2)
    optimizer = hvd.DistributedOptimizer(make(groups_of(model)), shard_state=1,
                                         named_parameters=named(model))
    reference = make(groups_of(whole))
    n_updates = []
    for number, x in enumerate(data(9)):
        if number == 7:
            assert_same_states(optimizer.state_dict(), reference.state_dict())
        changed = dict(lr=torch.tensor(5e-3) if number == 3 else 5e-3,
                       amsgrad=number in (0, 5, 8))  # what it keeps is kept by the kernel, too
        for group in (*optimizer.param_groups, *reference.param_groups):
            group.update(changed)
        if number == 2:  # a step that fails is none
            eps = [group.pop("eps") for group in optimizer.param_groups]
            try:
                train(model, optimizer, [share(x)], number)
            except KeyError:
                for group, value in zip(optimizer.param_groups, eps, strict=True):
                    group["eps"] = value
                n_updates.append(gpu.n_updates)
                continue
            raise AssertionError("there is no eps")
        train(model, optimizer, [share(x)], number)
        alone(lambda: train(whole, reference, [x], number))
        gpu.synchronize()
        n_updates.append(gpu.n_updates)
    for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert_close(p, q, name)
    assert n_updates[0] < n_updates[1] == n_updates[3] < n_updates[4] == n_updates[5]
    assert n_updates[5] < n_updates[6] < n_updates[7] == n_updates[8]


def has_masters():
    results, begun = [], gpu.n_updates
    for is_fused in (True, False):
        simulated_torch.count_as_gpu(gpu if is_fused else None)
        model = network(torch.bfloat16)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.AdamW(groups_of(model), lr=1e-2), shard_state=1,
            named_parameters=named(model))
        for number, x in enumerate(data(6, torch.bfloat16)):
            train(model, optimizer, [share(x)], number)
            if number == 2:
                with torch.no_grad():
                    model[2].weight[1] = 0.5  # a new master, where it is another weight
        if number == 3:
            optimizer.load_state_dict(optimizer.state_dict())
        results.append((optimizer.state_dict()["state"], list(model.parameters())))
    assert gpu.n_updates >= begun + 6
    (fused, weights), (plain, expected) = results
    for p, q in zip(weights, expected, strict=True):
        assert_close(p.float(), q.float(), "weights", 5e-4)
    for number, state in plain.items():
        assert "master" in state
        for key, value in state.items():
            assert_close(fused[number][key], value, key, 5e-4)


for part in sys.argv[2].split(","):
    print(part, flush=True)
    dict(switch=goes_to_torch_and_back, masters=has_masters).get(
        part, lambda: takes_the_steps_of(OPTIMIZERS[part]))()
print("all is equal")
"""


# "switch": settings that no kernel knows go to torch's class, and back; "masters": of 16 bits.
@pytest.mark.parametrize(
    "parts",
    at_length(
        ["plain", "nesterov", "dampened", "Adam", "AdamW", "switch", "masters"],
        ["switch,masters"],
    ),
)
def test_a_kernel_takes_the_steps_of_torchs_class(parts, tmp_path):
    job = run_script(N_RANKS, SCRIPT, tmp_path, parts, cwd=tmp_path)
    assert job.code == 0, job.output
    assert job.output.count("all is equal") == N_RANKS, job.output
