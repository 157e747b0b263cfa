"""Checkpoints: one moment on all servers, whole or not there, read by any number of them."""

import errno
import json
import logging
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from harness import at_length
from planted_files import damaged
from ps_ranks_as_threads import run_workers

import ringcomm as rc
from ringcomm import atomic_files, ps
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.core.current_engine import serve_thread
from ringcomm.engine.core.engine import Engine
from ringcomm.ps.checkpoint import files as checkpoint_files
from ringcomm.ps.job import session
from ringcomm.ps.partition_state import PartitionState, recut
from ringcomm.ps.placement.partitions import Move
from ringcomm.ps.placement.rebalance import move_all
from ringcomm.regular_files import BrokenFileError

COUNT = 1003
GRADIENTS = np.random.default_rng(0).standard_normal((40, 2, COUNT)).astype(np.float32)


def opened(updater=None, mode="sync", block_nbytes=1000, **options):
    updater = updater or ps.optim.Adam(0.01)
    return ps.table("w", COUNT, updater=updater, mode=mode, block_nbytes=block_nbytes, **options)


def train(t, rank, steps):
    for step in steps:
        t.push(GRADIENTS[step, rank])
        values = t.pull().wait()
    return values


def saved(root):
    """Return the folders of complete checkpoints, the newest last."""
    return sorted(path.parent for path in root.glob("save-*/manifest.json"))


def save_in_a_job(root, value=1.0, **options):
    """Let a job of one worker save a table full of `value`."""

    def body(rank):
        t = ps.table("w", COUNT, updater=ps.optim.Add(), block_nbytes=1000)
        t.push(np.full(COUNT, value, np.float32)).wait()
        ps.save(root, background=False, **options)

    run_workers(1, body, 2)


# --- restore ------------------------------------------------------------------------------------
ADAM, OTHERS = ps.optim.Adam(0.01), (
    ps.optim.NAdam(0.01), ps.optim.SGD(0.1, 0.9), ps.optim.RowwiseAdagrad(0.1)
)  # fmt: skip
ELSEWHERE = [(1, 1000), (3, 1000), (2, 1 << 20), (3, 68)]  # servers, bytes of a block


@pytest.mark.parametrize(
    ("updater", "n_servers", "block_nbytes"),
    [(ADAM, *each) for each in ELSEWHERE]
    + [(updater, *each) for updater in OTHERS for each in at_length(ELSEWHERE, ELSEWHERE[-1:])],
)
def test_training_goes_on_with_the_same_bits(tmp_path, updater, n_servers, block_nbytes):
    def through(rank):
        t = opened(updater)
        train(t, rank, range(8))
        if ps.is_chief():
            ps.save(tmp_path, step=8).wait()
        return train(t, rank, range(8, 16)).tobytes()

    def again(rank):
        t = opened(updater, block_nbytes=block_nbytes)
        if ps.is_chief():
            assert ps.restore(tmp_path)["step"] == 8
        rc.barrier()
        return train(t, rank, range(8, 16)).tobytes()

    expected = run_workers(2, through, 2)
    assert run_workers(2, again, n_servers) == expected


def test_the_same_job_goes_back_to_where_it_was(tmp_path):
    def body(rank):
        t = opened()
        train(t, rank, range(4))
        if ps.is_chief():
            ps.save(tmp_path, step=4).wait()
        first = train(t, rank, range(4, 8)).tobytes()
        rc.barrier()
        if ps.is_chief():
            ps.restore(tmp_path)
        rc.barrier()
        return first == train(t, rank, range(4, 8)).tobytes()

    assert run_workers(2, body, 2) == [True, True]


def test_pushes_of_a_new_job_are_not_taken_for_those_of_the_old_one(tmp_path):
    def body(rank):
        t = ps.table("w", COUNT, updater=ps.optim.Add(), block_nbytes=1000)
        if ps.restore(tmp_path) is None:
            for _ in range(50):
                t.push(np.ones(COUNT, np.float32))
            ps.save(tmp_path).wait()
        t.push(np.ones(COUNT, np.float32)).wait()
        return t.pull().wait().tolist()

    assert run_workers(1, body, 2) == [[51.0] * COUNT]
    assert run_workers(1, body, 2) == [[51.0] * COUNT]


