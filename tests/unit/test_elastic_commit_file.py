"""The file of State.keep_in(): a job that is started again goes on from the commit in it."""

import errno
import logging
import os
import pickle

import numpy as np
import pytest
from harness import run_ranks

from ringcomm.elastic import ArrayState, ObjectState, State, commit_file
from ringcomm.errors import RingcommError


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


def test_a_file_of_another_state_is_refused_on_all_ranks(tmp_path):
    path = tmp_path / "state"
    train(path, 1, 2)

    def body(rank):
        state = ObjectState(step=0, y=1)
        state.keep_in(path)
        state.sync()

    with pytest.raises(RingcommError, match=r"keeps the values .*Remove the file to begin anew"):
        run_ranks(1, body)


@pytest.mark.parametrize("content", [b"", b"nonsense", pickle.dumps({"format": 7})])
def test_a_file_that_is_no_commit_is_refused(content, tmp_path):
    path = tmp_path / "state"
    path.write_bytes(content)
    with pytest.raises(RingcommError, match=r"holds no commit.*Remove it to begin anew"):
        train(path, 1, 1)


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
