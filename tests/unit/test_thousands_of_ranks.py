"""Jobs of thousands of ranks: one of them is real, see ci/bench/cost_per_rank_of_large_jobs.py."""

import threading
import time

import numpy as np
from bench import cost_per_rank_of_large_jobs
from harness import DEADLINE_S, run_ranks
from loopback import LoopbackHub

import ringcomm as rc
from ringcomm.config import Settings
from ringcomm.engine.core.current_engine import engine, serve_thread
from ringcomm.engine.core.engine import Engine
from ringcomm.engine.core.meet_and_leave import leave, meet
from ringcomm.transport import failure_news, wire_team

OPERATIONS = {
    "unnamed": rc.allreduce,
    "named": lambda x: rc.allreduce(x, name="w"),
    "reduce": lambda x: rc.reduce(x, root=1),
    "reduce_scatter": rc.reduce_scatter,
    "broadcast": lambda x: rc.broadcast(x, 2),
    "barrier": lambda _: rc.barrier(),
}


def least_s(size):
    """Return the processor time that each operation takes at least, of one rank among `size`."""
    wire = cost_per_rank_of_large_jobs.Mirror(size // 2 + 1, size, 8, is_native=True)
    times, x = {name: [] for name in OPERATIONS}, np.ones(size, np.float32)
    with serve_thread(Engine(wire, Settings())):
        # In turn, so that what else runs for a moment does not slow all calls of one operation.
        for _ in range(20):
            for name, do in OPERATIONS.items():
                began = time.thread_time()
                do(x)
                times[name].append(time.thread_time() - began)
    return {name: min(each) for name, each in times.items()}


def test_an_operation_costs_python_as_much_among_thousands_as_among_few():
    few, many = least_s(128), least_s(16384)
    slow = {name: (few[name], many[name]) for name in OPERATIONS if many[name] > 5 * few[name]}
    assert slow == {}  # 10 to 200 times where each operation went through all of its group


class CountingHub(LoopbackHub):
    """Counts the messages of each rank, as the simulation does."""

    def __init__(self, size):
        super().__init__(size, tuple(range(size)), is_native=False)
        self.n_sent = [0] * size

    def transport(self, rank):
        wire = super().transport(rank)
        for name in ("isend", "control"):
            setattr(wire, name, self._counted(getattr(wire, name), rank))
        return wire

    def _counted(self, send, rank):
        def count(*args):
            self.n_sent[rank] += 1
            return send(*args)

        return count


def test_the_simulation_sends_what_a_rank_of_a_job_sends(monkeypatch):
    monkeypatch.setattr(failure_news, "DIRECT", 1)
    monkeypatch.setattr(failure_news, "GRACE_S", 600.0)  # nobody is taken for slow
    monkeypatch.setattr(wire_team, "MOST_MEMBERS", 0)  # as if there were thousands
    size, hub = 8, CountingHub(8)
    entered = threading.Barrier(size)

    def body(rank):
        counts = []
        for do in (
            lambda: meet(engine(), "1"),
            *[lambda: rc.allreduce(np.ones(1, np.float32))] * 2,
            lambda: leave(engine(), "called shutdown()"),
        ):
            before = hub.n_sent[rank]
            entered.wait(DEADLINE_S)
            do()
            counts.append(hub.n_sent[rank] - before)
        return counts

    results = run_ranks(size, body, hub=hub)
    costs = cost_per_rank_of_large_jobs.costs(size, ranks_per_host=1)
    simulated = [costs[what][0] for what in ("init", "unnamed operation", "shutdown")]
    assert [results[size // 2 + 1][i] for i in (0, 2, 3)] == simulated
