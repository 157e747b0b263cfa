"""What an allreduce on a GPU costs its rank's processor: no GPU, no other rank, no mpirun.

One rank is real: its engine, its team, its threads. Its GPU is through with everything at once, and
the other ranks have come already: what they would say is what this rank says. So nothing waits, and
what is counted is ringcomm's own code, without the calls of CUDA, which cost nothing here.
"""

import argparse
import contextlib
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

import simulated_gpu as sim
from loopback import LoopbackHub

import ringcomm as rc
from ringcomm.config import Settings
from ringcomm.engine.core.current_engine import serve_thread
from ringcomm.engine.core.engine import Engine
from ringcomm.engine.core.meet_and_leave import stop
from ringcomm.gpu.device.pinned_pool import whole_pages
from ringcomm.gpu.executor import jobs
from ringcomm.gpu.executor import team as team_module
from ringcomm.gpu.executor.engine_gpus import Gpus
from ringcomm.gpu.transports.ipc import IpcTransport, flags_nbytes
from ringcomm.gpu.transports.nccl import NcclTransport

_WARM_UP = 50
_THREADS = {
    "MainThread": "the caller",
    "ringcomm-gpu-launch": "calls of CUDA",
    "ringcomm": "in the background",
}
_GATHERING = (team_module, jobs)
_gather_alike = team_module.gather_alike
_ACTIVE = contextlib.nullcontext()  # the real one pushes and pops a context of CUDA


class InstantGpu(sim.SimulatedGpu):
    """A GPU that writes values at once, and does nothing else.

    Attributes:
        n_calls: calls that enqueue something.
    """

    n_calls = 0

    def enqueue(self, stream, action, is_ready=lambda: True):
        self.n_calls += 1

    def write_value(self, stream, address, value):
        self.n_calls += 1
        sim.ctypes.c_uint32.from_address(address).value = value

    def write_and_await(self, stream, own, others, value):
        self.write_value(stream, own, value)

    def active(self):
        return _ACTIVE

    def record(self, event, stream):
        self.n_calls += 1

    def await_event(self, stream, event):
        self.n_calls += 1

    def await_value(self, stream, address, value):
        self.n_calls += 1

    def launch(self, stream, kernel):
        self.n_calls += 1
        _ = kernel.defines, kernel.parameters, kernel.grid(132)  # what a launch asks for


def main(argv):
    args = arguments(argv)
    for kind in args.transports:
        with tempfile.TemporaryDirectory() as folder:
            measure(kind, args, folder)
    return 0


def measure(kind, args, folder):
    """Print the processor time of an operation."""
    engine = Engine(LoopbackHub(2, (0, 0)).transport(0), Settings(timeout_s=120))
    gpu = InstantGpu(folder)
    sim.use(gpu)
    Gpus.use(engine, sim.drivers())
    with serve_thread(engine):
        alone = rc.Group([0])
        x = rc.zeros(1024, "float32", device="cuda")
        rc.allreduce_(x, group=alone)
        gpus = Gpus.of(engine)
        pretend(gpus.team(alone), gpu, gpus.memory(gpu.index).host, kind, args.ranks)
        for _ in range(_WARM_UP):
            rc.allreduce_(x, group=alone)
        found = []
        for _ in range(args.repeats):
            before, n_calls = processor_times(), gpu.n_calls
            for _ in range(args.operations):
                rc.allreduce_(x, group=alone)
            after = processor_times()
            found.append({t: 1e6 * (after[t] - before[t]) / args.operations for t in before})
            n_calls = (gpu.n_calls - n_calls) / args.operations
    whole = [sum(each.values()) for each in found]
    least = found[whole.index(min(whole))]
    parts = (f"{what} {least.get(name, 0):.0f}" for name, what in _THREADS.items())
    print(
        f"{kind:5} N={args.ranks}: {min(whole):5.0f} us of processor time per operation (median "
        f"{statistics.median(whole):.0f}): {', '.join(parts)}; {n_calls:.1f} calls of CUDA",
        flush=True,
    )
    for module in _GATHERING:
        module.gather_alike = _gather_alike
    with contextlib.suppress(Exception):  # the other rank of the hub never was
        stop(engine)
    gpu.close()


def pretend(team, gpu, host, kind, size):
    """Let a team of one rank have a transport among `size` ranks, which all say what it says."""
    if kind == "ipc":
        flags = whole_pages(flags_nbytes(size))
        flags[:] = 0
        team.transport = IpcTransport(
            gpu, 0, size, flags=flags, host=host, reducers=tuple(range(size))
        )
    else:
        team.transport = NcclTransport(gpu, lambda *_: gpu.enqueue(0, None), 0, size)

    async def gather_alike(mine, _):
        return [mine] * size if mine else []

    for module in _GATHERING:
        module.gather_alike = gather_alike


def processor_times():
    """Return the processor time of each thread of this rank."""
    threads = [each for each in threading.enumerate() if each.name in _THREADS]
    clocks = {each.name: time.pthread_getcpuclockid(each.ident) for each in threads}
    return {name: time.clock_gettime(clock) for name, clock in clocks.items()}


def arguments(argv):
    parser = argparse.ArgumentParser(prog="ci/bench gpu_call_overhead", description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--operations", type=int, default=50, help="of one measurement")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--transports", nargs="+", default=["ipc", "nccl"])
    return parser.parse_args(argv)
