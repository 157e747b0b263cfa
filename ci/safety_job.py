"""The job of the safety matrix: rank 1 ends in the given way while the others wait for it.

usage: mpirun -np 4 python ci/safety_job.py DEED REPORT_DIR
Writes fault.time before the fault, and survivor.RANK with the name of what the others got.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

import ringcomm as rc

VICTIM = 1


def raise_here():
    raise ValueError("boom")


def raise_in_thread():
    thread = threading.Thread(target=raise_here)
    thread.start()
    thread.join()
    time.sleep(60)  # the main thread goes on as if nothing had happened


def send_signal(number):
    os.kill(os.getpid(), number)
    time.sleep(60)


DEEDS = {
    "raise": raise_here,
    "raise-in-thread": raise_in_thread,
    "sys.exit(3)": lambda: sys.exit(3),
    "SIGKILL": lambda: send_signal(signal.SIGKILL),
    "SIGSEGV": lambda: send_signal(signal.SIGSEGV),
    "os._exit(0)": lambda: os._exit(0),
}


def main():
    deed, folder = DEEDS[sys.argv[1]], Path(sys.argv[2])
    rc.init()
    grad = np.ones(1 << 20, np.float32)
    for _ in range(3):
        rc.allreduce(grad, name="grad")
    if rc.rank() == VICTIM:
        time.sleep(0.3)  # the others are in their wait by now
        (folder / "fault.time").write_text(repr(time.monotonic()))
        deed()
        return
    try:
        rc.allreduce(grad, name="layer3.weight")
    except BaseException as error:
        (folder / f"survivor.{rc.rank()}").write_text(f"{type(error).__name__}: {error}")
        raise


main()
