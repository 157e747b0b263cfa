"""Segments of a table are as tables of their own: without a gradient they stay as they are."""

import random

import numpy as np
import pytest
from ps_ranks_as_threads import run_workers

import ringcomm as rc
from ringcomm import ps
from ringcomm.codec import Int8, TopK
from ringcomm.ps.job import session
from ringcomm.ps.placement.partitions import Move
from ringcomm.ps.placement.rebalance import move_all
from ringcomm.ps.segments import Segments, ids_in, merged, packed_mask

SIZES = (7, 30, 1, 12, 50)
STARTS = (0, 7, 37, 38, 50)
COUNT = sum(SIZES)
UPDATERS = {
    "SGD": ps.optim.SGD(0.1, momentum=0.9, weight_decay=0.1, dampening=0.2),
    "Adam": ps.optim.Adam(0.1, weight_decay=0.1),
    "NAdam": ps.optim.NAdam(0.1),
    "Adagrad": ps.optim.Adagrad(0.1, lr_decay=0.1),
    "RowwiseAdagrad": ps.optim.RowwiseAdagrad(0.1),
}


def gradients(rank, step):
    """Return a gradient, and which segments have none on this worker; of some nobody has any."""
    absent = [k for k in range(5) if random.Random(step * 10 + k).random() < 0.4]
    absent += [k for k in range(5) if random.Random(step * 100 + rank * 10 + k).random() < 0.2]
    x = np.random.default_rng(step * 7 + rank).standard_normal(COUNT).astype(np.float32)
    for k in set(absent):
        x[STARTS[k] : STARTS[k] + SIZES[k]] = 0
    return x, sorted(set(absent))


def apart(rank, updater, steps, mode):
    """Return what tables of their own become."""
    tables = [
        ps.table(f"own{k}", n, updater=updater, mode=mode, init=1.0) for k, n in enumerate(SIZES)
    ]
    for step in steps:
        x, absent = gradients(rank, step)
        for k, t in enumerate(tables):
            if k not in absent:
                t.push(x[STARTS[k] : STARTS[k] + SIZES[k]])
            elif mode == "sync":
                t.push(None)
    return np.concatenate([t.pull().wait() for t in tables])


