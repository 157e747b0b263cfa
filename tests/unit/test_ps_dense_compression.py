"""Dense tables whose pushes and pulls are compressed: nothing lost, and the same bits anywhere."""

import itertools
import threading
from functools import partial

import harness
import numpy as np
import pytest
from ps_ranks_as_threads import run_workers

import ringcomm as rc
from ringcomm import codec, ps
from ringcomm.codec import BF16, FP16, Identity, Int8, TopK
from ringcomm.ps.client.dense.optimizer_state import pull_state
from ringcomm.ps.client.request import Request
from ringcomm.ps.job import session
from ringcomm.ps.placement.partitions import Move, cuts
from ringcomm.ps.placement.rebalance import move_all
from ringcomm.ps.protocol.frame_meta import ENCODED, PushMeta
from ringcomm.ps.protocol.frames import FrameHeader, FrameKind
from ringcomm.ps.server.dense import partition as dense
from ringcomm.ps.table_spec import Spec
from ringcomm.ps.update_modes import Mode

pytestmark = pytest.mark.one_wire

N, BLOCK = 1001, 900  # elements; bytes of a block: slices of 200 float32
LOSSY = [FP16(), BF16(), Int8(block=64), TopK(0.05)]
ALL = [Identity(), *LOSSY]


def on_wire(kind, monkeypatch):
    monkeypatch.setattr(harness, "wire", kind)


def table(name="w", updater=None, **options):
    updater = ps.optim.Add() if updater is None else updater
    return ps.table(name, N, updater=updater, block_nbytes=BLOCK, **options)


def gradients(n_steps, n_workers=1, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n_steps, n_workers, N)).astype(np.float32)


def whole(n_steps, n_workers=1):
    """Gradients of small integers: however often they are added, float32 adds them exactly."""
    rng = np.random.default_rng(1)
    return rng.integers(-8, 9, (n_steps, n_workers, N)).astype(np.float32)


