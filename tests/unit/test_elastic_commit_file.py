"""The file of State.keep_in(): a job that is started again goes on from the commit in it."""

import errno
import logging
import os
import pickle
import re

import numpy as np
import pytest
from harness import errors_of_ranks, run_ranks

from ringcomm.config import Settings
from ringcomm.elastic import ArrayState, ObjectState, State, commit_file
from ringcomm.errors import MismatchError, RingcommError


def train(path, size, n_steps, *, every=1):
    """Run a job up to a number of steps; return each rank's (step, x, commits) at its begin."""

    def body(rank):
        state = ArrayState(step=0, x=np.full(3, float(rank)))
        state.keep_in(path, every=every)
        state.sync()
        began = state.step, state.x.tolist(), state.n_commits
        while state.step < n_steps:
            state.step += 1
            state.x[:] = state.step
            state.commit()
        state.step, state.x[:] = 99, 99  # not committed
        return began

    return run_ranks(size, body)


@pytest.mark.parametrize(("every", "kept"), [(1, 7), (3, 6)])
def test_a_job_goes_on_from_the_newest_commit_in_the_file_and_says_what_is_lost(
    every, kept, tmp_path, caplog
):
    path = tmp_path / "folder" / "state"
    assert train(path, 3, 7, every=every) == [(0, [0, 0, 0], 0)] * 3
    with caplog.at_level(logging.WARNING, "ringcomm"):
        assert train(path, 2, 9, every=every) == [(kept, [kept] * 3, kept)] * 2
    texts = [each.getMessage() for each in caplog.records]
    n_lost = f"{7 - kept} commit{'' if kept == 6 else 's'} after it"
    assert len([t for t in texts if f"from commit {kept}" in t and n_lost in t]) == 1, texts


@pytest.mark.parametrize("every", [1, 100])
def test_training_goes_on_while_the_file_cannot_be_written(every, tmp_path, caplog):
    disk, folder = tmp_path / "disk", tmp_path / "folder"
    folder.symlink_to(disk)  # not mounted
    with caplog.at_level(logging.WARNING, "ringcomm"):
        assert train(folder / "state", 2, 7, every=every) == [(0, [0, 0, 0], 0)] * 2
    (text,) = [each.getMessage() for each in caplog.records]
    assert f"commit 1 cannot be kept in {folder / 'state'}: " in text
    disk.mkdir()
    assert train(folder / "state", 2, 100, every=every) == [(0, [0, 0, 0], 0)] * 2
    assert train(folder / "state", 2, 101, every=every) == [(100, [100] * 3, 100)] * 2


