"""What the driver does on this machine, in processes that need nothing but Python.

usage: python -m gpu_suite.driver_probes PROBE
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection

from gpu_suite.cuda_driver_by_ctypes import CudaError, Driver
from gpu_suite.outcome_lines import detail, figure, skip

PAGE = 4096
LINE = 128  # bytes between two flags
BLOCKS_FROM_S = 1.0  # a call that has not returned by then waits for the stream
RELEASED_WITHIN_S = 5.0
DEEP = 5000  # entries of a stream
MEETINGS = 300
MPS = "nvidia-cuda-mps-control"


class Flags:
    """Words in a memfd that processes and the GPU share."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("flags") if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, PAGE)
        self._map = mmap.mmap(self.fd, PAGE)
        self._words = (ctypes.c_uint32 * (PAGE // 4)).from_buffer(self._map)
        self.address = ctypes.addressof(self._words)

    def __getitem__(self, number: int) -> int:
        return self._words[number * LINE // 4]

    def __setitem__(self, number: int, value: int) -> None:
        self._words[number * LINE // 4] = value


def until(is_so: Callable[[], bool], timeout_s: float = RELEASED_WITHIN_S) -> bool:
    """Return True once a condition holds, False after the timeout."""
    end = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > end:
            return False
    return True


# --- memory operations ----------------------------------------------------------------------------
def memory_operations() -> None:
    """A stream writes to and waits for words of a registered memfd."""
    gpu, flags = Driver(), Flags()
    at, stream = gpu.register(flags.address, PAGE), gpu.new_stream()
    gpu.write_value(stream, at, 7)
    assert until(lambda: flags[0] == 7), f"the host sees {flags[0]} instead of 7"
    gpu.await_value(stream, at + LINE, 1)
    gpu.write_value(stream, at, 8)
    time.sleep(0.2)
    assert flags[0] == 7, "the stream did not wait"
    flags[1] = 2  # "or more"
    assert until(lambda: flags[0] == 8), "the stream still waits after the host's write"
    gpu.in_one_call(stream, [(gpu.AWAIT, at + LINE, 3), (gpu.WRITE, at, 9)])
    time.sleep(0.2)
    assert flags[0] == 8, "the stream did not wait in a call of several operations"
    flags[1] = 3
    assert until(lambda: flags[0] == 9), "several operations in one call are not carried out"
    times = []
    for turn in range(100):
        begin = time.perf_counter()
        gpu.await_value(stream, at + LINE, 4 + turn)
        gpu.write_value(stream, at, 10 + turn)
        flags[1] = 4 + turn
        assert until(lambda turn=turn: flags[0] == 10 + turn)
        times.append(time.perf_counter() - begin)
    figure(f"a wait and a write take {1e6 * statistics.median(times):.1f} us, with the host's part")


def release() -> None:
    """Another process ends the wait of a stream by writing to the memfd."""
    gpu, flags = Driver(), Flags()
    at, stream = gpu.register(flags.address, PAGE), gpu.new_stream()
    gpu.await_value(stream, at, 1)
    time.sleep(1)
    assert not gpu.is_done(stream), "the stream did not wait"
    other = get_context("fork").Process(target=flags.__setitem__, args=(0, 1))  # uses no CUDA
    other.start()
    begin = time.monotonic()
    assert until(lambda: gpu.is_done(stream)), "the stream still waits"
    took_s = time.monotonic() - begin
    other.join()
    figure(f"done {1e3 * took_s:.1f} ms after another process was started to write")


# --- what blocks ----------------------------------------------------------------------------------
def blocked_calls() -> None:
    """Which calls wait while a stream of this process waits for a word in host memory."""
    gpu, flags = Driver(), Flags()
    at = gpu.register(flags.address, PAGE)
    stuck, other = gpu.new_stream(), gpu.new_stream()
    page = mmap.mmap(-1, PAGE)
    anonymous = ctypes.addressof(ctypes.c_char.from_buffer(page))
    memory, spare, event = gpu.allocate(1 << 21), gpu.allocate(1 << 21), gpu.new_event()
    module, old = gpu.load_module(), gpu.load_function(gpu.load_module())
    gpu.launch(old, other)
    gpu.call("cuCtxSynchronize")
    functions: list[int] = []
    cases: dict[str, Callable[[], object]] = {
        "query of another stream": lambda: gpu.is_done(other),
        "query of the stuck stream": lambda: gpu.is_done(stuck),
        "new event": gpu.new_event,
        "record of an event on the stuck stream": lambda: gpu.call("cuEventRecord", event, stuck),
        "query of that event": lambda: gpu.call("cuEventQuery", event, may_return=(600,)),
        "launch of a loaded kernel": lambda: gpu.launch(old, other),
        "load of a module": gpu.load_module,
        "load of a function": lambda: functions.append(gpu.load_function(module)),
        "first launch of a function": lambda: gpu.launch(functions[0], other),
        "memset on another stream": lambda: gpu.call("cuMemsetD32Async", memory, 1, 4, other),
        "allocation": lambda: gpu.allocate(1 << 21),
        "free": lambda: gpu.call("cuMemFree_v2", spare),
        "registration of host memory": lambda: gpu.register(anonymous, PAGE),
        "its end": lambda: gpu.call("cuMemHostUnregister", anonymous),
        "export of memory": lambda: gpu.export(memory),
        "new stream": gpu.new_stream,
        "copy to pageable memory": lambda: gpu.read(memory),
        f"{DEEP} writes on the stuck stream": lambda: [
            gpu.write_value(stuck, at + LINE, 1) for _ in range(DEEP)
        ],
    }
    outcomes = []
    for number, (name, call) in enumerate(cases.items(), 1):
        gpu.await_value(stuck, at, number)
        outcomes.append(outcome(gpu, call, lambda number=number: flags.__setitem__(0, number)))
        detail(f"{name:<40} {outcomes[-1]}")
        if outcomes[-1].startswith("hangs") or "sticky" in outcomes[-1]:
            break
        gpu.call("cuStreamSynchronize", stuck)
    n_blocked = sum(text.startswith("blocks") for text in outcomes)
    figure(f"{n_blocked} of {len(outcomes)} calls block while a stream waits")
    if len(outcomes) < len(cases):
        sys.exit(f"AssertionError: {name}: {outcomes[-1]}; the others were not tried")
    assert not any(text.startswith("fails") for text in outcomes), "a call failed: see the details"


def outcome(gpu: Driver, call: Callable[[], object], let_go: Callable[[], None]) -> str:
    """Return what a call does while a stream waits, which let_go() ends."""
    failures: list[CudaError] = []

    def run() -> None:
        try:
            gpu.enter()
            call()
        except CudaError as error:
            failures.append(error)

    begin = time.perf_counter()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(BLOCKS_FROM_S)
    has_blocked, took_s = thread.is_alive(), time.perf_counter() - begin
    let_go()
    thread.join(RELEASED_WITHIN_S)
    if thread.is_alive():
        return "hangs, even after the stream was let go"
    if failures:
        kind = "a sticky error: " if failures[0].is_sticky else ""
        return f"fails with {kind}{failures[0]}"
    return "blocks until the stream goes on" if has_blocked else f"returns in {took_s * 1e6:.0f} us"


# --- memory of other processes --------------------------------------------------------------------
def ipc(size: int) -> None:
    """Each of `size` processes maps the memory of all; their streams meet by flags in a memfd."""
    flags = Flags()
    context = get_context("spawn")
    pipes = [context.Pipe() for _ in range(size)]
    inherited = os.dup(flags.fd)
    os.set_inheritable(inherited, True)
    path = f"/proc/{os.getpid()}/fd/{inherited}"
    ranks = [
        context.Process(target=be_a_rank, args=(rank, size, path, pipes[rank][1]), daemon=True)
        for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    for _, theirs in pipes:
        theirs.close()
    ours = [mine for mine, _ in pipes]
    handles = [pipe.recv() for pipe in ours]
    for pipe in ours:
        pipe.send(handles)
    results = [pipe.recv() for pipe in ours]
    for rank in ranks:
        rank.join(10)
    wrong = [f"rank {r}: {result}" for r, result in enumerate(results) if isinstance(result, str)]
    assert not wrong, "\n".join(wrong)
    map_us, meet_us = (max(each) for each in zip(*results, strict=True))
    figure(f"maps in {map_us:.0f} us; {size} streams meet in {meet_us:.1f} us")


def be_a_rank(rank: int, size: int, path: str, pipe: Connection) -> None:
    """Export memory, map that of the others, and meet them; send the times or the error."""
    try:
        flags, gpu = Flags(os.open(path, os.O_RDWR)), Driver()
        own = gpu.allocate(1 << 21)
        gpu.call("cuMemsetD32_v2", own, 100 + rank, (1 << 21) // 4)
        gpu.call("cuCtxSynchronize")
        pipe.send(gpu.export(own))
        handles = pipe.recv()
        begin = time.perf_counter()
        theirs = {r: gpu.map(handle) for r, handle in enumerate(handles) if r != rank}
        map_us = 1e6 * (time.perf_counter() - begin) / max(1, size - 1)
        for other, address in theirs.items():
            for at in (address, address + (1 << 21) - 4):
                found = gpu.read(at)
                assert found == 100 + other, f"the memory of rank {other} holds {found}"
        pipe.send((map_us, meet(gpu, flags, rank, size)))
    except (AssertionError, CudaError, OSError) as error:
        traceback.print_exc()
        pipe.send(f"{type(error).__name__}: {error}")


def meet(gpu: Driver, flags: Flags, rank: int, size: int) -> float:
    """Return the microseconds of a meeting of the streams of all ranks."""
    at, stream = gpu.register(flags.address, PAGE), gpu.new_stream()
    begin = 0.0
    for phase in range(1, MEETINGS + 1):
        gpu.write_value(stream, at + LINE * rank, phase)
        for other in range(size):
            if other != rank:
                gpu.await_value(stream, at + LINE * other, phase)
        if phase % 10 == 0:  # a stream takes so many entries before it blocks the host
            assert until(lambda: gpu.is_done(stream), 10), f"phase {phase} of a meeting hangs"
        if phase == 10:
            begin = time.perf_counter()
    return 1e6 * (time.perf_counter() - begin) / (MEETINGS - 10)


@contextmanager
def private_mps() -> Iterator[None]:
    """Run a daemon of MPS for the processes that are started meanwhile."""
    if shutil.which(MPS) is None:
        skip(f"there is no {MPS}")
    with tempfile.TemporaryDirectory(prefix="mps-", dir="/tmp") as folder:  # sockets: short names
        os.environ |= {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        begun = subprocess.run([MPS, "-d"], capture_output=True, text=True, timeout=20, check=False)
        if begun.returncode:
            skip(f"{MPS} -d ends with {begun.returncode}: {(begun.stdout + begun.stderr).strip()}")
        try:
            yield
        finally:
            subprocess.run([MPS], input="quit\n", text=True, timeout=20, check=False)


def main() -> None:
    name, *options = sys.argv[1].split(",")
    if name == "ipc":
        size, with_mps = int(options[0]), "mps" in options
        if with_mps:
            with private_mps():
                ipc(size)
        else:
            ipc(size)
    else:
        {"memory": memory_operations, "release": release, "blocked": blocked_calls}[name]()


if __name__ == "__main__":
    main()
