"""What docs/promises.md promises and no other test would catch a liar at."""

import functools
import itertools
import random
import threading
import time
from collections import defaultdict

import numpy as np
import pytest
from ps_ranks_as_threads import deadline, run_workers

import ringcomm as rc
from ringcomm import ps
from ringcomm.ps.client.request import Request
from ringcomm.ps.job import session
from ringcomm.ps.protocol import link
from ringcomm.ps.protocol.frame_meta import PullMeta, PushMeta
from ringcomm.ps.protocol.frames import CallOption, FrameKind
from ringcomm.ps.server.server import Server

NOTHING = np.empty(0, np.uint8)
SMALL, LARGE = 10, 50_000  # elements: within a frame, and in memory or a message of their own
MODES = ["async", "sync", ps.SSP(1), ps.FirstOf(2)]


def ones(count, value=1.0):
    return np.full(count, value, np.float32)


@pytest.fixture
def late_bodies(monkeypatch):
    """Bodies that are messages leave a little after the frames that announce them."""
    test = link._Sending.test

    def test_later(later):
        due = later.__dict__.setdefault("due", time.monotonic() + 0.002)
        return time.monotonic() >= due and test(later)

    monkeypatch.setattr(link._Sending, "test", test_later)


# --- always -------------------------------------------------------------------------------------
@pytest.mark.usefixtures("wire", "late_bodies")
def test_pushes_of_a_worker_apply_in_issue_order():
    """The last of many that nobody waits for counts, though bodies take different ways."""

    def body(rank):
        t = ps.table("w", LARGE, updater=ps.optim.Assign(), block_nbytes=4 * LARGE)
        kv = ps.hashtable("emb", 2, updater=ps.optim.Assign())
        for k in range(1, 101):
            part = slice(0, LARGE if k % 3 else SMALL)
            few = range(1 if k % 3 else 5000)
            pushed = t.push(ones(part.stop, k), where=part), kv.push(few, ones((len(few), 2), k))
            if k % 10 == 0:
                for future in pushed:
                    future.wait()
                assert t.pull(where=slice(0, SMALL)).wait().tolist() == [k] * SMALL
                assert kv.pull(0).wait().tolist() == [k, k]
        return t.pull().wait()[-1]

    assert run_workers(1, body, 2) == [100.0]


@pytest.mark.usefixtures("wire", "late_bodies")
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_a_pull_has_all_own_pushes(count, mode):
    def body(rank):
        t = ps.table("w", count, updater=ps.optim.SGD(1.0), mode=mode, block_nbytes=4 * count)
        kv = ps.hashtable("emb", 1, updater=ps.optim.SGD(1.0), mode=mode)
        for k in range(1, 21):
            t.push(ones(count, -1))
            kv.push([rank, 7], ones((2, 1), -1))
            assert t.pull().wait().min() >= k  # rounds, or own pushes
            assert kv.pull(7).wait()[0] >= k
            ps.complete_step()
        return True

    assert run_workers(2, body, 2) == [True, True]


@pytest.mark.long
@pytest.mark.usefixtures("wire", "late_bodies")
@pytest.mark.parametrize("count", [50_000, 500_000])
def test_no_pull_sees_half_an_update_or_goes_back(count):
    """One pushes as fast as it can: what others pull meanwhile is of the version that it says."""
    n_pulls = [0, 0]

    def body(rank):
        t = ps.table("w", count, updater=ps.optim.Add(), block_nbytes=4 * count)
        gradient, out, before = ones(count), np.empty(count, np.float32), 0
        rc.barrier()
        while rank == 2 and min(n_pulls) < 50:
            t.push(gradient)
        while rank < 2 and n_pulls[rank] < 50:
            values = t.pull(out=out).wait()
            assert values.min() == values.max() == t.blocks.versions[0] >= before
            before = values[0]
            n_pulls[rank] += before > 0  # those before the first push do not count
        return before

    assert min(run_workers(3, body)[:2]) > 0