def test_commits_that_a_full_disk_did_not_keep_are_among_those_that_are_lost(
    tmp_path, caplog, monkeypatch
):
    path = tmp_path / "state"
    train(path, 2, 4)

    def full(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as m:
        m.setattr(commit_file, "replacing", full)
        train(path, 2, 9)
    with caplog.at_level(logging.WARNING, "ringcomm"):
        assert train(path, 2, 9) == [(4, [4] * 3, 4)] * 2
    assert "from commit 4, which" in caplog.text
    assert "; 5 commits after it are lost" in caplog.text


def a_kept_commit(folder, n_steps=4):
    path = folder / "state"
    train(path, 2, n_steps)
    return path


def refusals(path, size=3, **values):
    """Return each rank's error when a job begins with the file, which must stay as it is."""
    before = path.read_bytes() if path.is_file() else None

    def body(rank):
        state = ArrayState(**(values or {"step": 0, "x": np.zeros(3)}))
        state.keep_in(path)
        state.sync()
        state.commit()

    errors = errors_of_ranks(size, body)
    assert {type(each) for each in errors} == {RingcommError}, errors
    assert (path.read_bytes() if path.is_file() else None) == before
    texts = {str(each) for each in errors}
    assert len(texts) == 1, texts
    assert str(path) in next(iter(texts))
    return texts.pop()


def flipped(data, at):
    out = bytearray(data)
    out[at] ^= 1 << 5
    return bytes(out)


DAMAGED = {
    "empty": lambda data: b"",
    "cut off in the middle": lambda data: data[: len(data) // 2],
    "without its last byte": lambda data: data[:-1],
    "one byte more": lambda data: data + b"\n",
    "zeros": lambda data: bytes(len(data)),
    "zeros at the end": lambda data: data[:-40] + bytes(40),
    "text": lambda data: b"step 8\nloss 0.1\n",
    "all bytes": lambda data: bytes(range(256)) * 40,
    "another pickle": lambda data: pickle.dumps([1, 2, 3]),
    "of a later version": lambda data: pickle.dumps({"format": 7}),
    "values that are none": lambda data: pickle.dumps({"format": 1, "n_commits": 3, "copies": 5}),
    "a class that is gone": lambda data: b"cno_such_module\nThing\n.",
    "a ValueError": lambda data: b"I12x\n.",
    "a KeyError": lambda data: b"g99\n.",
    "an IndexError": lambda data: b"0.",
    "a TypeError": lambda data: b"cbuiltins\nlen\n)R.",
    "a UnicodeDecodeError": lambda data: b"\x80\x04\x8c\x01\xff.",
    "an OverflowError": lambda data: b"\x80\x04\x8d" + b"\xff" * 8 + b".",
    "a bit changed in an array": lambda data: flipped(data, data.index(b"\x00" * 6 + b"\x10@") + 3),
    "a bit changed in the checksum": lambda data: flipped(data, -2),
}


@pytest.mark.parametrize("way", DAMAGED)
def test_a_damaged_file_is_an_error_on_all_ranks_and_stays(way, tmp_path):
    path = a_kept_commit(tmp_path)
    path.write_bytes(DAMAGED[way](path.read_bytes()))
    text = refusals(path)
    assert "No rank has begun, and the file stays as it is" in text
    assert "move it away to begin anew" in text


def test_each_changed_bit_of_a_file_is_seen(tmp_path):
    path = a_kept_commit(tmp_path, 1)
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(flipped(data, at))
        with pytest.raises(RingcommError, match=re.escape(str(path))):
            commit_file.KeptFile(path, 1).load()


def test_a_file_that_cannot_be_read_is_an_error_on_all_ranks(tmp_path, monkeypatch):
    path = a_kept_commit(tmp_path)

    def forbidden(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with monkeypatch.context() as m:
        m.setattr(commit_file.Path, "read_bytes", forbidden)
        m.setattr(commit_file.Path, "is_file", lambda path: False)
        assert "cannot be read ([Errno 13] Permission denied" in refusals(path)
    assert train(path, 2, 5) == [(4, [4] * 3, 4)] * 2


@pytest.mark.parametrize("name", ["s" * 250, "s\0"], ids=["long", "no name"])
def test_a_name_beside_which_none_can_be_is_an_error_on_all_ranks(name, tmp_path):
    """`.previous` would be too long, which stat() refuses; or the file itself can not exist."""
    path = tmp_path / name
    if "\0" not in name:
        path.write_bytes(b"")

    def body(rank):
        state = ArrayState(step=0)
        state.keep_in(path)
        state.sync()

    errors = errors_of_ranks(2, body, settings=Settings(timeout_s=5))
    assert {type(each) for each in errors} == {RingcommError}, errors
    assert all("No rank has begun" in str(each) for each in errors)


def test_a_folder_in_its_place_is_an_error_on_all_ranks(tmp_path):
    (tmp_path / "state").mkdir()
    assert "cannot be read ([Errno 21] Is a directory" in refusals(tmp_path / "state")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"step": 0, "y": np.zeros(3)}, "keeps the values ['x'], and the state has ['y']"),
        (
            {"step": 0, "x": np.zeros(3), "best": 0.5},
            "['step'], and the state has ['best', 'step']",
        ),
        ({"step": 0, "x": np.zeros(2)}, "keeps x as float64 (3,), and here it is float64 (2,)"),
        ({"step": 0, "x": np.zeros((1, 3))}, "float64 (3,), and here it is float64 (1, 3)"),
        ({"step": 0, "x": np.zeros(3, "f4")}, "float64 (3,), and here it is float32 (3,)"),
    ],
)
def test_a_file_that_does_not_fit_the_program_is_an_error_on_all_ranks(values, text, tmp_path):
    assert text in refusals(a_kept_commit(tmp_path), **values)


