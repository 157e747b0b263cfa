"""Who is missing: a wait that takes long names the workers, what they do, and what helps."""

import logging
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from harness import DEADLINE_S
from ps_ranks_as_threads import deadline, run_workers

import ringcomm as rc
from ringcomm import ps
from ringcomm.config import Settings
from ringcomm.ps.client.client import Client
from ringcomm.ps.client.future import Future
from ringcomm.ps.client.request import NO_BODY, Request
from ringcomm.ps.client.request_order import CREDIT_NBYTES
from ringcomm.ps.client.waits import reasons_text
from ringcomm.ps.job import session
from ringcomm.ps.placement.partitions import Move
from ringcomm.ps.placement.rebalance import move_all
from ringcomm.ps.protocol.frame_meta import packed_owners
from ringcomm.ps.protocol.frames import FrameHeader, FrameKind, NewsOption, Status
from ringcomm.ps.protocol.link import Delivery

ONES = np.ones(4, np.float32)
SOON_S = 0.6  # a wait that explains itself, and not a look


def message_of(wait):
    """Return what the error says of a wait that ends within SOON_S."""
    with deadline(SOON_S), pytest.raises(rc.CommTimeoutError) as raised:
        wait()
    return str(raised.value)


def while_others(missing, waiting, *, n_workers=2, **options):
    """Run waiting() on worker 0 while the others do missing(is_over); return what it returns."""
    is_over = threading.Event()

    def body(rank):
        if rank:
            missing(is_over)
            return None
        try:
            return waiting()
        finally:
            is_over.set()

    return run_workers(n_workers, body, **options)[0]


def idle(is_over):
    """Be in no call of ringcomm, and look after it now and then."""
    client = session().client
    while not is_over.wait(0.01):
        client.listen()


def in_a_push(is_over):
    other = ps.table("other", 4, mode="sync")
    with deadline(60):
        future = other.push(ONES)
        while not is_over.is_set():
            try:
                future.wait(0.05)
            except rc.CommTimeoutError:
                continue


@pytest.mark.long
@pytest.mark.parametrize(
    ("missing", "doing"),
    [
        (idle, "worker 1 (rank 1 of the job) is in no call of ringcomm."),
        (lambda over: over.wait(60), "worker 1 (rank 1 of the job) does not answer: it computes"),
        (in_a_push, "worker 1 (rank 1 of the job) is in push[other]."),
    ],
)
def test_a_round_names_the_worker_that_is_missing_and_what_it_does(missing, doing):
    def absent(is_over):
        ps.table("w", 4, mode="sync")
        missing(is_over)

    def waiting():
        table = ps.table("w", 4, mode="sync")
        return message_of(table.push(ONES).wait)

    text = while_others(absent, waiting)
    assert text.startswith(f"push[w]: no answer within {SOON_S} s from server 0 (rank 2")
    assert "Round 1 of w waits for worker 1." in text
    assert doing in text.replace("Worker", "worker")
    assert "set_samples(0)" in text
    assert "rc.shutdown()" in text
    assert "deadline_s=" in text


def test_a_pull_behind_a_push_names_who_is_missing_too():
    def waiting():
        table = ps.table("w", 4, mode="sync")
        table.push(ONES)
        return message_of(table.pull().wait)

    text = while_others(lambda over: (ps.table("w", 4, mode="sync"), idle(over)), waiting)
    assert "Round 1 of w waits for worker 1." in text


def test_of_several_workers_those_that_came_are_not_named():
    def missing(is_over):
        table = ps.table("w", 4, mode="sync")
        if rc.rank() == 2:
            table.push(ONES)
        idle(is_over)

    def waiting():
        return message_of(ps.table("w", 4, mode="sync").push(ONES).wait)

    text = while_others(missing, waiting, n_workers=4)
    assert "Round 1 of w waits for workers 1, 3." in text
    assert "worker 2" not in text


def test_values_that_the_chief_has_not_sent():
    is_over = threading.Event()

    def body(rank):
        if rank == 0:  # the chief
            idle(is_over)
            return ps.table("w", 4, init=ONES).pull().wait().tolist()
        try:
            table = ps.table("w", 4, init=ONES)
            return message_of(lambda: table.push(ONES).wait())
        finally:
            is_over.set()

    text = run_workers(2, body)[1]
    assert "The first value of w waits for worker 0." in text


def test_a_bounded_read_names_who_is_behind():
    def missing(is_over):
        ps.table("w", 4, mode=ps.SSP(1))
        idle(is_over)

    def waiting():
        table = ps.table("w", 4, mode=ps.SSP(1))
        for _ in range(3):
            table.push(ONES).wait()
            ps.complete_step()
        return message_of(table.pull().wait)

    text = while_others(missing, waiting)
    assert "Step 2 of w waits for worker 1." in text


def test_rows_of_a_hash_table():
    keys = np.arange(3)

    def open_table():
        return ps.hashtable("rows", 2, mode="sync")

    def waiting():
        table = open_table()
        return message_of(lambda: table.push(keys, np.ones((3, 2), np.float32)).wait())

    text = while_others(lambda over: (open_table(), idle(over)), waiting, n_servers=2)
    assert "Round 1 of rows waits for worker 1." in text