def by_blocks(c, x):
    """What a codec that rounds nothing at random makes of a table's blocks."""
    out, bounds = np.empty_like(x), cuts(N, BLOCK // 4)
    for first, last in itertools.pairwise(bounds):
        codec.decode(c.encode(x[first:last]), out[first:last])
    return out


# --- pushes -------------------------------------------------------------------------------------
@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("c", [Identity(), FP16(), BF16(), TopK(0.05)], ids=str)
def test_servers_apply_what_the_codec_makes_of_each_block(c, mode):
    x = gradients(1)[0, 0]

    def body(_):
        t = table(compression=c, mode=mode)
        t.push(x)
        return t.pull().wait()

    assert np.array_equal(run_workers(1, body, 2)[0], by_blocks(c, x))


@pytest.mark.usefixtures("wire")
def test_int8_is_right_on_average_and_each_push_rounds_anew():
    x, n = gradients(1)[0, 0], harness.at_length(600, 200)

    def body(_):
        t = table(compression="int8")
        for _ in range(n):
            t.push(x)
        return t.pull().wait()

    step = np.abs(x).max() / 127
    error = run_workers(1, body, 2)[0] / n - x
    assert 0 < np.abs(error).max() < 5 * step / 2 / n**0.5


def test_workers_do_not_round_alike():
    x = gradients(1)[0, 0]

    def body(rank):
        t, values = table(compression="int8"), []
        for turn in range(2):
            if turn == rank:
                t.push(x).wait()
            rc.barrier()
            values.append(t.pull().wait().copy())
            rc.barrier()
        return values

    (first, both), _ = run_workers(2, body)
    assert np.abs(both - 2 * first).max() > 0


@pytest.mark.usefixtures("wire")
def test_a_part_of_a_table_is_pushed_in_16_bits():
    x = gradients(1)[0, 0][:420]

    def body(_):
        t = table(compression="fp16", mode="sync")
        t.push(x, where=slice(100, 520))
        return t.pull().wait()

    expected = np.zeros(N, np.float32)
    expected[100:520] = x.astype(np.float16)
    assert np.array_equal(run_workers(1, body, 2)[0], expected)


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("c", ALL, ids=str)
def test_empty_and_tiny_tables(c, dtype):
    def body(_):
        sums = []
        for n in (0, 1, 2):
            options = {} if isinstance(c, TopK) else {"pull_compression": c}
            t = ps.table(f"w{n}", n, dtype, updater=ps.optim.Add(), compression=c, **options)
            t.push(np.ones(n, dtype)).wait()
            t.push(np.ones(n, dtype)).wait()
            sums.append((t.pull().wait() + t.residual).sum())
        return sums

    np.testing.assert_allclose(run_workers(1, body)[0], [0, 2, 4], rtol=0.02)


def test_fewer_bytes_travel(monkeypatch):
    on_wire("messages", monkeypatch)
    n = 200_000

    def body(_):
        told = []
        for k, c in enumerate([None, FP16(), Int8(), TopK(0.01)]):
            t = ps.table(f"w{k}", n, compression=c)
            before = ps.stats()[0]["nbytes_in"]
            t.push(np.ones(n, np.float32)).wait()
            told.append(ps.stats()[0]["nbytes_in"] - before)
        return told

    plain, fp16, int8, topk = run_workers(1, body)[0]
    assert plain >= 4 * n
    assert fp16 < plain * 0.501
    assert int8 < plain * 0.26
    assert topk < plain * 0.021


def test_what_waits_for_its_round_stays_compressed():
    spec = Spec("w", "dense", "float32", (N,), ps.optim.SGD(1.0).to_json(), Mode("sync"), N, 0.0, 1)
    part = dense.DensePartition(spec, 0, N, aligned)
    buffer = TopK(0.01).encode(np.ones(N, np.float32))
    meta = PushMeta(1.0, 0, N, ENCODED, 0, ps.optim.SGD(1.0).hyper)
    header = FrameHeader(FrameKind.PUSH)
    gradients = [part.decoded(header, meta, buffer, None) for _ in range(2)]
    assert gradients[0].values.nbytes == buffer.nbytes < N
    assert part.end(1, gradients, None, drops=False) == (b"", b"")
    assert part.version == 1
    assert part.values.sum() == -11


def aligned(nbytes):
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda b: b[:-1],
        lambda b: np.concatenate([b, b[-1:]]),
        lambda b: np.where(np.arange(b.size) == 2, 0, b).astype(np.uint8),
        lambda b: np.where(np.arange(b.size) > b.size - 5, 255, b).astype(np.uint8),
        lambda _: TopK(0.01).encode(np.ones(N - 1, np.float32)),
        lambda _: TopK(0.01).encode(np.ones(N, np.float64)),
    ],
    ids=["cut", "longer", "no mark", "index", "count", "dtype"],
)
def test_a_damaged_push_is_refused_and_the_server_lives_on(spoil, monkeypatch):
    on_wire("messages", monkeypatch)
    good = TopK(0.01).encode(np.ones(N, np.float32))

    def body(_):
        t = ps.table("w", N, updater=ps.optim.Add(), mode="sync", compression=TopK(0.01))
        meta = PushMeta(1.0, 0, N, ENCODED, 0, t.updater.hyper).packed()
        request = Request(FrameKind.PUSH, (t.number, 0), meta=meta, body=spoil(good))
        future = t.client.call("push[w]", [request], lambda: None)
        with pytest.raises(rc.RingcommError, match="decode: "):
            future.wait()
        t.push(np.ones(N, np.float32))
        return t.pull().wait().sum()

    assert run_workers(1, body) == [11]


# --- error feedback -----------------------------------------------------------------------------
@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("n_servers", [1, 3])
@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("c", LOSSY, ids=str)
def test_what_was_applied_plus_residuals_is_the_sum_of_all_gradients(c, mode, n_servers):
    steps, n = whole(12, 2), 2

    def body(rank):
        t = table(compression=c, mode=mode, error_feedback=True)
        for row in steps[:, rank]:
            t.push(row)
        t.pull().wait()
        rc.barrier()
        return t.pull().wait(), t.residual

    results = run_workers(n, body, n_servers)
    share = 1 if mode == "async" else n
    total = results[0][0].astype(np.float64) * share + sum(kept for _, kept in results)
    bound = 0 if isinstance(c, TopK) else 1e-4  # what TopK drops, it drops whole
    assert np.abs(total - steps.sum(axis=(0, 1))).max() <= bound
    if not isinstance(c, FP16 | BF16):  # which have all bits of small integers
        assert all(np.abs(kept).max() > 0 for _, kept in results)


