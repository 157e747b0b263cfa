"""What goes wrong with messages: deaths, late ranks, deadlines; ranks as threads."""

import contextlib
import threading
import time

import numpy as np
import pytest
from harness import DEADLINE_S, listen, outcomes, run_ranks, wait_until

import ringcomm as rc
from ringcomm.config import Settings
from ringcomm.engine.api.init_rank_size import engine

SHORT, LONG = 8, 1 << 17  # doubles
pytestmark = pytest.mark.usefixtures("wire")


def array(count, value=0.0, *, is_registered=False):
    x = rc.empty(count, np.float64) if is_registered else np.empty(count)
    x[:] = value
    return x


# What rank 0 does with rank 1, which will not answer.
CALLS = {
    "recv, short": lambda: rc.recv(array(SHORT), 1),
    "recv, long": lambda: rc.recv(array(LONG), 1),
    "recv, registered": lambda: rc.recv(array(LONG, is_registered=True), 1),
    "recv from anyone": lambda: rc.recv(array(SHORT), rc.ANY_SOURCE),
    "send, long": lambda: rc.send(array(LONG), 1),
    "send, registered": lambda: rc.send(array(LONG, is_registered=True), 1),
    "sendrecv, short": lambda: rc.sendrecv(array(SHORT), 1, array(SHORT), 1),
    "sendrecv, long": lambda: rc.sendrecv(array(LONG), 1, array(LONG), 1),
    "sendrecv with two ranks": lambda: rc.sendrecv(array(LONG), 2, array(LONG), 1),
    "irecv": lambda: rc.irecv(array(LONG), 1).wait(),
    "isend": lambda: rc.isend(array(LONG), 1).wait(),
    "in a group": lambda: rc.recv(array(LONG), 0, group=engine().group_of_test),
}


def begin():
    engine().group_of_test = rc.Group([1, 0])


def when_waiting(event):
    """Set an event as soon as this rank has nothing to do but wait."""
    progress = engine().progress
    park = progress._park

    def parked(*args, **kwargs):
        event.set()
        return park(*args, **kwargs)

    progress._park = parked


@pytest.mark.parametrize("when", ["before", "in"])
@pytest.mark.parametrize("call", CALLS)
def test_a_death_ends_the_message_with_the_dead_rank(call, when):
    waits, is_over = threading.Event(), threading.Event()

    def body(rank):
        if rank < 2:
            begin()
        if rank == 1:
            assert when == "before" or waits.wait(DEADLINE_S)
            raise ValueError("boom")
        if rank == 2:  # which lives, and receives
            if "two ranks" in call and when == "in":
                rc.recv(array(LONG), 0)
            assert is_over.wait(DEADLINE_S)
            return None
        if when == "before":
            listen(lambda: engine().watch.peers.has_lost)
        else:
            when_waiting(waits)
        try:
            with pytest.raises(rc.PeerFailedError, match="ValueError: boom") as caught:
                CALLS[call]()
        finally:
            is_over.set()
        return caught.value.rank

    assert outcomes(3, body)[0] == 1


@pytest.mark.parametrize("count", [SHORT, LONG])
def test_what_is_sent_to_the_dead_is_no_success(count):
    def body(rank):
        x = array(count)
        for _ in range(3):  # C++ knows how to send it
            rc.send(x, 1) if rank == 0 else rc.recv(x, 0)
        if rank == 1:
            raise ValueError("boom")
        listen(lambda: engine().watch.peers.has_lost)
        for call in (rc.send, lambda x, to: rc.sendrecv(x, to, array(count), to)):
            with pytest.raises(rc.PeerFailedError, match="ValueError: boom"):
                call(x, 1)
        return "told"

    assert outcomes(2, body)[0] == "told"


