"""What every Transport promises; each body runs on all ranks at once."""

import time

import numpy as np
import pytest

from ringcomm._core import WireFault
from ringcomm.transport.base import ArrivedMessage

DEADLINE_S = 10


def finish(transport, *requests):
    deadline = time.monotonic() + DEADLINE_S
    pending = list(requests)
    while pending:
        pending = [r for r in pending if not r.test()]
        assert time.monotonic() < deadline, "message never arrived"
        transport.poll()
        transport.park(1e-4)


def sample(n, rank=0):
    return ((np.arange(n) + rank) % 251).astype(np.uint8)


def bytes_arrive_as_sent(t):
    left, right = (t.rank - 1) % t.size, (t.rank + 1) % t.size
    for n in (0, 1, 100, 1 << 20):
        out = np.empty(n, np.uint8)
        finish(t, t.irecv(out, left, 0), t.isend(sample(n, t.rank), right, 0))
        assert np.array_equal(out, sample(n, left))


def messages_of_one_tag_keep_their_order(t):
    left, right = (t.rank - 1) % t.size, (t.rank + 1) % t.size
    sends = [t.isend(np.full(8, i, np.uint8), right, 0) for i in range(50)]
    outs = [np.empty(8, np.uint8) for _ in range(50)]
    finish(t, *[t.irecv(out, left, 0) for out in outs], *sends)
    assert [int(out[0]) for out in outs] == list(range(50))


def tags_are_channels_of_their_own(t):
    left, right = (t.rank - 1) % t.size, (t.rank + 1) % t.size
    first, second = np.empty(4, np.uint8), np.empty(4, np.uint8)
    sends = [t.isend(np.full(4, tag, np.uint8), right, tag) for tag in (0, 1)]
    late = t.irecv(second, left, 1)
    finish(t, late)  # although tag 0 was sent before it
    finish(t, t.irecv(first, left, 0), *sends)
    assert (first[0], second[0]) == (0, 1)


def a_message_with_the_largest_tag_arrives(t):
    left, right = (t.rank - 1) % t.size, (t.rank + 1) % t.size
    out, tags = np.empty(8, np.uint8), t.tags
    last = tags.tag(tags.n_contexts - 1, tags.n_streams - 1, 3)
    finish(t, t.irecv(out, left, last), t.isend(sample(8, t.rank), right, last))
    assert np.array_equal(out, sample(8, left))


def a_message_of_another_size_is_a_fault(t):
    """Short ones here: MPI itself reports the long ones."""
    if t.rank == 0:
        finish_or_fault(t, t.isend(sample(10), 1, 0))
    elif t.rank == 1:
        request = t.irecv(np.empty(20, np.uint8), 0, 0)
        with pytest.raises(WireFault):
            finish(t, request)


def finish_or_fault(t, request):
    try:
        finish(t, request)
    except WireFault:
        return


def control_messages_arrive_beside_the_data(t):
    for dest in range(t.size):
        if dest != t.rank:
            t.control(dest, b"hello from %d" % t.rank)
    seen, deadline = {}, time.monotonic() + DEADLINE_S
    while len(seen) < t.size - 1:
        for event in t.poll():
            assert isinstance(event, ArrivedMessage)
            seen[event.source] = event.message
        t.park(1e-4)
        assert time.monotonic() < deadline
    assert seen == {r: b"hello from %d" % r for r in range(t.size) if r != t.rank}


def abandoned_receives_take_no_message(t):
    left, right = (t.rank - 1) % t.size, (t.rank + 1) % t.size
    forgotten, out = np.zeros(4, np.uint8), np.empty(4, np.uint8)
    t.abandon([t.irecv(forgotten, left, 0)])
    meet(t)
    finish(t, t.irecv(out, left, 0), t.isend(np.full(4, 7, np.uint8), right, 0))
    assert (out == 7).all()
    assert (forgotten == 0).all()


def meet(t):
    for shift in range(1, t.size):
        out = np.empty(1, np.uint8)
        dest, source = (t.rank + shift) % t.size, (t.rank - shift) % t.size
        finish(t, t.irecv(out, source, 2), t.isend(np.ones(1, np.uint8), dest, 2))


BODIES = [
    bytes_arrive_as_sent,
    messages_of_one_tag_keep_their_order,
    tags_are_channels_of_their_own,
    a_message_with_the_largest_tag_arrives,
    a_message_of_another_size_is_a_fault,
    control_messages_arrive_beside_the_data,
    abandoned_receives_take_no_message,
]