class OneThatRefuses:
    def __init__(self, refuses):
        self._refuses = refuses

    def state_dict(self):
        return {"rate": 1}

    def load_state_dict(self, state):
        if self._refuses:
            raise KeyError("momentum")


def test_a_value_kept_as_a_number_does_not_replace_one_with_a_state_dict(tmp_path):
    def body(rank, schedule):
        state = ArrayState(schedule=schedule)
        state.keep_in(tmp_path / "state")
        state.sync()
        state.commit()

    run_ranks(1, lambda rank: body(rank, 0.1))
    errors = errors_of_ranks(2, lambda rank: body(rank, OneThatRefuses(False)))
    text = "keeps schedule as float, and here it is OneThatRefuses, which needs a state_dict()"
    assert [text in str(each) for each in errors] == [True] * 2, errors


def test_a_value_that_one_rank_cannot_restore_is_an_error_on_all_ranks(tmp_path):
    path = tmp_path / "state"

    def body(rank, *, refuses):
        state = ObjectState(schedule=OneThatRefuses(refuses and rank == 1))
        state.keep_in(path)
        state.sync()
        state.commit()

    run_ranks(1, lambda rank: body(rank, refuses=False))
    before = path.read_bytes()
    errors = errors_of_ranks(3, lambda rank: body(rank, refuses=True))
    assert {type(each) for each in errors} == {RingcommError}, errors
    assert {str(each) for each in errors if f"{path} keeps commit 1, which rank 1" in str(each)}
    assert len({str(each) for each in errors}) == 1
    assert path.read_bytes() == before


