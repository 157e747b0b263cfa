"""Hash tables in snapshots and checkpoints: one moment, all there is to a row, on any servers."""

import threading

import numpy as np
import pytest
from harness import at_length
from ps_ranks_as_threads import run_workers

import ringcomm as rc
from ringcomm import _core, ps
from ringcomm.ps import evaluation
from ringcomm.ps.checkpoint import files as checkpoint_files
from ringcomm.ps.job import session
from ringcomm.ps.placement import partitions
from ringcomm.ps.placement.partitions import HASH_PARTITIONS, Move
from ringcomm.ps.placement.rebalance import move_all
from ringcomm.ps.protocol.frame_meta import MISSING
from ringcomm.ps.server.clock import OwnClock
from ringcomm.ps.server.rows import hash_shard as hashed
from ringcomm.ps.server.rows.hash_shard import row_spec
from ringcomm.ps.server.rows.row_partition import RowsPartition

pytestmark = pytest.mark.one_wire

DIM, UNIVERSE = 5, 300
ALL = np.arange(UNIVERSE, dtype=np.uint64)
KEYS = np.random.default_rng(1).integers(0, UNIVERSE, (30, 2, 60)).astype(np.uint64)
ROWS = np.random.default_rng(2).standard_normal((30, 2, 60, DIM)).astype(np.float32)
UPDATERS = [
    ps.optim.Adagrad(0.1, initial_accumulator_value=0.3), ps.optim.RowwiseAdagrad(0.1),
    ps.optim.FTRL(0.1), ps.optim.Adam(0.01), ps.optim.SGD(0.1, 0.9),
]  # fmt: skip


@pytest.fixture(autouse=True)
def steps_are_seconds(monkeypatch):
    """Let time pass only as tests say so, and nothing be evicted that is not asked for."""
    state = {"now": 0.0}
    monkeypatch.setattr(OwnClock, "time", lambda _: state["now"])
    monkeypatch.setattr(hashed, "work_after_push", lambda _: 0)
    monkeypatch.setattr(evaluation, "_evaluation", None)
    return state


def opened(updater=None, mode="sync", **options):
    init = ps.initializers.normal(std=0.1, seed=3)
    options = {"init": init, "admit": ps.Admit(min_count=3), "evict": ps.Evict(ttl=4)} | options
    return ps.hashtable("emb", DIM, updater=updater or UPDATERS[0], mode=mode, **options)


def train(kv, rank, steps, time):
    """Push, admit and evict."""
    for step in steps:
        rc.barrier()
        time["now"] = float(step)
        rc.barrier()
        kv.push(KEYS[step, rank], ROWS[step, rank]).wait()
        if step % 3 == 2:
            rc.barrier()
            if rank == 0:
                kv.evict().wait()
    rc.barrier()


def everything(kv):
    """Return all that a client can know of a table: its number of rows, and a text of each key."""
    told = kv.metadata(ALL).wait()
    each = zip(kv.pull(ALL).wait(), told.pushes, told.steps, told.time, strict=True)
    texts = [
        f"{row.tobytes().hex()}, {pushes} pushes, {steps} steps, at {time}"
        for row, pushes, steps, time in each
    ]
    return {"rows": len(kv), **dict(enumerate(texts))}


def differing(found, expected):
    return {key: (found[key], text) for key, text in expected.items() if found[key] != text}


# --- checkpoints --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("updater", "n_servers"),
    [(updater, n) for updater in UPDATERS for n in at_length((1, 2, 3), (3,))]
    + at_length([], [(UPDATERS[1], 1), (UPDATERS[2], 2)]),
)
def test_a_restored_run_goes_on_as_if_it_had_never_stopped(
    tmp_path, updater, n_servers, steps_are_seconds
):
    def through(rank):
        kv = opened(updater)
        train(kv, rank, range(8), steps_are_seconds)
        if ps.is_chief():
            ps.save(tmp_path, step=8).wait()
        rc.barrier()
        train(kv, rank, range(8, 16), steps_are_seconds)
        return everything(kv)

    def again(rank):
        kv = opened(updater)
        train(kv, rank, range(20, 24), steps_are_seconds)  # is gone afterwards
        if ps.is_chief():
            assert ps.restore(tmp_path)["step"] == 8
        rc.barrier()
        train(kv, rank, range(8, 16), steps_are_seconds)
        return everything(kv)

    expected = run_workers(2, through, 2)
    assert 0 < expected[0]["rows"] < UNIVERSE  # some were evicted, or not admitted
    found = run_workers(2, again, n_servers)
    assert list(map(differing, found, expected)) == [{}, {}]


