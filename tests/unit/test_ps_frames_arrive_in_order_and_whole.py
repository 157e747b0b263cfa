"""Frames and messages: in order whatever way their bodies take, and refused where they are cut."""

import sys
import threading

import numpy as np
import pytest
from harness import wait_until
from loopback import LoopbackHub
from ps_ranks_as_threads import run_workers

from ringcomm import ps
from ringcomm.errors import RingcommError
from ringcomm.ps.protocol import link
from ringcomm.ps.protocol.body_memory import KEPT_NBYTES, MemoryForBodies
from ringcomm.ps.protocol.frame_dispatcher import FrameDispatcher
from ringcomm.ps.protocol.frame_meta import PushMeta
from ringcomm.ps.protocol.frames import (
    HEADER_NBYTES,
    FrameHeader,
    FrameKind,
    NewsOption,
    Where,
    frames,
    packed,
)
from ringcomm.ps.protocol.link import INLINE_MAX, Joiner, Link, pieces
from ringcomm.ps.protocol.node_pipes import Pipes
from ringcomm.transport import unannounced_messages
from ringcomm.transport.unannounced_messages import SHORT_MESSAGE_MAX


def links(nodes):
    hub = LoopbackHub(len(nodes), nodes)
    transports = [hub.transport(rank) for rank in range(len(nodes))]
    return transports, [Link(t, t.short_messages(), 1, lambda *_: None) for t in transports]


@pytest.mark.parametrize("n_meta", [0, 1, 8, 100])
@pytest.mark.parametrize("n_body", [0, 1, 7, 8, 1000])
def test_a_message_of_frames_is_read_as_it_was_written(n_meta, n_body):
    meta, body = b"m" * n_meta, bytes(range(256)) * 4
    data = b"".join(
        packed(FrameHeader(FrameKind.PUSH, sequence=i), meta, body[:n_body]) for i in range(3)
    )
    read = list(frames(data))
    assert [f.header.sequence for f in read] == [0, 1, 2]
    for frame in read:
        assert frame.meta == meta
        assert bytes(frame.inline) == body[:n_body]
        assert np.frombuffer(frame.inline, np.uint8).ctypes.data % 8 == 0


@pytest.mark.parametrize("cut", [1, 8, HEADER_NBYTES - 1, HEADER_NBYTES + 4])
def test_a_message_that_is_cut_off_is_refused(cut):
    data = packed(FrameHeader(FrameKind.PUSH), b"meta", b"body of it")
    with pytest.raises(RingcommError, match="ends inside"):
        list(frames(data[:-cut]))


def test_the_meta_of_a_push_is_read_as_it_was_written():
    meta = PushMeta(2.5, 7, 11, "bfloat16", 3, np.array([0.1, 0.9]))
    read = PushMeta.of(meta.packed())
    assert read[:5] == meta[:5]
    np.testing.assert_array_equal(read.hyper, meta.hyper)
    for cut in (1, 9, 40):
        with pytest.raises(RingcommError, match="the meta of a push has"):
            PushMeta.of(meta.packed()[:-cut])


@pytest.mark.parametrize("nodes", [(0, 1), (0, 0)])
def test_frames_arrive_in_order_whatever_way_their_bodies_take(nodes):
    transports, (a, b) = links(nodes)
    sizes = [0, 10, INLINE_MAX, INLINE_MAX + 1, 3, 1 << 20, 0, SHORT_MESSAGE_MAX, 5]
    bodies = []
    for i, size in enumerate(sizes):
        body = np.empty(size, np.uint8)
        if transports[0].node is not None and size > INLINE_MAX:
            body = transports[0].node.empty(size)
        body[:] = i
        bodies.append(body)
        a.send(1, FrameHeader(FrameKind.PUSH, sequence=i), b"x" * i, body)
    came = []
    for _ in range(1000):
        a.poll()
        came += b.poll()
        if len(came) == len(sizes):
            break
    assert [d.header.sequence for d in came] == list(range(len(sizes)))
    for i, delivery in enumerate(came):
        assert delivery.source == 0
        assert delivery.meta == b"x" * i
        assert delivery.body.nbytes == sizes[i]
        assert (delivery.body == i).all()
    is_shared = came[5].header.where == Where.SHARED
    assert is_shared == (nodes[0] == nodes[1])
    a.poll()
    assert not a.is_busy
    assert not a.is_streaming
    assert not b.is_busy


