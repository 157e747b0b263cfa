"""Kills a rank of an elastic job while the streams of the others wait for it; they go on.

usage: RINGCOMM_ELASTIC=1 mpirun --with-ft ulfm --runtime-options error-nonzero-status=0 -np 4 \
           python -m gpu_suite.elastic run|continue [cpu]

"run": elastic.run makes the step again in which the rank died. "continue": on_failure="continue"
leaves it out.

The ranks' gradients differ, but their mean in step s is 2 * s, however many ranks there are. So the
weights show a step that counts twice, or not, or is made with numbers of another step or rank.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
from gpu_suite.outcome_lines import figure

import ringcomm as rc
import ringcomm.torch as hvd

COUNT, STEPS = 1 << 20, 30
VICTIM, DIES_AT = 1, 12
BUSY_S = 30  # longer than all deadlines
CYCLES_PER_S = 2_000_000_000


def main() -> None:
    mode, device = [*sys.argv[1:], "cuda"][:2]
    hvd.init()
    if device == "cuda":
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    # On GPUs, the step in which the rank dies fails; on the CPU it has done its part by then.
    train_and_check(mode, device, fails_at=DIES_AT + (device == "cpu"))


def train_and_check(mode: str, device: str, fails_at: int) -> None:
    weights = torch.nn.ParameterDict({"w": torch.zeros(COUNT, device=device)})
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(weights.parameters(), lr=1.0),
        weights.named_parameters(),
        on_failure="continue" if mode == "continue" else "raise",
    )
    expected = -STEPS * (STEPS + 1)
    if mode == "continue":
        expected += 2 * fails_at
        for step in range(1, STEPS + 1):
            make_step(weights, optimizer, step)
    else:
        state = hvd.elastic.TorchState(weights, optimizer, step=1, began_anew=[])
        train(state)
        assert state.began_anew == [fails_at], state.began_anew
    wrong = int((weights["w"] != expected).sum())
    found = weights["w"][0].item()
    assert wrong == 0, f"{wrong} weights are wrong: the first is {found}, not {expected}"
    if hvd.rank() == 0:
        figure(f"{STEPS} steps; from step {fails_at} on with {hvd.size()} ranks")


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    if rc.elastic.view().number > 0:
        state.began_anew = [*state.began_anew, state.step]
    while state.step <= STEPS:
        make_step(state.model, state.optimizer, state.step)
        state.step += 1
        state.commit()


def make_step(weights: torch.nn.ParameterDict, optimizer: torch.optim.Optimizer, step: int) -> None:
    dies = (rc.elastic.view().members[hvd.rank()], step) == (VICTIM, DIES_AT)
    if dies and weights["w"].is_cuda:
        torch.cuda._sleep(BUSY_S * CYCLES_PER_S)
    optimizer.zero_grad()
    share = 2 * step + 2 * hvd.rank() - (hvd.size() - 1)
    (weights["w"].sum() * share).backward()
    if dies:
        optimizer.synchronize()  # on GPUs, the streams are yet to meet
        time.sleep(1)  # the others come to their commit, or to the update
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()


if __name__ == "__main__":
    main()
