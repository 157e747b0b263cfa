"""Rows that servers read where the worker has them: HashTable.rows() and push(copy=False)."""

import random

import harness
import numpy as np
import pytest
from harness import at_length
from ps_ranks_as_threads import run_workers

import ringcomm as rc
from ringcomm import _core, codec, ps
from ringcomm.ps.job import session
from ringcomm.ps.placement.partitions import HASH_PARTITIONS, Move
from ringcomm.ps.placement.rebalance import move_all

DIM, N = 7, 3000  # the rows of each of three servers are beyond what goes beside a header


def gradient(rank, turn, dtype="f4"):
    """Return whole numbers without a period that divides anything."""
    rng = np.random.default_rng([rank, turn])
    return rng.integers(-9, 10, (N, DIM)).astype(dtype)


def keys_of(rank, turn):
    """Return keys of which some occur twice."""
    return np.random.default_rng([7, rank, turn]).integers(0, 2 * N, N).astype(np.uint64)


def total(n_workers, n_turns, dtype="f4"):
    rows = np.zeros((2 * N, DIM))
    for rank in range(n_workers):
        for turn in range(n_turns):
            np.add.at(rows, keys_of(rank, turn), gradient(rank, turn, dtype))
    return rows


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("n_servers", at_length([1, 2, 3], [1, 3]))
@pytest.mark.parametrize("dtype", ["f4", "f2", "f8"])
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_rows_in_shared_memory_do_what_others_do(mode, dtype, n_servers):
    def body(rank):
        kv = ps.hashtable(
            "emb", DIM, dtype="f8" if dtype == "f8" else "f4", updater=ps.optim.Add(), mode=mode
        )
        rows = kv.rows(N) if dtype != "f2" else rc.zeros((N, DIM), "f2")
        for turn in range(3):
            rows[:] = gradient(rank, turn)
            kv.push(keys_of(rank, turn), rows, copy=False).wait()
        rc.barrier()
        out = kv.rows(2 * N)
        assert kv.pull(np.arange(2 * N), out=out).wait() is out
        return out.copy()

    scale = 2 if mode == "sync" else 1  # a round is a mean
    for rows in run_workers(2, body, n_servers):
        np.testing.assert_array_equal(rows * scale, total(2, 3))


@pytest.mark.parametrize("n_servers", [1, 3])
def test_nothing_is_copied(n_servers, monkeypatch):
    monkeypatch.setattr(harness, "wire", "node")

    def body(rank):
        kv = ps.hashtable("emb", DIM, updater=ps.optim.Add())
        rows, out = kv.rows(N), kv.rows(N)
        rows[:] = gradient(rank, 0)
        monkeypatch.setattr(_core, "stage_rows", None)
        monkeypatch.setattr(session(), "memory", lambda _nbytes: pytest.fail("new memory"))
        monkeypatch.setattr(
            session(), "memory_for", lambda _server, nbytes: np.empty(nbytes, np.uint8)
        )
        keys = np.arange(N, dtype=np.uint64)
        assert kv.push(keys, rows, copy=False).wait().applied
        assert kv.pull(keys, out=out).wait() is out
        return out.copy()

    np.testing.assert_array_equal(run_workers(1, body, n_servers)[0], gradient(0, 0))


@pytest.mark.usefixtures("wire")
def test_what_cannot_be_shared_is_copied():
    def body(_rank):
        plain = ps.hashtable("plain", DIM, updater=ps.optim.Add())
        narrow = ps.hashtable("narrow", DIM, updater=ps.optim.Add(), compression="fp16")
        coded = ps.hashtable(
            "coded", DIM, updater=ps.optim.Add(), compression=codec.Int8(block=DIM)
        )
        keys = np.arange(N, dtype=np.uint64)
        for kv, rows in (
            (plain, np.empty((N, DIM), np.float32)),  # ordinary memory
            (plain, kv_rows := plain.rows(2 * N)[::2]),  # with gaps
            (narrow, narrow.rows(N)),
            (coded, coded.rows(N)),
        ):
            rows[:] = gradient(0, 0)
            kv.push(keys, rows, copy=False).wait()
        assert not kv_rows.flags.c_contiguous
        return [kv.pull(keys).wait() for kv in (plain, narrow, coded)]

    plain, narrow, coded = run_workers(1, body, 2)[0]
    np.testing.assert_array_equal(plain, 2 * gradient(0, 0))
    np.testing.assert_array_equal(narrow, gradient(0, 0))
    np.testing.assert_allclose(coded, gradient(0, 0), atol=0.1)


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("n_servers", [1, 3])
def test_assigned_and_held_rows_may_be_shared(n_servers):
    def body(rank):
        kv = ps.hashtable("emb", DIM, updater=ps.optim.Add(), mode="sync")
        keys, rows = np.arange(N, dtype=np.uint64)[::-1].copy(), kv.rows(N)
        rows[:] = gradient(0, 0)
        if rank == 0:
            kv.push(keys, rows, assign=True, copy=False).wait()
        rc.barrier()
        rows[:] = gradient(rank, 1)
        held = kv.push(keys, rows, hold=True, copy=False).wait()
        rows[:] = 99  # the mean has been made
        assert kv.release(2.0).wait().applied
        return held.squares, kv.pull(keys).wait()

    mean = (gradient(0, 1).astype("f8") + gradient(1, 1)) / 2
    for squares, rows in run_workers(2, body, n_servers):
        np.testing.assert_allclose(squares, np.square(mean).sum())
        np.testing.assert_array_equal(rows, gradient(0, 0) + 2 * mean)


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_shared_rows_are_pushed_once_while_they_move(mode):
    n_turns = at_length(30, 10)

    def body(rank):
        kv = ps.hashtable("emb", DIM, updater=ps.optim.Add(), mode=mode)
        rows = kv.rows(N)
        for turn in range(n_turns):
            rows[:] = gradient(rank, turn)
            done = kv.push(keys_of(rank, turn), rows, copy=False)
            if rank == 0:
                parts = random.Random(turn).sample(range(HASH_PARTITIONS), HASH_PARTITIONS // 3)
                move_all(session(), [Move((kv.number, part), -1, turn % 3) for part in parts])
            done.wait()
        rc.barrier()
        return kv.pull(np.arange(2 * N)).wait()

    scale = 2 if mode == "sync" else 1
    for rows in run_workers(2, body, 3):
        np.testing.assert_array_equal(rows * scale, total(2, n_turns))


def test_bad_rows_are_refused_and_nothing_is_sent(wire):
    del wire

    def body(_rank):
        kv = ps.hashtable("emb", DIM, updater=ps.optim.Add())
        rows = kv.rows(N)
        rows[:] = 1
        rows[N - 1, DIM - 1] = np.nan
        with pytest.raises(ValueError, match=r"push\[emb\]: NaN or inf among the 3000 rows"):
            kv.push(np.arange(N), rows, copy=False)
        with pytest.raises(ValueError, match=r"rows\[emb\]: n is -1; it must be an integer, 0"):
            kv.rows(-1)
        for n in (1.5, "3", True, 1 << 62):
            with pytest.raises(ValueError, match=f"n is {n!r}; it must be"):
                kv.rows(n)
        with pytest.raises(TypeError, match="copy is 'no'; it must be True or False"):
            kv.push(np.arange(N), rows, copy="no")
        assert kv.push(np.arange(0), kv.rows(0), copy=False).wait().applied
        return len(kv)

    assert run_workers(1, body, 2) == [0]
