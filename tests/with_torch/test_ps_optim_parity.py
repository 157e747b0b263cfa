"""The updates of servers are those of torch.optim over 200 steps, also for NaN and denormals."""

import numpy as np
import pytest
import torch

from ringcomm import _core
from ringcomm.ps import optim

STEPS = 200
CASES = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "maximize": True, "weight_decay": 0.1}),
    ("Adagrad", {}),
    ("Adagrad", {"lr_decay": 0.01, "weight_decay": 0.1, "initial_accumulator_value": 0.1}),
    ("Adagrad", {"maximize": True, "eps": 1e-6}),
    ("Adam", {}),
    ("Adam", {"amsgrad": True, "weight_decay": 0.01, "betas": (0.8, 0.99)}),
    ("Adam", {"maximize": True, "betas": (0.3, 0.9)}),
    ("AdamW", {}),
    ("AdamW", {"amsgrad": True, "weight_decay": 0.3, "maximize": True}),
    ("RMSprop", {}),
    ("RMSprop", {"momentum": 0.9, "weight_decay": 0.01}),
    ("RMSprop", {"centered": True, "alpha": 0.9}),
    ("RMSprop", {"centered": True, "momentum": 0.5, "maximize": True}),
    ("Adadelta", {}),
    ("Adadelta", {"weight_decay": 0.1, "rho": 0.8, "maximize": True}),
    ("NAdam", {}),
    ("NAdam", {"weight_decay": 0.1, "momentum_decay": 0.01, "maximize": True}),
    ("NAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("RAdam", {}),
    ("RAdam", {"weight_decay": 0.1, "maximize": True}),
    ("RAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True, "betas": (0.9, 0.99)}),
]
IDS = ["-".join([name, *map(str, options)]) for name, options in CASES]
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-310, -1e-310, 1e-40, 1e300, -1e30, 5e-324, 1.0]


@pytest.fixture(autouse=True)
def _float64_state():
    """torch keeps NAdam's mu_product in the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Both:
    """One parameter, updated by torch and by us."""

    def __init__(self, name, options, values):
        self.param = torch.nn.Parameter(torch.from_numpy(values.copy()))
        kind = getattr(torch.optim, name)
        self.torch = kind([self.param], lr=0.01, foreach=False, **options)
        self.updater = optim.from_torch(self.torch.param_groups[0], name)
        self.values, self.step_count = values.copy(), 0
        self.slots = self.updater.new_slots(values.shape, values.dtype)

    def step(self, grad, lr):
        self.step_count += 1
        self.torch.param_groups[0]["lr"] = lr
        self.param.grad = torch.from_numpy(grad.copy())
        self.torch.step()
        updater = optim.from_torch(self.torch.param_groups[0], type(self.torch).__name__)
        args = (updater.code, updater.hyper, self.step_count, self.values, self.values)
        _core.apply_update(*args, self.slots, grad)

    def states(self):
        state = self.torch.state[self.param]
        yield self.values, self.param.detach().numpy()
        for name, slot in zip(self.updater.slot_names, self.slots, strict=True):
            yield slot, state[name].numpy().reshape(-1)


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
@pytest.mark.parametrize("count", [0, 1, 1003])
def test_200_steps_with_a_schedule_equal_torch(name, options, count):
    rng = np.random.default_rng(count)
    both = Both(name, options, rng.standard_normal(count))
    for k in range(STEPS):
        both.step(rng.standard_normal(count), 0.02 * (1 - k / STEPS))
    bound = 1e-13 if name == "SGD" else 1e-10
    for ours, theirs in both.states():
        np.testing.assert_allclose(ours, theirs, rtol=bound, atol=bound)


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_float32_equals_torch_as_far_as_it_rounds(name, options):
    rng = np.random.default_rng(1)
    both = Both(name, options, rng.standard_normal(257).astype(np.float32))
    for _ in range(STEPS):
        both.step(rng.standard_normal(257).astype(np.float32), 0.01)
    np.testing.assert_allclose(both.values, both.param.detach().numpy(), rtol=2e-4, atol=2e-5)


def special_values(options, dtype):
    """Where a square overflows, inf - fused square is inf, and inf - square NaN.

    torch's centered RMSprop gives one or the other, by where in a tensor the number lies.
    """
    with np.errstate(over="ignore"):
        special = np.array(SPECIAL).astype(dtype)
    is_small = ~np.isfinite(special) | (np.abs(special) < 1e15)
    return special[is_small] if "centered" in options else special


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_nan_inf_and_denormals_come_out_as_in_torch(name, options, dtype):
    special = special_values(options, dtype)
    grads = np.tile(special, len(special))
    both = Both(name, options, np.repeat(special, len(special)))
    rng = np.random.default_rng(2)
    for k in range(5):
        both.step(grads if k == 0 else rng.permutation(grads), 0.01)
    bound = 1e-10 if dtype == np.float64 else 1e-4
    for ours, theirs in both.states():
        np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
        np.testing.assert_allclose(ours, theirs, rtol=bound, atol=np.finfo(dtype).tiny)


@pytest.mark.parametrize("name", ["LBFGS", "Rprop", "Adamax", "ASGD", "MyAdam", "Adafactor"])
def test_other_optimizers_are_not_ours(name):
    assert optim.from_torch({"lr": 0.1, "betas": (0.9, 0.99)}, name) is None


def test_differentiable_steps_are_not_ours():
    group = torch.optim.SGD([torch.zeros(1)], lr=0.1, differentiable=True).param_groups[0]
    assert optim.from_torch(group, "SGD") is None


def test_a_learning_rate_in_a_tensor_is_its_number():
    group = torch.optim.Adam([torch.zeros(1)], lr=torch.tensor(0.25)).param_groups[0]
    assert optim.from_torch(group, "Adam") == optim.Adam(lr=0.25)


def test_defaults_are_those_of_torch():
    for name in ("SGD", "Adagrad", "Adam", "AdamW", "RMSprop", "Adadelta", "NAdam", "RAdam"):
        group = getattr(torch.optim, name)([torch.zeros(1)]).param_groups[0]
        assert optim.from_torch(group, name) == getattr(optim, name)()
