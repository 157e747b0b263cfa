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

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

import simulated_gpu as sim
from loopback import LoopbackHub

import ringcomm as rc
from ringcomm.config import Settings
from ringcomm.engine.core.current_engine import serve_thread
from ringcomm.engine.core.engine import Engine
from ringcomm.engine.core.lifecycle import stop
from ringcomm.gpu.device.shared_pinned_pool import whole_pages
from ringcomm.gpu.executor import team as team_module
from ringcomm.gpu.executor.gpus import Gpus
from ringcomm.gpu.transports.ipc import IpcTransport, flags_nbytes
from ringcomm.gpu.transports.nccl import NcclTransport

_WARM_UP = 50
_gather_alike = team_module.gather_alike


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

    def record(self, event, stream):
        self.n_calls += 1

    def await_event(self, stream, event):
        self.n_calls += 1

    def await_value(self, stream, address, value):
        self.n_calls += 1

    def launch(self, stream, kernel):
        self.n_calls += 1
        _ = kernel.defines, kernel.arguments, kernel.grid(132)  # what a launch asks for


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
            before, n_calls = processor_time(), gpu.n_calls
            for _ in range(args.operations):
                rc.allreduce_(x, group=alone)
            found.append(1e6 * (processor_time() - before) / args.operations)
            n_calls = (gpu.n_calls - n_calls) / args.operations
    print(
        f"{kind:5} N={args.ranks}: {min(found):5.0f} us of processor time per operation (median "
        f"{statistics.median(found):.0f}), {n_calls:.1f} calls of CUDA",
        flush=True,
    )
    team_module.gather_alike = _gather_alike
    with contextlib.suppress(Exception):  # the other rank of the hub never was
        stop(engine)
    gpu.close()


def pretend(team, gpu, host, kind, size):
    """Let a team of one rank have a transport among `size` ranks, which all say what it says."""
    if kind == "ipc":
        flags = whole_pages(flags_nbytes(size))
        flags[:] = 0
        team.transport = IpcTransport(gpu, 0, size, flags=flags, host=host)
    else:
        team.transport = NcclTransport(gpu, lambda *_: gpu.enqueue(0, None), 0, size)

    async def gather_alike(mine, _):
        return [mine] * size if mine else []

    team_module.gather_alike = gather_alike


def processor_time():
    """Return the processor time of the threads of this rank."""
    threads = [each for each in threading.enumerate() if each.name != "simulated-gpu"]
    clocks = [time.pthread_getcpuclockid(each.ident) for each in threads]
    return float(np.sum([time.clock_gettime(clock) for clock in clocks]))


def arguments(argv):
    parser = argparse.ArgumentParser(prog="ci/bench gpu_call_overhead", description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--operations", type=int, default=50, help="of one measurement")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--transports", nargs="+", default=["ipc", "nccl"])
    return parser.parse_args(argv)