def test_without_a_checkpoint_nothing_is_restored(tmp_path):
    def body(rank):
        opened()
        with pytest.raises(FileNotFoundError, match="no complete checkpoint in"):
            ps.load(tmp_path / "missing")
        return ps.restore(tmp_path / "missing")

    assert run_workers(1, body) == [None]
    with pytest.raises(FileNotFoundError, match="no complete checkpoint in"):
        ps.load_state_dict(tmp_path)


@pytest.mark.parametrize(
    ("open_another", "message"),
    [
        (lambda: ps.table("v", 7), r"table 'w' of the checkpoint is not open; open are \['v'\]"),
        (lambda: ps.table("w", 7, updater=ps.optim.Add()), r"shape is \(1003,\) .*, and \(7,\)"),
        (lambda: ps.table("w", COUNT, "float64", updater=ps.optim.Add()),
         "dtype is float32 in the checkpoint, and float64 where it is open"),
        (lambda: ps.table("w", COUNT, updater=ps.optim.SGD(0.1)), "updater is Add .*, and SGD"),
    ],
)  # fmt: skip
def test_another_table_is_refused_and_nothing_is_changed(tmp_path, open_another, message):
    save_in_a_job(tmp_path)

    def body(rank):
        t = open_another()
        with pytest.raises(ValueError, match=message):
            ps.restore(tmp_path)
        return float(abs(t.pull().wait()).max())

    assert run_workers(1, body, 2) == [0.0]


def test_another_state_of_the_updater_is_refused(tmp_path):
    def body(rank, momentum):
        opened(ps.optim.SGD(0.1, momentum), mode="async")
        if momentum:
            ps.save(tmp_path).wait()
            return
        with pytest.raises(ValueError, match=r"state of the updater is \('momentum_buffer',\) in"):
            ps.restore(tmp_path)

    run_workers(1, lambda rank: body(rank, 0.9), 2)
    run_workers(1, lambda rank: body(rank, 0.0), 2)


def test_a_learning_rate_may_be_another_one(tmp_path):
    def body(rank):
        opened(ps.optim.Adam(0.1))
        return ps.restore(tmp_path)["step"]

    def first(rank):
        opened(ps.optim.Adam(0.2))
        ps.save(tmp_path, step=3).wait()

    run_workers(1, first)
    assert run_workers(1, body) == [3]


def test_only_the_chief_saves(tmp_path):
    def body(rank):
        opened()
        if rank == 1:
            for call in (ps.save, ps.restore, ps.load):
                with pytest.raises(rc.RingcommError, match="worker 1 is not the chief"):
                    call(tmp_path)
        rc.barrier()  # when worker 0 has left, worker 1 is the chief
        return True

    assert run_workers(2, body) == [True, True]


# --- values alone -------------------------------------------------------------------------------
def test_values_alone_begin_another_training(tmp_path, caplog):
    save_in_a_job(tmp_path, 3.0)

    def body(rank):
        t = ps.table("w", COUNT, "float64", updater=ps.optim.Adam(0.01), init=1.0, mode="sync")
        head = ps.table("head", 5, init=2.0)
        with pytest.raises(ValueError, match=r"it has no head\. Nothing was changed; strict=False"):
            ps.load(tmp_path)
        assert (t.pull().wait() == 1).all()
        assert ps.load(tmp_path, strict=False)["missing"] == ["head"]
        assert (t.pull().wait() == 3).all()
        assert (head.pull().wait() == 2).all()
        t.push(np.ones(COUNT)).wait()
        return float(t.pull().wait()[0])

    [after] = run_workers(1, body, 3)
    assert after == pytest.approx(3 - 0.01)  # Adam's first step
    assert "head stay as they are" in caplog.text


