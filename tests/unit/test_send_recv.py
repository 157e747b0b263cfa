"""send(), recv(), sendrecv(), isend(), irecv(), wait_all()."""

import math
import threading
import time

import ml_dtypes
import numpy as np
import pytest
from harness import listen, outcomes, run_ranks
from loopback import LoopbackHub
from sample_values import whole_numbers

import ringcomm as rc
from ringcomm.config import Settings
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.core.current_engine import serve_thread
from ringcomm.engine.core.meet_and_leave import leave
from ringcomm.engine.executors.mail import how_long_messages_come

pytestmark = pytest.mark.usefixtures("wire")
LONG = 1 << 17  # doubles: more than goes through a pipe at once
MODERATE = 1 << 13  # doubles: more than goes through a pipe as a whole


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.complex128, np.bool_, "u8"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (1 << 18,)])
def test_what_is_sent_is_received(dtype, shape):
    def body(rank):
        x = whole_numbers(0, math.prod(shape), dtype).reshape(shape)
        if rank == 0:
            return rc.send(x, 1)
        out = np.zeros(shape, dtype)
        assert rc.recv(out, 0) == 0
        assert np.array_equal(out, x)
        return None

    run_ranks(2, body)


def test_strided_arrays_are_copied_on_both_sides():
    def body(rank):
        if rank == 0:
            return rc.send(np.arange(12.0).reshape(3, 4)[:, ::2], 1)
        out = np.zeros((3, 6))
        rc.recv(out[:, 1::3], 0)
        assert out[:, 1::3].tolist() == [[0, 2], [4, 6], [8, 10]]
        assert not out[:, 0::3].any()
        return None

    run_ranks(2, body)


def test_messages_of_one_tag_keep_their_order():
    def body(rank):
        if rank == 0:
            for i in range(5):
                rc.send(np.array([i]), 1, tag=7)
            return None
        out, seen = np.zeros(1, int), []
        for _ in range(5):
            rc.recv(out, 0, tag=7)
            seen.append(out.item())
        return seen

    assert run_ranks(2, body)[1] == [0, 1, 2, 3, 4]


