"""How ranks of a host meet where they may look into each other, and where they may not."""

import array
import errno
import os
import re
import select
import socket
import threading
from pathlib import Path

import numpy as np
import pytest

from ringcomm._core import NodeMemory, StatusPage, take, view
from ringcomm.transport.node import neighbours, node_discovery
from ringcomm.transport.node.divide_host import separations
from ringcomm.transport.node.neighbours import Neighbour, Neighbours, Offer
from ringcomm.transport.node.node_discovery import Inbox, give, meet


class Comm:
    """What meet() uses of MPI, for ranks as threads."""

    def __init__(self, hall, rank):
        self._hall = hall
        self.rank = rank
        self.size = len(hall.said)

    def allgather(self, sendobj):
        self._hall.said[self.rank] = sendobj
        self.Barrier()
        said = list(self._hall.said)
        self.Barrier()
        return said

    def Barrier(self):
        self._hall.barrier.wait(30)


class Hall:
    def __init__(self, size):
        self.said = [None] * size
        self.barrier = threading.Barrier(size)


class Resident:
    """A rank as a thread; all have one pid, so only the nonce tells them apart."""

    def __init__(self, rank):
        self.rank, nonce = rank, 100 + rank
        self.page = StatusPage.create("j", "h", rank, 4, rank, nonce)
        self.memory = NodeMemory.create(nonce, 1 << 20)
        fds = (self.memory.board_fd, self.memory.arena_fd)
        self.offer = Offer(os.getpid(), nonce, self.page.fd, self.page.lifeline_fd, *fds)
        self.neighbours = Neighbours()


@pytest.fixture
def met(monkeypatch):
    """Let ranks meet, of whom some may not look into others; return them and what meet() said."""
    everyone = []

    def meet_all(size, secluded=()):
        residents = [Resident(rank) for rank in range(size)]
        everyone.extend(residents)
        hall, said = Hall(size), [None] * size
        reached = Neighbour.reached

        def reach(offer):
            pair = int(threading.current_thread().name), offer.nonce - 100
            if pair in secluded:
                raise PermissionError(errno.EACCES, f"/proc/{pair}")
            return reached(offer)

        monkeypatch.setattr(Neighbour, "reached", reach)

        def main(rank):
            me = residents[rank]
            said[rank] = meet(Comm(hall, rank), rank, me.offer, me.neighbours)

        threads = [threading.Thread(target=main, args=(r,), name=str(r)) for r in range(size)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(60)
        assert None not in said
        return residents, [node for node, _ in said], [texts for _, texts in said]

    yield meet_all
    for each in everyone:
        each.neighbours.close()


def all_pairs(size):
    return {(a, b) for a in range(size) for b in range(size) if a != b}


@pytest.mark.parametrize("secluded", [set(), {(0, 1)}, {(2, 0), (1, 2)}, all_pairs(4)])
def test_who_may_not_look_into_another_is_given_the_descriptors(met, secluded):
    residents, nodes, texts = met(4, secluded)
    assert nodes == [[0, 1, 2, 3]] * 4
    assert texts == [[]] * 4
    for me in residents:
        for other in me.neighbours.ranks:
            assert me.neighbours[other].page.snapshot()["rank"] == other
    mine, theirs = residents[0], residents[1]
    piece = take(theirs.memory, 1000)
    piece[:] = np.arange(1000) % 61
    mapped = mine.neighbours[1].memory()
    assert np.array_equal(view(mapped, theirs.memory.offset_of(piece), 1000), piece)


@pytest.mark.parametrize("secluded", [set(), all_pairs(3)])
def test_without_pidfds_deaths_are_told_in_their_order(met, secluded, monkeypatch):
    monkeypatch.setattr(neighbours, "open_pidfd", refuse_pidfds)
    residents, _, _ = met(3, secluded)
    watch = residents[0].neighbours
    assert watch.watched == [1, 2]
    assert watch.ended() == []
    del residents[2].page
    select.select([watch], [], [], 30)
    assert watch.ended() == [2]
    del residents[1].page
    assert watch.ended() == [2, 1]
    watch.unwatch(2)
    assert watch.ended() == [1]
    assert watch[2].page.snapshot()["rank"] == 2  # its last words can still be read


def refuse_pidfds(pid):
    raise OSError(errno.ENOSYS, "pidfd_open")


def test_a_dead_process_is_not_watched_by_its_lifeline(monkeypatch):
    def dead(pid):
        raise OSError(errno.ESRCH, "pidfd_open")

    monkeypatch.setattr(neighbours, "open_pidfd", dead)
    with pytest.raises(ProcessLookupError):
        Neighbour.reached(Resident(0).offer)


@pytest.mark.parametrize("why", ["no network", "pid namespace", "no socket"])
def test_a_rank_that_is_lost_all_the_same_is_named_with_the_reason(met, why, monkeypatch):
    reasons = {
        "no network": "they could not be handed over: .*[Cc]onnection refused",
        "pid namespace": "of no use: .*another pid namespace",
        "no socket": "no socket to take descriptors: .*Too many open files",
    }
    if why == "no network":
        monkeypatch.setattr(node_discovery, "give", lambda *_: give("\0ringcomm-nobody", 1, []))
    elif why == "pid namespace":
        handed = Neighbour.handed
        monkeypatch.setattr(Neighbour, "handed", lambda offer, _, fds: handed(offer, 0, fds))
    else:

        def full():
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(node_discovery, "Inbox", full)
    _, nodes, texts = met(3, {(0, 2), (2, 0), (1, 2)})
    assert nodes == [[0, 1], [0, 1], [2]]
    assert texts[1:] == [[], []]
    (text,) = texts[0]
    assert text.startswith("rank 0 cannot share memory with rank 2 ([Errno 13] /proc/(0, 2)")
    assert re.search(reasons[why], text), text
    assert "So rank 2 of this host and the others exchange messages" in text


def test_there_is_a_text_for_every_node_beyond_the_first():
    opened = {0: {2}, 1: {3}, 2: {0}, 3: {1}, 4: set()}
    why = {r: {o: f"{r} of {o}" for o in range(5) if o != r and o not in opened[r]} for r in opened}
    one, two = separations(opened, why)
    assert one.startswith("rank 0 cannot share memory with rank 1 (0 of 1). So ranks 1, 3 of this")
    assert two.startswith("rank 0 cannot share memory with rank 4 (0 of 4). So rank 4 of this")
    assert separations({0: {1}, 1: {0}}, {0: {}, 1: {}}) == []


def test_an_inbox_takes_from_who_knows_the_token_alone():
    inbox = Inbox()
    read, write = os.pipe()
    before = len(os.listdir("/proc/self/fd"))
    give(inbox.address, 6, [read, write])
    give(inbox.address, 7, [read])
    pid, (taken,) = inbox.take(7)
    assert pid == os.getpid()
    assert os.fstat(taken).st_ino == os.fstat(read).st_ino
    assert not os.get_inheritable(taken)
    assert len(os.listdir("/proc/self/fd")) == before + 1  # those of the wrong token are closed
    with pytest.raises(BlockingIOError):
        inbox.take(7)
    for each in (taken, read, write):
        os.close(each)
    inbox.close()


def test_an_inbox_is_not_filled_by_who_sees_its_name_alone():
    inbox = Inbox()
    name, fds = inbox.address.partition("/")[0], [0] * 16
    everyone = Path("/proc/net/unix").read_text()
    assert f"@{name[1:]}" in everyone
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.setblocking(False)
        for _ in range(int(Path("/proc/sys/net/unix/max_dgram_qlen").read_text()) + 2):
            other.sendto(bytes(16), name)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
        other.sendmsg([bytes(16)], [rights], 0, name)
    give(inbox.address, 7, [0])
    _, (taken,) = inbox.take(7)
    os.close(taken)
    inbox.close()


def test_more_descriptors_of_others_than_fit_do_not_blame_the_limit(monkeypatch):
    monkeypatch.setattr(Inbox, "_let_in_with_key", refuse_filters)  # as in a sandbox
    inbox = Inbox()
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 16))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.sendmsg([bytes(16)], [rights], 0, inbox.address.partition("/")[0])
    with pytest.raises(BlockingIOError):
        inbox.take(7)
    inbox.close()


