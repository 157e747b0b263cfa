"""Training that goes on when ranks die: logistic regression with numpy alone.

    RINGCOMM_ELASTIC=1 mpirun --with-ft ulfm -np 4 python examples/elastic.py

While it runs, kill any of its processes, rank 0 too: kill -9 PID. With `--kill 2@30 --kill 0@60`
rank 2 kills itself in step 30, and rank 0 in step 60. The others go on in the step that failed.
"""

import argparse
import os
import signal

import numpy as np

import ringcomm as rc

STEPS, BATCH, WIDTH, RATE = 100, 64, 20, 0.5
WANTED = np.random.default_rng(1).normal(size=WIDTH)


def batch(step, member):
    """Return examples and labels. `member` is a process, so each has examples of its own."""
    random = np.random.default_rng([step, member])
    x = random.normal(size=(BATCH, WIDTH))
    return x, (x @ WANTED > 0).astype(float)


def loss_and_gradient(weights, x, y):
    p = 1 / (1 + np.exp(-x @ weights))
    loss = -np.mean(np.log(np.where(y > 0, p, 1 - p) + 1e-12))
    return loss, x.T @ (p - y) / len(y)


@rc.elastic.run
def train(state, kill_at):
    """Called again in each new view, with the last state that any rank has committed."""
    while state.step < STEPS:
        view = rc.elastic.view()
        me = view.members[rc.rank()]  # the rank that this process had at first
        if (me, state.step) in kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        loss, gradient = loss_and_gradient(state.weights, *batch(state.step, me))
        mean = rc.allreduce(np.append(gradient, loss), rc.AVERAGE)
        state.weights -= RATE * mean[:-1]
        state.loss = mean[-1]
        state.step += 1
        state.commit()
        if rc.rank() == 0 and state.step % 20 == 0:
            print(f"step {state.step}: loss {state.loss:.4f} on {rc.size()} ranks", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kill", action="append", default=[], help="RANK@STEP")
    args = parser.parse_args()
    kill_at = {tuple(map(int, text.split("@"))) for text in args.kill}
    rc.init()
    state = rc.elastic.ArrayState(step=0, weights=np.zeros(WIDTH), loss=np.inf)
    train(state, kill_at)
    if rc.rank() == 0:
        print(f"done: {state.step} steps, loss {state.loss:.4f}, ranks left: {rc.size()}")
    rc.shutdown()


if __name__ == "__main__":
    main()
