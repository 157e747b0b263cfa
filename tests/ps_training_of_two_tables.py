"""Steps of workers with a dense table and a hash table, whose values are known after any number."""

import numpy as np

import ringcomm as rc
from ringcomm import ps

KEYS = np.arange(60, dtype=np.uint64)
N = 600


def train(table, rows, steps):
    """Push what depends on the step alone."""
    for step in steps:
        pushed = table.push(np.full(table.shape, 1.0 + step))
        rows.push(KEYS[step % 9 :], np.full((60 - step % 9, 2), 1.0 + step)).wait()
        pushed.wait()
        table.pull().wait()
        rows.pull(KEYS).wait()
        ps.complete_step()


def require_exact(table, rows, n_steps, mode):
    """Fail unless each push of both workers counts once."""
    rc.barrier()
    n = 1 if str(mode) in ("sync", "FirstOf(2)") else 2
    expected = [n * sum(1.0 + s for s in range(n_steps) if s % 9 <= key) for key in range(60)]
    np.testing.assert_array_equal(table.pull().wait(), n * sum(1.0 + s for s in range(n_steps)))
    np.testing.assert_array_equal(rows.pull(KEYS).wait(), np.repeat(expected, 2).reshape(60, 2))
    rc.barrier()