def test_one_process_reads_what_servers_have_written(tmp_path):
    values = {}

    def body(rank):
        t, u = opened(), ps.table("u", (3, 5), "float64", updater=ps.optim.Add(), block_nbytes=48)
        u.push(np.arange(15.0).reshape(3, 5)).wait()
        values["w"], values["u"] = train(t, 0, range(3)), u.pull().wait()
        ps.save(tmp_path).wait()

    run_workers(1, body, 3)
    found = ps.load_state_dict(tmp_path)
    assert found.keys() == values.keys()
    for name, expected in values.items():
        np.testing.assert_array_equal(found[name], expected, strict=True)


# --- hash tables --------------------------------------------------------------------------------
KEYS = np.random.default_rng(1).integers(0, 1 << 63, (30, 2, 50), np.uint64) % np.uint64(400)
ROWS = np.random.default_rng(2).standard_normal((30, 2, 50, 6)).astype(np.float32)


def hashed(updater=None, mode="sync", **options):
    options = {"init": ps.initializers.normal(std=0.1, seed=3)} | options
    updater = updater or ps.optim.Adam(0.01)
    return ps.hashtable("emb", dim=6, updater=updater, mode=mode, **options)


def learn(kv, rank, steps):
    for step in steps:
        kv.push(KEYS[step, rank], ROWS[step, rank]).wait()
    rc.barrier()
    return kv.pull(np.arange(400, dtype=np.uint64)).wait()


@pytest.mark.long
@pytest.mark.parametrize("admit", [None, ps.Admit(min_count=4)])
@pytest.mark.parametrize("updater", [ps.optim.Adam(0.01), ps.optim.RowwiseAdagrad(0.1)])
def test_rows_go_on_with_the_same_bits_on_other_servers(tmp_path, updater, admit):
    def through(rank):
        kv = hashed(updater, admit=admit)
        learn(kv, rank, range(5))
        if ps.is_chief():
            ps.save(tmp_path).wait()
        rc.barrier()
        return learn(kv, rank, range(5, 15)).tobytes(), kv.n_rows().wait()

    def again(rank):
        kv = hashed(updater, admit=admit)
        learn(kv, rank, range(20, 22))  # is gone afterwards
        if ps.is_chief():
            ps.restore(tmp_path)
        rc.barrier()
        return learn(kv, rank, range(5, 15)).tobytes(), kv.n_rows().wait()

    expected = run_workers(2, through, 2)
    assert run_workers(2, again, 3) == expected


def test_a_save_of_rows_is_exactly_between_two_rounds(tmp_path):
    n_rounds, keys = 30, np.arange(100, dtype=np.uint64)

    def body(rank):
        kv = hashed(ps.optim.SGD(1.0), init=ps.initializers.zeros())
        for step in range(n_rounds):
            pushed = kv.push(keys, np.full((100, 6), -1.0, np.float32))
            if step == 0:
                pushed.wait()  # from now on there are rows
            if rank == 0 and step % 10 == 5:
                ps.save(tmp_path, step=step, keep=None)
        return kv.pull(keys).wait()

    assert all((values == n_rounds).all() for values in run_workers(2, body, 3))
    n_values = []
    for folder in saved(tmp_path):
        manifest = checkpoint_files.read_manifest(folder)
        records = checkpoint_files.read_records(folder, manifest)[1]
        states = [checkpoint_files.read_state(folder, record) for record in records]
        rows = [values for s in states for values in s.arrays["values"]]
        n_values.append(len(np.unique(rows)))
    assert len(n_values) == 3
    assert max(n_values) == 1  # before the first round there is no row


def test_values_of_rows_alone_begin_another_training(tmp_path):
    keys = np.arange(50, dtype=np.uint64)

    def first(rank):
        kv = hashed(ps.optim.Add(), "async")
        kv.push(keys, np.ones((50, 6), np.float32), assign=True).wait()
        ps.save(tmp_path).wait()

    def second(rank):
        kv = hashed(ps.optim.Adam(0.1), "async")
        ps.load(tmp_path)
        before = kv.pull(keys).wait().copy()
        kv.push(keys, np.ones((50, 6), np.float32)).wait()
        return before, kv.pull(keys).wait()

    run_workers(1, first, 2)
    [(before, after)] = run_workers(1, second, 3)
    assert (before == 1).all()
    np.testing.assert_allclose(after, 0.9, rtol=1e-6)  # Adam's first step
    found = ps.load_state_dict(tmp_path)["emb"]
    assert sorted(found["keys"].tolist()) == keys.tolist()
    assert (found["values"] == 1).all()