def test_slots_are_not_refilled_with_something_else_after_a_restore(tmp_path):
    def states(shard):
        rows = shard.rows.find
        found = [rows(n).export() for n in range(HASH_PARTITIONS) if rows(n) is not None]
        whole = [np.concatenate(each) for each in zip(*found, strict=True)]
        order = np.argsort(whole[0])
        return [each[order].tobytes() for each in whole]

    shards = []

    def body(rank, is_restored):
        kv = opened(UPDATERS[0], mode="async", admit=None, evict=None)
        if is_restored:
            assert ps.restore(tmp_path) is not None
        else:
            for step in range(10):
                kv.push(KEYS[step, 0], ROWS[step, 0]).wait()
            kv.erase(ALL[::3]).wait()
            kv.push(ALL[::6], np.ones((len(ALL[::6]), DIM), np.float32)).wait()  # in freed rows
            ps.save(tmp_path).wait()
        return True

    make = hashed.Shard.__init__

    def noting(self, *args):
        make(self, *args)
        shards.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashed.Shard, "__init__", noting)
        run_workers(1, lambda rank: body(rank, is_restored=False))
        run_workers(1, lambda rank: body(rank, is_restored=True))
    before, after = map(states, shards)
    assert before == after


def test_the_same_job_goes_back_and_takes_no_new_push_for_an_old_one(tmp_path, steps_are_seconds):
    def body(rank):
        kv = opened()
        train(kv, rank, range(4), steps_are_seconds)
        if ps.is_chief():
            ps.save(tmp_path).wait()
        rc.barrier()
        train(kv, rank, range(4, 8), steps_are_seconds)
        first = everything(kv)
        rc.barrier()
        if ps.is_chief():
            ps.restore(tmp_path)
        rc.barrier()
        train(kv, rank, range(4, 8), steps_are_seconds)
        return differing(everything(kv), first)

    assert run_workers(2, body, 2) == [{}, {}]


def test_pushes_that_wait_for_their_round_are_not_saved_as_applied(tmp_path):
    pushed, is_saved = threading.Event(), threading.Event()
    waiting = []

    def body(rank):
        kv = opened(admit=None)
        kv.push(KEYS[0, rank], ROWS[0, rank]).wait()
        if rank == 1:
            future = kv.push(KEYS[1, rank], ROWS[1, rank])
            waiting.extend(session().client.requests)
            ps.stats()  # what came before has arrived
            pushed.set()
            assert is_saved.wait(60)
        else:
            assert pushed.wait(60)
            ps.save(tmp_path).wait()
            is_saved.set()
            future = kv.push(KEYS[1, rank], ROWS[1, rank])
        future.wait()

    run_workers(2, body)
    [folder] = [path.parent for path in tmp_path.glob("save-*/manifest.json")]
    records = checkpoint_files.read_records(folder, checkpoint_files.read_manifest(folder))[1]
    for record in records:
        applied = checkpoint_files.read_state(folder, record).meta["applied"]
        last = dict(applied)
        assert last[0] > 0
        assert 0 < last[1] < min(waiting)


def test_partitions_that_have_not_changed_are_not_written_again(tmp_path, monkeypatch):
    n = 20_000
    # Else two of those that change share a file, of which the half that stays is written again.
    monkeypatch.setattr(partitions, "HASH_PARTITIONS", 256)

    def new_bytes():
        folder = max(path.parent for path in tmp_path.glob("save-*/manifest.json"))
        return sum(p.stat().st_size for p in folder.glob("*.data-*") if p.stat().st_nlink == 1)

    def body(_):
        kv = ps.hashtable("emb", 16, updater=ps.optim.Add(), admit=ps.Admit(min_count=2))
        for _ in range(2):
            kv.push(np.arange(n), np.ones((n, 16), np.float32)).wait()
        written = []
        changes = [
            lambda: kv.pull(np.arange(n)),
            lambda: kv.push([5, 6], np.ones((2, 16), np.float32)),
            lambda: kv.push([n + 1], np.ones((1, 16), np.float32)),  # is not admitted, but counted
            lambda: kv.erase([7]),
            kv.evict,
        ]
        for change in [kv.n_rows, *changes]:
            change().wait()
            ps.save(tmp_path, keep=None).wait()
            written.append(new_bytes())
        return written

    [written] = run_workers(1, body, 2)
    whole = written.pop(0)
    assert whole > n * 64
    assert [nbytes > 0 for nbytes in written] == [False, True, True, True, False]
    assert max(written) < whole / 100
    found = ps.load_state_dict(tmp_path)["emb"]
    assert len(found["keys"]) == n - 1
    values = dict(zip(found["keys"].tolist(), found["values"][:, 0].tolist(), strict=True))
    assert (values[4], values[5]) == (1, 2)
    assert n + 1 in found["candidate_keys"].tolist()


