"""A server is killed in the midst of training: the others go back to a checkpoint, and go on.

    mpirun --with-ft ulfm -x RINGCOMM_ELASTIC=1 --oversubscribe -np 5 python examples/ps_failover.py

Three servers and two workers. Server 0 kills itself at the 150th gradient that it gets. It opens
tables and decides what moves, so server 1 does that from then on. At the end all parameters have
the very values that they have without the death: each step's gradient depends on its number and
the parameters alone, and the loop asks ps.step_number() which step is the next.
"""

import argparse
import itertools
import os
import signal
import tempfile
from pathlib import Path

import numpy as np

import ringcomm as rc
from ringcomm import ps
from ringcomm.ps.protocol.frames import FrameKind
from ringcomm.ps.server.server import Server

N, STEPS, DIES_AT = 2000, 60, 150


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoints", type=Path)
    args = parser.parse_args()
    kill_server_0()
    ps.init(servers=3)  # from here on: workers
    folder = rc.broadcast_object(args.checkpoints or Path(tempfile.mkdtemp()))

    table = ps.table(
        "w", N, "float64", updater=ps.optim.Adam(0.01), mode="sync", init=0.0, block_nbytes=2000
    )
    ps.save(folder, every_steps=10)
    n_lost = 0
    while ps.step_number() < STEPS:
        try:
            values = table.pull().wait()
            table.push(gradient(values, ps.step_number())).wait()
            ps.complete_step()
        except rc.ServerLostError as error:
            recovered = ps.recover(folder)
            n_lost += recovered.lost_steps
            print(f"worker {rc.rank()}: {error.reason}; back to step {ps.step_number()}")

    values, expected = table.pull().wait(), alone()
    assert len(ps.stats()) == 2, "server 0 should be dead"
    assert n_lost > 0
    assert np.array_equal(values, expected), abs(values - expected).max()
    print(f"worker {rc.rank()}: {n_lost} steps were made twice, and all {N} values are as without")


def gradient(values: np.ndarray, step: int) -> np.ndarray:
    """Return the gradient of 1/2 (w - target)^2, where the target moves."""
    return values - np.cos(np.arange(N) + step)


def alone() -> np.ndarray:
    """Return what Adam makes of the same gradients in one process, in ringcomm's order."""
    table = ps.table("alone", N, "float64", updater=ps.optim.Adam(0.01), mode="sync", init=0.0)
    for step in range(STEPS):
        table.push(gradient(table.pull().wait(), step)).wait()
    return table.pull().wait()


def kill_server_0() -> None:
    """Let server 0 be killed at a gradient; on all ranks, before ps.init()."""
    on_request, gradients = Server.on_request, itertools.count(1)

    def on_request_or_die(server, request):
        is_gradient = server.index == 0 and request.header.kind == FrameKind.PUSH
        if is_gradient and next(gradients) == DIES_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        on_request(server, request)

    Server.on_request = on_request_or_die


if __name__ == "__main__":
    main()