def test_rows_of_another_initializer_are_refused(tmp_path):
    def body(rank, seed):
        hashed(init=ps.initializers.normal(std=0.1, seed=seed))
        if seed == 3:
            ps.save(tmp_path).wait()
            return
        with pytest.raises(ValueError, match=r"table\[emb\]: init is .* in the checkpoint, and"):
            ps.restore(tmp_path)

    run_workers(1, lambda rank: body(rank, 3))
    run_workers(1, lambda rank: body(rank, 4))


# --- one moment ---------------------------------------------------------------------------------
def test_a_save_is_exactly_between_two_rounds_while_others_train(tmp_path):
    n_rounds = 60

    def body(rank):
        t = ps.table("w", COUNT, updater=ps.optim.SGD(1.0), mode="sync", block_nbytes=400)
        for step in range(n_rounds):
            t.push(np.full(COUNT, -1.0, np.float32))
            if rank == 0 and step % 20 == 10:
                ps.save(tmp_path, step=step, keep=None)  # its own push is on its way
        return t.pull().wait()[0]

    assert run_workers(3, body, 3) == [n_rounds] * 3
    steps = set()
    for folder in saved(tmp_path):
        manifest = checkpoint_files.read_manifest(folder)
        records = checkpoint_files.read_records(folder, manifest)
        states = [checkpoint_files.read_state(folder, r) for r in records[1]]
        assert len({state.meta["steps"] for state in states}) == 1
        for state in states:
            assert (state.arrays["values"] == state.meta["steps"]).all()
        steps.add((manifest["step"], states[0].meta["steps"]))
    assert [step for step, _ in sorted(steps)] == [10, 30, 50]
    assert all(rounds <= step + 1 for step, rounds in steps)


def test_pushes_that_wait_for_their_round_are_not_saved_as_applied(tmp_path):
    pushed, is_saved = threading.Event(), threading.Event()
    waiting = {}

    def body(rank):
        t = opened()
        train(t, rank, range(2))
        if rank == 1:
            future = t.push(GRADIENTS[2, rank])
            asked = session().client.requests
            waiting.update({ask.partition: sequence for sequence, ask in asked.items()})
            ps.stats()  # what came before has arrived
            pushed.set()
            assert is_saved.wait(60)
        else:
            assert pushed.wait(60)
            ps.save(tmp_path).wait()
            is_saved.set()
            future = t.push(GRADIENTS[2, rank])
        future.wait()

    run_workers(2, body)
    [folder] = saved(tmp_path)
    records = checkpoint_files.read_records(folder, checkpoint_files.read_manifest(folder))[1]
    for record in records:
        state = checkpoint_files.read_state(folder, record)
        last = dict(state.meta["applied"])
        assert state.meta["steps"] == 2
        assert last[0] > 0
        assert 0 < last[1] < waiting[record.partition]


def test_a_moved_partition_is_saved_once(tmp_path):
    def body(rank):
        t = ps.table("w", COUNT, updater=ps.optim.Add(), block_nbytes=1000)
        for k in range(3):
            t.push(np.ones(COUNT, np.float32))
            ps.save(tmp_path, keep=1).wait()
            move_all(session(), [Move((t.number, p), -1, k % 2) for p in range(5)]).wait()
        return True

    run_workers(1, body, 2)
    assert (ps.load_state_dict(tmp_path)["w"] == 3).all()
    [folder] = saved(tmp_path)
    records = checkpoint_files.read_records(folder, checkpoint_files.read_manifest(folder))[1]
    assert sorted(record.partition[1] for record in records) == list(range(5))