@pytest.mark.parametrize("n", [1, 2])
def test_a_push_that_asks_to_be_among_the_first_k(n):
    """Its blocks hear that it is in its round, and have yet to say that the round is over."""

    def open_table():
        return ps.table("w", 40, mode=ps.FirstOf(2), block_nbytes=80)

    def waiting():
        table = open_table()
        pushes = [table.push(np.ones(40, np.float32)) for _ in range(n)]
        return message_of(pushes[-1].wait)

    text = while_others(lambda over: (open_table(), idle(over)), waiting, n_servers=2)
    assert f"no answer within {SOON_S} s from server 0 (rank 2), server 1 (rank 3" in text
    assert "Round 1, 1 of 2 in of w waits for worker 1." in text
    assert "Worker 1 (rank 1 of the job) is in no call of ringcomm." in text


def test_a_move_names_the_worker_that_is_within_a_snapshot():
    """Else it says that no worker is missing, and the server busy."""
    is_within = threading.Event()

    def missing(is_over):
        ps.table("w", 8, updater=ps.optim.SGD(1.0), block_nbytes=16)
        with ps.snapshot():
            is_within.set()
            idle(is_over)

    def waiting():
        t = ps.table("w", 8, updater=ps.optim.SGD(1.0), block_nbytes=16)
        assert is_within.wait(DEADLINE_S)
        moves = move_all(session(), [Move((t.number, 0), 0, 1), Move((t.number, 1), 1, 0)])
        return message_of(moves.wait)

    text = while_others(missing, waiting, n_servers=2)
    assert "A move waits for worker 1." in text
    assert "Nothing moves while it is within ps.snapshot()." in text


@pytest.mark.parametrize("kind", ["dense", "rows"])
def test_a_worker_that_was_late_hears_how_late_and_how_such_a_loop_ends(kind):
    """The others have made as many rounds of FirstOf(2) as steps, and wait for it elsewhere."""

    def opened():
        if kind == "dense":
            table = ps.table("w", 40, mode=ps.FirstOf(2), block_nbytes=80)
            return table, lambda: table.push(np.ones(40, np.float32)), table.pull
        rows, keys = ps.hashtable("w", 2, mode=ps.FirstOf(2)), np.arange(9)
        return rows, lambda: rows.push(keys, np.ones((9, 2), np.float32)), lambda: rows.pull(keys)

    def missing(is_over):
        _, push, pull = opened()
        for _ in range(3):
            assert push().wait().applied
            pull().wait()
        rc.barrier()
        idle(is_over)

    def waiting():
        table, push, pull = opened()
        rc.barrier()
        assert push().wait().why == "late"
        pull().wait()
        assert (table.n_rounds, table.n_missed) == (3, 3)
        return message_of(push().wait)

    text = while_others(missing, waiting, n_workers=3, n_servers=2)
    assert "Round 4, 1 of 2 in of w waits for workers 1, 2." in text
    assert "This worker was late: 3 of 3 rounds of w went by without it." in text
    for way in ("optimizer.n_rounds", "table.n_rounds", "ps.should_stop()"):
        assert way in text


def test_rows_of_several_tables_by_name_in_the_warning_and_in_the_error(caplog):
    caplog.set_level(logging.WARNING, "ringcomm")
    keys = np.arange(3)

    def open_tables():
        return [ps.hashtable(name, 2, mode="sync") for name in ("users", "items")]

    def waiting():
        tables = open_tables()
        for table in tables:
            table.push(keys, np.ones((3, 2), np.float32))
        return message_of(ps.pull_many([(table, keys) for table in tables]).wait)

    text = while_others(
        lambda over: (open_tables(), idle(over)), waiting,
        settings=Settings(timeout_s=DEADLINE_S, stall_warning_s=0.3),
    )  # fmt: skip
    (warning,) = [r.getMessage() for r in caplog.records if "pull" in r.getMessage()]
    for said in (warning, text):
        assert " s from server 0 (rank 2" in said
        assert "Round 1 of items, users waits for worker 1." in said


def test_a_worker_that_has_left_is_not_missing_but_rounds_go_on_without_it():
    def body(rank):
        table = ps.table("w", 4, mode="sync")
        if rank == 1:
            return True
        return table.push(ONES).wait().applied

    assert run_workers(2, body) == [True, True]


@pytest.mark.long
def test_a_warning_says_it_long_before_the_deadline(caplog):
    caplog.set_level(logging.WARNING, "ringcomm")

    def missing(is_over):
        table = ps.table("w", 4, mode="sync")
        client, end = session().client, time.monotonic() + 2.0
        while time.monotonic() < end:
            client.listen()
            time.sleep(0.01)  # it computes, and takes note of requests
        table.push(ONES).wait()

    def waiting():
        return ps.table("w", 4, mode="sync").push(ONES).wait().applied

    settings = Settings(timeout_s=DEADLINE_S, stall_warning_s=0.3)
    assert while_others(missing, waiting, settings=settings)
    (warning,) = [r.getMessage() for r in caplog.records if "push[w]" in r.getMessage()]
    assert warning.startswith("push[w]: no answer within 0.3 s from server 0")
    assert "Round 1 of w waits for worker 1." in warning


