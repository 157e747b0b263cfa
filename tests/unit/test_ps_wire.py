"""Frames and letters: in order whatever way their bodies take, and refused where they are cut."""

import numpy as np
import pytest

from ringcomm.errors import RingcommError
from ringcomm.ps.frames import HEADER_NBYTES, Header, Kind, Where, frames, packed
from ringcomm.ps.link import INLINE_MAX, Link
from ringcomm.ps.messages import PushMeta
from ringcomm.transport.loopback import LoopbackHub
from ringcomm.transport.mail import LETTER_MAX


def links(nodes):
    hub = LoopbackHub(len(nodes), nodes)
    transports = [hub.transport(rank) for rank in range(len(nodes))]
    return transports, [Link(t, t.mail(), 1, lambda *_: None) for t in transports]


@pytest.mark.parametrize("n_meta", [0, 1, 8, 100])
@pytest.mark.parametrize("n_body", [0, 1, 7, 8, 1000])
def test_a_letter_of_frames_is_read_as_it_was_written(n_meta, n_body):
    meta, body = b"m" * n_meta, bytes(range(256)) * 4
    letter = b"".join(packed(Header(Kind.PUSH, sequence=i), meta, body[:n_body]) for i in range(3))
    read = list(frames(letter))
    assert [f.header.sequence for f in read] == [0, 1, 2]
    for frame in read:
        assert frame.meta == meta
        assert bytes(frame.inline) == body[:n_body]
        assert np.frombuffer(frame.inline, np.uint8).ctypes.data % 8 == 0


@pytest.mark.parametrize("cut", [1, 8, HEADER_NBYTES - 1, HEADER_NBYTES + 4])
def test_a_letter_that_is_cut_off_is_refused(cut):
    letter = packed(Header(Kind.PUSH), b"meta", b"body of it")
    with pytest.raises(RingcommError, match="ends inside"):
        list(frames(letter[:-cut]))


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
    sizes = [0, 10, INLINE_MAX, INLINE_MAX + 1, 3, 1 << 20, 0, LETTER_MAX, 5]
    bodies = []
    for i, size in enumerate(sizes):
        body = np.empty(size, np.uint8)
        if transports[0].node is not None and size > INLINE_MAX:
            body = transports[0].node.empty(size)
        body[:] = i
        bodies.append(body)
        a.send(1, Header(Kind.PUSH, sequence=i), b"x" * i, body)
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
    assert not b.is_busy


def test_small_frames_share_a_letter():
    _, (a, b) = links((0, 1))
    for i in range(100):
        a.send(1, Header(Kind.TICK, sequence=i))
    a.flush()
    assert len(b._mail.collect()) <= 1 + 100 * HEADER_NBYTES // LETTER_MAX


def test_meta_that_fills_a_letter_has_no_room_for_a_body():
    _, (a, b) = links((0, 1))
    meta = b"m" * (LETTER_MAX - HEADER_NBYTES)
    a.send(1, Header(Kind.CREATE), meta)
    a.poll()
    assert b.poll()[0].meta == meta
