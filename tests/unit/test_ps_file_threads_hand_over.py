"""Threads that touch files of checkpoints hand over what they made; nothing else is theirs."""

import threading

import pytest
from harness import DEADLINE_S, wait_until

from ringcomm.ps.checkpoint import files
from ringcomm.ps.checkpoint.server import Store
from ringcomm.ps.protocol.frame_meta import FORGET, LOOK, PREPARE, packed_json
from ringcomm.ps.protocol.frames import FilesOption, FrameHeader, FrameKind, Status
from ringcomm.ps.protocol.link import Delivery
from ringcomm.ps.roles import Layout
from ringcomm.ps.server.replies import NOTHING, Replies

CLIENT = 5
NUMBER = (CLIENT << 32) + 1  # of a save or restore of this client


class Wire:
    """Notes what is sent, and by which thread."""

    def __init__(self):
        self.sent = []

    def send(self, dest, header, meta=b"", body=NOTHING):
        self.sent.append((Status(header.status), meta.decode(), threading.current_thread()))


@pytest.fixture
def wire():
    return Wire()


@pytest.fixture
def store(wire):
    return Store(0, None, {}, Replies(wire, Layout((1,), (0,), ()), 0))


@pytest.fixture
def checkpoint(tmp_path):
    """Return the folder of a checkpoint without tables."""
    files.write_manifest(tmp_path, {"tables": {}, "servers": []})
    return tmp_path


@pytest.fixture
def may_read(monkeypatch):
    """Return what reading threads wait for."""
    event, read = threading.Event(), files.read_manifest

    def reading(folder):
        assert event.wait(DEADLINE_S)
        return read(folder)

    monkeypatch.setattr(files, "read_manifest", reading)
    yield event
    event.set()


def request(option, **content):
    header = FrameHeader(FrameKind.FILES, sequence=1, option=option)
    return Delivery(CLIENT, header, packed_json(content), NOTHING)


def prepare(folder, number=NUMBER):
    return request(
        FilesOption.RESTORE,
        do=PREPARE,
        id=number,
        folder=str(folder),
        values_only=False,
        is_strict=True,
    )


def save(store, folder):
    store.begin(NUMBER, str(folder.parent))
    store.on_save(request(FilesOption.SAVE, id=NUMBER, folder=str(folder)))


WORK = {
    "save": save,
    "restore": lambda store, folder: store.on_restore(prepare(folder)),
    "look": lambda store, folder: store.on_restore(
        request(FilesOption.RESTORE, do=LOOK, folder=str(folder))
    ),
}


def await_replies(store, wire, n):
    def has_replied():
        store.settle()
        return len(wire.sent) == n

    wait_until(has_replied, "no reply")
    return [(status, text) for status, text, _ in wire.sent]


@pytest.mark.parametrize("name", WORK)
def test_the_thread_that_drives_replies_once_files_were_touched(name, store, wire, checkpoint):
    WORK[name](store, checkpoint)
    [(status, _)] = await_replies(store, wire, 1)
    assert status == Status.OK
    assert [thread for _, _, thread in wire.sent] == [threading.current_thread()]


def test_a_server_with_a_reply_to_come_is_not_quiet(store, wire, checkpoint):
    """A copy of it that is made meanwhile would lack the reply."""
    threads = {*threading.enumerate()}
    save(store, checkpoint)
    for each in {*threading.enumerate()} - threads:
        each.join(DEADLINE_S)
    assert not store.is_quiet
    await_replies(store, wire, 1)
    assert store.is_quiet


GIVING_UP = {
    "the chief gives it up": lambda store: store.on_restore(
        request(FilesOption.RESTORE, do=FORGET, id=NUMBER)
    ),
    "the chief dies": lambda store: store.give_up(CLIENT),
    "all recover": lambda store: store.clear(),
}


@pytest.mark.parametrize("how", GIVING_UP)
def test_a_restore_given_up_while_it_is_read_leaves_nothing(how, store, wire, checkpoint, may_read):
    store.on_restore(prepare(checkpoint))
    GIVING_UP[how](store)
    n_before = len(wire.sent)
    may_read.set()
    *_, (status, text) = await_replies(store, wire, n_before + 1)
    assert status == Status.REFUSED
    assert f"rank {CLIENT} has given up this restore" in text
    assert store.is_quiet


def test_of_two_restores_the_later_one_counts(store, wire, checkpoint, may_read):
    store.on_restore(prepare(checkpoint))
    store.on_restore(prepare(checkpoint, NUMBER + 1))
    may_read.set()
    statuses = [status for status, _ in await_replies(store, wire, 2)]
    assert sorted(statuses) == [Status.OK, Status.REFUSED]
    store.on_restore(request(FilesOption.RESTORE, do=FORGET, id=NUMBER + 1))
    assert store.is_quiet


def test_another_ranks_death_gives_up_no_restore(store, wire, checkpoint, may_read):
    store.on_restore(prepare(checkpoint))
    store.give_up(CLIENT + 1)
    may_read.set()
    [(status, _)] = await_replies(store, wire, 1)
    assert status == Status.OK
    assert not store.is_quiet  # it is to be committed