def test_a_short_look_asks_nobody(monkeypatch):
    from ringcomm.ps.client import waits

    def body(rank):
        table = ps.table("w", 4, mode="sync")
        future = table.push(ONES)
        if rank == 0:
            with monkeypatch.context() as patched:
                patched.setattr(waits, "ask_json", None)
                for _ in range(10):
                    with pytest.raises(rc.CommTimeoutError, match=r"no answer within 0.01 s"):
                        future.wait(0.01)
        rc.barrier()
        return True

    def late(rank):
        return body(rank) if rank == 0 else (time.sleep(0.5), body(rank))[1]

    assert run_workers(2, late) == [True, True]


def test_the_default_deadline_is_that_of_collectives():
    deadlines = run_workers(
        1, lambda _: session().client.deadline_s, deadline_s=None, settings=Settings(timeout_s=77)
    )
    assert deadlines == [77.0]


def test_the_text_is_short_whatever_is_missing():
    assert "no worker is missing" in reasons_text({}, {}, int)
    tables, ranks = {f"t{n}" for n in range(8)}, tuple(range(100))
    many = {(f"round {n}", ranks): tables for n in range(1, 6)}
    text = reasons_text(many, {3: "barrier"}, int)
    assert text.startswith("Round 1 of t0, t1, t2, and 5 more waits for workers 0, 1, 2,")
    assert "; and 1 more. Worker 0 (rank 0 of the job) does not answer" in text
    assert "worker 3 (rank 3 of the job) is in barrier" in text
    assert text.count("does not answer") == 15
    assert "; and 84 more. A worker without data" in text


# --- which servers are named --------------------------------------------------------------------
@pytest.fixture
def client():
    """Return a client of servers 0 and 1, of which the first has both slices of table 1."""
    link = SimpleNamespace(
        ask=lambda *_: None, send=lambda *_: None, waits_to_leave=False,
        shares_memory=lambda _: False, holds=lambda _: False,
    )  # fmt: skip
    layout = SimpleNamespace(
        rank_of=lambda server: server, servers=(0, 1), server_numbers=(0, 1), hosts={}, lost=set()
    )
    own = SimpleNamespace(
        job_rank=9,
        state=SimpleNamespace(require_usable=lambda: None),
        progress=SimpleNamespace(is_own_turn=True),  # waits for nothing
    )
    client = Client(own, link, layout, DEADLINE_S)
    client.add_table(1, [0, 0], {})
    return client


def pushed(client, *parts, nbytes=8):
    """Return the future of a push to slices of table 1."""
    body = np.zeros(nbytes, np.uint8)
    requests = [Request(FrameKind.PUSH, partition=(1, part), body=body) for part in parts]
    for each in requests:
        each.on_reply = lambda _: None
    future = Future(client, "push[w]", len(requests), lambda: None)
    client.send(requests, future, is_admitted=True)
    return future


def reply(client, future, part, **header):
    """Let a server answer the request of a future to a slice."""
    requests = client.requests.items()
    ((sequence, request),) = [
        (k, each) for k, each in requests if each.future is future and each.partition == (1, part)
    ]
    meta = header.pop("meta", b"")
    said = FrameHeader(FrameKind.REPLY, sequence=sequence, table=1, partition=part, **header)
    client.on_reply(Delivery(request.server, said, meta, NO_BODY))


def moved(client, part, epoch):
    header = FrameHeader(
        FrameKind.NEWS, option=NewsOption.MOVED, table=1, partition=part, clock=epoch
    )
    client.on_notice(Delivery(0, header, packed_owners(epoch, [1]), NO_BODY))


def test_a_server_that_has_answered_one_of_two_requests_is_named(client):
    future = pushed(client, 0, 1)
    reply(client, future, 0)
    assert {*future.unanswered()} == {0}
    reply(client, future, 1)
    assert {*future.unanswered()} == set()
    assert future.done()


def test_a_server_from_which_a_request_went_to_another_is_not_named(client):
    future = pushed(client, 0)
    reply(client, future, 0, status=Status.WRONG_VIEW, meta=packed_owners(1, [1]))
    assert {*future.unanswered()} == {1}


def test_the_server_of_now_is_named_for_what_waited_for_credit_during_a_move(client):
    first = pushed(client, 0, nbytes=CREDIT_NBYTES)
    second = pushed(client, 1, 0)
    assert {*second.unanswered()} == {0}
    moved(client, 1, 1)
    assert {*second.unanswered()} == {0, 1}
    moved(client, 0, 1)
    assert {*second.unanswered()} == {1}
    reply(client, first, 0)  # the others leave
    assert {*second.unanswered()} == {1}
    assert {*first.unanswered()} == set()


def test_of_tables_that_are_asked_together_each_names_its_servers(client):
    whole, own = pushed(client, 0), pushed(client, 1)
    own.carried_by = whole, {0}
    reply(client, own, 1)
    assert own.unanswered() == {0}
    reply(client, whole, 0)
    assert own.unanswered() == set()
