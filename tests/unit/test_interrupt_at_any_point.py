"""An interrupt anywhere in a collective: it has not begun, or every rank hears of it at once."""

import dis
import functools
import gc
import inspect
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from harness import is_at_length, run_ranks
from loopback import LoopbackHub

import ringcomm as rc
from ringcomm.config import Settings
from ringcomm.engine.api.init_rank_size import engine

PACKAGE = str(Path(rc.__file__).parent)
N_IN_THE_GATE = 12  # points of each operation, from its first to its last
# Where Python looks for signals: behind calls of C functions, where a loop goes on, and on entry.
_LOOKS = {"CALL", "CALL_FUNCTION_EX", "JUMP_BACKWARD", "RESUME"}


@functools.cache
def names_of(code):
    return [dis.opname[op] for op in code.co_code[::2]]


class Interrupt:
    """Raises KeyboardInterrupt at the n-th point where Python might run a handler of signals."""

    def __init__(self, n):
        self.n = n
        self.n_seen = 0
        self._last_frame, self._last_name = None, ""

    def __enter__(self):
        sys.settrace(self._trace)

    def __exit__(self, *_):
        sys.settrace(None)

    def _trace(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "call":
            self._last_frame, self._last_name = frame, "RESUME"
        elif event == "opcode":
            before, name = self._last_frame, self._last_name
            self._last_frame = frame
            self._last_name = names_of(frame.f_code)[frame.f_lasti // 2]
            is_from_c = before is frame or before.f_code.co_flags & inspect.CO_COROUTINE
            if is_from_c and name in _LOOKS | {"RETURN_VALUE", "YIELD_VALUE"}:
                self.n_seen += 1
                if self.n_seen == self.n:
                    raise KeyboardInterrupt
        return self._trace


def quick(x):
    rc.allreduce_(x)


def barrier(_x):
    rc.barrier()


def named(x):
    rc.allreduce_async_(x, name="w").wait()


def general(x):
    rc.allreduce_(x, deterministic=True)


OPERATIONS = [quick, barrier, named, general]


def interrupted(operation, n, *, shares_memory):
    """Let rank 0 be interrupted at its n-th point; return how many it has come to."""

    def body(rank):
        x = np.ones(1000, np.float32)
        for _ in range(3):
            operation(x)
        rc.barrier()
        x[:] = 1
        entered = engine().groups.n_entered_by_all
        points = Interrupt(n if rank == 0 else math.inf)
        try:
            try:
                with points:
                    operation(x)
                is_over = True
            except KeyboardInterrupt:
                is_over = (
                    not engine().state.is_broken and engine().groups.n_entered_by_all == entered
                )
                if is_over:
                    operation(x)  # it had not begun
            rc.barrier()
        except rc.RingcommError as error:
            return points.n_seen, error, engine().state.is_broken
        if is_over and operation is not barrier:
            assert (x == 2).all()
        return points.n_seen, None, engine().state.is_broken

    hub = LoopbackHub(2, (0, 0) if shares_memory else None)
    mine, others = run_ranks(2, body, hub=hub, settings=Settings(timeout_s=120))
    n_seen, error, is_broken = mine
    assert is_broken == (error is not None)
    if is_broken:
        assert isinstance(others[1], rc.PeerFailedError), others
        assert "rank 0 broke off" in str(others[1])
        assert "KeyboardInterrupt" in str(others[1])
    else:
        assert others[1] is None, others
    return n_seen


@pytest.fixture
def collection():
    """Let Python collect coroutines at the end only.

    It warns of those that were interrupted before they began, and cannot where it happens to make a
    named tuple just then: there is no __import__.
    """
    gc.disable()
    yield
    gc.collect()
    gc.enable()


@pytest.mark.usefixtures("collection")
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("shares_memory", [True, False])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_interrupt_anywhere_leaves_nobody_waiting(operation, shares_memory):
    n_points = interrupted(operation, math.inf, shares_memory=shares_memory)
    assert n_points > N_IN_THE_GATE / 2
    n = n_points if is_at_length() else N_IN_THE_GATE
    for at in sorted({round(each) for each in np.linspace(1, n_points, n)}):
        interrupted(operation, at, shares_memory=shares_memory)
