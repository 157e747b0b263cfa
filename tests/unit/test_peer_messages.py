"""What C++ does with messages between two ranks: csrc/p2p/peer_messages.hpp."""

import numpy as np
import pytest
from sample_values import whole_numbers

from ringcomm._core import Correspondence, LoopbackHub, NodeMemory, PeerMessages

GROUP, ROOM, LONG = 7, 256 << 10, 1 << 20  # bytes of a pipe, and of a message that is offered
PIPE, FIRST, STRIDE, N_TAGS = 1, 2, 1, 100  # tags
WHOLE_IN_NODE = 16 << 10


def ranks_of(nodes, *, may_read=True):
    """Return the messages of ranks on these nodes, and the hub between the nodes."""
    hub, size = LoopbackHub(len(nodes)), len(nodes)
    memories = {rank: NodeMemory.create(rank + 1, 64 << 20) for rank in range(size)}
    found = []
    for rank, node in enumerate(nodes):
        mates = {r: memories[r] for r in range(size) if nodes[r] == node}
        mates = mates if len(mates) > 1 else {}
        others = {r: r for r in range(size) if r not in mates and r != rank}
        tags = (PIPE, FIRST, STRIDE, N_TAGS)
        found.append(PeerMessages(rank, mates, True, may_read, hub.runner(rank), others, tags))
    return found, hub


@pytest.fixture(params=["read", "pieces", "wire"])
def pair(request):
    """Return the messages of two ranks."""
    is_by_wire = request.param == "wire"
    return ranks_of([0, 1] if is_by_wire else [0, 0], may_read=request.param == "read")[0]


@pytest.fixture
def apart():
    """Return the messages of two ranks on nodes of their own."""
    return ranks_of([0, 1])[0]


def advance(*messages):
    """Let messages go on until none of them does."""
    for _ in range(10):
        for each in messages:
            if hasattr(each, "advance"):
                each.advance()


def letters(messages, rank, nbytes, outline=b"bytes"):
    return Correspondence(messages, rank, GROUP, outline, nbytes)


def test_a_receive_of_what_its_sender_has_given_up_fails(pair):
    x, out = whole_numbers(0, LONG, np.uint8), np.zeros(LONG, np.uint8)
    begun = letters(pair[1], 0, LONG).receive(out, 0, 0.0)
    sent = letters(pair[0], 1, LONG).send(x, 0, 0.0)
    begun.advance()
    assert not sent.is_over
    assert not begun.is_over
    del sent  # as after an interrupt
    advance(begun)
    assert "rank 0 has given this message up" in begun.fault


def test_short_messages_do_not_overtake_those_that_wait_for_room(pair):
    n, count = 16_000, 20
    assert n * count > ROOM
    to, source = letters(pair[0], 1, n), letters(pair[1], 0, n)
    xs = [np.full(n, i, np.uint8) for i in range(count)]  # kept while they wait
    waiting = [to.send(x, 0, 0.0) for x in xs]
    assert waiting[0] is True
    assert waiting[-1] is not True
    xs.append(np.full(1, count, np.uint8))
    assert letters(pair[0], 1, 1).send(xs[-1], 0, 0.0) is not True
    for i in range(count):
        out = np.zeros(n, np.uint8)
        assert source.receive(out, 0, 0.0) == 0
        assert (out == i).all()
        for each in waiting:
            if each is not True:
                each.advance()
    assert all(each is True or each.is_over for each in waiting)


@pytest.mark.parametrize("is_over", [True, False])
def test_an_array_that_may_be_changed_is_not_looked_at_any_more(request, pair, is_over):
    is_by_wire = "wire" in request.node.callspec.id
    nbytes = (pair[0].most_whole_by_wire if is_by_wire else WHOLE_IN_NODE) + (not is_over)
    x, out = np.full(nbytes, 7, np.uint8), np.zeros(nbytes, np.uint8)
    sent = letters(pair[0], 1, nbytes).send(x, 0, 0.0)
    assert (sent is True) == is_over
    x[:] = 1
    rest = letters(pair[1], 0, nbytes).receive(out, 0, 0.0)
    advance(sent, rest)
    assert (out == (7 if is_over else 1)).all()


def test_what_cannot_be_taken_as_it_is_has_not_begun(pair):
    to = letters(pair[0], 1, 8)
    assert to.send(np.zeros((8, 2), np.uint8)[:, 0], 0, 0.0) is None
    assert to.send(np.zeros(9, np.uint8), 0, 0.0) is None
    assert to.send(None, 0, 0.0) is None
    assert to.send(np.zeros(8, np.uint8), 0.5, 0.0) is None
    constant = np.zeros(8, np.uint8)
    constant.flags.writeable = False
    assert letters(pair[1], 0, 8).receive(constant, 0, 0.0) is None
    assert letters(pair[1], 0, 8).receive(np.zeros(8, np.uint8), 0, 0.0) is not True


def test_after_the_end_of_a_view_nothing_begins(pair):
    x, out = np.zeros(LONG, np.uint8), np.zeros(8, np.uint8)
    sent = letters(pair[0], 1, LONG).send(x, 0, 0.0)
    pair[0].retire()
    sent.advance()
    assert "have ended their work" in sent.fault
    with pytest.raises(RuntimeError, match="have ended their work"):
        letters(pair[0], 1, 8).receive(out, 0, 0.0)


# --- between nodes ---


