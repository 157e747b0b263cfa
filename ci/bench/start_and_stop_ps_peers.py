"""Another library's client and server, in processes of their own, stopped while others measure.

torch's rpc looks for messages in shared memory without a pause, also when nobody asks anything:
on two cores, that would take away half of what the others have.
"""

import contextlib
import dataclasses
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

from bench.ps_workload import cpu_s_of

import ringcomm as rc
from ringcomm.errors import RingcommError
from ringcomm.launch.child import outside_of_a_job

# torch-rpc-uv: without its shared memory, which it polls
PEERS = {"torch-rpc": [], "torch-rpc-uv": ["uv"]}
SCRIPT = Path(__file__).with_name("ps_peer_torch_rpc.py")
PATIENCE_S = 120.0


class Peer:
    """A client of another library, for this worker; rank 0 has the server, too. Collective."""

    def __init__(self, name):
        self.name, rank, size = name, rc.rank(), rc.size()
        port = rc.broadcast_object(free_port() if rank == 0 else None)
        ranks = [rank, size] if rank == 0 else [rank]  # the last one is the server
        self.processes = [start(name, each, size + 1, port) for each in ranks]
        for each in self.processes:
            self.hear(each)
        rc.barrier()  # others may be about to say something to these
        self.signal(signal.SIGSTOP)

    @contextlib.contextmanager
    def awake(self):
        """Wake the processes for this block."""
        self.signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.signal(signal.SIGSTOP)

    def prepare(self, case):
        self.ask("prepare", *dataclasses.astuple(case))

    def run(self, op, n):
        return self.ask("run", op, n)

    @property
    def n_pushes(self):
        return self.ask("n_pushes")

    def count_wrong(self, n_pushes):
        return self.ask("count_wrong", n_pushes)

    def server_cpu_s(self):
        """Return the CPU time of the server so far; on rank 0."""
        return cpu_s_of(self.processes[-1].pid)

    def close(self):
        self.signal(signal.SIGCONT)
        for each in self.processes:
            self.say(each, "close")
        for each in self.processes:
            with each:
                try:
                    each.wait(PATIENCE_S)
                except subprocess.TimeoutExpired:
                    each.kill()

    def signal(self, number):
        for each in self.processes:
            each.send_signal(number)

    def ask(self, *what):
        self.say(self.processes[0], *what)
        return self.hear(self.processes[0])

    def say(self, process, *what):
        process.stdin.write(json.dumps(what) + "\n")
        process.stdin.flush()

    def hear(self, process):
        if not select.select([process.stdout], [], [], PATIENCE_S)[0]:
            process.kill()
            raise RingcommError(f"{self.name} has said nothing for {PATIENCE_S:g} s")
        line = process.stdout.readline()
        if not line:
            code = process.wait(PATIENCE_S)
            raise RingcommError(f"{self.name} ended with {code}; above is what it printed")
        return json.loads(line)


def start(name, rank, size, port):
    # One thread per operator, as the workers have: more would wait for each other, spinning.
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", SCRIPT, str(rank), str(size), str(port), *PEERS[name]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=outside_of_a_job(os.environ) | {"OMP_NUM_THREADS": "1"},
        text=True,
    )


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
