"""CPU that a rank burns while it has nothing to do, and while it waits for a late one.

    mpirun -np 2 python ci/idle.py

Prints one line per state and rank; exits with 1 if idle takes 1 % of a core or more, or waiting,
from 10 ms on, 5 % or more.
"""

import resource
import sys
import time

import numpy as np

import ringcomm as rc

SECONDS = 4.0
BARS = {"idle": 0.01, "waiting, asynchronous": 0.05, "waiting, synchronous": 0.05}


def cpu_s():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def share(wait):
    """Return the share of a core that this process takes while wait() lasts."""
    cpu, clock = cpu_s(), time.monotonic()
    wait()
    return (cpu_s() - cpu) / (time.monotonic() - clock)


def measure():
    x = np.ones(10)
    rc.barrier()
    shares = {"idle": share(lambda: time.sleep(SECONDS))}
    rc.barrier()
    if rc.rank() == 0:
        time.sleep(SECONDS + 0.1)
        rc.allreduce(x)
        time.sleep(SECONDS)
        rc.allreduce(x)
        return shares
    handle = rc.allreduce_async(x)
    time.sleep(0.01)
    shares["waiting, asynchronous"] = share(lambda: time.sleep(SECONDS))
    handle.wait()
    shares["waiting, synchronous"] = share(lambda: rc.allreduce(x))
    return shares


def main():
    rc.init()
    shares = measure()
    for state, value in shares.items():
        print(f"rank {rc.rank()}: {state}: {value:.2%} of a core", flush=True)
    rc.shutdown()
    return int(any(value >= BARS[state] for state, value in shares.items()))


if __name__ == "__main__":
    sys.exit(main())