def test_a_request_to_another_host_has_the_header_that_was_given():
    _, (a, b) = links((0, 1))
    a.ask(1, (FrameKind.PUSH, 3, 4, 5, 6, 7, 8, 9, 10), b"meta", np.arange(4, dtype=np.uint8))
    a.flush()
    (came,) = b.poll()
    given = FrameHeader(
        FrameKind.PUSH,
        view=3,
        origin=4,
        sequence=5,
        table=6,
        partition=7,
        clock=8,
        option=9,
        place=10,
    )
    assert came.header._replace(where=0, n_meta=0, n_body=0) == given
    assert (came.meta, came.body.tolist()) == (b"meta", [0, 1, 2, 3])


def test_a_link_is_streaming_while_a_long_body_is_under_way():
    _, (a, b) = links((0, 1))
    a.send(1, FrameHeader(FrameKind.PUSH), b"", np.ones(1 << 20, np.uint8))
    a.flush()
    assert a.is_streaming
    assert not b.is_streaming
    while not (came := b.poll()):
        a.poll()
    a.poll()
    assert len(came) == 1
    assert not a.is_streaming
    assert not b.is_streaming


class NoDeaths:
    def look(self):
        pass


def test_a_poll_that_moves_a_body_on_says_so(monkeypatch):
    """Else a rank would sleep for long behind it, just when there is more to do."""
    _, ends = links((0, 1))
    a, b = FrameDispatcher(), FrameDispatcher()
    for each, end in zip((a, b), ends, strict=True):
        each.link, each.deaths = end, NoDeaths()
    a.link.send(
        1, FrameHeader(FrameKind.NEWS, option=NewsOption.REPORT), b"", np.ones(1 << 20, np.uint8)
    )
    a.poll()
    with monkeypatch.context() as patched:
        patched.setattr(link, "is_over", lambda *_, **__: False)  # the body is late
        assert b.poll()
        assert not b.reports
        assert not b.poll()
    assert b.poll()
    assert len(b.reports) == 1
    assert a.poll()
    assert not a.poll()


def test_bodies_of_one_size_arrive_in_the_same_memory():
    _, (a, b) = links((0, 1))
    places = set()
    for k in range(5):
        a.send(1, FrameHeader(FrameKind.PUSH), b"", np.full(1 << 20, k, np.uint8))
        while not (came := b.poll()):
            a.poll()
        a.poll()
        (delivery,) = came
        assert (delivery.body == k).all()
        places.add(delivery.body.ctypes.data)
        del came, delivery
    assert len(places) == 1


def test_memory_is_given_again_once_no_array_has_it():
    memory = MemoryForBodies()
    first = memory.take(1 << 20)
    first[:] = 7
    place, piece = first.ctypes.data, first[1000:].view(np.float32)[5:]
    assert place % 64 == 0
    del first
    other = memory.take(1 << 20)
    other[:] = 1
    assert other.ctypes.data != place
    assert (piece.view(np.uint8) == 7).all()
    del piece
    assert memory.take(1 << 20).ctypes.data == place
    assert memory.take((1 << 20) + 64).ctypes.data not in (place, other.ctypes.data)