RATES = [1.0, 0.5, 0.5, 0.125, 0.0, 0.125, 2.0, 0.25, 0.25]


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_nothing_is_lost_when_the_learning_rate_changes(mode):
    """Of lr * gradient: what was dropped at 1.0 and is sent at 0.125 is sent eightfold."""
    steps, n = whole(len(RATES), 2), 2

    def body(rank):
        sgd = ps.optim.SGD(1.0)
        t = table(updater=sgd, compression=TopK(0.05), mode=mode)
        for row, lr in zip(steps[:, rank], RATES, strict=True):
            t.updater = sgd.with_(lr=lr)
            t.push(row)
        t.pull().wait()
        rc.barrier()
        return t.pull().wait(), t.residual * np.float32(RATES[-1])

    results = run_workers(n, body, 2)
    share = 1 if mode == "async" else n
    got = -results[0][0] * share + sum(kept for _, kept in results)
    # At lr 0 nothing is kept, as nothing has an effect.
    assert np.array_equal(got, np.tensordot(RATES, steps, 1).sum(axis=0))


def test_of_other_updaters_the_sum_of_gradients_is_kept():
    steps = whole(6)

    def body(_):
        adam = ps.optim.Adam(1.0)
        t = table(updater=adam, compression=TopK(0.05))
        decoded, mine = 0, codec.Residual(TopK(0.05))
        bounds = cuts(N, BLOCK // 4)
        for k, row in enumerate(steps[:, 0]):
            t.updater = adam.with_(lr=1.0 / (k + 1))
            t.push(row).wait()
            for part, first in enumerate(bounds[:-1]):
                buffer = mine.encode(str(part), row[first : bounds[part + 1]])
                decoded += codec.decoded(buffer).sum()
        return decoded + t.residual.sum()

    assert run_workers(1, body) == [steps.sum()]


@pytest.mark.usefixtures("wire")
def test_late_pushes_go_with_the_next():
    steps, first_done = whole(4, 2), threading.Event()

    def body(rank):
        t = table(compression=TopK(0.05), mode=ps.FirstOf(1))
        applied = []
        if rank == 1:
            assert first_done.wait(60)
        for row in steps[:, rank]:
            applied.append(t.push(row).wait().applied)
        first_done.set()
        return applied, t.pull().wait(), t.residual

    (first, _, kept0), (second, values, kept1) = run_workers(2, body, 2)
    assert first == [True] * 4
    assert second == [False] * 4
    assert np.array_equal(values + kept0, steps[:, 0].sum(axis=0))
    assert np.array_equal(kept1, steps[:, 1].sum(axis=0))


@pytest.mark.usefixtures("wire")
def test_a_step_that_is_skipped_goes_with_the_next_and_scales_are_undone():
    steps, scales = whole(3, 2), [64.0, 16.0, 16.0]
    poison = steps[1, 1].copy()
    poison[7] = np.inf

    def body(rank):
        t = table(updater=ps.optim.SGD(1.0), compression=TopK(0.05), mode="sync")
        mine = [poison if (k, rank) == (1, 1) else row for k, row in enumerate(steps[:, rank])]
        for row, scale in zip(mine, scales, strict=True):
            told = t.push(row * np.float32(scale), hold=True, scale=scale).wait()
            t.release(1 / scale if told.is_finite else None).wait()
        return t.pull().wait(), t.residual

    results = run_workers(2, body, 2)
    got = -2 * results[0][0] + results[0][1] + results[1][1]
    expected = steps.sum(axis=(0, 1)) - steps[1, 1]  # the worker that had inf keeps nothing of it
    blocks = cuts(N, BLOCK // 4)
    in_other_blocks = slice(blocks[1], None)  # there its gradient was finite
    expected[in_other_blocks] += steps[1, 1][in_other_blocks]
    assert np.array_equal(got, expected)


@pytest.mark.usefixtures("wire")
def test_a_batch_of_no_samples_leaves_the_residual_alone():
    steps = whole(3)

    def body(_):
        t = table(compression=TopK(0.05), mode="sync")
        t.push(steps[0, 0], weight=2)
        before = t.residual
        for nothing in (np.full(N, np.nan, np.float32), steps[1, 0]):
            assert t.push(nothing, weight=0).wait().why == "empty"
        assert t.push(None).wait().why == "empty"
        assert np.array_equal(t.residual, before)
        return t.pull().wait() + t.residual

    assert np.array_equal(run_workers(1, body)[0], steps[0, 0])


def test_values_that_are_assigned_go_as_they_are_and_drop_what_was_kept():
    x = gradients(1)[0, 0]

    def body(_):
        t = table(compression=TopK(0.05))
        t.push(x)
        assert t.residual.any()
        t.push(x, assign=True)
        return t.pull().wait(), t.residual

    values, kept = run_workers(1, body)[0]
    assert np.array_equal(values, x)
    assert not kept.any()


@pytest.mark.long
def test_a_fiftieth_of_the_gradient_finds_the_optimum():
    optimum = gradients(1)[0, 0]

    def body(rank):
        sgd = ps.optim.SGD(0.04)
        t = table(updater=sgd, compression=TopK(0.02), mode="sync")
        for step in range(500):
            t.updater = sgd.with_(lr=0.04 if step < 300 else 0.01)
            t.push(t.pull().wait() - optimum)
        return t.pull().wait()

    for values in run_workers(1, body):
        assert np.abs(values - optimum).max() < 0.02


# --- bits ---------------------------------------------------------------------------------------
def train(c, order):
    """Six rounds; `order` says who pushes first, and each waits for the one before it."""
    steps, turns = gradients(6, 3), [threading.Event() for _ in range(18)]

    def body(rank):
        adam = ps.optim.Adam(0.01)
        options = {} if isinstance(c, TopK) else {"pull_compression": c}
        t = table(updater=adam, mode="sync", compression=c, init=1.0, **options)
        for step in range(6):
            place = step * 3 + order.index(rank)
            assert place == 0 or turns[place - 1].wait(60)
            t.push(steps[step, rank], weight=rank + 1)
            turns[place].set()
            values = t.pull().wait()
        return values.tobytes(), t.residual.tobytes()

    return body


@pytest.mark.parametrize("c", LOSSY, ids=str)
def test_bits_are_the_same_for_any_number_of_servers_order_and_wire(c, monkeypatch):
    found = set()
    for wire, n_servers, order in [
        ("messages", 1, (0, 1, 2)),
        ("messages", 3, (2, 1, 0)),
        ("node", 1, (1, 2, 0)),
        ("node", 2, (0, 1, 2)),
    ]:
        on_wire(wire, monkeypatch)
        found.add(tuple(run_workers(3, train(c, order), n_servers)))
    assert len(found) == 1
    values = {each for each, _ in found.pop()}
    assert len(values) == 1  # and all workers have the same


@pytest.mark.long
def test_rounds_that_wait_go_along_when_their_partition_moves():
    steps, has_moved = whole(1, 2), threading.Event()

    def body(rank):
        t = table(compression=TopK(0.05), mode="sync")
        future = t.push(steps[0, rank]) if rank == 0 else None
        if rank == 0:
            for dest in range(2):
                for part in range(t.n_partitions):
                    move_all(session(), [Move((t.number, part), -1, dest)]).wait()
            has_moved.set()
        else:
            assert has_moved.wait(60)
            future = t.push(steps[0, 1])
        assert future.wait().applied
        return t.pull().wait() * 2, t.residual

    (values, kept0), (_, kept1) = run_workers(2, body, 2)
    assert np.array_equal(values + kept0 + kept1, steps.sum(axis=(0, 1)))


# --- pulls --------------------------------------------------------------------------------------
@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("c", ["fp16", "bf16", "int8"])
def test_pulls_are_compressed_and_the_servers_values_stay_exact(c):
    steps = whole(5)[:, 0] / np.float32(3)

    def body(rank):
        t = table(mode="sync", pull_compression=c)
        for row in steps:
            t.push(row)
            seen = t.pull().wait()
        part = t.pull(where=slice(100, 520)).wait()
        out = np.empty(N, np.float32)
        assert t.pull(out=out).wait() is out
        assert np.array_equal(out, seen)
        assert np.array_equal(out[100:520], part)
        rc.barrier()
        exact = pull_state(t).values
        assert np.array_equal(t.pull(exact=True).wait(), exact)
        with ps.snapshot():
            assert np.array_equal(t.pull().wait(), exact)
        return seen, exact

    results = run_workers(2, body, 2)
    expected = np.zeros(N, np.float32)
    for row in steps:
        expected += row
    for seen, exact in results:
        assert np.array_equal(exact, expected)
        assert np.array_equal(seen, results[0][0])
        error = np.abs(seen - exact).max() / np.abs(exact).max()
        assert 0 < error < {"fp16": 2**-11, "bf16": 2**-8, "int8": 1 / 127}[c]


def test_an_int8_pull_is_right_on_average():
    x, n = gradients(1)[0, 0], harness.at_length(400, 150)

    def body(_):
        t = table(pull_compression="int8", init=x)
        total = np.zeros(N)
        for _ in range(n):
            t.push(np.zeros(N, np.float32))  # another version, and other random numbers
            total += t.pull().wait()
        return total / n - x

    step = np.abs(x).max() / 127
    assert 0 < np.abs(run_workers(1, body)[0]).max() < 5 * step / 2 / n**0.5


def test_an_int8_pull_depends_on_the_version_and_not_on_who_pulled_before():
    """A round in which nobody had a gradient is a version of the same values."""

    def body(_, pulls_before):
        t = table(mode="sync", pull_compression="int8")
        t.push(gradients(1)[0, 0])
        if pulls_before:
            t.pull().wait()
        t.push(None)
        return t.pull().wait()

    first, second = (run_workers(1, partial(body, pulls_before=each))[0] for each in (True, False))
    np.testing.assert_array_equal(first, second)


# --- mistakes -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compression": "fp8"}, r"table\[w\]: compression is 'fp8'; it must be None, 'fp16'"),
        ({"compression": codec.Residual(FP16())}, "compression is <ringcomm.codec.residual.Res"),
        ({"pull_compression": TopK(0.1)}, r"pull_compression is TopK\(ratio=0.1\), with which"),
        ({"compression": TopK(), "error_feedback": False}, "lost without error feedback"),
        ({"error_feedback": True}, "error_feedback without compression= has nothing to do"),
    ],
)
def test_what_makes_no_sense_is_refused(options, message):
    def body(_):
        with pytest.raises(ValueError, match=message):
            table(**options)
        return table().pull().wait().sum()

    assert run_workers(1, body) == [0]