def test_a_tag_takes_its_own_message_alone():
    def body(rank):
        mine = engine()
        if rank == 0:
            threads = [threading.Thread(target=send_as, args=(mine, tag)) for tag in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            return None
        out, seen = np.zeros(1, int), []
        for tag in (3, 1, 2, 0):
            rc.recv(out, 0, tag=tag)
            seen.append(out.item())
        return seen

    def send_as(mine, tag):
        with serve_thread(mine):
            rc.send(np.array([10 * tag]), 1, tag=tag)

    assert run_ranks(2, body)[1] == [30, 10, 20, 0]


def test_sends_that_wait_for_each_other_end_by_the_deadline():
    def body(rank):
        with pytest.raises(rc.CommTimeoutError, match=r"send\(dest=\d, tag=0\)"):
            rc.send(np.ones(LONG), 1 - rank)
        return True

    assert run_ranks(2, body, settings=Settings(timeout_s=0.2)) == [True, True]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_any_source_hears_everybody_once(size):
    def body(rank):
        if rank:
            return rc.send(np.array([10 * rank]), 0)
        out, seen = np.zeros(1, int), {}
        for _ in range(size - 1):
            source = rc.recv(out, rc.ANY_SOURCE)
            seen[source] = out.item()
        assert seen == {r: 10 * r for r in range(1, size)}
        return None

    run_ranks(size, body)


def test_a_named_source_is_not_served_by_another():
    sent = threading.Event()

    def body(rank):
        out = np.zeros(1, int)
        if rank == 0:
            assert rc.recv(out, 2) == 2
            first = out.item()
            assert rc.recv(out, 1) == 1
            return first, out.item()
        if rank == 2:
            assert sent.wait(60)
        else:
            sent.set()
        return rc.send(np.array([rank]), 0)

    assert run_ranks(3, body)[0] == (2, 1)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_sendrecv_shifts_a_ring_and_reaches_itself(size):
    def body(rank):
        out = np.zeros(1000)
        x = np.full(1000, float(rank))
        left = rc.sendrecv(x, (rank + 1) % size, out, (rank - 1) % size)
        assert left == (rank - 1) % size
        assert (out == left).all()
        assert rc.sendrecv(np.full(3, 1.0 + rank), rank, out[:3], rank) == rank
        assert (out[:3] == 1 + rank).all()

    run_ranks(size, body)


@pytest.mark.parametrize(
    "out",
    [np.zeros(LONG + 1), np.zeros((LONG, 1)), np.zeros(LONG, np.float32)],
    ids=["count", "shape", "dtype"],
)
def test_a_mismatch_is_the_same_error_on_both_sides_and_nothing_is_written(out):
    def body(rank):
        with pytest.raises(rc.MismatchError) as caught:
            rc.send(np.ones(LONG), 1, tag=3) if rank == 0 else rc.recv(out, 0, tag=3)
        assert not out.any()
        require_usable(rank)
        return str(caught.value)

    texts = run_ranks(2, body)
    assert texts[0] == texts[1]
    assert f"rank 0 sent float64 ({LONG},), rank 1 receives" in texts[0]


def require_usable(rank):
    fits = np.zeros(2)
    if rank == 0:
        rc.send(np.ones(2), 1)
    else:
        rc.recv(fits, 0)
        assert fits.all()


@pytest.mark.parametrize("how", ["send", "recv", "sendrecv", "isend", "irecv"])
def test_the_sender_of_a_short_message_hears_of_a_mismatch_in_its_next_call(how):
    heard = threading.Event()

    def body(rank):
        if rank == 1:
            with pytest.raises(rc.MismatchError, match=r"rank 0 sent float64 \(3,\), rank 1 rec"):
                rc.recv(np.zeros(4), 0, tag=9)
            heard.set()
        else:
            try:
                rc.send(np.ones(3), 1, tag=9)
                assert heard.wait(60)
                x = np.ones(1)
                calls = {"send": lambda: rc.send(x, 1), "recv": lambda: rc.recv(x, 1)}
                calls["sendrecv"] = lambda: rc.sendrecv(x, 1, np.ones(1), 1)
                calls["isend"] = lambda: rc.isend(x, 1)
                calls["irecv"] = lambda: rc.irecv(x, 1)
                calls[how]()
            except rc.MismatchError as error:
                text = str(error)
            assert "rank 0 sent float64 (3,), rank 1 receives float64 (4,)" in text
            assert "tag=9" in text
        require_usable(rank)

    run_ranks(2, body, settings=Settings(timeout_s=30))


def test_a_message_arrives_although_its_sender_has_left():
    gone = threading.Event()

    def body(rank):
        if rank == 1:
            sent = rc.isend(np.full(5, 7.0), 0)
            gone.set()
            sent.wait()
            return leave(engine(), "done")
        out = np.zeros(5)
        assert gone.wait(60)
        rc.recv(out, 1)
        leave(engine(), "done")
        return out.tolist()

    assert run_ranks(2, body)[0] == [7] * 5


def test_who_waits_for_another_tag_hears_what_has_come_instead():
    def body(rank):
        if rank == 0:
            for tag in (5, -1):
                rc.send(np.ones(3), 1, tag=tag)
            return leave(engine(), "called shutdown()")
        with pytest.raises(rc.PeerFailedError, match="called shutdown") as caught:
            rc.recv(np.ones(3), 0, tag=6)
        text = "float64 (3,) of rank 0 with tag=-1, float64 (3,) of rank 0 with tag=5."
        assert text in str(caught.value)
        raise caught.value

    assert isinstance(outcomes(2, body, hub=LoopbackHub(2, (0, 0)))[1], rc.PeerFailedError)


@pytest.mark.parametrize("read_memory", [0, 1])
@pytest.mark.parametrize("is_registered", [False, True])
def test_long_and_short_messages_come_in_the_order_of_their_tag(is_registered, read_memory):
    counts = [1, LONG, 5, 3 * LONG, LONG + 1, 2]

    def body(rank):
        if rank == 0:
            handles = []
            for tag in (0, 1):
                for i, n in enumerate(counts):
                    x = rc.empty(n, np.float64) if is_registered else np.empty(n)
                    x[:] = 10 * tag + i
                    handles.append(rc.isend(x, 1, tag=tag))
            for handle in handles:
                handle.wait()
            return
        for tag in (1, 0):
            for i, n in enumerate(counts):
                out = np.zeros(n)
                assert rc.recv(out, 0, tag=tag) == 0
                assert (out == 10 * tag + i).all()

    run_ranks(2, body, settings=Settings(read_memory=read_memory))


@pytest.mark.parametrize(("read_memory", "way"), [(0, "copied twice"), (1, "copied once")])
def test_the_setting_decides_how_long_messages_come_within_a_node(read_memory, way):
    settings = Settings(read_memory=read_memory)
    for nodes, told in (((0, 0), way), ((0, 1), "sent by MPI")):
        hub = LoopbackHub(2, nodes)
        found = run_ranks(2, lambda _: how_long_messages_come(), hub=hub, settings=settings)
        assert found == [told] * 2


def test_any_source_takes_from_this_node_and_from_others():
    n = 40

    def body(rank):
        out, seen = np.zeros(1, int), []
        if rank == 0:
            for _ in range(3 * n):
                source = rc.recv(out)
                seen.append((source, out.item()))
            for source in (1, 2, 3):
                assert [value for s, value in seen if s == source] == list(range(n))
            return
        for i in range(n):
            rc.send(np.array([i]), 0)

    run_ranks(4, body, hub=LoopbackHub(4, (0, 0, 2, 2)))


def test_ranks_are_those_of_the_group():
    def body(rank):
        group = rc.Group([2, 0]) if rank != 1 else None
        x, out = np.array([rank]), np.zeros(1, int)
        for source in (rc.ANY_SOURCE, 0):
            for _ in range(3):  # from the second one on, C++ knows what is to be received
                if rank == 2:
                    rc.send(x, 1, group=group)
                    assert rc.sendrecv(x, 1, out, 1, group=group) == 1
                elif rank == 0:
                    assert rc.recv(out, source, group=group) == 0
                    assert rc.sendrecv(x, 0, out, source, group=group) == 0
        return out.item()

    assert run_ranks(3, body) == [2, 0, 0]


def test_the_same_tag_in_another_group_is_another_message():
    def body(rank):
        mine, group = engine(), rc.Group([0, 1])
        if rank == 0:
            other = threading.Thread(target=send_in, args=(mine, group))
            other.start()
            rc.send(np.array([1]), 1)
            other.join(60)
            return None
        out = np.zeros(1, int)
        rc.recv(out, 0, group=group)
        first = out.item()
        rc.recv(out, 0)
        return first, out.item()

    def send_in(mine, group):
        with serve_thread(mine):
            rc.send(np.array([2]), 1, group=group)

    assert run_ranks(2, body)[1] == (2, 1)


def doubled():
    return np.lib.stride_tricks.as_strided(np.ones(4), (3, 2), (8, 8), writeable=True)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: rc.send(np.ones(1), 2), ValueError, "dest is 2; ranks are 0 to 1"),
        (lambda: rc.send(np.ones(1), -1), ValueError, "dest is -1"),
        (lambda: rc.send(np.ones(1), 0.5), TypeError, "dest must be a rank"),
        (lambda: rc.recv(np.ones(1), 5), ValueError, "source is 5"),
        (lambda: rc.recv([1.0], 1), TypeError, "cannot communicate"),
        (lambda: rc.recv(np.broadcast_to(np.ones(1), 3), 1), ValueError, "read-only"),
        (
            lambda: rc.recv(doubled(), 1),
            ValueError,
            r"overlap.* waits until another recv\(\) receives",
        ),
        (lambda: rc.send(np.ones(1), 1, tag="a"), TypeError, "tag must be an int"),
        (lambda: rc.send(np.array(["x"]), 1), TypeError, "dtype"),
        (lambda: rc.isend(np.ones(1), 2), ValueError, "dest is 2; ranks are 0 to 1"),
        (lambda: rc.isend(np.ones(1), 1, timeout_s=-1), ValueError, "timeout_s is -1; it must"),
        (lambda: rc.irecv(np.ones(1), "a"), TypeError, "source must be a rank"),
        (lambda: rc.wait_all([3]), TypeError, "handles must be of ringcomm.Handle, not 3"),
    ],
)
def test_bad_arguments_are_refused_at_once(call, error, message):
    def body(rank):
        if rank == 0:
            with pytest.raises(error, match=message):
                call()
        rc.barrier()

    run_ranks(2, body)


