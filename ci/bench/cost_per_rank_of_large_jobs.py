"""What a job of many ranks costs one of them: messages, bytes and Python time, by simulation.

One rank is real: its engine, its groups, its operations. Its transport counts what it sends, and
stands for the others, which do the same at the same time: what this rank sends to `rank + d`, it
receives from `rank - d`. There is no MPI, no payload and no second process.
"""

import argparse
import statistics
import time

import numpy as np

import ringcomm as rc
from ringcomm.config import Settings
from ringcomm.engine.api.world import topology_of
from ringcomm.engine.core.current_engine import serve_thread
from ringcomm.engine.core.engine import Engine
from ringcomm.engine.core.meet_and_leave import leave, meet
from ringcomm.ranks_as_text import ranges_of, ranks_in
from ringcomm.transport.base import ArrivedMessage
from ringcomm.transport.control_header import ControlHeader, ControlKind
from ringcomm.transport.membership.view import View
from ringcomm.transport.presence import PLACE
from ringcomm.transport.tags import WIDEST

SIZES = (128, 1024, 16384)  # with more than 64 ranks, C++ sends no short payloads of its own
_WARM_UP, _REPEATS = 3, 15


class Done:
    """A message that is complete."""

    source = 0

    def test(self):
        return True

    def cancel(self):
        pass


class Idle:
    """Stands for what C++ advances, and for a recorded algorithm, which is over at once."""

    has_programs = False
    is_over = True
    fault = ""

    def run(self, *_):
        return self

    def __getattr__(self, name):
        return lambda *_: None


class Mirror:
    """Transport of one rank among `size` that all do what it does.

    Args:
        is_native: recorded algorithms take no Python, as in a job: their messages are not counted.

    Attributes:
        n_messages: that this rank has sent.
        n_bytes: in them.
        own_s: processor time in here, which is the simulation's.
    """

    implementation = "a simulation"
    tags = WIDEST
    is_threaded = False
    node = None
    ring_epoch = 0

    def __init__(self, rank, size, ranks_per_host, *, is_native):
        self.rank, self.size = rank, size
        self.nodes = tuple(r - r % ranks_per_host for r in range(size))
        self.view = View.first(size)
        self.loop = Idle()
        self.runner = self.loop if is_native else None
        self.n_messages = self.n_bytes = 0
        self.own_s = 0.0
        self._events = []

    def isend(self, data, dest, tag):
        self.n_messages += 1
        self.n_bytes += data.nbytes
        return Done()

    def irecv(self, out, source, tag):
        out[:] = 0
        return Done()

    def wire_ranks(self, ranks):
        return ranks

    def control(self, dest, message):
        began = time.thread_time()
        self.n_messages += 1
        self.n_bytes += len(message)
        distance = dest - self.rank
        source = (self.rank - distance) % self.size
        self._events.append(ArrivedMessage(source, self._shifted(message, distance)))
        self.own_s += time.thread_time() - began

    def _shifted(self, message, distance):
        """Return what the rank `distance` before this one sends where this one sends `message`."""
        header, text = ControlHeader.unpack(message)
        if header.kind is not ControlKind.LEFT:
            return message
        how, _, ranges = text.rpartition("\n")
        ranks = [(rank - distance) % self.size for rank in ranks_in(ranges)]
        return header.pack(f"{how}\n{ranges_of(ranks)}")

    def poll(self):
        events, self._events = self._events, []
        return events

    def park(self, seconds):
        pass

    def wake(self):
        pass

    def abandon(self, requests):
        pass

    def label(self, rank):
        return f"rank {rank}"

    def close(self, *, is_clean):
        self.loop.stop()


def main(argv):
    parser = argparse.ArgumentParser(
        prog="ci/bench cost_per_rank_of_large_jobs", description=__doc__
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="ranks of the job")
    parser.add_argument("--ranks-per-host", type=int, default=8)
    args = parser.parse_args(argv)
    print("| ranks | | messages | bytes | Python, ms |", "|---|---|---|---|---|", sep="\n")
    for size in args.sizes:
        for what, (n_messages, n_bytes, seconds) in costs(size, args.ranks_per_host).items():
            print(f"| {size} | {what} | {n_messages} | {n_bytes} | {seconds * 1e3:.2f} |")
    return 0


def costs(size, ranks_per_host=8):
    """Return {what: (messages, bytes, seconds of processor time)} of one rank among `size`."""
    found = {"places": places(size, ranks_per_host)}
    counted, timed = (
        _measured(Mirror(size // 2 + 1, size, ranks_per_host, is_native=is_native))
        for is_native in (False, True)
    )
    return found | {what: (*counted[what][:2], timed[what][2]) for what in counted}


def _measured(wire):
    found = {}

    def of(do, repeats=1):
        each = []
        for _ in range(repeats):
            before = wire.n_messages, wire.n_bytes, wire.own_s, time.thread_time()
            do()
            n, nbytes, own_s, now = wire.n_messages, wire.n_bytes, wire.own_s, time.thread_time()
            each.append((n - before[0], nbytes - before[1], now - before[3] - (own_s - before[2])))
        return (*each[-1][:2], statistics.median(seconds for *_, seconds in each))

    engines = []

    def start():
        engines.append(Engine(wire, Settings()))
        meet(engines[0], "1")

    found["init"] = of(start)
    x = np.ones(1, np.float32)
    with serve_thread(engines[0]):
        for what, name in (("unnamed operation", None), ("named operation", "w")):
            operation = lambda name=name: rc.allreduce(x, name=name)  # noqa: E731
            of(operation, _WARM_UP)
            found[what] = of(operation, _REPEATS)
        found["shutdown"] = of(lambda: leave(engines[0], "called shutdown()"))
    return found


def places(size, ranks_per_host):
    """Return what it costs to learn from MPI where all ranks live: no messages of ours."""
    packed = np.zeros(size, PLACE)
    packed["node"] = packed["machine"] = np.arange(size) // ranks_per_host * ranks_per_host
    packed["local_rank"] = np.arange(size) % ranks_per_host
    began = time.thread_time()
    found = np.frombuffer(packed.tobytes(), PLACE)
    _ = tuple(found["node"].tolist())
    topology_of(found, size // 2)
    return 0, packed.nbytes, time.thread_time() - began