def test_a_partition_that_moved_and_came_back_is_written_anew(tmp_path):
    def body(_):
        kv = ps.hashtable("emb", DIM, updater=ps.optim.Add())
        for k in range(5):
            kv.push(ALL, np.ones((UNIVERSE, DIM), np.float32)).wait()
            ps.save(tmp_path, keep=1).wait()
            moves = [Move((kv.number, part), -1, k % 2) for part in range(HASH_PARTITIONS)]
            move_all(session(), moves).wait()
        return True

    run_workers(1, body, 2)
    found = ps.load_state_dict(tmp_path)["emb"]
    assert sorted(found["keys"].tolist()) == ALL.tolist()
    assert (found["values"] == 5).all()


@pytest.mark.parametrize("n_servers", [1, 2])
def test_a_table_without_rows_is_read_as_one(n_servers, tmp_path):
    def body(_):
        kv = ps.hashtable("emb", DIM, updater=ps.optim.Adam(), dtype="float64")
        ps.save(tmp_path).wait()
        never = ps.load_state_dict(tmp_path)["emb"]
        kv.push([1, 2], np.ones((2, DIM))).wait()
        kv.erase([1, 2]).wait()
        ps.save(tmp_path).wait()
        return [never, ps.load_state_dict(tmp_path)["emb"]]

    for rows in run_workers(1, body, n_servers)[0]:
        assert (rows["keys"].dtype, rows["keys"].shape) == (np.uint64, (0,))
        assert (rows["values"].dtype, rows["values"].shape) == (np.float64, (0, DIM))


# --- snapshots ----------------------------------------------------------------------------------
@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("n_servers", [1, 3])
def test_an_evaluator_sees_rows_between_two_rounds(n_servers):
    seen = []

    @ps.evaluator(every=3)
    def evaluate(step):
        kv = ps.hashtable("emb", DIM, updater=ps.optim.SGD(1.0), mode="sync")
        first = kv.pull(ALL).wait()
        assert len(np.unique(first)) == 1  # of all rows the same round
        assert first[0, 0] >= step
        for _ in range(3):
            assert (kv.pull(ALL).wait() == first).all()
        seen.append(first[0, 0])

    def body(rank):
        kv = ps.hashtable("emb", DIM, updater=ps.optim.SGD(1.0), mode="sync")
        for _ in range(20):
            kv.push(ALL, np.full((UNIVERSE, DIM), -1, np.float32))
            kv.pull(ALL[:2]).wait()
            session().tick()
        return kv.pull(ALL).wait()[0, 0]

    assert run_workers(2, body, n_servers, evaluators=1) == [20, 20]
    assert seen
    assert seen == sorted(seen)


def test_whatever_happens_to_rows_a_snapshot_has_them_as_they_were(tmp_path):
    def body(_):
        kv = opened(ps.optim.Add(), mode="async", admit=None)
        kv.push(ALL[:200], np.ones((200, DIM), np.float32)).wait()
        ps.save(tmp_path).wait()
        kv.push(ALL[:100], np.ones((100, DIM), np.float32)).wait()
        before = {missing: kv.pull(ALL, missing=missing).wait() for missing in ("init", "zero")}
        with ps.snapshot():
            for change in (
                lambda: kv.push(ALL, np.ones((UNIVERSE, DIM), np.float32)),
                lambda: kv.push(ALL, np.ones((UNIVERSE, DIM), np.float32), assign=True),
                lambda: kv.erase(ALL[50:250]),
                lambda: kv.push(ALL[100:220], np.ones((120, DIM), np.float32)),
            ):
                change().wait()
                for missing, rows in before.items():
                    np.testing.assert_array_equal(kv.pull(ALL, missing=missing).wait(), rows)
            assert kv.pull(ALL[:200], missing="raise").wait().shape == (200, DIM)
            with pytest.raises(KeyError, match="key 299 has no row"):
                kv.pull(ALL[[5, 299]], missing="raise").wait()
        assert (kv.pull(ALL, missing="zero").wait() != before["zero"]).any()
        return True

    assert run_workers(1, body, 2) == [True]


