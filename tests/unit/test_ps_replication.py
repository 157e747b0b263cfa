"""With replication=2 a server may die: what was acknowledged is there, once, and all goes on."""

import contextlib
import time
from collections import Counter

import harness
import numpy as np
import pytest
from harness import DEADLINE_S, at_length
from loopback import LoopbackHub
from ps_ranks_as_threads import Boom, ended, kill_server, moving_beside, run_all
from ps_training_of_two_tables import KEYS, N, require_exact, train

import ringcomm as rc
from ringcomm import ps
from ringcomm.config import Settings
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.ps.checkpoint import files
from ringcomm.ps.client.dense.pulls import DensePulls
from ringcomm.ps.placement.partitions import HASH_PARTITIONS, Move
from ringcomm.ps.placement.rebalance import move_all
from ringcomm.ps.server.homes import copy_transfer
from ringcomm.ps.server.homes.local_homes import Homes
from ringcomm.ps.server.values import Pushes
from ringcomm.ps.session import session

pytestmark = pytest.mark.one_wire

ELASTIC = Settings(timeout_s=DEADLINE_S, elastic=1)
MODES = ["sync", "async", ps.SSP(1), ps.FirstOf(2)]
COUNTED = ("requests", "nbytes_in", "nbytes_out")


def run(body, n_workers=2, n_dead=1, n_servers=3, **options):
    """Return what the workers that live return."""
    results = run_all(n_workers, body, n_servers, settings=ELASTIC, replication=2, **options)
    return [each for each in ended(results, n_dead) if not isinstance(each, str)]


def tables(mode="async", updater=None, **of_rows):
    updater = ps.optim.Add() if updater is None else updater
    table = ps.table("w", N, "float64", updater=updater, mode=mode, block_nbytes=1600)
    return table, ps.hashtable("emb", 2, updater=updater, mode=mode, dtype="float64", **of_rows)


def kill_at(step, at, *victims):
    if step == at and rc.rank() == 0:
        for victim in victims:
            kill_server(victim)


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_server_that_dies_loses_nothing_and_doubles_nothing(mode, victim):
    def body(rank):
        table, rows = tables(mode)
        for step in range(30):
            kill_at(step, 10, victim)
            train(table, rows, [step])
        require_exact(table, rows, 30, mode)

    assert run(body) == [None, None]


def test_pulls_ask_no_server_unless_one_has_died(monkeypatch):
    monkeypatch.setattr(harness, "wire", "node")
    asked = Counter()

    def count(pulls, *args, request=DensePulls._request):
        asked[pulls] += 1
        return request(pulls, *args)

    monkeypatch.setattr(DensePulls, "_request", count)

    def body(rank):
        table, _ = tables()
        n_asked = []
        for step in range(4):
            if step == 2:
                kill_at(0, 0, 0)
                while not session().layout.hosts:
                    table.pull().wait()
            table.push(np.ones(N)).wait()
            rc.barrier()  # a push of the other one could overtake the read
            before = asked[table._pulls]
            table.pull().wait()
            n_asked.append(asked[table._pulls] - before)
            rc.barrier()
        rc.barrier()
        found = table.pull().wait()
        rc.barrier()
        return n_asked, found, asked[table._pulls]

    for n_asked, values, n in run(body):
        assert (values == 8).all()
        assert n_asked[1] == n_asked[3] == 0
        assert n_asked[0] < n < 2 * n_asked[0]  # once, and again those of the server that died