class Index:
    """An int to operator.index() alone: it equals nothing."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


@pytest.mark.parametrize("kind", [int, np.int64, Index])
def test_to_oneself_only_sendrecv_can_end(kind):
    def body(rank):
        with pytest.raises(ValueError, match="use sendrecv"):
            rc.send(np.ones(1), kind(rank))
        with pytest.raises(ValueError, match="use sendrecv"):
            rc.recv(np.ones(1), kind(rank))

    run_ranks(2, body)


@pytest.mark.parametrize(
    "call", [lambda: rc.send(np.ones(LONG), 1), lambda: rc.recv(np.ones(9), 1)]
)
def test_a_peer_that_died_or_left_is_an_error(call):
    def died(rank):
        if rank == 1:
            raise ValueError("boom")
        with pytest.raises(rc.PeerFailedError, match="boom"):
            call()
        return True

    def left(rank):
        if rank == 1:
            return leave(engine(), "called shutdown()")
        with pytest.raises(rc.PeerFailedError, match="called shutdown") as caught:
            call()
        raise caught.value

    assert outcomes(2, died)[0] is True
    assert isinstance(outcomes(2, left)[0], rc.PeerFailedError)


def test_any_source_fails_once_nobody_is_left():
    def body(rank):
        if rank:
            return leave(engine(), f"called shutdown() as rank {rank}")
        with pytest.raises(rc.PeerFailedError, match="called shutdown"):
            rc.recv(np.ones(1))
        raise ValueError("over")

    assert str(outcomes(3, body)[0]) == "over"


def test_any_source_is_served_while_somebody_is_left():
    has_heard = threading.Event()

    def body(rank):
        out = np.zeros(1)
        if rank == 0:
            listen(lambda: 1 in engine().watch.peers.left)
            has_heard.set()
            out[:] = rc.recv(out)
        elif rank == 2:
            assert has_heard.wait(60)
            time.sleep(0.1)  # not for synchronisation: time to give up too early
            rc.send(out, 0)
        leave(engine(), "done")
        return out.item()

    assert run_ranks(3, body) == [2.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "call", [lambda: rc.send(np.ones(LONG), 1), lambda: rc.recv(np.ones(9), 1)]
)
def test_a_peer_that_does_not_come_is_a_timeout_that_says_where_it_is(call):
    over = threading.Event()

    def body(rank):
        if rank == 1:
            with pytest.raises(rc.CommTimeoutError):
                rc.barrier()
            over.wait(60)
            return None
        with pytest.raises(rc.CommTimeoutError) as caught:
            call()
        over.set()
        return str(caught.value)

    text = run_ranks(2, body, settings=Settings(timeout_s=0.3))[0]
    assert "rank 1" in text


def test_large_messages_cross():
    """Both ranks send before they receive: sendrecv() does not depend on buffers."""

    def body(rank):
        out = np.zeros(1 << 20)
        rc.sendrecv(np.full(1 << 20, 1.0 + rank), 1 - rank, out, 1 - rank)
        return out[0], out[-1]

    assert run_ranks(2, body) == [(2.0, 2.0), (1.0, 1.0)]


def test_a_sendrecv_that_is_refused_leaves_no_receive_behind():
    def body(rank):
        old, new = np.zeros(3), np.zeros(3)
        if rank == 0:
            with pytest.raises(ValueError, match="dest is 9"):
                rc.sendrecv(np.ones(3), 9, old, 1)
            rc.recv(new, 1)
            return old.tolist(), new.tolist()
        return rc.send(np.ones(3), 0)

    assert run_ranks(2, body)[0] == ([0, 0, 0], [1, 1, 1])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_messages_pass_without_waiting(size, wire):
    def body(rank):
        x, out = np.full(5, rank), np.empty(5, int)
        sent = rc.isend(x, (rank + 1) % size)
        received = rc.irecv(out, rc.ANY_SOURCE)
        assert received.wait() == (rank - 1) % size
        sent.wait()
        return out[0]

    assert run_ranks(size, body) == [(rank - 1) % size for rank in range(size)]


LENGTHS = [1, MODERATE, LONG]


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_ranks_may_start_to_receive_and_then_to_send(size, n):
    def body(rank):
        left, right = (rank - 1) % size, (rank + 1) % size
        for turn in range(5):  # the first one prepares the others
            out, strided = np.zeros(n), np.zeros((n, 2))
            handles = [rc.irecv(out, left), rc.irecv(strided[:, 1], left, tag=1)]
            x = np.full(n, 10.0 * turn + rank)
            handles += [rc.isend(x, right, tag=1), rc.isend(x + 0.5, right)]
            assert rc.wait_all(handles) == [left, left, None, None]
            assert (out == 10 * turn + left + 0.5).all()
            assert (strided == [0, 10 * turn + left]).all()

    run_ranks(size, body)


def test_neither_messages_nor_receives_overtake():
    lengths = [*LENGTHS, 1, MODERATE, 2, LONG, 3]

    def body(rank):
        if rank == 0:
            handles = [rc.isend(np.full(n, float(i)), 1) for i, n in enumerate(lengths)]
            rc.send(np.array([-1.0]), 1)
            handles += [rc.isend(np.full(1, float(i)), 1) for i in range(4)]
            return rc.wait_all(handles)
        outs = [np.zeros(n) for n in lengths]
        handles = [rc.irecv(out, 0) for out in outs]
        last, rest = np.zeros(1), np.zeros(4)
        assert rc.recv(last, 0) == 0
        handles += [rc.irecv(rest[i : i + 1], source) for i, source in enumerate([0, -1, 0, -1])]
        assert rc.wait_all(reversed(handles)) == [0] * len(handles)
        assert [set(out.tolist()) for out in outs] == [{i} for i in range(len(lengths))]
        assert (last[0], rest.tolist()) == (-1, [0, 1, 2, 3])
        return None

    for _ in range(2):
        run_ranks(2, body)


@pytest.mark.parametrize("is_late", [False, True])
def test_what_has_come_is_received_at_once(is_late, wire):
    def body(rank):
        out = np.zeros(5)
        for _ in range(2):
            received = rc.irecv(out, 0) if rank and not is_late else None
            rc.barrier()
            if rank == 0:
                assert rc.isend(np.ones(5), 1).done() or wire != "node"
            rc.barrier()
            if rank == 1:
                received = received or rc.irecv(out, 0)
                assert received.done() or wire != "node"
                assert received.wait() == 0
            rc.barrier()

    run_ranks(2, body)


def test_results_come_in_the_order_of_the_handles_once_all_are_over():
    received = threading.Event()

    def body(rank):
        met = rc.barrier_async()
        if rank == 2:
            assert received.wait(60)
            rc.send(np.ones(3), 0, tag=2)
        elif rank == 1:
            rc.send(np.ones(3), 0, tag=1)
        else:
            outs = np.zeros((2, 3))
            late, soon = rc.irecv(outs[0], tag=2), rc.irecv(outs[1], tag=1)
            soon.when_done(received.set)
            assert rc.wait_all([late, met, soon]) == [2, None, 1]
            assert [each.done() for each in (late, soon)] == [True, True]
            assert outs.all()
        met.wait()

    run_ranks(3, body)


def test_wait_all_waits_for_all_and_raises_the_first_error():
    def body(rank):
        if rank == 1:
            for tag, n in ((1, LONG), (2, LONG + 1)):
                with pytest.raises(rc.MismatchError):
                    rc.send(np.ones(n), 0, tag=tag)
            time.sleep(0.1)  # not for synchronisation: time to give up too early
            rc.send(np.ones(3), 0, tag=3)
            return require_usable(rank)
        out, unfit = np.zeros(3), np.zeros(4)
        handles = [rc.irecv(unfit, 1, tag=1), rc.irecv(out, 1, tag=3), rc.irecv(unfit, 1, tag=2)]
        with pytest.raises(rc.MismatchError, match=rf"\({LONG},\)") as caught:
            rc.wait_all(handles)
        assert out.all()
        [note] = caught.value.__notes__
        assert "handle 2 failed, too" in note
        assert f"({LONG + 1},)" in note
        assert handles[1].wait() == 1
        assert not unfit.any()
        return require_usable(rank)

    run_ranks(2, body)


@pytest.mark.parametrize("n", LENGTHS)
def test_a_receive_that_has_begun_raises_what_recv_raises(n):
    begun = threading.Event()

    def mismatch(rank):
        if rank == 0:
            assert begun.wait(60)
            with pytest.raises(rc.MismatchError, match=r"rank 1 receives float64 \(\d+, 1\)"):
                hear_of_refusal(rc.isend(np.ones(n), 1))
            return require_usable(0)
        out = np.zeros((n, 1))
        received = rc.irecv(out, 0)
        begun.set()
        with pytest.raises(rc.MismatchError, match="rank 0 sent float64"):
            received.wait()
        assert not out.any()
        return require_usable(1)

    def hear_of_refusal(sent):
        sent.wait()
        rc.recv(np.ones(1), 1)  # a short message has gone before it is refused

    def dies(rank):
        if rank == 1:
            raise ValueError("boom")
        received = rc.irecv(np.zeros(n), 1)
        with pytest.raises(rc.PeerFailedError, match="boom"):
            received.wait()
        return True

    def leaves(rank):
        if rank == 1:
            return leave(engine(), "called shutdown()")
        with pytest.raises(rc.PeerFailedError, match="called shutdown") as caught:
            rc.irecv(np.zeros(n), 1).wait()
        raise caught.value

    run_ranks(2, mismatch)
    assert outcomes(2, dies)[0] is True
    assert isinstance(outcomes(2, leaves)[0], rc.PeerFailedError)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("timeout_s", [None, 0.2])
@pytest.mark.parametrize("is_send", [True, False])
def test_what_nobody_answers_ends_by_the_deadline(is_send, timeout_s, n):
    if is_send and n == 1:
        pytest.skip("a short message goes on its way")
    over = threading.Event()

    def body(rank):
        if rank == 1:
            return over.wait(60)
        call = rc.isend if is_send else rc.irecv
        handle = call(np.zeros(n), 1, timeout_s=timeout_s)
        with pytest.raises(rc.CommTimeoutError, match="is still under way"):
            handle.wait(timeout_s=0)
        with pytest.raises(rc.CommTimeoutError, match=r"(send|recv)\((dest|source)=1, tag=0\)"):
            handle.wait()
        over.set()
        with pytest.raises(rc.RingcommError):
            rc.barrier()
        raise ValueError("over")

    settings = Settings(timeout_s=0.2 if timeout_s is None else 60)
    assert str(outcomes(2, body, settings=settings)[0]) == "over"


@pytest.mark.parametrize("n", LENGTHS)
def test_a_receive_that_nobody_waits_for_is_served(n):
    served = threading.Event()

    def body(rank):
        if rank == 0:
            rc.send(np.ones(n), 1)
            rc.send(np.ones(n), 1, tag=1)
            assert served.wait(60)
            return
        out, dropped = np.zeros(n), np.zeros(n)
        received = rc.irecv(out, 0, tag=1)
        rc.irecv(dropped, 0)
        received.when_done(served.set)
        assert served.wait(60)
        assert out.all()
        assert dropped.all()

    run_ranks(2, body)


def test_a_sender_gets_room_although_the_receiver_waits_for_something_else():
    sent = threading.Event()
    many = 60  # messages: more than a pipe has room for

    def body(rank):
        x = np.ones(1 << 11)  # as much as goes through a pipe as a whole
        if rank == 0:
            handles = [rc.isend(x, 1, tag=1) for _ in range(many)]
            rc.send(np.ones(3), 1)
            sent.set()
            return rc.wait_all(handles)
        received = rc.irecv(np.zeros(3), 0)
        assert sent.wait(60)
        for _ in range(many):
            rc.recv(x, 0, tag=1)
        return received.wait()

    for _ in range(2):  # the first one prepares the others
        sent.clear()
        run_ranks(2, body)


def test_no_message_overtakes_those_that_wait_for_room():
    begun = threading.Event()
    lengths = [1 if i % 3 == 0 else 1 << 11 for i in range(100)]  # more than a pipe has room for

    def body(rank):
        if rank == 0:
            handles = [rc.isend(np.full(n, float(i)), 1) for i, n in enumerate(lengths)]
            begun.set()
            return rc.wait_all(handles)
        assert begun.wait(60)
        for i, n in enumerate(lengths):
            out = np.zeros(n)
            rc.recv(out, 0)
            assert np.unique(out).tolist() == [i]
        return None

    run_ranks(2, body)


def test_leaving_completes_what_was_started():
    def body(rank):
        out = np.zeros(MODERATE)
        handle = rc.isend(np.ones(MODERATE), 1) if rank == 0 else rc.irecv(out, 0)
        leave(engine(), "called shutdown()")
        return handle.wait(), out.all()

    assert run_ranks(2, body) == [(None, False), (0, True)]


@pytest.mark.parametrize("nobody", [rc.PROC_NULL, np.int64(rc.PROC_NULL)])
def test_nothing_comes_from_nobody_and_nothing_goes_there(nobody):
    def body(rank):
        for _ in range(2):  # the first messages prepare others
            out, x = np.full(3, 7.0), np.full(3, 10.0 + rank)
            rc.send(x, nobody)
            handles = [rc.isend(x, nobody), rc.irecv(out, nobody)]
            assert rc.wait_all(handles) == [None, rc.PROC_NULL]
            assert rc.recv(out, nobody) == rc.PROC_NULL
            assert rc.sendrecv(x, nobody, out, nobody) == rc.PROC_NULL
            assert (out == 7).all()
            dest, source = (1, nobody) if rank == 0 else (nobody, 0)
            assert rc.sendrecv(x, dest, out, source) == source
            assert (out == (10 if rank else 7)).all()
        return True

    run_ranks(2, body)
    assert rc.PROC_NULL < 0
    assert rc.PROC_NULL != rc.ANY_SOURCE


def test_messages_to_nobody_need_an_engine_that_works():
    def body(rank):
        leave(engine(), "called shutdown()")
        for call in (
            lambda: rc.send(np.ones(1), rc.PROC_NULL),
            lambda: rc.recv(np.ones(1), rc.PROC_NULL),
            lambda: rc.isend(np.ones(1), rc.PROC_NULL),
        ):
            with pytest.raises(rc.NotInitializedError):
                call()

    run_ranks(2, body)


THINGS = ["x", {"a": [1, None]}, "y" * 4070, "z" * 9000, np.arange(30_000)]


def alike(a, b):
    return type(a) is type(b) and np.array_equal(a, b)


@pytest.mark.parametrize("source", [0, rc.ANY_SOURCE])
def test_objects_arrive_in_their_order(source):
    def body(rank):
        if rank == 0:
            for thing in THINGS:
                rc.send_object(thing, 1, tag=3)
            return
        for thing in THINGS:
            found, sender = rc.recv_object(source, tag=3)
            assert alike(found, thing)
            assert sender == 0

    run_ranks(2, body)


def test_an_object_of_each_length_around_the_first_message_arrives():
    objects = [bytes(n) for n in range(4050, 4085)]

    def body(rank):
        if rank == 0:
            return [rc.send_object(each, 1) for each in objects]
        return [rc.recv_object(0)[0] for _ in objects]

    assert run_ranks(2, body)[1] == objects


def test_objects_go_by_their_tag_and_do_not_meet_arrays():
    def body(rank):
        out = np.zeros(4096, np.uint8)
        if rank == 0:
            threads = [
                threading.Thread(target=send_as, args=(engine(), tag, thing))
                for tag, thing in enumerate(THINGS)
            ]
            for each in threads:
                each.start()
            rc.send(out + 5, 1, tag=2)
            for each in threads:
                each.join(60)
            return
        found = {tag: rc.recv_object(0, tag=tag)[0] for tag in (4, 2, 0, 3, 1)}
        assert all(alike(found[tag], thing) for tag, thing in enumerate(THINGS))
        assert rc.recv(out, tag=2) == 0
        assert (out == 5).all()

    def send_as(mine, tag, thing):
        with serve_thread(mine):
            rc.send_object(thing, 1, tag=tag)

    run_ranks(2, body)


def test_threads_may_send_and_receive_objects_of_one_tag():
    n = 20

    def body(rank):
        found = []
        calls = [rc.recv_object, rc.recv_object] if rank == 0 else [rc.send_object]
        threads = [
            threading.Thread(target=go, args=(engine(), call, rank, found)) for call in calls
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join(60)
        return sorted(found)

    def go(mine, call, rank, found):
        with serve_thread(mine):
            for i in range(n):
                if call is rc.send_object:
                    call((rank, i, "x" * 9000, rank, i), 0)
                else:
                    (*head, _, sender, number), source = call()
                    assert head == [sender, number]
                    assert source == sender
                    found.append((sender, number))

    assert run_ranks(3, body)[0] == [(rank, i) for rank in (1, 2) for i in range(n)]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda _: rc.send_object(threading.Lock(), 1), TypeError, "send_object: obj cannot be"),
        (lambda _: rc.send_object(1, 2), ValueError, "dest is 2; ranks are 0 to 1"),
        (lambda _: rc.recv_object(0.5), TypeError, "source must be a rank"),
        (lambda _: rc.send_object(1, 1, tag="a"), TypeError, "tag must be an int"),
        (lambda rank: rc.send_object(1, rank), ValueError, "wait for ever$"),
        (rc.recv_object, ValueError, "wait for ever$"),
    ],
)
def test_bad_arguments_for_objects_are_refused_at_once(call, error, message):
    def body(rank):
        with pytest.raises(error, match=message):
            call(rank)
        assert rc.recv_object(rc.PROC_NULL) == (None, rc.PROC_NULL)
        rc.send_object(1, rc.PROC_NULL)
        rc.barrier()

    run_ranks(2, body)


def test_who_waits_for_an_object_in_vain_hears_what_has_come_instead():
    def body(rank):
        if rank == 0:
            rc.send(np.ones(3), 1)
            rc.send_object("x", 1, tag=4)
            return leave(engine(), "called shutdown()")
        with pytest.raises(rc.PeerFailedError, match=r"recv_object\(source=0, tag=7\)") as caught:
            rc.recv_object(0, tag=7)
        text = "float64 (3,) of rank 0 with tag=0, an object of rank 0 with tag=4."
        assert text in str(caught.value)
        raise caught.value

    assert isinstance(outcomes(2, body, hub=LoopbackHub(2, (0, 0)))[1], rc.PeerFailedError)