@pytest.mark.long
def test_a_restore_leaves_the_snapshot_of_another_rank_as_it_is(tmp_path):
    holds, is_restored = threading.Event(), threading.Event()

    def body(rank):
        kv = opened(ps.optim.Add(), mode="async", admit=None)
        if rank == 0:
            kv.push(ALL[:9], np.ones((9, DIM), np.float32)).wait()
            ps.save(tmp_path).wait()
            kv.push(ALL, np.ones((UNIVERSE, DIM), np.float32)).wait()
        rc.barrier()
        if rank == 1:
            before = kv.pull(ALL).wait()
            with ps.snapshot():
                holds.set()
                assert is_restored.wait(60)
                np.testing.assert_array_equal(kv.pull(ALL).wait(), before)
            return len(kv)
        assert holds.wait(60)
        ps.restore(tmp_path)
        is_restored.set()
        return len(kv)

    assert run_workers(2, body, 2) == [9, 9]


def test_a_table_that_is_opened_within_a_snapshot_is_not_in_it():
    def body(_):
        with ps.snapshot():
            kv = ps.hashtable("emb", DIM)
            with pytest.raises(KeyError, match=r"pull\[emb\]: the snapshot does not hold it"):
                kv.pull([1]).wait()
        return kv.pull([1]).wait().tolist()

    assert run_workers(1, body) == [[[0.0] * DIM]]


def test_a_snapshot_costs_what_changes_and_nothing_once_it_is_over():
    updater = ps.optim.Add()
    shard = _core.Shard(row_spec(DIM, updater), np.zeros(HASH_PARTITIONS, np.uint32), 0)

    def push(keys, stamp):
        grads = np.ones((len(keys), DIM), np.float32)
        shard.push([(keys, grads, 1.0, None)], updater.code, updater.hyper, 1.0, 0.0, stamp, 0)

    def pull(**options):
        out = np.empty((UNIVERSE, DIM), np.float32)
        found = shard.gather(ALL, out, 1, None, **options)
        return out[:, 0].tolist(), found

    push(ALL[:200], 1)
    shard.hold(7)
    push(ALL[100:], 2)
    shard.hold(8)
    push(ALL[:10], 3)
    one, two = [1.0] * 200 + [0.0] * 100, [1.0] * 100 + [2.0] * 100 + [1.0] * 100
    assert pull(held=7) == (one, 200)
    assert pull(held=8) == (two, 300)
    shard.release(7)
    with pytest.raises(ValueError, match="no snapshot 7 is held here"):
        pull(held=7)
    assert pull(held=8) == (two, 300)
    assert pull() == ([2.0] * 10 + two[10:], 300)


def test_a_partition_without_rows_has_no_state():
    spec = []

    def body(_):
        spec.append(opened()._spec)

    run_workers(1, body)
    shard = hashed.Shard(spec[0], [0] * HASH_PARTITIONS, 0, lambda: 0.0)
    part = RowsPartition(shard, 5)
    assert part.is_empty
    assert part.state().arrays == {}
    part.load(part.state())
    assert (part.stamp, shard.stamp) == (0, 0)


@pytest.mark.parametrize("load", ["load", "load_values"])
def test_a_checkpoint_with_arrays_that_are_not_known_any_more_is_loaded(load):
    spec, keys = [], np.arange(1, 40, dtype=np.uint64)

    def body(_):
        spec.append(opened(updater=ps.optim.Add(), mode="async", admit=None, evict=None)._spec)

    run_workers(1, body)
    shards = [hashed.Shard(spec[0], [0] * HASH_PARTITIONS, 0, lambda: 0.0) for _ in range(2)]
    grads = np.ones((len(keys), DIM), np.float32)
    shards[0].rows.push([(keys, grads, 1.0, None)], ps.optim.Add.code, np.empty(0), 1.0, 0.0, 1, 0)
    for number in range(HASH_PARTITIONS):
        state = RowsPartition(shards[0], number).state()
        if state.arrays:
            state.arrays["stamps"] = np.ones(len(state.arrays["keys"]), np.uint64)
        getattr(RowsPartition(shards[1], number), load)(state)
    found = [np.empty(len(keys) * DIM, np.float32) for _ in shards]
    for shard, out in zip(shards, found, strict=True):
        shard.pull(keys, out.view(np.uint8), MISSING.index("raise"))
    np.testing.assert_array_equal(*found)