def test_ranks_that_disagree_are_told_both_values():
    def body(rank):
        if rank == 0:
            table(compression=TopK(0.01))
        rc.barrier()
        if rank == 1:
            text = r"it has compression=.*'ratio': 0.01.* rank 1 opens it with .*'ratio': 0.02"
            with pytest.raises(rc.MismatchError, match=text):
                table(compression=TopK(0.02))
        return True

    assert run_workers(2, body) == [True, True]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_int8_cannot_say_is_an_error_of_who_pushes_it(bad):
    x = np.ones(N, np.float32)
    x[17] = bad

    def body(_):
        t = table(updater=ps.optim.SGD(1.0), compression="int8", error_feedback=True)
        t.push(np.ones(N, np.float32) / 3)
        before = t.residual
        with pytest.raises(ValueError, match=r"push\[w\]: NaN or inf among the 1001 elements"):
            t.push(x)
        assert np.array_equal(t.residual, before)
        return np.isfinite(t.pull().wait()).all()

    assert run_workers(1, body) == [True]


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("c", [FP16(), BF16(), TopK(0.05)], ids=str)
def test_others_let_nan_through_and_go_on(c):
    x = np.ones(N, np.float32)
    x[17] = np.nan

    def body(_):
        t = table(compression=c)
        t.push(x)
        assert np.flatnonzero(np.isnan(t.pull().wait())).tolist() == [17]
        t.push(np.zeros(N, np.float32), assign=True)
        t.push(np.ones(N, np.float32))
        return t.pull().wait().max()

    assert run_workers(1, body) == [1]


def test_a_part_of_a_table_with_error_feedback_is_refused():
    def body(_):
        t = table(compression=TopK(0.05))
        with pytest.raises(ValueError, match=r"where= selects 5 of 1001 elements.*Push all"):
            t.push(np.ones(5, np.float32), where=slice(0, 5))
        return t.residual.any()

    assert run_workers(1, body) == [False]