# --- files --------------------------------------------------------------------------------------
def test_what_has_not_changed_is_not_written_again(tmp_path):
    def body(rank):
        t = ps.table("w", 100_000, updater=ps.optim.Add(), block_nbytes=40_000)
        ps.save(tmp_path, keep=None).wait()
        t.push(np.ones(10_000, np.float32), where=slice(0, 10_000)).wait()
        ps.save(tmp_path, keep=None).wait()
        again = np.full(10_000, 2, np.float32)
        t.push(again, where=slice(0, 10_000), assign=True).wait()  # no step, but a change
        ps.save(tmp_path, keep=2).wait()

    run_workers(1, body, 2)
    second, third = saved(tmp_path)
    new = [p for p in third.glob("*.data-*") if p.stat().st_nlink == 1]
    assert sum(path.stat().st_size for path in new) < 50_000
    linked = {p.name for p in third.glob("*.data-*")} & {p.name for p in second.glob("*.data-*")}
    assert linked
    assert ps.load_state_dict(tmp_path)["w"].sum() == 20_000


def test_a_file_of_which_little_is_of_use_is_written_anew(tmp_path):
    def body(rank):
        t = ps.table("w", 100_000, updater=ps.optim.Add(), block_nbytes=40_000)
        ps.save(tmp_path, keep=1).wait()
        for _ in range(3):
            t.push(np.ones(80_000, np.float32), where=slice(0, 80_000)).wait()
            ps.save(tmp_path, keep=1).wait()

    run_workers(1, body)
    [folder] = saved(tmp_path)
    sizes = [path.stat().st_size for path in folder.glob("*.data-*")]
    assert sum(sizes) < 2 * 400_000
    assert ps.load_state_dict(tmp_path)["w"].sum() == 240_000


def test_a_save_has_not_failed_if_an_older_one_cannot_be_removed(tmp_path, monkeypatch, caplog):
    real = shutil.rmtree

    def remove(path, *, ignore_errors=False):
        if not ignore_errors:
            raise OSError(errno.ENOTEMPTY, "somebody reads it over NFS", str(path))
        real(path, ignore_errors=True)

    def body(rank):
        opened(ps.optim.Add(), "async")
        ps.save(tmp_path, step=0, keep=1).wait()
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", remove)
            folder = ps.save(tmp_path, step=1, keep=1).wait()
        assert checkpoint_files.complete(tmp_path) == [folder]
        ps.save(tmp_path, step=2, keep=1).wait()
        return ps.restore(tmp_path)["step"]

    assert run_workers(1, body) == [2]
    assert "save-00000001" in caplog.text
    assert len([*tmp_path.iterdir()]) == 1  # the next save has removed the rest


@pytest.mark.parametrize(("keep", "left"), [(1, 1), (2, 2), (None, 4)])
def test_as_many_checkpoints_are_kept_as_were_asked_for(tmp_path, keep, left):
    def body(rank):
        opened(ps.optim.Add(), "async")
        for step in range(4):
            ps.save(tmp_path, step=step, keep=keep)
        with pytest.raises(ValueError, match="keep is 0"):
            ps.save(tmp_path, keep=0)

    run_workers(1, body)
    assert len(saved(tmp_path)) == left
    assert len(list(tmp_path.glob("save-*"))) == left


@pytest.mark.parametrize("damage", ["data", "cut", "missing", "list", "manifest"])
def test_of_a_damaged_checkpoint_the_file_is_named_and_the_one_before_is_used(
    tmp_path, damage, caplog
):
    save_in_a_job(tmp_path, 1.0)
    save_in_a_job(tmp_path, 2.0)
    folder = saved(tmp_path)[-1]
    path = {"list": folder / "server-1.json", "manifest": folder / "manifest.json"}.get(
        damage, next(folder.glob("server-1.data-*"))
    )
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        os.truncate(path, 700)
    else:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content if damage != "manifest" else content[:-9])

    def body(rank):
        t = ps.table("w", COUNT, updater=ps.optim.Add())
        assert ps.restore(tmp_path) is not None
        return float(t.pull().wait()[0])

    caplog.set_level(logging.WARNING, "ringcomm")
    assert run_workers(1, body, 3) == [1.0]
    assert path.name in caplog.text
    caplog.clear()
    assert (ps.load_state_dict(tmp_path)["w"] == 1).all()
    assert path.name in caplog.text


