"""A step of the heat equation on a grid of ranks: rc.Grid beside mpi4py's Create_cart.

Both programs have the same blocks and do the same arithmetic; they differ in the exchange of halos.
They take turns within a run. Printed are medians of what the slowest rank takes.
"""

import argparse
import time

import numpy as np

import ringcomm as rc
from ringcomm.launch.bench import quiet

_TURN_S = 0.05


class OverRingcomm:
    name = "ringcomm"

    def __init__(self, dims, *, periodic):
        self.grid = rc.Grid(dims, periodic)

    def bind(self, x):
        exchange = self.grid.exchange_halo
        return lambda: exchange(x)


class OverMpi:
    name = "mpi4py"

    def __init__(self, dims, *, periodic):
        from mpi4py import MPI

        self.comm = MPI.COMM_WORLD.Create_cart(dims, periods=[periodic] * len(dims))

    def bind(self, x):
        """Return an exchange whose slices and buffers are made once; columns are packed."""
        swap, (above, below), (left, right) = (
            self.comm.Sendrecv, self.comm.Shift(0, 1), self.comm.Shift(1, 1)
        )  # fmt: skip
        first, last, top, bottom = x[1], x[-2], x[0], x[-1]
        columns = x[:, 1], x[:, -2], x[:, 0], x[:, -1]
        buffers = [np.empty(len(x), x.dtype) for _ in columns]
        has_left, has_right = left >= 0, right >= 0

        def exchange():
            swap(first, above, 0, bottom, below, 0)
            swap(last, below, 1, top, above, 1)
            if has_left:
                buffers[0][:] = columns[0]
            if has_right:
                buffers[1][:] = columns[1]
            swap(buffers[0], left, 2, buffers[3], right, 2)
            swap(buffers[1], right, 3, buffers[2], left, 3)
            if has_left:
                columns[2][:] = buffers[2]
            if has_right:
                columns[3][:] = buffers[3]

        return exchange


def step_of(exchange, x):
    """Return a function that exchanges halos, and then makes an explicit step of diffusion."""
    own, scratch = x[1:-1, 1:-1], np.empty((x.shape[0] - 2, x.shape[1] - 2), x.dtype)
    up, down, left, right = x[:-2, 1:-1], x[2:, 1:-1], x[1:-1, :-2], x[1:-1, 2:]

    def step():
        exchange()
        np.add(up, down, out=scratch)
        np.add(scratch, left, out=scratch)
        np.add(scratch, right, out=scratch)
        np.multiply(scratch, 0.05, out=scratch)
        np.multiply(own, 0.8, out=own)
        np.add(own, scratch, out=own)

    return step


def main(argv):
    parser = argparse.ArgumentParser("ci/bench halo", description=__doc__)
    parser.add_argument("--blocks", default="256,1024", help="cells of a side of a rank's block")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each block and case")
    parser.add_argument("--periodic", action="store_true")
    options = parser.parse_args(argv)
    rc.init()
    dims = rc.Grid((0, 0)).dims
    contenders = [way(dims, periodic=options.periodic) for way in (OverRingcomm, OverMpi)]
    blocks = [int(each) for each in options.blocks.split(",")]
    if rc.rank() == 0:
        print(f"# {dims[0]} x {dims[1]} ranks, float64, periodic={options.periodic}", flush=True)
    for side in blocks:
        require_same(contenders, side)
        for what in ("halo alone", "step"):
            report(contenders, side, what, options.seconds)
    rc.shutdown()
    return 0


def block(side):
    return np.random.default_rng(rc.rank()).random((side + 2, side + 2))


def require_same(contenders, side):
    found = []
    for each in contenders:
        x = block(side)
        step = step_of(each.bind(x), x)
        for _ in range(3):
            step()
        found.append(x)
    assert np.array_equal(*found), "the programs differ"


def report(contenders, side, what, seconds):
    calls = []
    for each in contenders:
        x = block(side)
        exchange = each.bind(x)
        calls.append(exchange if what == "halo alone" else step_of(exchange, x))
    times_us = 1e6 * take_long_turns(calls, seconds)
    ours, theirs = np.median(times_us, axis=0)
    ratio = np.median(times_us[:, 0] / times_us[:, 1])
    if rc.rank() == 0:
        text = f"{side:>5} x {side:<5} {what:<10}  ringcomm {ours:9.1f} us  mpi4py {theirs:9.1f} us"
        print(f"{text}  ringcomm / mpi4py {ratio:.2f} ({len(times_us)} turns)", flush=True)


def take_long_turns(calls, seconds):
    """Return the seconds of a call, shape (turns, calls): those of the slowest rank. Collective.

    Where ranks share cores, a turn must be long against their time slices.
    """
    for call in calls:
        timed(call, 10)
    call_s = max(rc.allgather_object(timed(calls[0], 30)))
    n = max(int(_TURN_S / call_s), 1)
    rounds = max(int(seconds / (n * call_s * len(calls))), 5)
    found = np.empty((rounds, len(calls)))
    with quiet():
        for number in range(rounds):
            # The order alternates: else each would always follow the same other one.
            order = range(len(calls))
            for each in order if number % 2 == 0 else reversed(order):
                found[number, each] = timed(calls[each], n)
    return rc.allreduce(found, rc.MAX)


def timed(call, n):
    rc.barrier()
    call()
    begun = time.perf_counter()
    for _ in range(n):
        call()
    return (time.perf_counter() - begun) / n
