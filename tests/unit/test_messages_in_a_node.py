"""What C++ does with messages between ranks of a node: csrc/shm/messages.hpp."""

import numpy as np
import pytest
from sample_values import whole_numbers

from ringcomm._core import Correspondence, NodeMemory, NodeMessages

GROUP, ROOM, LONG = 7, 256 << 10, 1 << 20  # bytes of a pipe, and of a message that is offered


@pytest.fixture(params=[True, False], ids=["read", "pieces"])
def pair(request):
    """Return the messages of two ranks, which share their memories."""
    memories = {rank: NodeMemory.create(rank + 1, 64 << 20) for rank in range(2)}
    return [
        NodeMessages(rank, memories, is_crowded=True, may_read=request.param) for rank in range(2)
    ]


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
    begun.advance()
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


@pytest.mark.parametrize(("nbytes", "is_over"), [(16 << 10, True), ((16 << 10) + 1, False)])
def test_an_array_that_may_be_changed_is_not_looked_at_any_more(pair, nbytes, is_over):
    x, out = np.full(nbytes, 7, np.uint8), np.zeros(nbytes, np.uint8)
    sent = letters(pair[0], 1, nbytes).send(x, 0, 0.0)
    assert (sent is True) == is_over
    x[:] = 1
    rest = letters(pair[1], 0, nbytes).receive(out, 0, 0.0)
    while not is_over and not rest.is_over:
        sent.advance()
        rest.advance()
    assert (out == (7 if is_over else 1)).all()


def test_a_receive_is_withdrawn_only_before_a_message_has_come(pair):
    out = np.zeros(4, np.uint8)
    first, second = (letters(pair[1], 0, 4).receive(out, 0, 0.0) for _ in range(2))
    assert first.withdraw()
    assert letters(pair[0], 1, 4).send(np.arange(4, dtype=np.uint8), 0, 0.0) is True
    second.advance()
    assert second.is_over
    assert second.source == 0
    assert not second.withdraw()
    assert out.tolist() == [0, 1, 2, 3]


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