def as_before(manifest):
    """Return a manifest as version 0.1.0 wrote it before it had a checksum."""
    content = json.loads(manifest)
    content.pop("crc", None)
    return json.dumps({**content, "format": 1}, indent=1).encode()


def read_all(root):
    """Return the step of the newest checkpoint that can be used, and a value."""

    def attempt(checkpoint):
        checkpoint_files.specs_of(checkpoint.manifest)
        checkpoint_files.counts_in(checkpoint.manifest)
        return [checkpoint.manifest[name] for name in ("step", "clock", "job")]

    found = checkpoint_files.first_usable(root, "test", attempt)
    [values] = ps.load_state_dict(root).values()
    return found[0], float(values[0])


def test_a_manifest_of_which_a_bit_or_the_end_has_changed_is_not_used(tmp_path):
    save_in_a_job(tmp_path, 1.0, step=1)
    save_in_a_job(tmp_path, 2.0, step=2)
    path = saved(tmp_path)[-1] / "manifest.json"
    whole = path.read_bytes()
    assert read_all(tmp_path) == (2, 2.0)
    for data in damaged(whole, *at_length([4000, 400], [150, 20])):
        path.write_bytes(data)
        assert read_all(tmp_path) == (1, 1.0), data
    path.write_bytes(whole)
    assert read_all(tmp_path) == (2, 2.0)


def test_a_manifest_of_before_is_read_and_what_is_no_manifest_is_not_used(tmp_path):
    """It has no checksum, so another step in it is not seen; but no error is another one's."""
    save_in_a_job(tmp_path, 1.0, step=1)
    save_in_a_job(tmp_path, 2.0, step=2)
    path = saved(tmp_path)[-1] / "manifest.json"
    whole = as_before(path.read_bytes())
    path.write_bytes(whole)
    assert read_all(tmp_path) == (2, 2.0)
    values = []
    for data in damaged(whole, *at_length([4000, 400], [150, 20])):
        path.write_bytes(data)
        values.append(read_all(tmp_path)[1])
    assert set(values) == {1.0, 2.0}


def test_if_all_are_damaged_nothing_is_changed_and_all_files_are_named(tmp_path):
    save_in_a_job(tmp_path, 1.0)
    [path] = tmp_path.glob("save-*/server-0.data-*")
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    def body(rank):
        t = ps.table("w", COUNT, updater=ps.optim.Add(), init=7.0)
        with pytest.raises(BrokenFileError, match=r"no checkpoint can be used: .*server-0.data"):
            ps.restore(tmp_path)
        return float(t.pull().wait().sum())

    assert run_workers(1, body, 2) == [7.0 * COUNT]


def test_a_save_that_fails_is_told_and_leaves_nothing(tmp_path, monkeypatch):
    """Server 0's disk is full while server 1 still writes; so it may be because of what was left
    by a job that was killed.
    """
    fail, is_removed = threading.Event(), threading.Event()
    left = tmp_path / "save-00000009" / "server-0.data-9-0"
    writer = checkpoint_files.Writer
    finish, add, rmtree = writer.finish, writer.add, shutil.rmtree

    def finishing(writer):
        if fail.is_set() and writer._server == 0:
            raise OSError(28, "No space left on device")
        assert not (fail.is_set() and is_removed.wait(0.2))
        return finish(writer)

    def adding(writer, *args):
        assert not left.exists()
        return add(writer, *args)

    def removing(folder, **options):
        rmtree(folder, **options)
        is_removed.set()

    monkeypatch.setattr(writer, "finish", finishing)
    monkeypatch.setattr(writer, "add", adding)

    def body(rank):
        t = ps.table("w", COUNT, updater=ps.optim.Add(), block_nbytes=1000)
        first = ps.save(tmp_path, keep=None).wait()
        t.push(np.ones(COUNT, np.float32)).wait()
        fail.set()
        monkeypatch.setattr(shutil, "rmtree", removing)
        with pytest.raises(OSError, match="No space left"):
            ps.save(tmp_path, keep=None).wait()
        assert os.listdir(tmp_path) == [first.name]
        assert (ps.load_state_dict(tmp_path)["w"] == 0).all()
        fail.clear()
        left.parent.mkdir()
        left.write_bytes(b"half")
        second = ps.save(tmp_path, keep=None).wait()
        assert sorted(os.listdir(tmp_path)) == [first.name, second.name]

    run_workers(1, body, 3)
    assert (ps.load_state_dict(tmp_path)["w"] == 1).all()


