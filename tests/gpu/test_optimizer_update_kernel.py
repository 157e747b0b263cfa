"""A step of an optimizer whose state is spread over GPUs: reduced, updated and pushed in one."""

import numpy as np
import pytest
import simulated_gpu as sim
from gpu_ranks import choose, on_gpus

import ringcomm as rc
from ringcomm.arrays import DTYPES, Span
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.gpu.executor import plans as gpu_plans
from ringcomm.gpu.kernels.reduce_and_optimizer_step import adam_numbers, sgd_numbers
from ringcomm.gpu.transports.works import UpdatePiece

SIZE, COUNT, STEPS = 3, 1000, 4
BOUNDS = [0, 400, 401, COUNT]  # one rank owns a single element


def gradient(rank, step):
    return np.random.default_rng([rank, step]).standard_normal(COUNT).astype(np.float32)


def own(values):
    made = sim.array(values)
    return Span(made.address, made.count, DTYPES["float32"], made)


def train(rank, numbers_of, rule, n_states):
    start, stop = BOUNDS[rank], BOUNDS[rank + 1]
    weights = rc.zeros(COUNT, "float32", device="cuda")
    gradients = rc.zeros(COUNT, "float32", device="cuda")
    weights.fill_later(np.linspace(-1, 1, COUNT, dtype=np.float32))
    master = own(np.linspace(-1, 1, COUNT, dtype=np.float32)[start:stop])
    states = [own(np.zeros(stop - start, np.float32)) for _ in range(n_states)]
    for step in range(1, STEPS + 1):
        gradients.fill_later(gradient(rank, step))
        piece = UpdatePiece(start, stop, (master, *states), rule, numbers_of(step))
        engine().execute(
            "update",
            "bucket 0",
            lambda g, piece=piece: gpu_plans.update(
                g, "bucket 0", gradients, weights, [piece], scale=1 / SIZE
            ),
        )
    return weights.get()


def sgd(step):
    return sgd_numbers(step, lr=0.1, momentum=0.9)


def adam(step):
    return adam_numbers(step, lr=0.1)


@pytest.mark.parametrize(
    ("numbers_of", "rule", "n_states"), [(sgd, "Momentum", 1), (adam, "Adam", 2)]
)
def test_a_spread_step_is_that_of_a_whole_optimizer(numbers_of, rule, n_states, tmp_path):
    spread = on_gpus(
        SIZE, lambda rank: train(rank, numbers_of, rule, n_states), tmp_path, **choose("ipc")
    )
    assert all(np.array_equal(each, spread[0]) for each in spread)
    whole = np.linspace(-1, 1, COUNT, dtype=np.float64)
    moments = [np.zeros(COUNT), np.zeros(COUNT)]
    for step in range(1, STEPS + 1):
        mean = sum(gradient(r, step).astype(np.float64) for r in range(SIZE)) / SIZE
        if rule == "Momentum":
            moments[0] = mean if step == 1 else 0.9 * moments[0] + mean
            whole -= 0.1 * moments[0]
            continue
        moments[0] = 0.9 * moments[0] + 0.1 * mean
        moments[1] = 0.999 * moments[1] + 0.001 * mean**2
        root = np.sqrt(moments[1] / (1 - 0.999**step)) + 1e-8
        whole -= 0.1 * moments[0] / (1 - 0.9**step) / root
    assert np.abs(spread[0] - whole).max() < 1e-5


def test_a_team_that_cannot_says_so(tmp_path):
    def body(rank):
        x = rc.zeros(10, "float32", device="cuda")
        with pytest.raises(rc.RingcommError, match="update: the ranks' transport is not ipc"):
            engine().execute(
                "update", None, lambda g: gpu_plans.update(g, None, x, x, [], scale=1.0)
            )
        return True

    assert on_gpus(2, body, tmp_path, **choose("staged")) == [True, True]
