"""The file of State.keep_in(): a job that is started again goes on from the commit in it."""

import errno
import logging
import os
import pickle
import re
import stat
import struct
import zlib

import numpy as np
import pytest
from harness import errors_of_ranks, run_ranks
from other_users import IS_ROOT, OTHER, shared_folder, write_as_another

from ringcomm import trusted_files
from ringcomm.config import Settings
from ringcomm.elastic import ArrayState, ObjectState, State, commit_file
from ringcomm.engine.control.live_parameters_and_callbacks import PROGRAM
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


def test_steps_are_counted_on_from_those_at_the_commit(tmp_path, monkeypatch):
    """So a later checkpoint of @rc.on_checkpoint has a larger number."""
    monkeypatch.setattr(PROGRAM, "n_before", 0)
    monkeypatch.setattr(PROGRAM, "n_steps", 12)
    train(tmp_path / "state", 1, 3)
    monkeypatch.setattr(PROGRAM, "n_steps", 0)
    train(tmp_path / "state", 2, 3)
    assert (PROGRAM.n_steps, PROGRAM.n_before) == (12, 12)


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


@pytest.mark.parametrize("every", [1, 2])
def test_that_a_full_disk_keeps_no_commits_is_said_once_and_they_are_among_those_that_are_lost(
    every, tmp_path, caplog, monkeypatch
):
    path = tmp_path / "state"
    train(path, 2, 4, every=every)

    def full(path, **_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as m:
        m.setattr(commit_file, "replacing", full)
        train(path, 2, 9, every=every)
    assert len([text for text in caplog.messages if "cannot be kept" in text]) == 1, caplog.text
    with caplog.at_level(logging.WARNING, "ringcomm"):
        assert train(path, 2, 9) == [(4, [4] * 3, 4)] * 2
    assert "from commit 4, which" in caplog.text
    assert "; 5 commits after it are lost" in caplog.text


def test_training_goes_on_with_a_value_that_no_file_can_hold(tmp_path, caplog):
    def body(rank):
        state = ObjectState(step=0, rule=None)
        state.keep_in(tmp_path / "state")
        state.sync()
        began = state.step
        while state.step < 5:
            state.step += 1
            state.rule = (lambda: 0) if state.step > 2 else None  # can be copied, not pickled
            state.commit()
        return began

    with caplog.at_level(logging.WARNING, "ringcomm"):
        assert run_ranks(2, body) == [0, 0]
    assert "commit 3 cannot be kept in" in caplog.text
    assert "lambda" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "ringcomm"):
        assert run_ranks(2, body) == [2, 2]
    assert "from commit 2, which" in caplog.text
    assert "; 3 commits after it are lost" in caplog.text


class OneWithASync(ObjectState):
    def sync(self):
        super().sync()


def test_losses_do_not_begin_the_count_anew_where_a_class_has_a_sync_of_its_own(tmp_path):
    """Else the file would never have a tenth commit if there is a loss before each of them."""

    def body(rank):
        state = OneWithASync(step=0)
        state.keep_in(tmp_path / "state", every=10)
        state.sync()
        began = state.step
        for n_steps in (9, 18, 27, 36):
            while state.step < n_steps:
                state.step += 1
                state.commit()
            if rank == 0:
                state.commit()  # one more than the others have; rank 0 is whose values count
            state.resume()  # as after a loss
        return began, state.n_commits

    assert run_ranks(3, body) == [(0, 40)] * 3
    assert run_ranks(3, body) == [(36, 44)] * 3


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

    def forbidden(path, **_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with monkeypatch.context() as m:
        m.setattr(commit_file, "read_trusted", forbidden)
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


# --- who can write it -----------------------------------------------------------------------------
def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022])
def test_what_a_job_keeps_is_its_users_alone_whatever_the_umask(mask, tmp_path, monkeypatch):
    def no_links(*_):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    before = os.umask(mask)
    try:
        for n_steps in (3, 5):
            train(tmp_path / "linked", 2, n_steps)
        monkeypatch.setattr(commit_file.os, "link", no_links)
        for n_steps in (3, 5):
            train(tmp_path / "copied", 2, n_steps)
    finally:
        os.umask(before)
    ends = ("", ".count", ".previous", ".previous.count")
    names = [name + end for name in ("linked", "copied") for end in ends]
    modes = {path.name: mode_of(path) for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(names, 0o600)


def attack(marker):
    """Return a commit file, with a right trailer, that makes a file when it is unpickled."""
    content = b"cos\nopen\n(V%s\nI%d\ntR." % (os.fsencode(marker), os.O_CREAT | os.O_WRONLY)
    return content + struct.pack("<16sQI", b"ringcomm commit\n", len(content), zlib.crc32(content))


def test_the_attack_of_these_tests_runs_code_from_a_file_of_ones_own(tmp_path):
    path, marker = tmp_path / "state", tmp_path / "ran"
    path.write_bytes(attack(marker))
    path.chmod(0o600)
    assert "holds no commit" in refusals(path)
    assert marker.exists()


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o666])
def test_a_file_of_another_user_is_not_unpickled(mode, tmp_path, monkeypatch):
    if not IS_ROOT and mode == 0o600:
        pytest.skip("root alone can read it")
    with shared_folder() as folder:
        path, marker = folder / "state", tmp_path / "ran"
        write_as_another(path, attack(marker), monkeypatch, mode=mode)
        text = refusals(path)
        assert f"belongs to user {path.stat().st_uid}" in text
        assert mode_of(path) == mode
    assert not marker.exists()