# --- as data ------------------------------------------------------------------------------------
def test_a_state_is_read_as_it_was_written():
    arrays = {"values": np.arange(7.0), "slot0": np.ones((2, 3), np.float32), "none": np.empty(0)}
    data = np.concatenate([*PartitionState({"steps": 3}, arrays).packed()])
    found = PartitionState.unpacked(data)
    assert found.meta == {"steps": 3}
    for name, array in arrays.items():
        np.testing.assert_array_equal(found.arrays[name], array, strict=True)


@pytest.mark.parametrize("end", [3, 20, -1])
def test_a_state_that_is_cut_off_is_refused(end):
    data = np.concatenate(PartitionState({}, {"values": np.arange(7.0)}).packed())
    with pytest.raises(ValueError, match="partition"):
        PartitionState.unpacked(data[:end])


def test_slices_that_do_not_cover_a_range_are_refused():
    def body(rank):
        spec = opened()._spec
        piece = PartitionState(
            {"start": 0, "stop": 5, "steps": 1}, {"values": np.zeros(5, np.float32)}
        )
        with pytest.raises(ValueError, match="5 of elements 0 to 6 are there"):
            recut(spec, 0, 6, [piece])

    run_workers(1, body)


def test_a_file_is_replaced_at_once_or_stays(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(TypeError), atomic_files.replacing(path) as file:
        file.write("no bytes")
    assert path.read_bytes() == b"old"
    with atomic_files.replacing(path) as file:
        file.write(json.dumps([1]).encode())
    assert json.loads(path.read_text()) == [1]
    assert os.listdir(tmp_path) == ["x"]


def test_a_save_that_ends_after_its_engine_raises_nothing_in_its_thread(tmp_path, monkeypatch):
    """Nobody catches an error there: it would end the rank as failed."""
    threads, nudge = [], Engine.nudge

    def nudging(own):
        if threading.current_thread().name == "ringcomm-ps-save":
            threads.append(threading.current_thread())
            raise rc.NotInitializedError("ringcomm was shut down")
        nudge(own)

    monkeypatch.setattr(Engine, "nudge", nudging)
    save_in_a_job(tmp_path)
    (thread,) = threads
    thread.join(60)
    assert saved(tmp_path)


def test_saves_of_several_threads_come_one_after_the_other(tmp_path):
    def body(rank):
        ps.table("w", 64, block_nbytes=64)
        own = engine()

        def save(step):
            with serve_thread(own):
                return ps.save(tmp_path, step=step, keep=None).wait()

        with ThreadPoolExecutor(4) as threads:
            return sorted(path.name for path in threads.map(save, range(4)))

    [names] = run_workers(1, body, 2)
    assert names == [f"save-{n:08}" for n in range(1, 5)]


def test_a_job_that_saves_where_another_one_does_says_so(tmp_path, caplog):
    def body(rank):
        ps.table("w", 64)
        for _ in range(2):
            ps.save(tmp_path, background=False)
        assert not caplog.records
        save_in_a_job(tmp_path / "another", step=1)
        (newest,) = (tmp_path / "another").iterdir()
        newest.rename(tmp_path / "save-00000003")
        ps.save(tmp_path, background=False)
        (warning,) = [record.getMessage() for record in caplog.records]
        assert f"another job saves in this folder, too: {tmp_path}/save-00000003" in warning
        ps.save(tmp_path, background=False)
        assert len(caplog.records) == 1

    run_workers(1, body)


def test_a_save_with_a_step_that_is_none_leaves_nothing(tmp_path):
    with pytest.raises(TypeError):
        save_in_a_job(tmp_path, step="x")
    assert not os.listdir(tmp_path)
