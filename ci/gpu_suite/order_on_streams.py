"""Checks collectives between other work of the caller's stream: no host waits, the order is kept.

usage: mpirun -np N python -m gpu_suite.order_on_streams
Before each call, the stream sleeps and then writes the array. After the call, the stream reads the
result and overwrites the array.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import cupy
import numpy as np
import torch
from gpu_suite.gpu_helpers import LIBRARIES, Arrays, current, highest, sleep, start
from gpu_suite.outcome_lines import detail, figure

import ringcomm as rc

BUSY_S = 0.2
TURNS = 20
COUNT = (1 << 22) + 5
Streams = Sequence[cupy.cuda.Stream]
Form = Callable[[Any, Streams], Any]


def blocking_in_place(x: Any, streams: Streams) -> Any:
    return rc.allreduce_(x)


def blocking(x: Any, streams: Streams) -> Any:
    return rc.allreduce(x)


def waited_for_at_once(x: Any, streams: Streams) -> Any:
    return rc.allreduce_async(x).wait()


def waited_for_on_another_stream(x: Any, streams: Streams) -> Any:
    handle = rc.allreduce_async_(x)
    with current(streams[1]):
        y = handle.wait() * 1
    cupy.cuda.get_current_stream().wait_event(streams[1].record())
    return y


FORMS = (blocking_in_place, blocking, waited_for_at_once, waited_for_on_another_stream)


def main() -> None:
    start()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    longest = 0.0
    for library, form in itertools.product(LIBRARIES, FORMS):
        what = f"{library.name}, {form.__name__}"
        check(library, form, streams)  # compiles kernels and takes memory, which may wait
        call_s, has_waited = check(library, form, streams)
        assert not has_waited, f"{what}: the call waited for the GPU"
        call_s = highest(call_s)
        longest = max(longest, call_s)
        if rc.rank() == 0:
            detail(f"{what:<42} {call_s * 1e3:6.2f} ms")
    n_passed_on = pass_memory_on()
    if rc.rank() == 0:
        detail(f"memory of a stream that another one got: {n_passed_on} of {2 * TURNS} times")
        figure(f"longest call {longest * 1e3:.2f} ms, on a stream that was busy {BUSY_S:g} s")


def check(library: Arrays, form: Form, streams: Streams) -> tuple[float, bool]:
    """Return the seconds of a call, and True if it waited for the GPU; fail if its result is wrong.

    Args:
        library: of the array.
        form: of the call.
        streams: the caller's stream, and another one.
    """
    x = library.of(np.full(COUNT, -7, np.float32))
    torch.cuda.synchronize()
    rc.barrier()
    with current(streams[0]):
        sleep(BUSY_S)
        x[...] = rc.rank() + 1.0
        written = streams[0].record()
        begin = time.perf_counter()
        y = form(x, streams)
        call_s = time.perf_counter() - begin
        has_waited = written.done
        z = y * 2
        x[...] = -1.0
    torch.cuda.synchronize()
    total = rc.size() * (rc.size() + 1.0)
    assert (library.read(z) == total).all(), f"{library.name}, {form.__name__}: wrong numbers"
    return call_s, has_waited


def pass_memory_on() -> int:
    """Return how often a stream got memory of another; fail if that one wrote to it later."""
    n_passed_on = 0
    owners: dict[int, int] = {}  # by address: the stream that had that memory last
    used = []  # so that no stream gets the address of a former one

    def take() -> cupy.ndarray:
        nonlocal n_passed_on
        x = rc.zeros(COUNT, "float32", device="cuda")
        stream = cupy.cuda.get_current_stream().ptr
        n_passed_on += owners.get(x.data.ptr, stream) != stream
        owners[x.data.ptr] = stream
        return x

    for _ in range(TURNS):
        busy, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        used += [busy, other]
        with current(busy):
            x = take()
            sleep(BUSY_S / TURNS)
            x.fill(1.0)
            del x
        with current(other):
            y = take()
        torch.cuda.synchronize()
        assert not cupy.asnumpy(y).any(), "memory is used by two streams at once"
        del y
        for thread in threading.enumerate():
            if thread.name == "ringcomm-gpu-memory":  # notes that a stream is through
                thread.join()
    assert n_passed_on, "no stream got memory of another, so nothing was shown"
    return n_passed_on


if __name__ == "__main__":
    main()