def test_who_only_receives_says_what_it_has_taken_so_that_its_sender_goes_on(apart):
    n, count = 16_000, 100
    to, source = letters(apart[0], 1, n), letters(apart[1], 0, n)
    xs = [np.full(n, i, np.uint8) for i in range(count)]
    waiting = [to.send(x, 0, 0.0) for x in xs]
    assert sum(each is True for each in waiting) == ROOM // n
    for i in range(count):
        out = np.zeros(n, np.uint8)
        rest = source.receive(out, 0, 0.0)
        advance(*waiting, rest)
        assert (rest if rest == 0 else rest.source) == 0
        assert (out == i).all()


def test_what_is_taken_is_told_with_what_is_sent(apart):
    """So ranks that answer each other send no messages of the pipe's own, which would cost time."""
    x, out = np.zeros(40_000, np.uint8), np.zeros(40_000, np.uint8)
    for i in range(3 * ROOM // len(x)):
        for sender, receiver in ((0, 1), (1, 0)):
            assert letters(apart[sender], receiver, len(x)).send(x, i, 0.0) is True
            assert letters(apart[receiver], sender, len(x)).receive(out, i, 0.0) == sender


@pytest.mark.parametrize("was", ["on its way", "there, and nobody had asked for it", "wanted"])
def test_one_that_is_given_up_does_no_harm_to_the_next(apart, was):
    xs, outs = (
        [np.full(LONG, i, np.uint8) for i in (1, 2)],
        [np.zeros(LONG, np.uint8) for _ in "ab"],
    )
    to, source = letters(apart[0], 1, LONG), letters(apart[1], 0, LONG)
    sent = [to.send(x, 0, 0.0) for x in xs]
    received = [source.receive(out, 0, 0.0) for out in outs] if was == "wanted" else []
    del sent[0]
    if was.startswith("there"):
        assert len(apart[1].unasked(GROUP, 4)) == 2
    received = received or [source.receive(out, 0, 0.0) for out in outs]
    advance(*sent, *received)
    assert "rank 0 has given this message up" in received[0].fault
    assert sent[0].is_over
    assert received[1].is_over
    assert not received[1].fault
    assert (outs[1] == 2).all()


def test_a_receive_that_is_given_up_is_not_written_to_and_the_next_one_comes(apart):
    xs, outs = (
        [np.full(LONG, i, np.uint8) for i in (1, 2)],
        [np.zeros(LONG, np.uint8) for _ in "ab"],
    )
    to, source = letters(apart[0], 1, LONG), letters(apart[1], 0, LONG)
    sent = [to.send(x, 0, 0.0) for x in xs]
    received = [source.receive(out, 0, 0.0) for out in outs]
    del received[0]
    advance(*sent, *received)
    assert received[0].is_over
    assert (outs[0] == 0).all()
    assert (outs[1] == 2).all()


def test_from_any_rank_messages_come_from_both_sides_and_to_itself():
    (mine, mate, far), _ = ranks_of([0, 0, 2])
    for sender, other in ((far, 2), (mate, 1), (mine, 0)):
        for nbytes in (8, LONG):
            x, out = np.full(nbytes, other, np.uint8), np.full(nbytes, 9, np.uint8)
            rest = letters(mine, None, nbytes).receive(out, 0, 0.0)
            sent = letters(sender, 0, nbytes).send(x, 0, 0.0)
            advance(sent, rest)
            assert rest.is_over
            assert rest.source == other
            assert (out == other).all()


@pytest.mark.parametrize("nbytes", [8, LONG])
def test_a_rank_without_a_node_sends_to_itself(apart, nbytes):
    x, out = np.full(nbytes, 7, np.uint8), np.zeros(nbytes, np.uint8)
    rest = letters(apart[0], 0, nbytes).receive(out, 0, 0.0)
    sent = letters(apart[0], 0, nbytes).send(x, 0, 0.0)
    advance(rest, sent)
    assert rest.is_over
    assert sent is True or sent.is_over
    assert (out == 7).all()


@pytest.mark.parametrize("call", ["send", "receive", "both"])
def test_what_no_pipe_sends_ends_the_messages_with_that_rank_and_no_others(call):
    (mine, _, far), hub = ranks_of([0, 1, 2])
    wrong, x, out = np.zeros(3, np.uint8), np.zeros(LONG, np.uint8), np.zeros(LONG, np.uint8)
    begun = [] if call == "send" else [letters(mine, 1, LONG).receive(out, 0, 0.0)]
    begun += [] if call == "receive" else [letters(mine, 1, LONG).send(x, 0, 0.0)]
    others = letters(mine, 2, 8).receive(out[:8], 0, 0.0)
    stranger = hub.send(1, wrong, 0, PIPE)
    stranger.start()
    advance(*begun)
    assert all("another kind" in each.fault for each in begun)
    late = letters(mine, 1, 8).send(x[:8], 0, 0.0)
    advance(late)
    assert "another kind" in late.fault
    assert letters(far, 0, 8).send(x[:8], 0, 0.0) is True
    advance(others)
    assert others.is_over
    assert not others.fault


def test_after_the_wires_are_closed_messages_fail(apart):
    x = np.zeros(LONG, np.uint8)
    sent = letters(apart[0], 1, LONG).send(x, 0, 0.0)
    apart[0].close_wires(0.0)
    advance(sent)
    assert "the wire is closed" in sent.fault