def test_nobody_reads_the_memory_of_a_dead_server_once_another_goes_on(monkeypatch):
    monkeypatch.setattr(harness, "wire", "node")
    seen = []

    def note(homes, rank, go_on=Homes.on_death):
        seen.append(engine().transport.node.memory_of(rank).is_withdrawn)
        go_on(homes, rank)

    monkeypatch.setattr(Homes, "on_death", note)

    def body(rank):
        ps.stats()  # answered by all servers: all have begun to serve
        kill_at(0, 0, 0)
        while not session().layout.hosts:
            ps.stats()
        rc.barrier()

    run(body)
    assert len(seen) >= 2
    assert all(seen)


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("victim", at_length([0, 1], [0]))
@pytest.mark.parametrize("mode", at_length(MODES, [MODES[0], MODES[2]]), ids=str)
def test_partitions_move_while_a_server_dies(mode, victim):
    """They move to and fro between all servers all the time, and go on to do so."""
    n_steps = at_length(60, 14)  # a move of rows takes tens of ms

    def body(rank):
        table, rows = tables(mode)
        current = session()

        def next_move(rng):
            dest = rng.randrange(3)
            if rng.random() < 0.5:
                moves = [Move((table.number, rng.randrange(3)), -1, dest)]
            else:
                some = range(0, HASH_PARTITIONS, 3)
                moves = [Move((rows.number, part), -1, dest) for part in some]
            return move_all(current, moves)

        end = moving_beside(next_move) if rank == 0 else None
        for step in range(n_steps):
            kill_at(step, 4, victim)
            pushed = table.push(np.full(N, 1.0 + step))
            rows.push(KEYS, np.full((60, 2), 1.0 + step)).wait()
            pushed.wait()
            table.pull().wait()
            rows.pull(KEYS).wait()
            ps.complete_step()
        n_moved = end() if end is not None else 99
        rc.barrier()
        found = n_moved, table.pull().wait(), rows.pull(KEYS).wait()
        rc.barrier()
        return found

    n_in_round = 1 if str(mode) in ("sync", "FirstOf(2)") else 2
    total = n_in_round * sum(1.0 + step for step in range(n_steps))
    for n_moved, dense, sparse in run(body):
        assert n_moved > n_steps / 4
        assert (dense == total).all()
        assert (sparse == total).all()


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_rows_of_servers_on_several_hosts_survive(victim):
    """Those that are near may write in a worker's memory, and their copies on another host not."""
    hosts = (0, 0, 2, 2, 2)  # server 0 is on the first, and worker 1 on the second

    def body(rank):
        many = np.arange(900, dtype=np.uint64)
        emb = ps.hashtable("emb", 64, updater=ps.optim.Add(), mode="sync", dtype="float64")
        more = ps.hashtable("more", 64, updater=ps.optim.Add(), mode="sync", dtype="float64")
        found, pushed = np.empty((900, 64)), np.random.default_rng(rank).integers(9, size=(900, 64))
        for step in range(12):
            both = [each.push(many, pushed.astype(float)) for each in (emb, more)]
            for each in both:
                each.wait()
            kill_at(step, 4, victim)  # the pull may be on its way to it
            assert emb.pull(many, out=found).wait() is found
            for each in ps.pull_many([(emb, many), (more, many)]).wait():
                np.testing.assert_array_equal(each, found)
        rc.barrier()
        return pushed, found

    (one, found), (other, _) = run(body, hub=LoopbackHub(5, hosts))
    np.testing.assert_array_equal(found, 12 * (one + other) / 2)


def test_servers_that_run_in_one_process_share_a_part_of_the_load():
    def body(rank):
        table = ps.table("w", 1200, "float64", updater=ps.optim.Add(), block_nbytes=800)
        kill_at(0, 0, 1)
        for _ in range(20):
            table.push(np.ones(1200)).wait()
        found = ps.rebalance().wait()
        again = table.pull().wait()
        return found, again

    ((moved, load, after), values), *_ = run(body, n_workers=1)
    assert moved >= 1
    assert load[0] < 0.4
    assert 0.42 < after[0] < 0.58  # of two processes, of which the other one runs two servers
    assert (values == 20).all()


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_pushes_that_nobody_waits_for_count_once(mode):
    def body(rank):
        table, rows = tables(mode)
        done = []
        for step in range(40):
            kill_at(step, 20, 1)
            done.append(table.push(np.ones(N)))
            done.append(rows.push(KEYS, np.ones((60, 2))))
        n_applied = sum(each.wait(DEADLINE_S).applied for each in done)
        rc.barrier()
        return n_applied, table.pull().wait(), rows.pull(KEYS).wait()

    n = 40 if str(mode) in ("sync", "FirstOf(2)") else 80
    for n_applied, dense, sparse in run(body):
        assert n_applied == 80
        assert (dense == n).all()
        assert (sparse == n).all()


