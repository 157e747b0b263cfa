"""What ci/matrix has the ranks of a cell do: matrix_job.py collectives|step|servers|killed

Values are asserted on every rank; rank 0 then prints what was right.
"""

import glob
import os
import signal
import sys
import time

import numpy as np

import ringcomm as rc

HEARD_LIMIT_S = 20
VICTIM = 1


def main():
    part = {"collectives": collectives, "step": step, "servers": servers, "killed": killed}
    part[sys.argv[1]]()


def say(what):
    if rc.rank() == 0:
        print(f"right on {rc.size()} ranks: {what}", flush=True)


def values(rank, n, dtype=np.float32):
    """Return small integers, of a period that divides no segment, different on each rank."""
    return ((np.arange(n) * (rank + 3) + rank) % 61).astype(dtype)


def collectives():
    rc.init()
    rank, size = rc.rank(), rc.size()
    assert size == int(sys.argv[2]), f"{size} ranks, not {sys.argv[2]}"
    for dtype in (np.float32, np.float64, np.int64, np.float16):
        for n in (0, 1, 1021, 300_007):
            x = values(rank, n, dtype)
            equal(rc.allreduce(x), sum(values(r, n, dtype) for r in range(size)))
            equal(rc.allreduce(x, op=rc.MAX), np.max([values(r, n) for r in range(size)], axis=0))
            parts = [values(r, n + r, dtype) for r in range(size)]
            equal(rc.allgather(parts[rank]), np.concatenate(parts))
            exchange(rank, size, n, dtype)
            out = np.full(n, -1, dtype)
            source = (rank - 1) % size
            assert rc.sendrecv(x, (rank + 1) % size, out, source) == source
            equal(out, values(source, n, dtype))
    say("allreduce, allgather, alltoall, sendrecv")
    rc.shutdown()


def exchange(rank, size, n, dtype):
    """Check alltoall: each rank sends n + d rows to rank d."""
    rows = [n + d for d in range(size)]
    starts = np.cumsum([0, *rows])
    sent = [values(r, starts[-1], dtype) for r in range(size)]
    mine = slice(starts[rank], starts[rank + 1])
    equal(rc.alltoall(sent[rank], rows), np.concatenate([each[mine] for each in sent]))


def equal(found, wanted):
    np.testing.assert_array_equal(found, np.asarray(wanted, found.dtype))


def step():
    """Train on shares of a batch; the weights must be those of one process with all of it."""
    import torch

    import ringcomm.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    batch = torch.from_numpy(values(0, 12 * 8, np.float64).reshape(12, 8)) / 61
    target = torch.from_numpy(values(1, 12 * 3, np.float64).reshape(12, 3)) / 61

    def network(seed):
        torch.manual_seed(seed)
        layers = (torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
        return torch.nn.Sequential(*layers).double()

    def train(model, optimizer, share):
        for _ in range(5):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(batch[share]), target[share]).backward()
            optimizer.step()

    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

    alone = network(0)
    train(alone, sgd(alone), slice(None))
    model = network(hvd.rank())  # those of rank 0 count
    named = model.named_parameters()
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=named)
    hvd.broadcast_parameters(model.state_dict())
    train(model, optimizer, slice(hvd.rank(), None, hvd.size()))
    for name, found, wanted in zip(
        model.state_dict(), model.parameters(), alone.parameters(), strict=True
    ):
        off = (found - wanted).abs().max().item()
        assert off < 1e-12, f"{name} is off by {off:.2g}"
    assert (alone[0].weight - network(0)[0].weight).abs().max() > 1e-3
    say("DistributedOptimizer, 5 steps as of one process")
    hvd.shutdown()


def servers():
    """Push gradients whose means are known; the table must have their sum, exactly."""
    from ringcomm import ps

    ps.init()  # returns on workers alone
    n, steps = 5003, 4
    table = ps.table("w", (n,), mode="sync", updater=ps.optim.SGD(0.5), init=np.zeros(n))
    for k in range(steps):
        table.push(values(ps.rank() + k, n)).wait()
        ps.complete_step()
    mean = sum(values(r + k, n) for k in range(steps) for r in range(rc.size())) / rc.size()
    np.testing.assert_allclose(table.pull().wait(), -0.5 * mean, rtol=1e-6)
    say(f"a table after {steps} rounds")


def killed():
    """Have a rank killed in mid-allreduce; the others write when they hear of it, and of whom."""
    rc.init()
    x = np.ones(1 << 18, np.float32)
    for _ in range(5):
        rc.allreduce_(x, op=rc.MAX)
    if rc.rank() == VICTIM:
        with open("killed.at", "w") as file:
            file.write(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            rc.allreduce_(x, op=rc.MAX)
    except rc.PeerFailedError as error:
        with open(f"heard.{rc.rank()}", "w") as file:
            file.write(f"{error.rank} {time.time()}")
        deadline = time.monotonic() + HEARD_LIMIT_S  # a launcher ends the others once one ends
        while time.monotonic() < deadline and len(glob.glob("heard.*")) < rc.size() - 1:
            time.sleep(0.01)
        raise


if __name__ == "__main__":
    main()