@pytest.mark.parametrize("read_memory", [0, 1])
@pytest.mark.parametrize("is_registered", [False, True])
@pytest.mark.parametrize("count", [SHORT, LONG])
def test_of_the_dead_what_had_come_is_received_and_the_rest_fails(
    count, is_registered, read_memory
):
    """A short message is in shared memory; a long one comes whole or not at all."""
    sent = threading.Event()

    def body(rank):
        if rank == 1:
            letter = rc.isend(array(count, 7, is_registered=is_registered), 0)
            sent.set()
            assert letter.done() == (count == SHORT)
            raise ValueError("boom")
        assert sent.wait(DEADLINE_S)
        listen(lambda: engine().watch.peers.has_lost)
        out = array(count)
        with (
            contextlib.nullcontext() if count == SHORT else contextlib.suppress(rc.PeerFailedError)
        ):
            assert rc.recv(out, 1) == 1
            assert (out == 7).all()
        with pytest.raises(rc.PeerFailedError, match="ValueError: boom"):
            rc.recv(out, 1)
        return "told"

    assert outcomes(2, body, settings=patient(read_memory))[0] == "told"


def patient(read_memory):
    return Settings(timeout_s=DEADLINE_S, read_memory=read_memory)


# In the others rank 1 would receive, late, a message that has come.
UNANSWERED = [call for call in CALLS if call not in ("recv from anyone", "sendrecv, short")]


@pytest.mark.parametrize("call", UNANSWERED)
def test_a_message_that_nobody_answers_ends_by_the_deadline_and_the_late_rank_is_told(call):
    is_over = threading.Event()

    def body(rank):
        if rank == 2:
            if "two ranks" in call:
                rc.recv(array(LONG), 0)
            assert is_over.wait(DEADLINE_S)
            return None
        begin()
        if rank == 1:
            assert is_over.wait(DEADLINE_S)
            out = array(LONG, 5)
            with pytest.raises(rc.CommTimeoutError):
                rc.recv(out, 0)
            return (out == 5).all()  # no rank writes there, or reads where it must not any more
        start = time.monotonic()
        with pytest.raises(rc.CommTimeoutError, match=r"for rank 1, which did not") as caught:
            CALLS[call]()
        assert time.monotonic() - start < 60
        assert caught.value.missing == (1,)
        is_over.set()
        with pytest.raises(rc.CommTimeoutError, match="cannot be used any more"):
            rc.send(array(SHORT), 2)
        return None

    settings = Settings(timeout_s=0.15)
    assert outcomes(3, body, settings=settings)[1]


@pytest.mark.parametrize("read_memory", [0, 1])
@pytest.mark.parametrize("late", ["sender", "receiver"])
def test_a_late_rank_is_named_once_and_its_message_comes(late, read_memory, caplog):
    def body(rank):
        if (rank == 1) == (late == "sender"):
            wait_until(lambda: "has waited" in caplog.text, "nobody warns")
        if rank == 1:
            return rc.send(array(LONG, 7), 0, tag=3)
        out = array(LONG)
        assert rc.recv(out, 1, tag=3) == 1
        return (out == 7).all()

    settings = Settings(timeout_s=DEADLINE_S, stall_warning_s=0.2, read_memory=read_memory)
    assert run_ranks(2, body, settings=settings)[0]
    (text,) = (text for text in caplog.messages if "has waited" in text)
    waiter, waited_for = (0, 1) if late == "sender" else (1, 0)
    assert f"rank {waiter} has waited" in text
    assert f"for rank {waited_for}, which did not" in text


@pytest.mark.parametrize("source", [1, rc.ANY_SOURCE])
@pytest.mark.parametrize("count", [SHORT, LONG])
def test_one_half_of_a_sendrecv_that_does_not_fit_is_told_to_both_and_the_other_comes(
    count, source
):
    def body(rank):
        x, out = array(count, 7), array(count + (rank == 0), 5)
        if rank == 0:
            with pytest.raises(rc.MismatchError, match=rf"rank 1 sent .*\({count},\), rank 0 rec"):
                rc.sendrecv(x, 1, out, source)
        else:
            with pytest.raises(rc.MismatchError, match=rf"rank 1 sent .*\({count},\), rank 0 rec"):
                hear(lambda: rc.sendrecv(x, 0, out, 0))
        assert (out == (5 if rank == 0 else 7)).all()
        rc.barrier()

    def hear(call):
        call()
        rc.recv(array(1), 0, tag=9)  # of a short message it hears in its next call

    run_ranks(2, body)