def test_updates_have_the_same_bits_as_those_of_servers_that_live():
    def train(rank, *victims):
        table, rows = tables("sync", ps.optim.Adam(0.1))
        rng = np.random.default_rng(rank)
        for step in range(20):
            kill_at(step, 8, *victims)
            held = step % 3 == 1
            told = table.push(rng.normal(size=N), hold=held).wait()
            if held:
                table.release(min(1.0, 1 / np.sqrt(told.squares)))
            rows.push(KEYS, rng.normal(size=(60, 2))).wait()
        rc.barrier()
        found = table.pull().wait(), rows.pull(KEYS).wait()
        rc.barrier()
        return found

    alive = run(train, n_dead=0)
    killed = run(lambda rank: train(rank, 0))
    for one, other in zip(alive, killed, strict=True):
        for values, wanted in zip(one, other, strict=True):
            assert values.tobytes() == wanted.tobytes()


def test_what_is_asked_of_a_server_that_dies_is_done_once():
    @ps.function
    def add(values, x):
        values += x
        return float(values[0])

    def body(rank):
        table, rows = tables()
        rows.push(KEYS, np.ones((60, 2))).wait()
        table.push(np.full(N, 5.0), assign=True).wait()
        rc.barrier()
        if rank == 0:
            kill_server(0)
            for _ in range(20):
                table.call("add", x=1.0).wait()
            erased = rows.erase(KEYS[:10]).wait()
            later = ps.table("later", 3, "float64", updater=ps.optim.Add())
            later.push(np.ones(3)).wait()
            return table.pull().wait(), erased, len(rows), later.pull().wait()
        return None

    (values, erased, left, later), _ = run(body)
    assert (values == 25).all()
    assert (erased, left) == (10, 50)
    assert (later == 1).all()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_snapshot_is_held_by_the_copy_of_a_server_that_dies(victim):
    def body(rank):
        table, rows = tables()
        table.push(np.ones(N)).wait()
        rows.push(KEYS, np.ones((60, 2))).wait()
        rc.barrier()
        found = []
        if rank == 0:
            with ps.snapshot():
                kill_server(victim)
                for _ in range(10):
                    found.append((table.pull().wait(), rows.pull(KEYS).wait()))
        else:
            for _ in range(20):
                table.push(np.ones(N)).wait()
        return found

    held, _ = run(body)
    for dense, sparse in held:
        np.testing.assert_array_equal(dense, held[0][0])
        assert (sparse == 2).all()


def test_a_checkpoint_is_whole_and_goes_back_into_both_copies(tmp_path):
    def body(rank):
        table, rows = tables("sync")
        for step in range(6):
            table.push(np.ones(N)).wait()
            rows.push(KEYS, np.ones((60, 2))).wait()
            if step == 2:
                rc.barrier()
                if ps.is_chief():
                    ps.save(tmp_path, step=3, background=False)
                rc.barrier()
        rc.barrier()
        if ps.is_chief():
            ps.restore(tmp_path)
        rc.barrier()
        kill_at(0, 0, 0)
        for _ in range(5):
            table.push(np.ones(N)).wait()
            rows.push(KEYS, np.ones((60, 2))).wait()
        return table.pull().wait(), rows.pull(KEYS).wait()

    for dense, sparse in run(body):
        assert (dense == 8).all()
        assert (sparse == 8).all()


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_save_fails_by_name_or_is_whole_and_is_taken_again(victim, tmp_path):
    failed = []

    def body(rank):
        table, _ = tables()
        table.push(np.ones(N)).wait()
        rc.barrier()
        if ps.is_chief():
            saved = ps.save(tmp_path, step=1)
            kill_server(victim)
            try:
                saved.wait()
            except rc.RingcommError as error:
                failed.append(str(error))
                ps.save(tmp_path, step=1, background=False)
            for _ in range(20):
                table.push(np.zeros(N)).wait()
        rc.barrier()
        return table.pull().wait()

    for values in run(body):
        assert (values == 2).all()
    assert files.complete(tmp_path)
    assert all(f"server {victim} died" in each for each in failed)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_worker_and_a_server_die_at_once(mode):
    def body(rank):
        table, _ = tables(mode)
        for step in range(30):
            if step == 10 and rank == 2:
                kill_server(1)
                raise Boom
            table.push(np.full(N, 1.0)).wait()
            table.pull().wait()
            ps.complete_step()
        return table.pull().wait()

    for values in run(body, n_workers=3, n_dead=2):
        assert (values >= 30).all()
        assert (values <= 70).all()