def test_memory_that_nobody_uses_is_bounded():
    memory = MemoryForBodies()
    for size in (KEPT_NBYTES // 4, KEPT_NBYTES // 4 + 64):
        taken = [memory.take(size) for _ in range(5)]
        del taken
        assert memory._nbytes <= KEPT_NBYTES
        assert memory._nbytes == sum(k * len(free) for k, free in memory._free.items())
    assert memory._nbytes > KEPT_NBYTES // 2
    memory.take(KEPT_NBYTES + 1)
    assert memory._nbytes <= KEPT_NBYTES


def test_memory_is_bounded_while_all_of_the_oldest_size_is_in_use():
    memory = MemoryForBodies()
    memory.take(1 << 20)
    in_use = memory.take(1 << 20)
    taken = [memory.take(KEPT_NBYTES // 4) for _ in range(6)]
    del taken
    assert memory._nbytes == KEPT_NBYTES
    assert memory._nbytes == sum(k * len(free) for k, free in memory._free.items())
    del in_use
    assert memory._nbytes <= KEPT_NBYTES


@pytest.mark.parametrize("has_kept", [False, True])
@pytest.mark.parametrize("is_taking", [False, True])
def test_memory_that_ends_in_the_midst_of_a_call_is_kept_once(is_taking, has_kept):
    for at in range(12):  # calls of C functions, after each of which the collector may run
        memory = MemoryForBodies()
        taken = [memory.take(1 << 20) for _ in range(5)]
        if has_kept:
            taken.pop()
        ending = [taken.pop()]
        left = at

        def end(_frame, event, _called, ending=ending):
            nonlocal left
            left -= event == "c_return"
            if left < 0:
                ending.clear()

        last = [] if is_taking else [taken.pop()]
        sys.setprofile(end)
        try:
            if is_taking:
                taken.append(memory.take(1 << 20))
            last.clear()
        finally:
            sys.setprofile(None)
        ending.clear()
        assert memory._nbytes == sum(k * len(free) for k, free in memory._free.items())
        taken += [memory.take(1 << 20) for _ in range(3)]
        places = {each.ctypes.data for each in taken}
        assert len(places) == len(taken)  # none was given twice
        assert memory._nbytes == 0


def test_small_frames_share_a_message():
    _, (a, b) = links((0, 1))
    for i in range(100):
        a.send(1, FrameHeader(FrameKind.TICK, sequence=i))
    a.flush()
    assert len(b._short_messages.collect()) <= 1 + 100 * HEADER_NBYTES // SHORT_MESSAGE_MAX


@pytest.mark.parametrize("nodes", [(0, 1), (0, 0)])
@pytest.mark.parametrize("n_body", [0, 100, INLINE_MAX + 1])
@pytest.mark.parametrize(
    "n_meta", [SHORT_MESSAGE_MAX - HEADER_NBYTES + 1, 3 * SHORT_MESSAGE_MAX, 200_001]
)
def test_a_meta_of_any_length_arrives_and_nothing_overtakes_it(n_meta, n_body, nodes):
    rng = np.random.default_rng(n_meta + n_body)
    meta, body = rng.bytes(n_meta), rng.integers(0, 256, n_body, np.uint8)
    hub = LoopbackHub(2, nodes)
    came = [[], []]

    def talk(rank):
        transport = hub.transport(rank)
        pipes = Pipes(transport, range(2))
        places[rank] = pipes.places
        both.wait(60)
        pipes.connect(places, goes_on_alone=False, looks=1)
        link = Link(transport, transport.short_messages(), 1, lambda *_: None, pipes)
        both.wait(60)
        other = 1 - rank
        for i in range(3):
            link.send(other, FrameHeader(FrameKind.PULL, sequence=i))
            link.send(other, FrameHeader(FrameKind.ASK, sequence=i), meta, body)
        is_over = lambda: len(came[rank]) == 6 and not link.is_busy  # noqa: E731
        wait_until(lambda: came[rank].extend(link.poll()) or is_over(), "frames are missing")
        both.wait(60)
        transport.close(is_clean=True)

    places, both = [None, None], threading.Barrier(2)
    threads = [threading.Thread(target=talk, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for deliveries in came:
        kinds = [(d.header.kind, d.header.sequence) for d in deliveries]
        assert kinds == [(kind, i) for i in range(3) for kind in (FrameKind.PULL, FrameKind.ASK)]
        for each in deliveries[1::2]:
            assert each.meta == meta
            assert each.body.tobytes() == body.tobytes()


def test_a_frame_of_which_a_piece_is_missing_is_refused():
    frame = packed(FrameHeader(FrameKind.ASK), b"m" * 1000)
    joiner = Joiner()
    first, _, third = [next(frames(each)) for each in pieces(frame, 7, 512)]
    assert joiner.add(3, first) is None
    with pytest.raises(RingcommError, match=r"1064 bytes from rank 3 came 448 bytes.* from 896 on"):
        joiner.add(3, third)


def test_pieces_of_two_senders_are_not_mixed_up():
    whole = [packed(FrameHeader(FrameKind.ASK, sequence=k), bytes([k]) * 1000) for k in range(2)]
    joiner, came = Joiner(), {}
    for parts in zip(*(pieces(each, 7, 512) for each in whole), strict=True):
        for source, piece in enumerate(parts):
            came[source] = joiner.add(source, next(frames(piece)))
    assert [came[k].meta for k in range(2)] == [bytes([k]) * 1000 for k in range(2)]


def test_a_message_that_is_too_long_is_refused_where_it_is_sent():
    hub = LoopbackHub(2)
    with pytest.raises(RingcommError, match="message of 16385 bytes to rank 1; 16384 are the most"):
        hub.transport(0).short_messages().send(1, bytes(SHORT_MESSAGE_MAX + 1))


def test_meta_that_fills_a_message_has_no_room_for_a_body():
    _, (a, b) = links((0, 1))
    meta = b"m" * (SHORT_MESSAGE_MAX - HEADER_NBYTES)
    a.send(1, FrameHeader(FrameKind.ASK), meta)
    a.poll()
    assert b.poll()[0].meta == meta


# --- in a job -----------------------------------------------------------------------------------
@pytest.mark.usefixtures("wire")
def test_a_table_of_thousands_of_segments_opens_and_learns():
    n = 3000

    def body(rank):
        t = ps.table(
            "w", 20 * n, updater=ps.optim.SGD(1.0), mode="sync", segments=range(0, 20 * n, 20)
        )
        t.push(-np.ones(20 * n, np.float32), absent=range(0, n, 2)).wait()
        return t.pull().wait().sum()

    assert run_workers(2, body) == [20 * n / 2] * 2


@pytest.mark.usefixtures("wire")
def test_a_job_goes_on_as_ever_however_short_messages_are(monkeypatch, tmp_path):
    """Whatever grows with tables, partitions, ranks or segments is longer than these."""
    for each in (link, unannounced_messages):
        monkeypatch.setattr(each, "SHORT_MESSAGE_MAX", 128)

    def body(rank):
        tables = [ps.table(f"t{k}", 20, mode="sync", block_nbytes=16) for k in range(20)]
        kv = ps.hashtable("emb", 2, updater=ps.optim.SGD(1.0))
        for push in [t.push(np.ones(20, np.float32)) for t in tables]:
            assert push.wait().applied
        kv.push(np.arange(100), -np.ones((100, 2), np.float32)).wait()
        with ps.snapshot():
            pulled = np.array([t.pull().wait() for t in tables])
            rows = kv.pull(np.arange(100)).wait()
        if ps.is_chief():
            ps.save(tmp_path).wait()
            ps.rebalance().wait()
            ps.restore(tmp_path)
            ps.stats()
        with pytest.raises(ValueError, match="shape"):
            tables[0].push(np.ones(21, np.float32))
        ps.complete_step()
        return np.ptp(pulled), rows.min()

    results = run_workers(2, body, 2, deadline_s=30)
    assert [ptp for ptp, _ in results] == [0.0, 0.0]
    assert min(row for _, row in results) >= 1.0


def test_a_body_leaves_once_it_is_filled():
    _, (a, b) = links((0, 1))
    body, filled = np.zeros(1 << 20, np.uint8), []
    a.send(1, FrameHeader(FrameKind.PUSH), b"", body, is_filled=lambda: bool(filled))
    a.send(1, FrameHeader(FrameKind.TICK))
    for _ in range(20):
        a.poll()
        assert not b.poll()
    assert a.is_busy
    body[:] = 3
    filled.append(True)
    came = []
    while len(came) < 2:
        a.poll()
        came += b.poll()
    assert [each.header.kind for each in came] == [FrameKind.PUSH, FrameKind.TICK]
    assert (came[0].body == 3).all()