@pytest.mark.usefixtures("wire")
def test_a_pull_waits_for_the_push_before_it_however_long_that_is_under_way():
    def body(rank):
        t = ps.table("w", 10, updater=ps.optim.Add())
        t.pull().wait()
        wire, kept = session().client.link, []
        ask, wire.ask = wire.ask, lambda *request: kept.append(request)
        t.push(ones(10))
        pull = t.pull()
        assert not pull.done()
        wire.ask = ask
        for request in kept:
            ask(*request)
        return pull.wait().tolist()

    assert run_workers(1, body) == [[1.0] * 10]


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_a_push_that_comes_twice_is_applied_once(count, mode):
    def body(rank):
        t = ps.table("w", count, updater=ps.optim.SGD(1.0), mode=mode, block_nbytes=4 * count)
        wire = session().client.link
        ask = wire.ask

        def ask_twice(dest, header, meta, body):
            for _ in range(1 + (header[0] == FrameKind.PUSH)):
                ask(dest, header, meta, body)

        wire.ask = ask_twice
        for _ in range(5):
            t.push(ones(count, -1)).wait()
            t.pull().wait()
            ps.complete_step()
        wire.ask = ask
        rc.barrier()
        values = t.pull().wait()
        assert sum(each["pushes"] for each in ps.stats()) == 10
        return values.min(), values.max()

    expected = 5 if mode in ("sync", ps.FirstOf(2)) else 10
    assert run_workers(2, body) == [(expected, expected)] * 2


# --- rounds -------------------------------------------------------------------------------------
def test_a_round_has_the_same_bits_in_any_order_of_arrival():
    gradients = np.random.default_rng(0).standard_normal((6, 3, 999)).astype(np.float32)
    orders = list(itertools.permutations(range(3)))

    def body(rank):
        t = ps.table("w", 999, updater=ps.optim.Adam(0.1), mode="sync", init=1.0)
        u = ps.table("u", 999, updater=ps.optim.Adam(0.1), mode="sync", init=1.0)
        for order in orders:
            u.push(gradients[0, rank], weight=rank + 1)
            rc.barrier()
            for turn in order:
                if turn == rank:
                    future = t.push(gradients[0, rank], weight=rank + 1)
                    ps.stats()  # the push before it on the same wire has arrived
                rc.barrier()
            assert future.wait().applied
        return t.pull().wait().tobytes(), u.pull().wait().tobytes()

    assert len({bits for pair in run_workers(3, body) for bits in pair}) == 1


@pytest.mark.parametrize("n_servers", [1, 3])
@pytest.mark.parametrize("kind", ["dense", "rows"])
def test_what_first_of_applies_and_what_it_says_are_the_same(kind, n_servers):
    """Every push of 1, 2 or 4 is told to be applied, and is in the sum of each block, or late."""
    n_pushes, count = 20, 12

    def body(rank):
        updater, mode = ps.optim.SGD(1.0), ps.FirstOf(1)
        if kind == "dense":
            t = ps.table("w", count, updater=updater, mode=mode, block_nbytes=8)
            push, pull = t.push, t.pull
        else:
            kv = ps.hashtable("emb", 1, updater=updater, mode=mode)
            push = lambda x: kv.push(range(count), x.reshape(-1, 1))  # noqa: E731
            pull = lambda: kv.pull(range(count))  # noqa: E731
        rng, n_applied = random.Random(rank), 0
        for _ in range(n_pushes):
            future = push(ones(count, -(2**rank)))
            for _ in range(rng.randrange(3)):
                pull().wait()
            told = future.wait()
            assert (told.applied, told.why) in ((True, ""), (False, "late"))
            n_applied += told.applied
        rc.barrier()
        return n_applied * 2**rank, pull().wait().reshape(-1).tolist()

    results = run_workers(3, body, n_servers)
    assert [values for _, values in results] == [[sum(own for own, _ in results)] * count] * 3


# --- bounded staleness --------------------------------------------------------------------------
@pytest.mark.parametrize("n_servers", [1, 2])
@pytest.mark.parametrize("bound", [0, 1, 3])
def test_ssp_reads_are_never_staler_than_the_bound_and_reach_it(bound, n_servers):
    """Each worker adds to an element of its own: a read shows how far it is from the others."""
    n_workers, n_steps, lock = 3, 15, threading.Lock()
    clocks, leads = [0] * n_workers, []

    def step(t, rank, clock):
        values = t.pull().wait()
        with lock:
            leads.append(clock - min(clocks))
        assert values.min() >= clock - bound
        assert values[rank] == clock
        t.push(ones(1), where=slice(rank, rank + 1))
        with lock:
            clocks[rank] += 1  # before the servers hear of it: never less than they know
        assert ps.complete_step() == clock + 1

    def body(rank):
        updater = ps.optim.Add()
        t = ps.table("w", n_workers, updater=updater, mode=ps.SSP(bound), block_nbytes=4)
        rc.barrier()
        if rank == 0:  # the others stand still: it comes so far, and no further
            for clock in range(bound + 1):
                step(t, rank, clock)
            with pytest.raises(rc.CommTimeoutError, match="or waits for other workers"):
                t.pull().wait(0.1)
        rc.barrier()
        rng = random.Random(rank)
        for clock in range(clocks[rank], n_steps):
            for _ in range(rng.randrange(12) if clock % n_workers == rank else 0):
                ps.stats()  # each is slow in its turn
            step(t, rank, clock)
        return True

    assert run_workers(n_workers, body, n_servers) == [True] * n_workers
    assert max(leads) == bound