@pytest.mark.parametrize(
    ("mode", "victims"),
    at_length(
        [(mode, victims) for mode in MODES for victims in ((0, 1), (1, 2))],
        [("sync", (1, 2)), ("async", (0, 1))],  # of these the leader is one
    ),
    ids=str,
)
def test_all_go_back_to_a_checkpoint_if_both_copies_are_lost(mode, victims, tmp_path):
    """And there are copies again, so that another server may die without that."""
    told = []

    def body(rank):
        table, rows = tables(mode)
        if ps.is_chief():
            ps.save(tmp_path, background=False)
        rc.barrier()
        n_recovered = 0
        while ps.step_number() < 24:
            try:
                step = ps.step_number()
                if step == 6 and not n_recovered:
                    kill_at(0, 0, *victims)
                pushed = table.push(np.full(N, 1.0 + step))
                rows.push(KEYS, np.full((60, 2), 1.0 + step)).wait()
                pushed.wait()
                table.pull().wait()
                if step == 16:
                    await_copies()
                    rc.barrier()
                    kill_at(0, 0, 3)
                ps.complete_step()
            except rc.ServerLostError as error:
                told.append(str(error))
                n_recovered += 1
                assert ps.recover(tmp_path).manifest["clock"] == 0
        rc.barrier()
        found = n_recovered, table.pull().wait(), rows.pull(KEYS).wait()
        rc.barrier()
        return found

    total = (1 if str(mode) in ("sync", "FirstOf(2)") else 2) * sum(1.0 + s for s in range(24))
    for n_recovered, dense, sparse in run(body, n_dead=3, n_servers=4):
        assert n_recovered == 1
        assert (dense == total).all()
        assert (sparse == total).all()
    assert len(told) == 2
    for each in told:
        assert "is lost, with its copy" in each
        assert "call ps.recover(path)" in each


def await_copies():
    """Return once there are two copies of each server again."""
    until = time.monotonic() + DEADLINE_S
    while any(each["copies"] < 2 for each in ps.stats()):
        assert time.monotonic() < until, ps.stats()


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("fails_at", ["primary", "follower"])
def test_copies_of_which_one_has_no_memory_for_a_request_are_made_alike_again(
    fails_at, monkeypatch, caplog
):
    """Else the next death would lose a push that was acknowledged, or bring one back."""
    is_due = []

    def apply(pushes, action, values, apply=Pushes._apply):
        link = pushes._reply._link
        if is_due and link._home == 0 and link.is_primary == (fails_at == "primary"):
            is_due.clear()
            raise MemoryError("no room for new rows")
        apply(pushes, action, values)

    monkeypatch.setattr(Pushes, "_apply", apply)

    def body(rank):
        _, rows = tables()
        rows.push(KEYS, np.ones((60, 2))).wait()
        is_due.append(True)
        is_refused = pytest.raises(rc.RingcommError, match="no room for new rows")
        with is_refused if fails_at == "primary" else contextlib.nullcontext():
            rows.push(KEYS, np.ones((60, 2))).wait()
        assert not is_due
        await_copies()
        rows.push(KEYS, np.ones((60, 2))).wait()
        before = rows.pull(KEYS).wait()
        kill_server(0)
        return before, rows.pull(KEYS).wait()

    ((before, after),) = run(body, n_workers=1)
    np.testing.assert_array_equal(before, after)
    assert (before == 3).any()
    assert (before == 2).any() == (fails_at == "primary")
    assert "the copy of server 0 on rank 2 has come to differ" in caplog.text


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("victims", at_length([(0, 1), (2, 0)], [(0, 1)]), ids=str)
@pytest.mark.parametrize("mode", at_length(MODES, MODES[:2]), ids=str)
def test_a_second_server_may_die_once_lost_copies_are_made_again(mode, victims, monkeypatch):
    """Workers go on while copies are made, of pieces that go one by one."""
    monkeypatch.setattr(copy_transfer, "FRAME_NBYTES", 1)
    monkeypatch.setattr(copy_transfer, "WINDOW_NBYTES", 1)

    def body(rank):
        table, rows = tables(mode, admit=ps.Admit(2), evict=ps.Evict(ttl="1h"))
        applied = 0
        for step in range(40):
            kill_at(step, 8, victims[0])
            if step == 20:
                await_copies()
                rc.barrier()
            kill_at(step, 25, victims[1])
            pushed = table.push(np.full(N, 1.0 + step))
            rows.push(KEYS[step % 9 :], np.full((60 - step % 9, 2), 1.0 + step)).wait()
            applied += (1.0 + step) * pushed.wait().applied
            table.pull().wait()
            rows.pull(KEYS).wait()
            ps.complete_step()
        rc.barrier()
        found = applied, table.pull().wait(), rows.pull(KEYS).wait()
        rc.barrier()
        return found

    results = run(body, n_dead=2)
    in_round = 2 if str(mode) in ("sync", "FirstOf(2)") else 1
    total = sum(applied for applied, *_ in results) / in_round
    assert total
    for _, dense, sparse in results:
        assert (dense == total).all()
        assert (sparse == results[0][2]).all()
        assert sparse[59].min() > total / 2


