"""A process that takes part in the copies of the ranks of its node."""

import time

import numpy as np
from sample_values import whole_numbers

from ringcomm._core import make_team, start_copy, view

LONG = 3_000_017  # bytes, more than shared memory has room for at a time
N = 3  # turns
DEADLINE_S = 20.0


def exchange(rank, memories, *, may_read, before_last=lambda: None, in_last=None):
    """Take part in N allgathers of private arrays, and in broadcasts of rank 0's between them.

    Args:
        before_last: is called before the last one begins.
        in_last: is called with the step of the last one, instead of going on with it.

    Returns what the last one has brought, see bytes_of(), and whether it went through memory that
    the ranks share; or what in_last() returns.
    """
    team = make_team(rank, 0, True, memories, may_read)
    deadline = time.monotonic() + DEADLINE_S
    for turn in range(N):
        is_last = turn == N - 1
        if is_last:
            before_last()
        if turn > 0 and in_last is None:
            whole = whole_numbers(0, LONG, np.uint8, turn=10 + turn)
            copy = whole.copy() if rank == 0 else np.zeros(LONG, np.uint8)
            shown, pulls = (whole, []) if rank == 0 else (whole[:0], [(0, 0, copy)])
            finish(start_copy(team, turn, 8, shown, pulls), deadline)
            np.testing.assert_array_equal(copy, whole)
        shown = whole_numbers(rank, LONG, np.uint8, turn=turn)
        out = [np.zeros(LONG, np.uint8) for _ in memories]
        step = start_copy(team, turn, 7, shown, [(r, 0, each) for r, each in enumerate(out)])
        if is_last and in_last is not None:
            return in_last(step)
        finish(step, deadline)
    shared = view(memories[rank], 0, 4 << 20).tobytes()
    return [[seen(each) for each in out], shown[-1000:].tobytes() in shared]


def finish(step, deadline):
    while not step.is_over and time.monotonic() < deadline:
        step.drive(1e-3)
    assert step.is_over
    assert not step.fault


def bytes_of(n, rank, turn):
    return seen(whole_numbers(rank, n, np.uint8, turn=turn))


def seen(x):
    return [int(x[7]), int(x.sum(dtype=np.int64)), x.tobytes().hex()[-20:]]
