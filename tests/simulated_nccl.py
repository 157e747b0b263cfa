"""NCCL that is not there: what it does to the memory of simulated GPUs."""

import itertools
import json
import os
import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from simulated_gpu import SimulatedGpu, bytes_at, poll

from ringcomm import _core
from ringcomm.arrays import DTYPES
from ringcomm.gpu.transports import nccl as nccl_module

_serial = itertools.count(1)


@dataclass(frozen=True)
class FakeNccl:
    """An NcclBinding whose ranks, threads or processes, meet in a folder."""

    gpu: SimulatedGpu
    folder: Path
    version: int = 22703
    shares_gpus: bool = False

    def unique_id(self):
        return f"comm-{os.getpid()}-{next(_serial)}".encode()

    def connect(self, unique_id, rank, size):
        return FakeCommunicator(self.gpu, Path(self.folder), unique_id.decode(), rank, size)


_TYPES = {code: DTYPES[name] for name, code in nccl_module.DATA_TYPES.items()}
_OPS = {code: op for op, code in nccl_module.OPERATORS.items() if op.value != "average"}


class FakeCommunicator:
    """What NCCL does to memory, one call after another; ranks that call different things stick."""

    late_connections: ClassVar = []  # kinds of operations that blocked who launched the first one

    def __init__(self, gpu, folder, name, rank, size):
        self._gpu, self._folder, self._name = gpu, folder, name
        self._rank, self._size = rank, size
        self._n_calls = 0
        self._group = None
        self.is_aborted = False
        self._connected = set()
        self._seen = {}
        self._publish("join", {})
        self._meet("join", 30)

    def __call__(self, function, *arguments):
        name = re.sub(r"\B(?=[A-Z])", "_", function.removeprefix("nccl")).lower()
        getattr(self, name)(*arguments)

    def all_reduce(self, source, target, count, dtype, op, stream):
        def work(calls):
            return [(target, self._reduced(calls, 0, count, dtype, op))]

        self._call("all_reduce", (count, dtype, op), source, count, dtype, work, stream)

    def reduce(self, source, target, count, dtype, op, root, stream):
        def work(calls):
            if self._rank != root:
                return []
            return [(target, self._reduced(calls, 0, count, dtype, op))]

        self._call("reduce", (count, dtype, op, root), source, count, dtype, work, stream)

    def reduce_scatter(self, source, target, count, dtype, op, stream):
        def work(calls):
            start = self._rank * count * _TYPES[dtype].itemsize
            return [(target, self._reduced(calls, start, count, dtype, op))]

        whole = count * self._size
        self._call("reduce_scatter", (count, dtype, op), source, whole, dtype, work, stream)

    def broadcast(self, source, target, count, dtype, root, stream):
        nbytes = count * _TYPES[dtype].itemsize

        def work(calls):
            return [(target, self._read(calls[root]["source"][0], 0, nbytes))]

        self._call("broadcast", (count, dtype, root), source, count, dtype, work, stream)

    def group_start(self):
        self._group = []

    def send(self, source, count, dtype, peer, stream):
        self._add("send", source, count, dtype, peer, stream)

    def recv(self, target, count, dtype, peer, stream):
        self._add("receive", target, count, dtype, peer, stream)

    def group_end(self):
        entries, self._group = self._group, None
        stream = entries[0][-1] if entries else 0
        mine = [(kind, peer, n) for kind, _, n, peer, _ in entries]
        sources = [(at, nbytes) for kind, at, nbytes, *_ in entries if kind == "send"]

        def work(calls):
            out, n_seen = [], dict.fromkeys(range(self._size), 0)
            for kind, at, nbytes, peer, _ in entries:
                if kind == "receive":
                    place, size = _sends(calls[peer], self._rank)[n_seen[peer]]
                    assert size == nbytes, f"rank {peer} sends {size} bytes for {nbytes}"
                    out.append((at, self._read(place, 0, nbytes)))
                    n_seen[peer] += 1
            return out

        self._enqueue("group", mine, sources, work, stream, is_alike=False)

    def comm_abort(self):
        self.is_aborted = True

    def comm_destroy(self):
        pass

    def _add(self, kind, address, count, dtype, peer, stream):
        assert self._group is not None, "send and receive belong into a group"
        self._group.append((kind, address, count * _TYPES[dtype].itemsize, peer, stream))

    def _call(self, kind, what, source, count, dtype, work, stream):
        nbytes = count * _TYPES[dtype].itemsize
        self._enqueue(kind, what, [(source, nbytes)], work, stream)

    def _enqueue(self, kind, what, sources, work, stream, *, is_alike=True):
        """Put three things on the stream: show what is called, compute from all, write it."""
        self._connect(kind)
        turn = self._n_calls
        self._n_calls += 1
        names = [f"{self._name}.{turn}.data.{self._rank}.{i}" for i in range(len(sources))]
        shown = {"kind": kind, "what": what, "source": names}
        results = []

        def show():
            for name, (at, nbytes) in zip(names, sources, strict=True):
                bytes_at(at, nbytes).tofile(self._folder / name)
            self._publish(f"{turn}.call", shown)

        def compute():
            if self.is_aborted:
                return
            calls = [self._load(f"{turn}.call", r) for r in range(self._size)]
            kinds = {call["kind"] for call in calls}
            alike = {json.dumps(call["what"]) for call in calls} if is_alike else {0}
            assert len(kinds) == len(alike) == 1, f"ranks call different things: {calls}"
            results.extend(work(calls))
            self._publish(f"{turn}.done", {})

        def write():
            for at, data in results:
                bytes_at(at, data.nbytes)[:] = data

        self._gpu.enqueue(stream, show)
        self._gpu.enqueue(stream, compute, lambda: self.is_aborted or self._all(f"{turn}.call"))
        self._gpu.enqueue(stream, write, lambda: self.is_aborted or self._all(f"{turn}.done"))

    def _connect(self, kind):
        """Block with the first operation of a kind until all ranks have called it."""
        if kind in self._connected:
            return
        self._connected.add(kind)
        if threading.current_thread().name != "ringcomm-nccl":
            self.late_connections.append(kind)
        self._publish(f"connect {kind}", {})
        self._meet(f"connect {kind}", 60)

    def _meet(self, what, timeout_s):
        """Wait until all ranks have published it."""
        deadline = time.monotonic() + timeout_s

        def is_over():
            assert time.monotonic() < deadline, f"not all ranks come to {what}"
            return self.is_aborted or self._all(what)

        poll(is_over)  # files of other processes

    def _reduced(self, calls, start, count, dtype, op):
        nbytes = count * _TYPES[dtype].itemsize
        pieces = [self._read(call["source"][0], start, nbytes) for call in calls]
        first = self._rank_that_begins(count)
        order = [pieces[(first + i) % self._size] for i in range(self._size)]
        total = order[0]
        for piece in order[1:]:
            if _TYPES[dtype].is_16bit_float:  # it rounds at every step
                both = [total.copy(), piece]
                _core.combine_at_once(total, both, _TYPES[dtype].kernel, _OPS[op].kernel, 1)
            else:
                _core.combine(total, piece, _TYPES[dtype].kernel, _OPS[op].kernel)
        return total

    def _rank_that_begins(self, count):
        """NCCL combines in an order of its own; the same on all ranks, as here."""
        return count % self._size

    def _read(self, name, start, nbytes):
        return np.fromfile(self._folder / name, np.uint8, nbytes, offset=start)

    def _path(self, what, rank):
        return self._folder / f"{self._name}.{what}.{rank}"

    def _publish(self, what, content):
        path = self._path(what, self._rank)
        path.with_suffix(f".tmp{self._rank}").write_text(json.dumps(content))
        path.with_suffix(f".tmp{self._rank}").rename(path)

    def _load(self, what, rank):
        return json.loads(self._path(what, rank).read_text())

    def _all(self, what):
        """Return True once all ranks have published it. Streams ask again and again."""
        lacking = self._seen.setdefault(what, [self._path(what, r) for r in range(self._size)])
        while lacking and os.path.exists(lacking[-1]):
            lacking.pop()
        return not lacking


def _sends(call, dest):
    """Return place and bytes of what one rank's group sends to `dest`, in order."""
    sent = [(peer, nbytes) for kind, peer, nbytes in call["what"] if kind == "send"]
    return [
        (place, nbytes)
        for (peer, nbytes), place in zip(sent, call["source"], strict=True)
        if peer == dest
    ]
