"""Pushes to a hash table while this process may take no more memory; a program of its own.

    python ps_rows_without_memory.py new|counts|snapshot

It prints what tests/unit/test_ps_shard.py checks.
"""

import resource
import sys
from pathlib import Path

import numpy as np

from ringcomm import _core
from ringcomm.ps import optim
from ringcomm.ps.row_policies import Admit
from ringcomm.ps.server.rows.hash_shard import row_spec

DIM, N_PARTITIONS = 1000, 8
SGD = optim.SGD(1.0)
SNAPSHOT = 7
ROOM = 24 << 20  # bytes that may still be taken


def push(shard, keys, stamp):
    grads = np.ones((1, DIM), np.float32)
    places = np.zeros(len(keys), np.uint32)  # one gradient for all: needs no memory here
    shard.push([(keys, grads, 1.0, places)], SGD.code, SGD.hyper, 1.0, 0.0, stamp, stamp)


def state(shard, keys, *, is_held):
    """Return all that a push changes."""
    parts = [shard.find(k) for k in range(N_PARTITIONS)]
    values, held = np.empty((2, len(keys), DIM), np.float32)
    shard.gather(keys, values, 0)
    if is_held:
        shard.gather(keys, held, 0, held=SNAPSHOT)
    return (
        len(shard),
        values.tobytes(),
        is_held and held.tobytes(),
        [None if part is None else (len(part), part.stamp) for part in parts],
        [None if part is None else part.candidates()[1].tobytes() for part in parts],
    )


def limit(more):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard if more is None else used + more, hard))


def main(case):
    admit = Admit(min_count=2) if case == "counts" else None
    spec = row_spec(DIM, SGD, admit=admit)
    shard = _core.Shard(spec, np.zeros(N_PARTITIONS, np.uint32), 0)
    few, many = np.arange(200, dtype=np.uint64), np.arange(20_000, dtype=np.uint64)
    push(shard, few, 1)
    push(shard, few, 2)
    if case == "counts":  # the push that fails would admit them
        push(shard, many[200:], 3)
    if case == "snapshot":
        push(shard, many, 3)
        shard.hold(SNAPSHOT)
    is_held = case == "snapshot"
    before, nbytes = state(shard, few, is_held=is_held), shard.nbytes
    limit(ROOM)
    try:
        push(shard, many, 4)
    except MemoryError as error:
        print("refused:", error)
    limit(None)
    print("same state:", state(shard, few, is_held=is_held) == before)
    print("memory was given back:", shard.nbytes < nbytes + (ROOM >> 2))
    push(shard, many, 5)
    print("rows in the end:", len(shard))


main(sys.argv[1])
