"""What it saves to carry out an algorithm without Python: ring allreduce of 4 MiB in a thread.

    mpirun -np 2 python ci/loop.py

Prints medians, from the first step to the last, while the main thread sleeps and while it computes
in Python, as a training script does; with and without Python in the loop, turn by turn in one
process, so that ratios mean something on a machine that is not quiet.
"""

import contextlib
import statistics
import sys
import threading
import time

import numpy as np

import ringcomm as rc
from ringcomm.arrays import adapter_for
from ringcomm.collectives.algorithms import ring
from ringcomm.collectives.recording import perform
from ringcomm.transport.channel import Channel
from ringcomm.transport.mpi import MpiTransport
from ringcomm.transport.watch import Watch

NBYTES = 4 << 20
TURNS = 30
SPINS, NAP_S = 100, 20e-6


class Clock:
    """When the first phase began, and when the last one ended."""

    def __init__(self):
        self.times_ns = []

    @contextlib.contextmanager
    def phase(self, name):
        begin_ns = time.monotonic_ns()
        yield
        self.span(name, begin_ns, time.monotonic_ns())

    def span(self, _name, begin_ns, end_ns):
        self.times_ns += [begin_ns, end_ns]

    @property
    def seconds(self):
        return (max(self.times_ns) - min(self.times_ns)) / 1e9


def drive(strand):
    """Advance a coroutine: test, spin a little, nap. What runs without Python is left to C++."""
    with contextlib.suppress(StopIteration):
        while True:
            pending = list(strand.send(None))
            idle = 0
            while pending := [request for request in pending if not request.test()]:
                if hasattr(pending[0], "_run"):
                    pending[0]._run.drive(60)
                idle += 1
                if idle > SPINS:
                    time.sleep(NAP_S)


def run_beside(strand, *, is_busy):
    """Drive in a thread while this one is busy, or waits."""
    thread = threading.Thread(target=drive, args=(strand,))
    thread.start()
    while is_busy and thread.is_alive():
        sum(range(2000))
    thread.join()


def measure(mpi):
    """Return the times by (is_busy, is_native): the slowest rank's, turn by turn."""
    wires = {is_native: MpiTransport(mpi, is_native=is_native) for is_native in (True, False)}
    x = np.empty(NBYTES // 4, np.float32)
    flat = adapter_for(x).flat(x)
    times = {}
    for turn in range(TURNS):
        for is_busy, is_native in [(b, n) for b in (False, True) for n in (True, False)]:
            transport, clock = wires[is_native], Clock()
            t = Channel(Watch(transport), 1, tuple(range(transport.size)), phases=clock)
            x[:] = turn
            mpi.COMM_WORLD.Barrier()
            run_beside(perform(ring.allreduce_, t, flat), is_busy=is_busy)
            assert (x == turn * transport.size).all()
            slowest = mpi.COMM_WORLD.allreduce(clock.seconds, mpi.MAX)
            times.setdefault((is_busy, is_native), []).append(slowest)
    for transport in wires.values():
        transport.close(is_clean=True)
    return times


def main():
    rc.init()
    from mpi4py import MPI

    times = measure(MPI)
    for is_busy in (False, True):
        cpp, python = (statistics.median(times[is_busy, native]) * 1e3 for native in (True, False))
        state = "computes" if is_busy else "sleeps"
        if rc.rank() == 0:
            print(
                f"main thread {state}: without Python {cpp:.2f} ms, with it {python:.2f} ms, "
                f"ratio {python / cpp:.2f}",
                flush=True,
            )
    rc.shutdown()


if __name__ == "__main__":
    sys.exit(main())