@pytest.mark.parametrize("refuses", [False, True])
def test_a_begin_that_is_interrupted_begins_with_the_file_again(refuses, tmp_path, caplog):
    """A rank was lost while all got what the file holds; who has read it goes on with them."""
    path = tmp_path / "state"

    def body(rank, *, refuses=False, is_interrupted=False):
        state = ObjectState(schedule=OneThatRefuses(refuses and rank == 1))
        state.keep_in(path)
        with pytest.MonkeyPatch.context() as m:
            if is_interrupted:
                m.setattr(state, "verify", lambda: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    state.sync()
        state.sync()
        state.commit()

    run_ranks(2, body)
    with caplog.at_level(logging.WARNING, "ringcomm"):
        errors = errors_of_ranks(2, lambda rank: body(rank, refuses=refuses, is_interrupted=True))
    if refuses:
        assert {type(each) for each in errors} == {RingcommError}, errors
        assert all("which rank 1 cannot restore" in str(each) for each in errors)
    else:
        assert errors == [None] * 2
        assert "the job goes on from commit 1" in caplog.text


def test_what_a_job_began_with_is_kept_as_previous_when_it_is_overwritten(tmp_path, caplog):
    path, previous = tmp_path / "state", tmp_path / "state.previous"
    train(path, 2, 7, every=3)  # keeps 6
    assert not previous.exists()
    before = path.read_bytes()
    train(path, 2, 8, every=3)  # goes on from 6 and keeps no later one
    assert not previous.exists()
    train(path, 2, 13, every=3)
    assert previous.read_bytes() == before
    assert (tmp_path / "state.previous.count").read_bytes().split() == [b"8"]
    assert train(path, 2, 13, every=3) == [(12, [12] * 3, 12)] * 2  # nobody reads it
    path.write_bytes(b"")
    assert f"{previous} is an older commit" in refusals(path)
    os.replace(previous, path)
    os.replace(tmp_path / "state.previous.count", tmp_path / "state.count")
    with caplog.at_level(logging.WARNING, "ringcomm"):
        assert train(path, 2, 6) == [(6, [6] * 3, 6)] * 2
    assert "from commit 6, which" in caplog.text
    assert "; 2 commits after it are lost" in caplog.text


@pytest.mark.parametrize("count", [b"9" * 20, b"", b"-3", b"many"])
def test_a_count_that_cannot_be_is_no_reason_not_to_begin(count, tmp_path):
    path = a_kept_commit(tmp_path, 4)
    (tmp_path / "state.count").write_bytes(count)
    assert commit_file.KeptFile(path, 1).load().origin.n_made < 1 << 63  # what ranks can send
    assert train(path, 2, 6) == [(4, [4] * 3, 4)] * 2


def test_a_later_rank_0_of_the_job_leaves_previous_as_it_is(tmp_path):
    path = a_kept_commit(tmp_path, 4)
    writers = [commit_file.KeptFile(path, 1) for _ in range(3)]
    for each in writers:  # as sync() does on all ranks
        each.origin = writers[0].load().origin if each is writers[0] else writers[0].origin
    for n, each in enumerate(writers, 5):
        each.keep(n, {})
    assert commit_file.KeptFile(tmp_path / "state.previous", 1).load().n_commits == 4


def test_previous_is_copied_where_no_links_can_be_made(tmp_path, monkeypatch):
    path = a_kept_commit(tmp_path)
    before = path.read_bytes()

    def refuse(*args):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(commit_file.os, "link", refuse)
    train(path, 2, 5)
    assert (tmp_path / "state.previous").read_bytes() == before


def test_a_file_that_could_not_be_kept_as_previous_is_not_overwritten(
    tmp_path, monkeypatch, caplog
):
    path = a_kept_commit(tmp_path)
    before = path.read_bytes()

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as m, caplog.at_level(logging.WARNING, "ringcomm"):
        m.setattr(commit_file.os, "link", full)
        m.setattr(commit_file, "replacing", full)
        train(path, 2, 9)
    assert path.read_bytes() == before
    assert f"commit 5 cannot be kept in {path}: " in caplog.text


def test_ranks_that_keep_commits_in_different_places_are_refused(tmp_path):
    def body(rank):
        state = ObjectState(step=0)
        if rank < 2:
            state.keep_in(tmp_path / f"state-{rank}")
        state.sync()

    first, odd = tmp_path / "state-0", tmp_path / "state-1"
    for size, other in ((2, odd), (3, odd)):
        errors = errors_of_ranks(size, body)
        assert {type(each) for each in errors} == {MismatchError}, errors
        assert {f"in {first}, and rank 1 in {other}" in str(each) for each in errors} == {True}


def test_no_commit_is_kept_before_the_file_has_been_read(tmp_path):
    path = a_kept_commit(tmp_path)
    before = path.read_bytes()

    def too_early(rank):
        state = ArrayState(step=0, x=np.zeros(3))
        state.keep_in(path)
        state.commit()

    def too_late(rank):
        state = ArrayState(step=0, x=np.zeros(3))
        state.sync()
        state.keep_in(path)

    for body, text in ((too_early, "nobody has read what"), (too_late, "without ")):
        errors = errors_of_ranks(2, body)
        assert [type(each) for each in errors] == [RingcommError] * 2, errors
        assert all(text in str(each) and str(path) in str(each) for each in errors)
    assert path.read_bytes() == before


def test_wrong_arguments_are_refused(tmp_path):
    class Own(State):
        def save(self): ...
        def restore(self): ...
        def receive(self, root, *, is_new): ...

    with pytest.raises(TypeError, match="Own does not say in COPIES"):
        Own().keep_in(tmp_path / "state")
    for every in (0, -1, 1.5, None):
        with pytest.raises(ValueError, match="a number of commits >= 1"):
            ObjectState(step=0).keep_in(tmp_path / "state", every=every)