def test_a_worker_that_has_left_holds_up_nobody_under_ssp():
    def body(rank):
        t = ps.table("w", 4, updater=ps.optim.Add(), mode=ps.SSP(0))
        for _ in range(1 + 9 * rank):
            t.pull().wait()
            t.push(ones(4)).wait()
            ps.complete_step()
        session().leave()
        return True

    assert run_workers(2, body) == [True, True]


def test_steps_are_counted_and_do_not_go_back():
    def body(rank):
        assert ps.complete_step() == 1
        assert ps.complete_step(40) == 40
        assert ps.complete_step(40) == 40
        with pytest.raises(ValueError, match="step is 39, and this worker has completed 40"):
            ps.complete_step(39)
        return True

    assert run_workers(1, body) == [True]


# --- every wait ends ----------------------------------------------------------------------------
@pytest.fixture
def deaf(monkeypatch):
    """Set: servers take no notice of requests; what came meanwhile is carried out afterwards."""
    is_deaf, on_request, kept = threading.Event(), Server.on_request, defaultdict(list)

    def handle(server, delivery):
        mine = kept[server.index]  # each in its own thread
        mine.append(delivery)
        while mine and not is_deaf.is_set():
            on_request(server, mine.pop(0))

    monkeypatch.setattr(Server, "on_request", handle)
    return is_deaf


def snapshot():
    with ps.snapshot():
        pass


ROWS = ones((2, 2))
CALLS = {
    "table": lambda t, kv, path: ps.table("new", 4),
    "hashtable": lambda t, kv, path: ps.hashtable("new", 2),
    "Table.push": lambda t, kv, path: t.push(ones(4)).wait(),
    "Table.pull": lambda t, kv, path: t.pull().wait(),
    "Table.push_pull": lambda t, kv, path: t.push_pull(ones(4)).wait(),
    "HashTable.push": lambda t, kv, path: kv.push([1, 2], ROWS).wait(),
    "HashTable.pull": lambda t, kv, path: kv.pull([1, 2]).wait(),
    "HashTable.push_pull": lambda t, kv, path: kv.push_pull([1, 2], ROWS).wait(),
    "HashTable.erase": lambda t, kv, path: kv.erase([1, 2]).wait(),
    "HashTable.evict": lambda t, kv, path: kv.evict().wait(),
    "HashTable.n_rows": lambda t, kv, path: kv.n_rows().wait(),
    "HashTable.metadata": lambda t, kv, path: kv.metadata([1, 2]).wait(),
    "len": lambda t, kv, path: len(kv),
    "stats": lambda t, kv, path: ps.stats(),
    "snapshot": lambda t, kv, path: snapshot(),
    "rebalance": lambda t, kv, path: ps.rebalance().wait(),
    "save": lambda t, kv, path: ps.save(path),
    "restore": lambda t, kv, path: ps.restore(path),
    "load": lambda t, kv, path: ps.load(path),
}


@pytest.mark.parametrize("call", CALLS)
def test_every_call_ends_and_names_the_server_that_does_not_answer(call, deaf, tmp_path):
    def body(rank):
        t = ps.table("w", 4, updater=ps.optim.Add())
        kv = ps.hashtable("emb", 2, updater=ps.optim.Add())
        deaf.set()
        try:
            with (
                deadline(0.3),
                pytest.raises(rc.CommTimeoutError, match=r"server 0 \(rank 1") as told,
            ):
                CALLS[call](t, kv, tmp_path)
        finally:
            deaf.clear()
        assert 1 in told.value.missing
        ps.rebalance().wait()  # nothing is held up by what was given up
        return t.push(ones(4)).wait().applied

    assert run_workers(1, body, 2) == [True]


# --- bad input ----------------------------------------------------------------------------------
HYPER = ps.optim.Adam(0.1).hyper


def push_meta(n=4, *, start=0, dtype="float32", hyper=HYPER):
    return PushMeta(1.0, start, n, dtype, 0, hyper).packed()


def raw(*shape):
    return np.ones(shape, np.float32).reshape(-1).view(np.uint8)


