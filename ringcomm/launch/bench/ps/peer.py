"""Another library's client and server, in processes of their own, stopped while others measure.

torch's rpc looks for messages in shared memory without a pause, also when nobody asks anything:
on two cores, that would take away half of what the others have.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Final

from ringcomm import config
from ringcomm.engine.api.collectives import barrier, broadcast_object
from ringcomm.errors import RingcommError
from ringcomm.launch.bench.ps.cases import Case
from ringcomm.launch.bench.ps.work import Turn, cpu_s_of
from ringcomm.launch.child import outside_of_a_job

# What each runs, by "module:class"; it is made with (rank, size, port, *arguments).
_TARGETS: Final = {
    "torch-rpc": ("ringcomm.torch.rpc_peer:TorchRpc", []),
    "torch-rpc-uv": ("ringcomm.torch.rpc_peer:TorchRpc", ["uv"]),
}
PEERS: Final = tuple(_TARGETS)
_PATIENCE_S = 120.0


class Peer:
    """A client of another library, for this worker; the chief has the server, too. Collective.

    Args:
        name: one of PEERS.
        rank: of this worker.
        size: number of workers.
    """

    def __init__(self, name: str, rank: int, size: int) -> None:
        self.name = name
        port: int = broadcast_object(_free_port() if rank == 0 else None)
        ranks = [rank, size] if rank == 0 else [rank]  # the last one is the server
        self._children = [_Child(name, each, size + 1, port) for each in ranks]
        for child in self._children:
            child.hear()
        barrier()  # others may be about to say something to these
        for child in self._children:
            child.stop()

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Let the processes run in this block."""
        for child in self._children:
            child.go_on()
        try:
            yield
        finally:
            for child in self._children:
                child.stop()

    def prepare(self, case: Case) -> None:
        """Make a table of zeros. Collective."""
        self._client.ask("prepare", case=dataclasses.asdict(case))

    def run(self, op: str, n: int) -> Turn:
        """Do an operation n times."""
        return Turn(*self._client.ask("run", op=op, n=n))

    def n_pushes(self) -> list[int]:
        """Return how often this client has pushed to each set of keys."""
        told: list[int] = self._client.ask("n_pushes")
        return told

    def count_wrong(self, n_pushes: list[int]) -> int:
        """Return how many elements are not the sum of all clients' pushes."""
        told: int = self._client.ask("count_wrong", n_pushes=n_pushes)
        return told

    def server_cpu_s(self) -> float:
        """Return the CPU time of the server so far; on the chief."""
        return cpu_s_of(self._children[-1].pid)

    def close(self) -> None:
        """End the processes."""
        for child in self._children:
            child.go_on()
            child.say("close")
        for child in self._children:
            child.end()

    @property
    def _client(self) -> _Child:
        return self._children[0]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


class _Child:
    """A process that does what lines of JSON say; child.py is its side."""

    def __init__(self, name: str, rank: int, size: int, port: int) -> None:
        target, arguments = _TARGETS[name]
        self._label = f"{name}, process {rank} of {size}"
        # One thread per operator, as the workers have: more would wait for each other, spinning.
        environment = outside_of_a_job(config.environment()) | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "ringcomm.launch.bench.ps.child",
             target, str(rank), str(size), str(port), *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True,
        )  # fmt: skip
        self.pid = self._process.pid

    def ask(self, what: str, **how: Any) -> Any:
        """Let it do something and return what comes of it."""
        self.say(what, **how)
        return self.hear()

    def say(self, what: str, **how: Any) -> None:
        """Let it do something."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **how}) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        """Return what came of it.

        Raises:
            RingcommError: it has ended, or says nothing.
        """
        stdout = self._process.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], _PATIENCE_S)[0]:
            self._process.kill()
            raise RingcommError(f"{self._label} has said nothing for {_PATIENCE_S:g} s")
        line = stdout.readline()
        if not line:
            code = self._process.wait(_PATIENCE_S)
            raise RingcommError(f"{self._label} ended with {code}; above is what it printed")
        return json.loads(line)

    def stop(self) -> None:
        """Let it take no CPU time."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it run."""
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Wait for its end."""
        with self._process:
            try:
                self._process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