def together(updater, mode, block_nbytes):
    return ps.table(
        "w", COUNT, updater=updater, mode=mode, init=1.0, block_nbytes=block_nbytes,
        segments=STARTS,
    )  # fmt: skip


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("name", UPDATERS)
@pytest.mark.parametrize("block_nbytes", [4000, 92])  # one block, or cut within segments
def test_segments_are_as_tables_of_their_own(name, block_nbytes):
    def body(rank):
        t = together(UPDATERS[name], "sync", block_nbytes)
        for step in range(20):
            x, absent = gradients(rank, step)
            t.push(x, absent=absent)
            if rank == 0:
                move_all(session(), [Move((t.number, step % t.n_partitions), -1, step // 5 % 2)])
        values = t.pull().wait()
        rc.barrier()
        return values, apart(rank, UPDATERS[name], range(20), "sync")

    for values, expected in run_workers(2, body, 2):
        np.testing.assert_array_equal(values, expected)


def test_segments_of_async_tables_and_of_means_that_are_held():
    adam = UPDATERS["Adam"]

    def body(rank):
        one = together(adam, "async", 92)
        for step in range(10):
            x, absent = gradients(0, step)
            one.push(x, absent=absent)
        alone = one.pull().wait(), apart(0, adam, range(10), "async")
        held = ps.table("held", COUNT, updater=adam, mode="sync", init=1.0, segments=STARTS)
        for step in range(10):
            x, absent = gradients(0, step)
            held.push(x, absent=absent, hold=True).wait()
            move_all(session(), [Move((held.number, 0), -1, step % 2)]).wait()
            held.release(1.0)
        return *alone, held.pull().wait()

    [(values, expected, held)] = run_workers(1, body, 2)
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(held, expected)


@pytest.mark.parametrize("name", UPDATERS)
def test_a_push_to_a_part_is_a_step_of_the_segments_that_it_touches(name):
    """Each as a table of its own would be pushed to, with the same part of it."""

    def body(_):
        t = together(UPDATERS[name], "async", 4000)
        own = [
            ps.table(f"own{k}", n, updater=UPDATERS[name], init=1.0) for k, n in enumerate(SIZES)
        ]
        rng = np.random.default_rng(5)
        for step in range(40):
            start, stop = (0, COUNT) if step % 4 == 0 else sorted(rng.integers(0, COUNT, 2))
            x = rng.standard_normal(stop - start).astype(np.float32)
            t.push(x, where=slice(start, stop))
            for k, alone in enumerate(own):
                first, last = max(start, STARTS[k]), min(stop, STARTS[k] + SIZES[k])
                if first < last:
                    where = slice(first - STARTS[k], last - STARTS[k])
                    alone.push(x[first - start : last - start], where=where)
        return t.pull().wait(), np.concatenate([each.pull().wait() for each in own])

    [(values, expected)] = run_workers(1, body)
    np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("c", [TopK(0.2), Int8(32)], ids=str)
@pytest.mark.parametrize("block_nbytes", [4000, 92])  # one block, or cut within segments
def test_what_is_kept_of_a_segment_stays_while_it_has_no_gradient(c, mode, block_nbytes):
    """Applied plus kept is all that was given, of each worker, also while learning rates change."""

    def body(rank):
        sgd = ps.optim.SGD(1.0)
        t = ps.table(
            "w", COUNT, updater=sgd, mode=mode, segments=STARTS, block_nbytes=block_nbytes,
            compression=c, error_feedback=True,
        )  # fmt: skip
        given = np.zeros(COUNT)
        for step, lr in enumerate([1.0, 1.0, 0.5, 2.0, 2.0, 1.0]):
            x, absent = gradients(rank, step)
            t.updater = sgd.with_(lr=lr)
            before = t.residual * np.float32(lr)
            t.push(x, absent=absent).wait()
            kept = t.residual * np.float32(lr)
            for k in absent:
                own = slice(STARTS[k], STARTS[k] + SIZES[k])
                np.testing.assert_allclose(kept[own], before[own], rtol=1e-5)
            given += lr * x
        rc.barrier()
        return t.pull().wait(), kept, given

    results = run_workers(2, body, 2)
    share = 1 if mode == "async" else 2
    applied = -results[0][0].astype(np.float64) * share
    total = sum(given for _, _, given in results)
    np.testing.assert_allclose(applied + sum(kept for _, kept, _ in results), total, atol=1e-4)


@pytest.mark.parametrize("name", UPDATERS)
def test_a_checkpoint_has_the_steps_of_each_segment(name, tmp_path):
    def first(rank):
        t = together(UPDATERS[name], "sync", 92)
        for step in range(10):
            x, absent = gradients(0, step)
            t.push(x, absent=absent)
        t.pull().wait()
        ps.save(tmp_path).wait()

    def second(rank):
        t = together(UPDATERS[name], "sync", 140)
        ps.restore(tmp_path)
        for step in range(10, 20):
            x, absent = gradients(0, step)
            t.push(x, absent=absent)
        return t.pull().wait(), apart(0, UPDATERS[name], range(20), "sync")

    run_workers(1, first, 2)
    [(values, expected)] = run_workers(1, second, 3)
    np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ps.table("w", 10, segments=(1, 5)), "must begin with 0, ascend"),
        (lambda: ps.table("w", 10, segments=(0, 6, 5)), "must begin with 0, ascend"),
        (lambda: ps.table("w", 10, segments=(0, 11)), "lie within 10 elements"),
        (lambda: ps.table("w", 9000, segments=range(9000)), "9000 segments; 4096 are the most"),
        (lambda: ps.table("w", 4).push(np.ones(4, np.float32), absent=[0]), "of 0 segments"),
    ],
)
def test_a_mistake_is_told(call, message):
    def body(rank):
        with pytest.raises(ValueError, match=message):
            call()
        return True

    assert run_workers(1, body) == [True]


# --- decisions ----------------------------------------------------------------------------------
@pytest.mark.parametrize("cut", [1, 3, 7, 23, 100])
def test_every_segment_is_in_the_blocks_that_hold_it(cut):
    for start in range(0, COUNT, cut):
        stop = min(COUNT, start + cut)
        expected = [
            k for k, n in enumerate(SIZES) if max(start, STARTS[k]) < min(stop, STARTS[k] + n)
        ]
        assert list(ids_in(STARTS, start, stop)) == expected


def test_neighbours_are_updated_as_one_while_they_have_made_the_same_steps():
    segments = Segments(STARTS, 0, COUNT, [])
    [run] = segments.runs(segments.present(b""))
    assert run.elements == slice(0, COUNT)
    for run in segments.runs(segments.present(packed_mask(5, [1, 4]))):
        segments.note(run, [])
    assert segments.steps.tolist() == [1, 0, 1, 1, 0]
    runs = [run.segments for run in segments.runs(segments.present(b""))]
    assert runs == [slice(0, 1), slice(1, 2), slice(2, 4), slice(4, 5)]


def test_a_segment_that_was_cut_has_its_most_steps():
    pieces = [Segments(STARTS, 0, 20, []), Segments(STARTS, 20, COUNT, [])]
    pieces[0].steps[:] = [3, 4]
    pieces[1].steps[:] = [5, 6, 7, 8]
    whole = Segments(STARTS, 0, COUNT, [])
    whole.load(merged([each.arrays() for each in pieces]), 0, [])
    assert whole.steps.tolist() == [3, 5, 6, 7, 8]