KEY = np.zeros(8, np.uint8)
SENSELESS = {  # what no client of ours sends: (kind or call, table: 0 none, 1 dense, 2 rows, ...)
    "a kind that is none": (200, 1, b"", NOTHING),
    "a push to no table": (FrameKind.PUSH, 0, push_meta(), raw(4)),
    "a pull of no table": (FrameKind.PULL, 0, b"", NOTHING),
    "a state of no table": (CallOption.GET_STATE, 0, b"", NOTHING),
    "rows of no table": (CallOption.COUNT, 0, b"", NOTHING),
    "rows of a dense table": (CallOption.COUNT, 1, b"", NOTHING),
    "a state of rows": (CallOption.GET_STATE, 2, b"", NOTHING),
    "too few bytes": (FrameKind.PUSH, 1, push_meta(), raw(3)),
    "too many elements": (FrameKind.PUSH, 1, push_meta(5), raw(5)),
    "elements behind the end": (FrameKind.PUSH, 1, push_meta(2, start=3), raw(2)),
    "another dtype": (FrameKind.PUSH, 1, push_meta(16, dtype="int8"), raw(4)),
    "no hyper-parameters": (FrameKind.PUSH, 1, push_meta(hyper=HYPER[:0]), raw(4)),
    "those of another updater": (FrameKind.PUSH, 1, push_meta(hyper=HYPER[:2]), raw(4)),
    "a meta that is cut off": (FrameKind.PUSH, 1, push_meta()[:-3], raw(4)),
    "a command that is no JSON": (FrameKind.ASK, 0, b"{", NOTHING),
    "a command of nothing": (FrameKind.ASK, 0, b"{}", NOTHING),
    "a command that is none": (FrameKind.ASK, 0, b'{"command": "dance"}', NOTHING),
    "a table of nothing": (FrameKind.ASK, 0, b'{"command": "open", "spec": {}}', NOTHING),
    "a snapshot of nothing": (FrameKind.ASK, 0, b'{"command": "snapshot"}', NOTHING),
    "rows: too few bytes": (FrameKind.PUSH, 2, push_meta(2), KEY),
    "rows: no hyper-parameters": (
        FrameKind.PUSH, 2, push_meta(1, hyper=HYPER[:0]), np.append(KEY, raw(2)),
    ),
    "rows: a meta that is cut off": (FrameKind.PULL, 2, b"1", KEY),
    "rows: half a key": (FrameKind.PULL, 2, PullMeta(1, 0).packed(), KEY[:4]),
    "rows: half a key to erase": (CallOption.ERASE, 2, b"", KEY[:4]),
}  # fmt: skip


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("senseless", SENSELESS)
def test_a_request_that_makes_no_sense_changes_nothing(senseless, mode):
    assert run_workers(2, job(mode, senseless)) == undisturbed(mode)


@functools.cache
def undisturbed(mode):
    return run_workers(2, job(mode))


def job(mode, senseless=None):
    """Return a body that trains, with such a request in between, and returns all results."""

    def body(rank):
        updater = ps.optim.Adam(0.1)  # the number of its steps shows in what it does
        t = ps.table("w", 4, updater=updater, mode=mode)
        kv = ps.hashtable("emb", 2, updater=updater, mode=mode)
        first = train(t, kv)
        if rank == 0 and senseless is not None:
            with pytest.raises((ValueError, KeyError, TypeError, rc.RingcommError)) as told:
                send(t, kv, SENSELESS[senseless]).wait()
            assert not isinstance(told.value, rc.CommTimeoutError)
        rc.barrier()
        return first, train(t, kv), train(t, kv), t.pull().wait().tolist(), len(kv)

    return body


def train(t, kv):
    pushed = t.push(ones(4)), kv.push([0, 1], ROWS)
    applied = [each.wait().applied for each in pushed]
    rc.barrier()
    values = t.pull().wait().tolist(), kv.pull([0, 1]).wait().tolist()
    rc.barrier()
    (told,) = ps.stats()
    rc.barrier()
    parts = told["tables"]["w"]["0"], told["hashtables"]["emb"]
    return applied, values, [(part["pushes"], part["late"]) for part in parts]


def send(t, kv, senseless):
    kind, which, meta, content = senseless
    client, number = session().client, (0, t.number, kv.number)[which]
    partition = (number, 0) if which == 1 else None
    kind, option = (FrameKind.CALL, kind) if isinstance(kind, CallOption) else (kind, 0)
    request = Request(
        kind, partition, server=0, table=number, option=option, meta=meta, body=content
    )
    return client.call("senseless", [request], lambda: None)


def test_an_updater_of_another_kind_is_refused_where_it_is_set():
    def body(rank):
        t = ps.table("w", 4, updater=ps.optim.SGD(0.1), mode="sync")
        for other in (ps.optim.Adam(0.1), ps.optim.SGD(0.1, momentum=0.9)):
            with pytest.raises(ValueError, match=r"table\[w\]: it was made for SGD"):
                t.updater = other
        t.updater = t.updater.with_(lr=0.2)
        return t.push(ones(4)).wait().applied

    assert run_workers(2, body) == [True, True]
