"""Jobs of thousands of ranks: one of them is real, see ci/bench/scale.py."""

import time

import numpy as np
from bench import scale

import ringcomm as rc
from ringcomm.config import Settings
from ringcomm.engine.core.current import serve_thread
from ringcomm.engine.core.engine import Engine

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
    wire = scale.Mirror(size // 2 + 1, size, 8, is_native=True)
    found, x = {}, np.ones(size, np.float32)
    with serve_thread(Engine(wire, Settings())):
        for name, do in OPERATIONS.items():
            times = []
            for _ in range(15):
                began = time.thread_time()
                do(x)
                times.append(time.thread_time() - began)
            found[name] = min(times)
    return found


def test_an_operation_costs_python_as_much_among_thousands_as_among_few():
    few, many = least_s(64), least_s(16384)
    slow = {name: (few[name], many[name]) for name in OPERATIONS if many[name] > 5 * few[name]}
    assert slow == {}  # 10 to 200 times where each operation went through all of its group