@pytest.mark.parametrize(
    ("mode", "of_folder", "text"),
    [
        (0o666, 0o700, "can be written by every user (mode 0666)"),
        (0o602, 0o1777, "can be written by every user (mode 0602)"),
        (0o600, 0o777, "where every user can replace it (mode 0777)"),
        (0o600, 0o2707, "where every user can replace it (mode 2707)"),
    ],
)
@pytest.mark.parametrize("is_linked", [False, True])
def test_a_file_that_others_can_write_or_replace_is_not_unpickled(
    mode, of_folder, text, is_linked, tmp_path
):
    folder, marker = tmp_path / "folder", tmp_path / "ran"
    folder.mkdir()
    path = folder / "state"
    path.write_bytes(attack(marker))
    path.chmod(mode)
    folder.chmod(of_folder)
    (tmp_path / "link").symlink_to(path)
    assert text in refusals(tmp_path / "link" if is_linked else path)
    assert not marker.exists()
    assert mode_of(path) == mode


@pytest.mark.parametrize("of_folder", [0o700, 0o1777, 0o2770])
@pytest.mark.parametrize("is_linked", [False, True])
def test_a_job_goes_on_in_a_folder_of_a_group_or_with_a_sticky_bit(of_folder, is_linked, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(of_folder)
    (tmp_path / "link").symlink_to(folder)
    path = (tmp_path / "link" if is_linked else folder) / "state"
    train(path, 2, 4)
    assert train(path, 2, 5) == [(4, [4] * 3, 4)] * 2


def test_a_file_that_its_group_can_write_is_taken_once_and_mended(tmp_path, caplog):
    """As all files of before are under umask 002."""
    path = a_kept_commit(tmp_path)
    path.chmod(0o664)
    with caplog.at_level(logging.WARNING, "ringcomm"):
        assert train(path, 2, 0) == [(4, [4] * 3, 4)] * 2
        assert mode_of(path) == 0o600
        assert train(path, 2, 0) == [(4, [4] * 3, 4)] * 2
    warned = [m for m in caplog.messages if "could be written by group" in m]
    assert len(warned) == 1, caplog.messages
    assert f"{path} could" in warned[0]
    assert "(mode 0664)" in warned[0]


@pytest.mark.parametrize("says", ["chmod: Operation not permitted", "the file system ignores"])
def test_a_file_that_its_group_can_write_for_good_is_refused(says, tmp_path, monkeypatch):
    """Some file systems, as of Windows servers, know one mode for all files."""

    def chmod(*_):
        if "not permitted" in says:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    path = a_kept_commit(tmp_path)
    path.chmod(0o660)
    monkeypatch.setattr(os, "fchmod", chmod)
    text = refusals(path)
    assert "can be written by group" in text
    assert says in text


@pytest.mark.skipif(not IS_ROOT, reason="only root can give files away")
def test_a_file_that_a_colleague_has_kept_in_the_folder_of_a_group_is_refused_until_copied(
    tmp_path,
):
    folder = tmp_path / "group"
    folder.mkdir()
    os.chown(folder, OTHER, OTHER)
    folder.chmod(0o2770)
    path = a_kept_commit(folder)
    os.chown(path, OTHER, OTHER)
    path.chmod(0o660)
    text = refusals(path)
    assert f"belongs to user {OTHER}" in text
    assert "copy it (cp)" in text
    copy = folder / "copy"
    copy.write_bytes(path.read_bytes())
    copy.replace(path)
    assert train(path, 2, 5) == [(4, [4] * 3, 4)] * 2


def test_where_a_server_gives_files_to_nobody_a_warning_comes_with_the_first_commit(
    tmp_path, caplog, monkeypatch
):
    """NFS does so with files of root. So the user need not wait for the refusal."""
    nobody = 65534
    fstat = os.fstat

    def squashed(descriptor):
        facts = list(fstat(descriptor))
        return os.stat_result([*facts[:4], nobody, nobody, *facts[6:]])

    path = tmp_path / "state"
    with caplog.at_level(logging.WARNING, "ringcomm"), monkeypatch.context() as m:
        m.setattr(trusted_files.os, "fstat", squashed)
        train(path, 2, 4)
        (text,) = caplog.messages
        assert "a job that is started again will not begin with" in text
        assert f"belongs to user {nobody}" in text
        assert "An NFS server that squashes root" in text
        assert f"belongs to user {nobody}" in refusals(path)
    assert train(path, 2, 5) == [(4, [4] * 3, 4)] * 2


@pytest.mark.parametrize("name", ["state", "state.count"])
def test_a_pipe_in_place_of_a_file_makes_no_rank_wait(name, tmp_path, caplog):
    if name == "state.count":
        a_kept_commit(tmp_path)
        (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with caplog.at_level(logging.WARNING, "ringcomm"):
        if name == "state":
            assert "is no regular file" in refusals(tmp_path / name)
        else:
            assert train(tmp_path / "state", 2, 5) == [(4, [4] * 3, 4)] * 2
            assert "commit 5 cannot be kept" in caplog.text


def test_a_link_in_place_of_the_count_is_not_followed(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("a text that is longer than a count")
    (tmp_path / "state.count").symlink_to(precious)
    train(tmp_path / "state", 2, 3)
    assert precious.read_text() == "a text that is longer than a count"


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
        each.keep(n, 0, {})
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

    def full(*args, **_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as m, caplog.at_level(logging.WARNING, "ringcomm"):
        m.setattr(commit_file.os, "link", full)
        m.setattr(commit_file, "replacing", full)
        train(path, 2, 9)
    assert path.read_bytes() == before
    assert f"commit 5 cannot be kept in {path}: " in caplog.text


def test_what_killed_ranks_have_left_half_written_is_removed(tmp_path):
    path = tmp_path / "state.a"
    names = [".state.a-abcd_123.tmp", ".state.a.previous-00000000.tmp"]
    others = [".state.b-abcdefgh.tmp", ".state.a-x.tmp", "state.a-abcdefgh.tmp"]
    for each in [*names, *others]:
        (tmp_path / each).write_bytes(bytes(100))
    train(path, 2, 2)
    assert {each.name for each in tmp_path.iterdir()} == {"state.a", "state.a.count", *others}

    def is_killed(*_):
        raise SystemExit  # as if the process were gone: nothing is tidied up

    with pytest.MonkeyPatch.context() as m:
        m.setattr(os, "fsync", is_killed)
        m.setattr(os, "unlink", lambda _: None)
        writer = commit_file.KeptFile(path, 1)
        writer.origin = writer.load().origin
        with pytest.raises(SystemExit):
            writer.keep(3, 0, {})
    assert len(list(tmp_path.iterdir())) > 2 + len(others)
    train(path, 2, 4)
    kept = {f"state.a{suffix}" for suffix in ("", ".count", ".previous", ".previous.count")}
    assert {each.name for each in tmp_path.iterdir()} == {*kept, *others}


def test_two_jobs_that_keep_commits_in_one_file_say_so_once_each(tmp_path, caplog):
    path = tmp_path / "state"
    jobs = [commit_file.KeptFile(path, 1) for _ in range(2)]
    for each in jobs:
        each.origin = commit_file.Origin(commit_file.ABSENT)
    with caplog.at_level(logging.WARNING, "ringcomm"):
        for n in range(1, 4):
            for job in jobs:
                job.keep(n, 0, {"_saved": {"job": jobs.index(job)}})
    texts = [each.getMessage() for each in caplog.records]
    assert [text.partition(",")[0] for text in texts] == [
        "elastic: before commit 2 of this job"
    ] * 2, texts
    assert all(f"somebody else has written {path}" in each for each in texts)


def test_a_job_alone_with_its_file_warns_of_nobody_else(tmp_path, caplog):
    path = tmp_path / "state"

    def body(rank):
        state = ArrayState(step=0)
        state.keep_in(path, every=2)
        state.sync()
        for step in range(9):
            state.step = step // 4  # the same in several commits
            if step == 5:
                path.unlink()  # moved away, to begin anew
            state.commit()

    with caplog.at_level(logging.WARNING, "ringcomm"):
        run_ranks(1, body)
    assert caplog.records == []


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