def refuse_filters(_):
    raise OSError(errno.ENOPROTOOPT, "Protocol not available")


@pytest.mark.parametrize("takes_memory", [False, True])
def test_no_descriptor_of_a_neighbour_is_left(takes_memory):
    resident = Resident(0)
    before = set(os.listdir("/proc/self/fd"))
    given = [os.dup(fd) for fd in resident.offer.descriptors]
    neighbour = Neighbour.handed(resident.offer, os.getpid(), given)
    memory = neighbour.memory() if takes_memory else None
    assert len(set(os.listdir("/proc/self/fd"))) <= len(before) + 5  # of each of many neighbours
    neighbour.close()
    assert neighbour.page.snapshot()["rank"] == 0
    del neighbour, memory
    assert set(os.listdir("/proc/self/fd")) == before


def test_descriptors_that_are_refused_are_closed():
    resident, stranger = Resident(0), Resident(1)
    given = [os.dup(fd) for fd in stranger.offer.descriptors]
    with pytest.raises(RuntimeError, match="belongs to another process"):
        Neighbour.handed(resident.offer, os.getpid(), given)
    for each in given:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(each)


def test_a_neighbour_that_cannot_be_watched_is_closed_and_not_met():
    class Full:
        def register(self, *_):
            raise OSError(errno.ENOSPC, "No space left on device")  # fs.epoll.max_user_watches

    resident = Resident(0)
    deaths, resident.neighbours._deaths = resident.neighbours._deaths, Full()
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space left"):
        resident.neighbours.add(1, Neighbour.reached(resident.offer))
    assert set(os.listdir("/proc/self/fd")) == before
    resident.neighbours._deaths = deaths
    assert resident.neighbours.ranks == []
    resident.neighbours.close()
