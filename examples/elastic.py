"""Training that goes on when ranks die: logistic regression with numpy alone.

    ringcomm run -np 4 --elastic 1:4 examples/elastic.py

While it runs, kill any of its processes, rank 0 too: kill -9 PID. With `--kill 2@30 --kill 0@60`
rank 2 kills itself in step 30, and rank 0 in step 60. The others go on in the step that failed,
with the samples of the lost rank, too: the last line shows the same loss, whoever dies.
"""

import argparse
import os
import signal

import numpy as np

import ringcomm as rc

N, BATCH, EPOCHS, RATE = 6400, 64, 4, 0.5
random = np.random.default_rng(1)
X = random.normal(size=(N, 20))
Y = (X @ random.normal(size=20) > 0).astype(float)


def sums(weights, x, y):
    """Return the sums of gradient and loss over the samples, and the number of samples."""
    p = 1 / (1 + np.exp(-x @ weights))
    loss = -np.log(np.where(y > 0, p, 1 - p) + 1e-12).sum()
    return np.concatenate([x.T @ (p - y), [loss, len(y)]])


@rc.elastic.run
def train(state, kill_at):
    """Called again in each new view, with the last state that any rank has committed."""
    me = rc.elastic.view().members[rc.rank()]  # the rank that this process had at first
    for _ in range(state.loader.sampler.epoch, EPOCHS):
        for x, y in state.loader:
            if (me, state.step) in kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            *gradient, loss, n = rc.allreduce(sums(state.weights, x, y))
            state.weights -= RATE * np.array(gradient) / n
            state.loss = loss / n
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
    loader = rc.data.Loader((X, Y), BATCH, sampler=rc.data.ShardedSampler(N, remainder="uneven"))
    state = rc.elastic.ArrayState(step=0, weights=np.zeros(20), loss=np.inf, loader=loader)
    train(state, kill_at)
    if rc.rank() == 0:
        print(f"done: {state.step} steps, loss {state.loss:.4f}, ranks left: {rc.size()}")
    rc.shutdown()


if __name__ == "__main__":
    main()