@pytest.mark.long
def test_updates_have_the_same_bits_after_two_deaths(monkeypatch):
    monkeypatch.setattr(copy_transfer, "FRAME_NBYTES", 1)
    monkeypatch.setattr(copy_transfer, "WINDOW_NBYTES", 1)

    def train(rank, *victims):
        table, rows = tables("sync", ps.optim.Adam(0.1), evict=ps.Evict(max_rows=40))
        later = ps.table("later", 3, "float64", updater=ps.optim.Adam(0.1), mode="sync")
        rng = np.random.default_rng(rank)
        for step in range(30):
            kill_at(step, 5, *victims[:1])
            if step == 15 and victims:
                await_copies()
                rc.barrier()
            kill_at(step, 20, *victims[1:])
            told = table.push(rng.normal(size=N), hold=True).wait()
            table.release(min(1.0, 1 / np.sqrt(told.squares)))
            rows.push(KEYS[: 30 + step], rng.normal(size=(30 + step, 2))).wait()
            later.push(rng.normal(size=3)).wait()
        rc.barrier()
        found = table.pull().wait(), rows.pull(KEYS).wait(), later.pull().wait()
        rc.barrier()
        return found

    alive = run(train, n_dead=0)
    for victims in at_length(((0, 1), (1, 0)), ((0, 1),)):
        killed = run(lambda rank: train(rank, *victims), n_dead=2)  # noqa: B023 - used at once
        for one, other in zip(alive, killed, strict=True):
            for values, wanted in zip(one, other, strict=True):
                assert values.tobytes() == wanted.tobytes()


def test_a_copy_has_counted_less_which_is_no_negative_traffic():
    """Copies answer no reads, and one that is made again begins later than what it is made of."""

    def body(rank):
        _, rows = tables()
        keys, told = np.arange(3000, dtype=np.uint64), []

        def pull(n):
            for _ in range(n):
                rows.pull(keys).wait()
            told.extend(ps.stats())

        rows.push(keys, np.ones((3000, 2))).wait()
        pull(50)
        ps.rebalance().wait()
        kill_server(0)
        pull(20)
        load = ps.rebalance().wait().load
        await_copies()
        pull(1)
        kill_server(1)
        pull(1)
        return load, [each[f"{what}_per_s"] for each in told for what in COUNTED]

    ((load, rates),) = run(body, n_workers=1, n_dead=2)
    assert load == pytest.approx((1 / 3,) * 3, abs=0.1)
    assert 0 <= min(rates) <= max(rates) < 1e9


@pytest.mark.long
def test_a_work_queue_dies_with_its_server_and_can_be_made_again():
    def body(rank):
        table, _ = tables()
        queue = rc.data.WorkQueue(400, 5)
        rc.barrier()
        kill_at(0, 0, 0)
        with pytest.raises(rc.PeerFailedError, match="queue"):
            # a part takes so long: the server dies before all are done
            all(time.sleep(0.01) is None for _ in queue)
        table.push(np.ones(N)).wait()  # the server that goes on is known from here on
        return sum(indices.sum() for indices in rc.data.WorkQueue(400, 5))

    assert sum(run(body)) == sum(range(400))


REFUSED = {
    "at most 2 copies": {"replication": 3},
    "servers=1": {"servers": 1},
    "colocated=True": {"colocated": True},
    "RINGCOMM_ELASTIC=1": {"settings": Settings(timeout_s=DEADLINE_S)},
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_copies_do_not_go_with_is_refused_with_the_reason(why):
    options = {"replication": 2, "settings": ELASTIC, "servers": 2, **REFUSED[why]}
    results = run_all(2, lambda _: None, options.pop("servers"), **options)
    errors = [str(each) for each in results if isinstance(each, rc.ConfigError)]
    assert errors  # who is told later hears of these
    assert all(why in each for each in errors)
